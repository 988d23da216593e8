"""The bench's result: JSON, tables, a picture; measuring cases in turn; aiomoqt's own words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvcs.bench import needs, plot
from kvcs.bench.children import ChildFailed, Unavailable
from kvcs.bench.figures import Process, Ratio, Sample
from kvcs.bench.measure import measure
from kvcs.bench.peer import sample as peer_sample
from kvcs.bench.plan import Case, Group, Scale
from kvcs.bench.plot import check_plot, draw
from kvcs.bench.result import Result
from kvcs.bench.tables import listing, report
from kvcs.bench.transfer import Certificates, Transfer
from kvcs.bench.workload import KIB, MIB, Workload
from kvcs.errors import FileError

PEER_SAID = """
  Subscribed to 'bench/track', receiving...
  Groups:      41
  Objects:     6,500
  Bytes:       213,000,000
  Throughput:  852.00 Mbps
"""


def taken(seconds: float) -> Sample:
    """A sample of a transfer."""
    processes = {"sender": Process(0.5, 50_000_000), "receiver": Process(1.0, 70_000_000)}
    values = {"first_layer_ms": 2.0, "first_over_all_layers": 0.05}
    return Sample(10_000_000, seconds, processes, 3, True, values)


def case(name: str, samples: Sequence[Sample], order: list[str] | None = None) -> Case:
    """A case whose samples are known before."""

    async def run(certificates: Certificates, number: int) -> Sample:
        assert certificates.folder.is_dir()
        if order is not None:
            order.append(name)
        if not samples:
            raise Unavailable("it is not here")
        return samples[number]

    return Case(name, f"what {name} is", run)


def groups(order: list[str] | None = None) -> list[Group]:
    """Two groups, with one case that is not there."""
    quick, slow = [taken(1.0), taken(1.0)], [taken(2.0), taken(4.0)]
    first = Group(
        "goodput",
        "about goodput",
        [case("relay_32KiB", slow, order), case("direct_32KiB", quick, order)],
        [Ratio("relay_32KiB_over_direct", "relay_32KiB", "direct_32KiB")],
        rounds=2,
    )
    second = Group(
        "layers",
        "about layers",
        [case("queued", quick, order), case("absent", [], order)],
        [
            Ratio("queued_direct_first_over_all_layers", "queued", metric="first_over_all_layers"),
            Ratio("queued_over_absent", "queued", "absent"),
        ],
        rounds=2,
    )
    return [first, second]


async def measured() -> Result:
    return await measure(groups(), Scale(), lambda text: None)


async def test_cases_take_turns_and_what_is_absent_is_tried_once() -> None:
    order: list[str] = []
    told: list[str] = []
    result = await measure(groups(order), Scale(), told.append)
    first = ["relay_32KiB", "direct_32KiB"]
    assert order == [*first, *first[::-1], "queued", "absent", "queued"]
    assert result.skipped == {"absent": "it is not here"}
    assert told[0] == "goodput, round 1/2: relay_32KiB: 5.0 MB/s"
    assert "layers, round 1/2: absent: skipped: it is not here" in told
    assert [each.seconds for each in result.samples["relay_32KiB"]] == [2.0, 4.0]


async def test_rounds_of_the_command_go_first() -> None:
    result = await measure(groups()[:1], Scale(rounds=1), lambda text: None)
    assert {name: len(samples) for name, samples in result.samples.items()} == {
        "relay_32KiB": 1,
        "direct_32KiB": 1,
    }
    assert result.facts["rounds"] == {"goodput": 1}


async def test_a_case_that_fails_ends_the_run() -> None:
    async def fail(certificates: Certificates, number: int) -> Sample:
        raise ChildFailed("it went wrong")

    broken = Group("g", "", [Case("x", "x", fail)], [])
    with pytest.raises(ChildFailed, match="x: it went wrong"):
        await measure([broken], Scale(), lambda text: None)


async def test_the_document_has_ratios_figures_targets_and_facts() -> None:
    found = (await measured()).document()
    assert list(found) == ["ratios", "ranges", "targets", "figures", "skipped", "facts"]
    assert found["ratios"] == {
        "relay_32KiB_over_direct": 0.375,
        "queued_direct_first_over_all_layers": 0.05,
    }
    assert found["ranges"]["relay_32KiB_over_direct"] == [0.25, 0.5]
    assert found["targets"]["one relay / direct"] == {
        "at_least": 0.5,
        "median": 0.375,
        "min": 0.25,
        "max": 0.5,
        "reached": False,
    }
    assert found["targets"]["first layer / all 32 layers, queued"]["reached"] is True
    assert set(found["figures"]) == {"relay_32KiB", "direct_32KiB", "queued"}
    assert found["figures"]["queued"]["digests_match"] is True
    assert found["skipped"] == {"absent": "it is not here"}
    assert {"cores", "python", "aioquic", "rounds", "short", "seconds"} <= found["facts"].keys()
    assert json.loads(json.dumps(found)) == found


async def test_the_report_has_targets_and_ratios_before_figures() -> None:
    text = report(await measured())
    lines = text.splitlines()
    assert lines[0] == "| target | bound | median [min-max] | verdict |"
    assert "| one relay / direct | >= 0.5 | 0.38 [0.25-0.50] | MISSED |" in lines
    assert any(line.endswith("| 0.05 [0.05-0.05] | reached |") for line in lines)
    assert "| relay 32KiB / direct | 0.38 [0.25-0.50] |" in lines
    assert (
        "| what relay_32KiB is | 3.8 [2.5-5.0] | 50.0, 100.0 | 50, 70 | first layer 2.0 |" in lines
    )
    assert "skipped absent: it is not here" in lines
    assert text.index("goodput: ratios") < text.index("goodput: figures")


async def test_columns_that_nothing_fills_are_left_out() -> None:
    bare = Group("others", "", [case("a", [Sample(1_000_000, 1.0, {})])], [], rounds=1)
    text = report(await measure([bare], Scale(), lambda text: None))
    assert "| others: figures | MB/s |\n| --- | --- |\n| what a is | 1.0 [1.0-1.0] |" in text


def test_the_listing_has_a_line_for_each_group() -> None:
    rows = listing()
    assert [row["group"] for row in rows][:3] == ["goodput", "objects", "streams"]
    assert all(row["seconds"] >= row["short_seconds"] > 0 and row["about"] for row in rows)


# The picture


@pytest.mark.parametrize("name", ["ratios.png", "ratios.svg"])
async def test_a_picture_is_drawn(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    check_plot(tmp_path / name)
    draw(await measured(), tmp_path / name)
    magic = {".png": b"\x89PNG", ".svg": b"<?xml"}[Path(name).suffix]
    assert (tmp_path / name).read_bytes().startswith(magic)


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(FileError, match="nothing to draw"):
        draw(Result([]), tmp_path / "ratios.png")


def test_a_picture_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plot, "find_spec", lambda name: object())
    with pytest.raises(FileError, match=r"is a \.png, \.svg or \.pdf file"):
        check_plot(tmp_path / "ratios.txt")
    with pytest.raises(FileError, match="is not a folder"):
        check_plot(tmp_path / "nowhere" / "ratios.png")
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    with pytest.raises(Unavailable, match=r"pip install '\.\[bench\]'"):
        check_plot(tmp_path / "ratios.png")


# Others


def test_the_words_of_aiomoqt_become_a_sample() -> None:
    found = peer_sample(PEER_SAID)
    assert (found.octets, found.objects) == (213_000_000, 6500)
    assert found.rate == pytest.approx(106_500_000)
    assert found.digests_match is None and not found.processes


@pytest.mark.parametrize("said", ["", "No data received.", "Bytes: 0\nThroughput:  0.00 Mbps"])
def test_a_peer_that_receives_nothing_is_no_sample(said: str) -> None:
    with pytest.raises(ChildFailed, match="received nothing"):
        peer_sample(said)


async def test_what_is_not_installed_is_skipped_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = Transfer(workload=Workload.of(32 * KIB, 2 * MIB), stack="redis")
    monkeypatch.setattr(needs.shutil, "which", lambda name: None)
    run = needs.needs(transfer, module="json", program="redis-server")
    with pytest.raises(Unavailable, match="no redis-server on PATH"):
        await run(Certificates(tmp_path), 0)
    monkeypatch.setattr(needs, "find_spec", lambda name: None)
    run = needs.needs(transfer, module="redis", program="redis-server")
    with pytest.raises(Unavailable, match="redis is not installed"):
        await run(Certificates(tmp_path), 0)


async def test_what_memory_is_too_small_for_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer = Transfer(workload=Workload.of(32 * KIB, 2 * MIB))
    monkeypatch.setattr(needs, "available_octets", lambda: 1024 * MIB)
    with pytest.raises(Unavailable, match=r"needs 1\.5 GiB of memory, 1\.0 are free"):
        await needs.needs_memory(transfer, 1536 * MIB)(Certificates(tmp_path), 0)


def test_free_memory_is_told() -> None:
    free = needs.available_octets()
    assert free is None or free > MIB
