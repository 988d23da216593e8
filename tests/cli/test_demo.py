"""`kvcs demo` and the scripts to copy from, each as processes."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest

import kvcs
from kvcs.cli import children, demo
from tests.cli.conftest import LAYERS, Place, RunningRelay, make_cache
from tests.command import ROOT, Process, Run, came_once

SCRIPTS = ROOT / "scripts"


def test_the_demo_shows_that_both_ends_have_the_same_cache(place: Place) -> None:
    with Process("demo", "--file", place.cache, "--pace", "0.01") as process:
        ran = process.end()
    assert ran.code == 0, ran.err
    header, *table = ran.out.splitlines()
    assert header.split()[:3] == ["layer", "published", "verified"]
    rows = [line.split() for line in table[:LAYERS]]
    assert [int(layer) for layer, _, _ in rows] == list(range(LAYERS))
    assert rows[0][1] == "0"
    facts = dict(line.split("  ", 1) for line in table[LAYERS:])
    assert facts["verdict"].strip() == "equal, byte for byte"
    assert facts["objects"].strip() == str(2 * 4 * LAYERS)
    # What is said on the way goes to standard error, in plain lines where nobody watches.
    said = ran.err.splitlines()
    assert said[0] == "kvcs: tiny: 6 layers, 4 blocks of 4 tokens, from cache.safetensors"
    assert re.fullmatch(r"kvcs: relay at moqt://127\.0\.0\.1:\d+", said[1])
    assert len(said) == 2
    assert "\x1b" not in ran.out + ran.err


@pytest.mark.slow
def test_the_demo_through_two_relays(place: Place, run: Run) -> None:
    ran = run("demo", "--chain", "--file", place.cache, "--pace", "0.01", "--json")
    assert ran.code == 0, ran.err
    document = ran.json()
    assert document["equal"] is True
    assert (document["layers"], document["objects"]) == (LAYERS, 2 * 4 * LAYERS)
    assert came_once(document)
    _, first, second = ran.err.splitlines()
    [url] = re.findall(r"^kvcs: relay A at (moqt://127\.0\.0\.1:\d+)$", first)
    found = re.fullmatch(r"kvcs: relay B at (moqt://\S+), whose upstream is (moqt://\S+)", second)
    assert found is not None and found[1] != url and found[2] == url


@pytest.mark.slow
def test_the_demo_of_the_real_cache_in_json(place: Place, run: Run) -> None:
    ran = run("demo", "--pace", "0", "--json")
    assert ran.code == 0, ran.err
    document = ran.json()
    assert document["equal"] is True
    assert (document["layers"], document["tokens"], document["objects"]) == (30, 160, 600)
    assert came_once(document)
    timeline = document["timeline"]
    assert [row["layer"] for row in timeline] == list(range(30))
    assert all(row["verified_ms"] is not None for row in timeline)
    assert min(row["published_ms"] for row in timeline) == 0


def test_the_demo_of_a_file_that_is_none(run: Run, tmp_path: Path) -> None:
    ran = run("demo", "--file", tmp_path / "none")
    assert (ran.code, ran.out) == (2, "")
    assert ran.line() == f"kvcs: {tmp_path / 'none'}: No such file or directory"


def test_the_demo_says_which_process_failed(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = tmp_path / "partial.safetensors"
    whole = kvcs.load_kv_file(place.cache)
    kvcs.save_kv_file(partial, whole.descriptor, whole.token_ids, {0: whole.layers[0]})
    loaded = kvcs.load_kv_file(partial, partial=True)
    monkeypatch.setattr(demo, "_cache", lambda *_: loaded)
    ran = run("demo", "--pace", "0")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[-1].startswith("kvcs: the publish ended early: kvcs: ")
    assert "layer 1 and 4 more missing" in ran.err


async def test_a_child_that_does_not_become_ready_is_told() -> None:
    wait = ("-c", "import sys; sys.stdin.read()")
    async with children.run_child(*wait, program=(sys.executable,), name="relay") as child:
        with pytest.raises(children.ChildFailed, match=r"relay was not listening within 0\.1 s"):
            await child.event("listening", 0.1)
    assert child.process.returncode == -signal.SIGTERM


def test_the_scripts_to_copy_from(place: Place, relay: RunningRelay, tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache.safetensors", seed=8)
    there = ("--relay", relay.url, "--ca", place.pem.ca, "--scope-key", place.scope_key)
    with (
        Process(cache, *there, program=(str(SCRIPTS / "consumer.py"),)) as consumer,
        Process(cache, *there, "--retain", "30", program=(str(SCRIPTS / "producer.py"),)),
    ):
        got = consumer.end()
    assert (got.code, got.err) == (0, "")
    *layers, last = got.out.splitlines()
    assert layers == [
        f"layer {index}: k (16, 2, 8) v (16, 2, 8) float16" for index in range(LAYERS)
    ]
    assert last.startswith("retrieved CacheReport(")

    unknown = make_cache(tmp_path / "unknown.safetensors", seed=10)
    with Process(
        *(unknown, *there, "--deadline", "0.5"), program=(str(SCRIPTS / "consumer.py"),)
    ) as consumer:
        lost = consumer.end()
    assert (lost.code, lost.err) == (3, "")
    assert lost.out.startswith("compute the prefix here instead: no publication of the prefix")
    assert len(lost.out.splitlines()) == 1
