"""What an operator sees of a relay over HTTP, without a relay behind it."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import socket
import time
from urllib.parse import urlsplit

import pytest
from rich.console import Console

from kvcs.cli.status import table
from kvcs.errors import ConnectionFailed
from kvcs.relay import admin as rooms
from kvcs.relay.admin import Admin, families
from kvcs.relay.stats import PeerStats, RelayStats, RelayStatus, UpstreamStats

STATS = RelayStats(sessions=2, cache_octets=4096, hits=5, misses=1, groups=3, tracks=2)
PEERS = tuple(
    PeerStats(
        session=n,
        peer=f"127.0.0.1:{n}",
        seconds=1,
        requests=4,
        serving=2,
        queued_octets=n,
        rtt=None,
    )
    for n in (1, 2)
)


def get(url: str, path: str, method: str = "GET") -> tuple[int, str]:
    """Status code and body."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


async def test_metrics_are_those_of_now_under_the_documented_names() -> None:
    async with Admin(lambda: RelayStatus(True, STATS, PEERS), "9.9") as admin:
        code, text = await asyncio.to_thread(get, admin.url, "/metrics")
    assert code == 200
    lines = text.splitlines()
    for line in (
        'kvcs_build_info{version="9.9"} 1.0',
        "kvcs_ready 1.0",
        "kvcs_sessions 2.0",
        "kvcs_cache_bytes 4096.0",
        "kvcs_cache_items 2.0",
        "kvcs_cache_groups 3.0",
        "kvcs_relay_hits_total 5.0",
        "kvcs_relay_misses_total 1.0",
        "kvcs_relay_upstream_fetches_total 0.0",
        "kvcs_subscribers 4.0",
        "kvcs_send_queue_peer_max_bytes 2.0",
        "kvcs_bytes_published_total 0.0",
    ):
        name = line.split()[0]
        # The process's own counters go on through other tests: their name is what counts here.
        assert line in lines or (name == "kvcs_bytes_published_total" and name in text), line


UPSTREAMS = (
    UpstreamStats(0, "relay-a.example:4433", "open", sessions=2, requests=7, retries=1),
    UpstreamStats(1, "relay-b.example", "opening", sessions=0, requests=0, retries=5),
)


async def test_upstreams_have_metrics_and_rows_of_their_own() -> None:
    status = RelayStatus(True, STATS, PEERS, (), UPSTREAMS)
    samples = {
        (sample.name, sample.labels["preference"], sample.labels.get("state")): sample.value
        for family in families(status, "9.9")
        for sample in family.samples
        if sample.labels.get("upstream") in [each.upstream for each in UPSTREAMS]
    }
    assert samples["kvcs_upstream_state", "0", "open"] == 1
    assert samples["kvcs_upstream_state", "0", "opening"] == 0
    assert samples["kvcs_upstream_state", "1", "opening"] == 1
    for one in UPSTREAMS:
        for member in ("sessions", "requests", "retries"):
            found = samples[f"kvcs_upstream_{member}_total", str(one.preference), None]
            assert found == getattr(one, member)
    async with Admin(lambda: status, "9.9") as admin:
        _, document = await asyncio.to_thread(get, admin.url, "/status")
    shown = io.StringIO()
    Console(file=shown, width=100).print(table(json.loads(document)))
    rows = [line.replace("│", " ").split() for line in shown.getvalue().splitlines()]
    assert ["relay-a.example:4433", "open", "0", "2", "7", "1"] in rows
    assert ["relay-b.example", "opening", "1", "0", "0", "5"] in rows


async def test_no_label_can_name_what_is_cached_or_who_asks() -> None:
    async with Admin(lambda: RelayStatus(True, STATS, PEERS), "9.9") as admin:
        _, text = await asyncio.to_thread(get, admin.url, "/metrics")
    labels = {
        part.split("=")[0].rpartition(",")[2].strip('"')
        for line in text.splitlines()
        if "{" in line and not line.startswith("#")
        for part in line.partition("{")[2].partition("}")[0].split('",')
    }
    # Those of the whole process: what other tests have counted is there, too.
    known = {"version", "component", "codec", "reason", "outcome", "action", "state", "le"}
    assert labels <= known | {"request", "code"}
    assert "127.0.0.1" not in text


async def test_readiness_follows_the_relay_and_health_does_not() -> None:
    ready = False
    async with Admin(lambda: RelayStatus(ready, STATS, ()), "9.9") as admin:
        for expected in (False, True, False):
            ready = expected
            code, _ = await asyncio.to_thread(get, admin.url, "/readyz")
            assert code == (200 if expected else 503)
            assert await asyncio.to_thread(get, admin.url, "/healthz") == (200, "ok\n")


async def test_a_loop_that_hangs_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "ANSWER_SECONDS", 0.01)
    async with Admin(lambda: RelayStatus(True, STATS, ()), "9.9") as admin:
        # Asked within the loop, which cannot answer meanwhile.
        for path in ("/healthz", "/readyz", "/metrics", "/status"):
            code, _, body = admin.answer(path)
            assert (code, b"did not answer" in body) == (503, True), path


async def test_unknown_paths_and_other_methods() -> None:
    async with Admin(lambda: RelayStatus(True, STATS, ()), "9.9") as admin:
        assert (await asyncio.to_thread(get, admin.url, "/"))[0] == 404
        assert (await asyncio.to_thread(get, admin.url, "/status?x=1"))[0] == 200
        assert await asyncio.to_thread(get, admin.url, "/healthz", "HEAD") == (200, "")
        assert (await asyncio.to_thread(get, admin.url, "/healthz", "POST"))[0] == 501


async def test_a_port_in_use_is_told() -> None:
    async with Admin(lambda: RelayStatus(True, STATS, ()), "9.9") as admin:
        port = urlsplit(admin.url).port
        assert port is not None
        with pytest.raises(ConnectionFailed, match=str(port)):
            async with Admin(lambda: RelayStatus(True, STATS, ()), "9.9", port=port):
                raise AssertionError("it cannot listen there twice")
    assert admin.url == ""


def dribble(address: tuple[str, int], seconds: float) -> bool:
    """Whether a connection that sends an octet now and then is closed in time."""
    until = time.monotonic() + seconds
    with socket.create_connection(address) as connection:
        connection.settimeout(0.005)
        while time.monotonic() < until:
            try:
                connection.sendall(b"G")
                if not connection.recv(1):
                    return True
            except TimeoutError:
                continue
            except OSError:
                return True
    return False


async def test_a_connection_that_dribbles_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "CONNECTION_SECONDS", 0.2)
    async with Admin(lambda: RelayStatus(True, STATS, ()), "9.9") as admin:
        parts = urlsplit(admin.url)
        assert parts.hostname is not None and parts.port is not None
        assert await asyncio.to_thread(dribble, (parts.hostname, parts.port), 20.0)
