"""What the bench measures: its groups, the targets, and the floors of continuous integration."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from kvcs.bench import check
from kvcs.bench.figures import Ratio, Spread
from kvcs.bench.groups import GROUPS, SHORT_DEFAULT, chosen
from kvcs.bench.plan import Group, Scale
from kvcs.bench.targets import LARGEST, TARGET_GROUPS, TARGETS, Reached
from kvcs.bench.transfer import ROLES as STACKS
from kvcs.bench.worker import ROLES
from kvcs.errors import UsageError
from kvcs.quic.aioquic_backend.settings import LARGEST_DATAGRAM

ROOT = Path(__file__).resolve().parents[2]
FULL, SHORT = Scale(), Scale(short=True)

GOODPUT_RATIOS = {
    "direct_32KiB_over_raw",
    "direct_256KiB_over_raw",
    "relay_32KiB_over_raw",
    "relay_256KiB_over_raw",
    "relay_32KiB_over_direct",
    "relay_256KiB_over_direct",
    "direct_32KiB_over_stock",
    "direct_256KiB_over_stock",
    "raw_32KiB_over_stock",
    "raw_256KiB_over_stock",
    "direct_32KiB_cpu_over_raw",
    "direct_256KiB_cpu_over_raw",
    "relay_32KiB_cpu_over_raw",
    "relay_256KiB_cpu_over_raw",
}


def every(scale: Scale) -> list[Group]:
    return [*chosen(list(GROUPS), scale), check.group()]


@pytest.mark.parametrize("scale", [FULL, SHORT])
def test_names_are_told_apart(scale: Scale) -> None:
    cases = [case.name for group in every(scale) for case in group.cases]
    ratios = [ratio.name for group in every(scale) for ratio in group.ratios]
    assert len(set(cases)) == len(cases)
    assert len(set(ratios)) == len(ratios)
    assert all(group.about for group in every(scale))


@pytest.mark.parametrize("scale", [FULL, SHORT])
def test_ratios_are_of_cases_of_their_own_group(scale: Scale) -> None:
    for group in every(scale):
        names = {case.name for case in group.cases}
        for ratio in group.ratios:
            assert ratio.case in names, ratio.name
            assert ratio.over is None or ratio.over in names, ratio.name
            assert (ratio.over is None) <= (ratio.metric != "rate"), "a rate alone is no ratio"


def test_the_short_run_has_the_ratios_of_goodput() -> None:
    [group] = chosen((), SHORT)
    assert group.name == "goodput" == SHORT_DEFAULT[0]
    assert {ratio.name for ratio in group.ratios} == GOODPUT_RATIOS


def test_the_full_run_has_every_group_in_order() -> None:
    assert [group.name for group in chosen((), FULL)] == list(GROUPS)
    assert [group.name for group in chosen(("loss", "goodput"), FULL)] == ["goodput", "loss"]
    assert sum(entry.seconds for entry in GROUPS.values()) <= 30 * 60


def test_whole_runs_take_what_the_pages_say() -> None:
    minutes = round(sum(entry.seconds for entry in GROUPS.values()) / 60)
    for page in ("docs/bench.md", "README.md"):
        assert f"about {minutes} minutes" in (ROOT / page).read_text(encoding="utf-8"), page


def test_protection_is_measured_long_and_often_and_shortly_where_short() -> None:
    [full], [short] = (chosen(("protection",), scale) for scale in (FULL, SHORT))
    assert full.rounds_of(FULL) == 7 and short.rounds_of(SHORT) == 2
    assert len(full.cases) == 8 and len(short.cases) == 4
    for group in (full, short):
        # Each row has its goodput and its CPU time beside those of the plain one of its round.
        compared = {(ratio.case, ratio.over, ratio.metric) for ratio in group.ratios}
        sizes = {case.name.removeprefix("plain_") for case in group.cases if "plain" in case.name}
        assert compared == {
            (f"{row}_{size}", f"plain_{size}", metric)
            for row in ("signed", "sealed", "both")
            for size in sizes
            for metric in ("rate", "cpu")
        }


def test_a_group_that_does_not_exist_is_refused_with_those_that_do() -> None:
    with pytest.raises(UsageError, match="no group 'speed'; there are goodput, objects"):
        chosen(("goodput", "speed"), FULL)


def test_what_is_measured_is_what_the_groups_promise() -> None:
    names = {case.name for group in every(FULL) for case in group.cases}
    for size in ("16KiB", "32KiB", "64KiB", "256KiB", "1MiB"):
        assert {f"raw_{size}", f"direct_{size}", f"relay_{size}"} <= names
    for octets in (1200, 1452, 8952, LARGEST_DATAGRAM):
        assert {f"{row}_{octets}B" for row in ("raw", "direct")} <= names
        # The stock library corrupts STREAM frames beyond 16,383 octets.
        assert (f"stock_{octets}B" in names) == (octets < 16_383)
    for count in (1, 8, 32, 160):
        assert {f"raw_{count}streams", f"direct_{count}streams"} <= names
    for count in (1, 4, 16):
        assert {f"direct_{count}consumers", f"relay_{count}consumers"} <= names
    for rtt in (1, 20, 80):
        for loss in ("0.1", "1"):
            assert f"direct_rtt{rtt}ms_loss{loss}pct" in names
    assert {"growth_64MiB", "growth_1GiB", "growth_8GiB"} <= names
    for size in ("32KiB", "1MiB"):
        assert {f"{row}_{size}" for row in ("plain", "signed", "sealed", "both")} <= names
    assert "churn_relay" in names


def test_every_stack_and_role_is_there() -> None:
    more = {"relay", "link", "churner", "watched-relay"}
    assert {role for pair in STACKS.values() for role in pair} | more == set(ROLES)
    for where in ROLES.values():
        module, _, name = where.partition(":")
        if module in ("http", "redis_store"):
            pytest.importorskip({"http": "aiohttp", "redis_store": "redis"}[module])
        found = importlib.import_module(f"kvcs.bench.roles.{module}")
        assert callable(getattr(found, name))


# Targets


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_each_target_is_measured_by_a_full_run(target: object) -> None:
    assert target in TARGETS
    found = next(each for each in TARGETS if each is target)
    [group] = chosen((found.group,), FULL)
    assert found.ratios[0] in {ratio.name for ratio in group.ratios}


def test_targets_are_those_that_were_set() -> None:
    bounds = {target.name: (target.bound, target.at_most) for target in TARGETS}
    assert bounds == {
        "direct / raw, 1200 B datagrams": (0.90, False),
        "direct / raw, largest datagrams": (0.75, False),
        "direct / stock, 1452 B datagrams": (1.8, False),
        "direct / aiomoqt": (1.8, False),
        "one relay / aiomoqt's relay": (1.5, False),
        "one relay / direct": (0.50, False),
        "32 KiB objects / 1 MiB objects": (0.85, False),
        "160 streams / 1 stream": (0.85, False),
        "first layer / all 32 layers, queued": (0.0813, True),
        "memory of a consumer / cache": (1.15, True),
        "memory of a publisher that copies / cache": (1.15, True),
        "memory of a publisher that lends / cache": (0.15, True),
        "signed / plain": (0.90, False),
        "sealed / plain": (0.85, False),
        "growth of a relay's memory / its cache": (0.10, True),
    }
    assert LARGEST == LARGEST_DATAGRAM
    assert set(TARGET_GROUPS) <= set(GROUPS)


def test_the_median_decides_about_a_target() -> None:
    least = next(target for target in TARGETS if not target.at_most)
    most = next(target for target in TARGETS if target.at_most)
    near = Spread(least.bound, 0.0, 99.0)
    assert Reached(least, near).holds
    assert not Reached(least, Spread(least.bound - 0.01, 0.0, 99.0)).holds
    assert Reached(most, Spread(most.bound, 0.0, 99.0)).holds
    assert not Reached(most, Spread(most.bound + 0.01, 0.0, 99.0)).holds
    assert Reached(least, near).to_json() == {
        "at_least": least.bound,
        "median": least.bound,
        "min": 0.0,
        "max": 99.0,
        "reached": True,
    }


# Floors


def spreads(value: float) -> dict[str, Spread]:
    """The same value for every floor."""
    return {target.name: Spread.of([value]) for target in check.floors()}


def test_every_floor_is_measured_by_the_check() -> None:
    names = {ratio.name for ratio in check.group().ratios}
    assert {target.name for target in check.floors()} == names


def test_floors_leave_much_room_below_the_targets() -> None:
    alike = {
        "check_relay_over_direct": "one relay / direct",
        "check_direct_1452B_over_stock": "direct / stock, 1452 B datagrams",
        "check_160streams_over_1": "160 streams / 1 stream",
        "check_32KiB_over_1MiB": "32 KiB objects / 1 MiB objects",
    }
    floors = {target.name: target.bound for target in check.floors()}
    bounds = {target.name: target.bound for target in TARGETS}
    for name, target in alike.items():
        assert floors[name] <= 0.4 * bounds[target]


def test_a_floor_breaks_when_even_the_better_round_is_beyond_it() -> None:
    fine = spreads(0.0)
    for target in check.floors():
        fine[target.name] = Spread(target.bound, target.bound, target.bound)
    assert check.broken(fine) == []
    for target in check.floors():
        worse = target.bound * (1.5 if target.at_most else 0.5)
        noisy = Spread(worse, min(worse, target.bound), max(worse, target.bound))
        assert check.broken({**fine, target.name: noisy}) == [], "one round was good enough"
        [line] = check.broken({**fine, target.name: Spread(worse, worse, worse)})
        assert line.startswith(f"{target.name} is {worse:.2f}, to be at ")


def test_what_was_not_measured_does_not_pass() -> None:
    lines = check.broken({})
    assert len(lines) == len(check.floors())
    assert all(line.endswith("was not measured") for line in lines)


def test_a_ratio_of_nothing_is_nothing() -> None:
    assert Ratio("x", "a", "b").of({"a": [], "b": []}) is None
