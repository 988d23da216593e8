"""`kvcs relay --admin` and `--status`: an operator's view of a relay that moved a cache."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest

from tests.cli.conftest import Place
from tests.command import Process, Run


@pytest.fixture(scope="module")
def urls(place: Place) -> Iterator[tuple[str, str]]:
    """URLs of a relay and of its HTTP."""
    options = ("--bind", "127.0.0.1:0", "--admin", "0", "--allow-anyone", "--lines")
    with Process("relay", *options, *place.keys) as it:
        listening = it.event("listening")
        yield listening["url"], listening["admin"]


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def test_a_move_shows_in_metrics_and_status(place: Place, urls: tuple[str, str], run: Run) -> None:
    relay, admin = urls
    assert get(f"{admin}/readyz") == "ready\n"
    publish = ("publish", place.cache, "--relay", relay, *place.member, "--lines")
    with Process(*publish) as producer:
        producer.event("published")
        out = place.folder / "operated.safetensors"
        fetched = run(
            "subscribe", "--relay", relay, *place.member, "--like", place.cache, "--out", out
        )
        assert fetched.code == 0, fetched.err
        status = run("relay", "--status", admin, "--json").json()
        assert status["ready"] is True
        assert status["stats"]["octets_in"] > 0
        assert status["stats"]["tracks"] >= 3
        assert len(status["peers"]) >= 1
        assert f"kvcs_relay_bytes_received_total {float(status['stats']['octets_in'])}" in get(
            f"{admin}/metrics"
        )
        shown = run("relay", "--status", admin)
        assert shown.code == 0
        for word in ("ready", "tracks", "cache", "hits", "misses", "queued", "127.0.0.1:"):
            assert word in shown.out


def test_no_namespace_is_shown(urls: tuple[str, str]) -> None:
    _, admin = urls
    text = get(f"{admin}/status")
    assert set(json.loads(text)) == {"ready", "stats", "peers", "scopes", "upstreams"}
    assert "kvcs" not in text


def test_a_relay_that_is_not_there_and_one_that_is_no_url(run: Run) -> None:
    ran = run("relay", "--status", "http://127.0.0.1:1")
    assert ran.code == 2
    assert "127.0.0.1:1" in ran.line()
    ran = run("relay", "--status", "moqt://127.0.0.1:1")
    assert ran.code == 2
    assert "http://HOST:PORT" in ran.line()


def test_a_relay_without_certificate_is_told(run: Run) -> None:
    ran = run("relay", "--allow-anyone")
    assert ran.code == 2
    assert "--cert" in ran.line()
