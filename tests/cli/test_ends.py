"""How long-running commands end: by a signal, with their relay, or because a producer died."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.cli.conftest import Place, RunningRelay, make_cache
from tests.command import Process, Ran, Run
from tests.ports import free_port

PROMPTLY = 20.0
"""Seconds from a signal to the end of the process, on a busy machine."""


def check_ended(ended: tuple[Ran, float], number: signal.Signals) -> None:
    """A command that was interrupted ends soon, with the code of the signal and no traceback."""
    ran, seconds = ended
    assert ran.code == 128 + number
    assert "Traceback" not in ran.err
    assert "error" not in ran.err
    assert seconds < PROMPTLY


def test_a_relay_ends(place: Place) -> None:
    options = ("--bind", "127.0.0.1:0", *place.keys, "--allow-anyone", "--json")
    with Process("relay", *options) as relay:
        relay.says("relay listening on moqt://127.0.0.1:")
        ended = relay.stop(signal.SIGINT)
    check_ended(ended, signal.SIGINT)
    assert ended[0].json()["sessions_total"] == 0
    assert len(ended[0].err.splitlines()) == 1


def test_a_producer_that_serves_ends(place: Place, relay: RunningRelay) -> None:
    there = ("--relay", relay.url, *place.member)
    with Process("publish", place.cache, *there, "--lines") as producer:
        producer.event("published")
        ended = producer.stop(signal.SIGINT)
    check_ended(ended, signal.SIGINT)
    assert ended[0].err == ""


def test_a_producer_that_serves_others_directly_ends(place: Place) -> None:
    with Process(
        *("publish", place.cache, "--serve", "127.0.0.1:0", *place.keys),
        *("--scope-key-file", place.scope_key, "--lines"),
    ) as producer:
        producer.event("published")
        ended = producer.stop(signal.SIGINT)
    check_ended(ended, signal.SIGINT)
    assert ended[0].err == ""


def test_a_consumer_that_waits_ends(place: Place, relay: RunningRelay, tmp_path: Path) -> None:
    there = ("--relay", relay.url, *place.member)
    unknown = make_cache(tmp_path / "unknown.safetensors", seed=7)
    out = tmp_path / "out.safetensors"
    with Process(
        *("subscribe", *there, "--like", unknown, "--out", out),
        *("--log-level", "debug"),
    ) as consumer:
        consumer.says("session_established")
        ended = consumer.stop(signal.SIGINT)
    check_ended(ended, signal.SIGINT)
    assert ended[0].out == ""
    assert not list(tmp_path.glob("*out*"))


def test_consumers_and_producer_are_stopped_in_the_middle(
    place: Place, relay: RunningRelay, tmp_path: Path
) -> None:
    there = ("--relay", relay.url, *place.member)
    cache = make_cache(tmp_path / "cache.safetensors", seed=4)
    wanted = ("subscribe", *there, "--like", cache, "--lines", "--out")
    with (
        Process(*wanted, tmp_path / "1.out") as stopped,
        Process(*wanted, tmp_path / "2.out") as left,
        Process("publish", cache, *there, "--lines", "--pace", "2") as producer,
    ):
        assert stopped.event("layer_verified")["layer"] == 0
        check_ended(stopped.stop(signal.SIGTERM), signal.SIGTERM)
        assert left.event("layer_verified")["layer"] == 0
        check_ended(producer.stop(signal.SIGINT), signal.SIGINT)
        lost = left.end()
    assert lost.code == 3
    assert lost.line().startswith("kvcs: cache incomplete: the publisher aborted the publication")
    check_names_what_lacks(lost.line())
    assert not list(tmp_path.glob("*out*")), "files appear whole or not at all"


@pytest.mark.slow
def test_a_producer_that_is_killed_in_the_middle_leaves_an_incomplete_cache(
    place: Place, relay: RunningRelay, tmp_path: Path
) -> None:
    there = ("--relay", relay.url, *place.member)
    cache = make_cache(tmp_path / "cache.safetensors", seed=5)
    out = tmp_path / "out.safetensors"
    with Process("publish", cache, *there, "--lines", "--pace", "3") as producer:
        producer.event("layer_published")  # the consumer's time begins when a layer is there
        with Process(
            *("subscribe", *there, "--like", cache, "--out", out, "--lines", "--deadline", "6")
        ) as consumer:
            consumer.event("layer_verified")
            producer.send(signal.SIGKILL)
            lost = consumer.end()
    assert lost.code == 3
    assert lost.line().startswith("kvcs: cache incomplete: the deadline of 6 s passed;")
    check_names_what_lacks(lost.line())
    assert not out.exists()


def check_names_what_lacks(line: str) -> None:
    """The line names components, layers, blocks and tokens."""
    assert "missing k layer " in line
    assert "; v layer " in line
    assert "blocks 0-3 (tokens 0-15)" in line
    assert line.endswith("0 tokens are usable in every layer")


def test_a_relay_keeps_a_whole_cache_when_its_producer_is_stopped(
    place: Place, relay: RunningRelay, tmp_path: Path, run: Run
) -> None:
    there = ("--relay", relay.url, *place.member)
    cache = make_cache(tmp_path / "cache.safetensors", seed=6)
    wanted = (*there, "--like", cache, "--compare", cache, "--json")
    with Process("publish", cache, *there, "--lines") as producer:
        uri = producer.event("announced")["uri"]
        producer.event("published")
        assert run("subscribe", *wanted).code == 0
        check_ended(producer.stop(), signal.SIGTERM)
    for command in ("subscribe", "fetch"):
        got = run(command, *wanted, "--publication", uri, "--deadline", "10")
        assert (got.code, got.err) == (0, "")
        assert got.json()["equal"] is True


@pytest.mark.slow
def test_a_producer_that_is_not_to_come_back_leaves_a_relay_that_goes_away(place: Place) -> None:
    with Process(
        "relay", "--bind", "127.0.0.1:0", *place.keys, "--allow-anyone", "--lines"
    ) as relay:
        url = relay.event("listening")["url"]
        there = ("--relay", url, *place.member, "--reconnect", "0")
        with Process("publish", place.cache, *there, "--lines") as producer:
            producer.event("published")
            stopped = relay.stop()
            left = producer.end()
    check_ended(stopped, signal.SIGTERM)
    assert stopped[0].err == ""
    last = stopped[0].lines()[-1]
    assert (last["event"], last["sessions_total"], last["namespaces"]) == ("stopped", 1, 1)
    assert left.code == 2
    assert left.line() == "kvcs: session closed by the peer (no code): it goes away (GOAWAY)"


@pytest.mark.slow
def test_a_producer_comes_back_to_a_relay_that_is_started_again(place: Place, run: Run) -> None:
    def start(port: int) -> Process:
        options = (*place.keys, "--allow-anyone", "--lines")
        return Process("relay", "--bind", f"127.0.0.1:{port}", *options)

    port = free_port()  # nobody is given it while no relay listens
    with start(port) as relay:
        url = relay.event("listening")["url"]
        there = ("--relay", url, *place.member)
        with Process("publish", place.cache, *there, "--lines") as producer:
            producer.event("published")
            check_ended(relay.stop(), signal.SIGTERM)  # it need not wait for the producer
            with start(port) as again:
                again.event("listening")
                wanted = ("--like", place.cache, "--compare", place.cache, "--json")
                got = run("subscribe", *there, *wanted, "--deadline", "20")
                assert (got.code, got.err) == (0, "")
                assert got.json()["equal"] is True
            check_ended(producer.stop(signal.SIGINT), signal.SIGINT)


@pytest.mark.slow
def test_a_producer_gives_a_relay_up_that_stays_away(place: Place) -> None:
    with Process(
        "relay", "--bind", "127.0.0.1:0", *place.keys, "--allow-anyone", "--lines"
    ) as relay:
        url = relay.event("listening")["url"]
        there = ("--relay", url, *place.member, "--reconnect", "0.5")
        with Process("publish", place.cache, *there, "--lines") as producer:
            producer.event("published")
            relay.stop()
            left = producer.end()
    assert left.code == 2
    assert "no session followed within 0.5 s" in left.line()


@pytest.mark.slow
def test_a_producer_moves_to_the_relay_that_a_stopping_one_names(place: Place, run: Run) -> None:
    def relay(*options: object) -> Process:
        anyone = (*place.keys, "--allow-anyone", "--lines")
        return Process("relay", "--bind", "127.0.0.1:0", *anyone, *options)

    with relay() as other:
        there = other.event("listening")["url"]
        with relay("--goaway-uri", there, "--goaway-timeout", "20") as first:
            here = first.event("listening")["url"]
            options = ("--relay", here, *place.member, "--lines")
            with Process("publish", place.cache, *options) as producer:
                producer.event("published")
                check_ended(first.stop(), signal.SIGTERM)  # long before its 20 s
                wanted = ("--like", place.cache, "--compare", place.cache, "--json")
                got = run("subscribe", "--relay", there, *place.member, *wanted)
                assert (got.code, got.err) == (0, "")
                assert got.json()["equal"] is True
                check_ended(producer.stop(signal.SIGINT), signal.SIGINT)


def test_a_relay_sends_nobody_to_what_is_no_relay(place: Place, run: Run) -> None:
    options = ("--bind", "127.0.0.1:0", *place.keys, "--allow-anyone")
    failed = run("relay", *options, "--goaway-uri", "https://relay.example")
    assert failed.code == 2
    assert "is not a moqt:// URI" in failed.line()


@pytest.mark.slow
def test_where_one_relay_cannot_be_reached_another_serves(
    place: Place, relay: RunningRelay, run: Run, tmp_path: Path
) -> None:
    cache = make_cache(tmp_path / "cache.safetensors", seed=9)
    nobody = "moqt://127.0.0.1:1"
    with Process("publish", cache, "--relay", relay.url, *place.member, "--lines") as producer:
        producer.event("published")
        wanted = (*place.member, "--like", cache, "--compare", cache, "--json")
        got = run("subscribe", "--relay", nobody, "--relay", relay.url, *wanted)
        assert (got.code, got.json()["equal"]) == (0, True)
        assert got.line().startswith("kvcs: left out: cannot connect to 127.0.0.1:1")
    failed = run("subscribe", "--relay", nobody, "--relay", nobody, *wanted)
    assert failed.code == 2
    assert failed.line().startswith("kvcs: cannot connect to 127.0.0.1:1")


@pytest.mark.slow
def test_a_producer_at_two_relays_stays_while_one_is_left(
    place: Place, relay: RunningRelay, run: Run
) -> None:
    with Process(
        "relay", "--bind", "127.0.0.1:0", *place.keys, "--allow-anyone", "--lines"
    ) as other:
        url = other.event("listening")["url"]
        both = ("--relay", url, "--relay", relay.url, *place.member, "--reconnect", "0.5")
        with Process("publish", place.cache, *both, "--lines") as producer:
            producer.event("published")
            other.stop()
            wanted = ("--like", place.cache, "--compare", place.cache, "--json")
            got = run("subscribe", "--relay", relay.url, *place.member, *wanted)
            assert (got.code, got.err) == (0, "")
            check_ended(producer.stop(signal.SIGINT), signal.SIGINT)
