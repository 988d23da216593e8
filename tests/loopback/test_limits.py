"""What a session tells of the limits that its peer reached: counters, and one line for each."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

import kvcs
from kvcs.moqt import FullTrackName, Limit
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.parameters import Parameters
from kvcs.quic.connection import Connection, PeerRequest
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import accepting, joined, serving, with_session

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

NAME = FullTrackName((b"kvcs-1", b"test"), b"track")


async def test_a_limit_is_answered_counted_and_logged_once(files: PemFiles) -> None:
    def keep_waiting(connection: Connection, event: PeerRequest) -> bool:
        return True

    settings, observer = with_session(max_peer_requests=2), accepting(keep_waiting)
    with capture_logs() as logs:
        async with serving(files, session=settings, observer=observer) as server:
            async with joined(server, files) as client:
                asked = [client.core.requester.subscribe(NAME, Parameters()) for _ in range(5)]
                waits = [client.reply(request_id) for request_id in asked[2:]]
                async with asyncio.timeout(20):
                    refusals = await asyncio.gather(*waits, return_exceptions=True)
                for refusal in refusals:
                    assert isinstance(refusal, kvcs.RequestError)
                    assert refusal.code == RequestCode.EXCESSIVE_LOAD
                    assert refusal.retry_after_ms == 1000
                (peer,) = server.connections
                assert peer.limits[Limit.OPEN_REQUESTS] == 3
                assert sum(peer.limits.values()) == 3
                assert sum(client.limits.values()) == 0
    told = [entry["limit"] for entry in logs if entry["event"] == "limit_reached"]
    assert told == ["open_requests"]


async def test_sessions_of_one_server_share_what_they_hold(files: PemFiles) -> None:
    async with serving(files) as server:
        async with joined(server, files) as one, joined(server, files) as other:
            async with asyncio.timeout(20):
                for client in (one, other):
                    with pytest.raises(kvcs.RequestError):
                        await client.reply(client.core.requester.track_status(NAME))
            first, second = (peer.core.settings.shared for peer in server.connections)
            assert first is second
            assert one.core.settings.shared is not other.core.settings.shared
