"""The bench's arithmetic: workloads, samples, spreads, ratios, rounds."""

from __future__ import annotations

from typing import Any

import pytest

from kvcs.bench.children import ChildFailed
from kvcs.bench.figures import Process, Ratio, Sample, Spread, figures
from kvcs.bench.plan import Group, Scale, in_turn
from kvcs.bench.transfer import Link, Transfer, sample
from kvcs.bench.workload import KIB, MIB, Workload, size_name

USAGE = {"cpu_seconds": 1.0, "peak_octets": 1, "before_octets": 0}


def taken(seconds: float, *, cpu: float = 0.5, octets: int = 10_000_000, **values: float) -> Sample:
    """A sample of a transfer."""
    processes = {
        "sender": Process(cpu, 50_000_000, 40_000_000),
        "receiver": Process(2 * cpu, 70_000_000, 90_000_000),
    }
    return Sample(octets, seconds, processes, values=values)


def said(workload: Workload, **received: object) -> tuple[dict[str, Any], Any, list[Any]]:
    """What the processes of a good transfer say."""
    receiver = {
        "octets": workload.octets,
        "objects": workload.objects,
        "digest": "aa",
        "at": 12.0,
        "started_at": 9.5,
        **USAGE,
    }
    relay = {"started_at": 9.0, "at": 13.0, **USAGE}
    sender = {"digest": "aa", "started_at": 10.0, "at": 13.0, **USAGE}
    return sender, relay, [{**receiver, **received}]


LOAD = Workload.of(32 * KIB, 4 * MIB)


# Workloads


@pytest.mark.parametrize(
    ("size", "layers", "components"), [(16 * KIB, 32, 2), (32 * KIB, 80, 2), (64 * KIB, 1, 1)]
)
def test_workloads_have_the_sizes_that_they_are_named_by(
    size: int, layers: int, components: int
) -> None:
    load = Workload.of(size, 80 * MIB, layers=layers, components=components)
    assert load.data_octets == size
    assert load.streams == layers * components
    assert load.streams * load.stream_octets == load.objects * size == load.octets == 80 * MIB


@pytest.mark.parametrize(("size", "total"), [(32 * KIB, 3 * MIB), (3000, 3000 * 64), (KIB, 0)])
def test_sizes_that_do_not_come_out_even_are_refused(size: int, total: int) -> None:
    with pytest.raises(ValueError, match="do not divide"):
        Workload.of(size, total)


def test_sizes_have_the_names_of_their_units() -> None:
    assert [size_name(n) for n in (32 * KIB, MIB, 1024 * MIB, 1500)] == [
        "32KiB",
        "1MiB",
        "1GiB",
        "1500B",
    ]


def test_each_round_has_every_case_and_begins_with_another() -> None:
    rows = ["a", "b", "c"]
    assert [in_turn(rows, number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def test_rounds_are_those_that_are_asked_for_or_the_groups_own() -> None:
    group = Group("g", "", [], [], rounds=5)
    assert group.rounds_of(Scale()) == 5
    assert group.rounds_of(Scale(short=True)) == 2
    assert group.rounds_of(Scale(rounds=7)) == 7
    assert Group("g", "", [], [], rounds=1).rounds_of(Scale(short=True)) == 1


def test_a_slow_link_and_more_octets_are_given_more_time() -> None:
    plain = Transfer(workload=LOAD)
    assert plain.seconds < Transfer(workload=LOAD, consumers=4).seconds
    assert plain.seconds < Transfer(workload=LOAD, link=Link(80, 0.01)).seconds
    computing = Transfer(workload=LOAD, compute_ms=1000.0)
    assert computing.seconds == plain.seconds + LOAD.layers


# Numbers of one sample


def test_a_sample_gives_each_of_its_numbers() -> None:
    one = taken(4.0, cpu=0.02, octets=20_000_000, first_layer_ms=3.0)
    assert one.measure("rate") == one.rate == 5_000_000
    assert one.measure("seconds") == 4.0
    assert one.measure("cpu:sender") == 1.0
    assert one.measure("cpu:receiver") == 2.0
    assert one.measure("cpu") == 3.0
    assert one.measure("memory:sender") == 0.5, "10 of 20 MB beyond what was there before"
    assert one.measure("memory:receiver") == 0, "never negative"
    assert one.measure("first_layer_ms") == 3.0
    with pytest.raises(KeyError):
        one.measure("no such number")


def test_a_sample_joins_what_the_processes_said() -> None:
    joined = sample(Transfer(workload=LOAD, relay=True), said(LOAD))
    assert joined.seconds == 2.0
    assert list(joined.processes) == ["sender", "relay", "receiver"]
    assert (joined.octets, joined.objects) == (4 * MIB, 128)
    assert joined.digests_match is True


def test_consumers_count_together_and_the_last_one_ends_it() -> None:
    sender, _, [receiver] = said(LOAD)
    receivers = [receiver, {**receiver, "at": 14.0, "peak_octets": 7}]
    joined = sample(Transfer(workload=LOAD, consumers=2), (sender, None, receivers))
    assert (joined.octets, joined.seconds, joined.objects) == (8 * MIB, 4.0, 128)
    assert joined.processes["receiver"] == Process(2.0, 7, 0)
    assert "relay" not in joined.processes


def test_a_consumer_that_comes_late_counts_from_its_own_start() -> None:
    joined = sample(Transfer(workload=LOAD, late=True), said(LOAD))
    assert joined.seconds == 2.5


def test_layers_are_timed_from_the_start_and_behind_their_computing() -> None:
    load = Workload.of(32 * KIB, 32 * KIB * 6, layers=3)
    times = {"verified_at": [10.25, 11.0, 12.0]}
    sender, relay, receivers = said(load, **times)
    sender["computed_at"] = [10.0, 10.5, 11.5]
    joined = sample(Transfer(workload=load, compute_ms=500.0), (sender, relay, receivers))
    assert joined.values == {
        "first_layer_ms": 250.0,
        "all_layers_ms": 2000.0,
        "first_over_all_layers": 0.125,
        "first_layer_behind_ms": 250.0,
        "median_layer_behind_ms": 500.0,
        "last_layer_behind_ms": 500.0,
        "all_layers_over_computing": pytest.approx(2.0 / 1.5),
    }
    assert joined.behind_ms == [250.0, 500.0, 500.0]


@pytest.mark.parametrize(("name", "value"), [("octets", 1), ("objects", 127), ("digest", "bb")])
def test_what_is_not_confirmed_is_no_sample(name: str, value: object) -> None:
    with pytest.raises(ChildFailed):
        sample(Transfer(workload=LOAD), said(LOAD, **{name: value}))


def test_one_bad_consumer_of_several_is_enough() -> None:
    sender, relay, [receiver] = said(LOAD)
    with pytest.raises(ChildFailed, match="tensors"):
        sample(
            Transfer(workload=LOAD, consumers=2),
            (sender, relay, [receiver, {**receiver, "digest": "bb"}]),
        )


# Spreads and ratios


def test_a_spread_has_the_median_and_the_extremes() -> None:
    assert Spread.of([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)
    assert Spread.of([4.0]).text(1) == "4.0 [4.0-4.0]"
    assert Spread(1.23456, 1.0, 2.0).to_json(2) == {"median": 1.23, "min": 1.0, "max": 2.0}


def test_ratios_compare_within_a_round() -> None:
    samples = {
        "raw": [taken(1.0), taken(4.0), taken(2.0)],
        "direct": [taken(2.0), taken(4.0), taken(5.0)],
    }
    assert Ratio("x", "direct", "raw").of(samples) == Spread(0.5, 0.4, 1.0)
    assert Ratio("x", "direct", "raw", "seconds").of(samples) == Spread(2.0, 1.0, 2.5)
    assert Ratio("x", "direct", "nobody").of(samples) is None
    assert Ratio("x", "nobody", "raw").of(samples) is None
    assert Ratio("x", "nobody").of(samples) is None


def test_a_quotient_of_one_case_stands_alone() -> None:
    samples = {"late": [taken(1.0, share=0.1), taken(1.0, share=0.3)]}
    assert Ratio("x", "late", metric="share").of(samples) == Spread(0.2, 0.1, 0.3)


def test_rounds_that_do_not_pair_are_an_error() -> None:
    with pytest.raises(ValueError, match="zip"):
        Ratio("x", "a", "b").of({"a": [taken(1.0)], "b": [taken(1.0), taken(1.0)]})


def test_figures_have_the_median_of_each_layer() -> None:
    rounds = [Sample(1, 1.0, {}, behind_ms=times) for times in ([1, 2], [3, 9], [2, 4])]
    assert figures(rounds)["layers_behind_ms"] == [2, 4]


def test_figures_are_absolute_and_say_their_units() -> None:
    found = figures([taken(1.0, cpu=0.02, first_layer_ms=5.0)])
    assert found["mb_per_s"] == {"median": 10.0, "min": 10.0, "max": 10.0}
    assert found["cpu_s_per_gb"]["sender"]["median"] == 2.0
    assert found["cpu_s_per_gb"]["receiver"]["median"] == 4.0
    assert found["peak_mb"]["receiver"] == {"median": 70.0, "min": 70.0, "max": 70.0}
    assert found["first_layer_ms"]["median"] == 5.0
    assert found["octets_confirmed"] == 10_000_000
    assert not {"objects", "digests_match"} & found.keys(), "nothing was verified"
    assert "cpu_s_per_gb" not in figures([Sample(1, 1.0, {})])
