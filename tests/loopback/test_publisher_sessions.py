"""A Publisher and its sessions: refused, one of two, closed in the middle, none at all."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import kvcs
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.quic.connection import Connection, PeerRequest
from tests.builders import put, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import accepting, joined, serving

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


def refusing(connection: Connection, request: PeerRequest) -> bool:
    """A relay that lets nobody publish."""
    if not isinstance(request, events.PublishNamespaceReceived):
        return False
    refusal = kvcs.RequestError("not in this scope", RequestCode.UNAUTHORIZED)
    connection.core.responder.refuse(request.request_id, refusal)
    return True


def allowing(connection: Connection, request: PeerRequest) -> bool:
    """A relay that lets everybody publish."""
    if not isinstance(request, events.PublishNamespaceReceived):
        return False
    connection.core.responder.accept(request.request_id)
    return True


async def test_a_refused_announcement_is_an_error_at_once(files: PemFiles) -> None:
    async with serving(files, observer=accepting(refusing)) as relay:
        async with joined(relay, files) as session:
            publisher = kvcs.Publisher(session)
            with pytest.raises(kvcs.RequestError, match="not in this scope") as caught:
                async with publisher.publish(toy_prefix()):
                    raise AssertionError("it was announced")
    assert caught.value.code == RequestCode.UNAUTHORIZED
    assert publisher.publications == ()


async def test_one_relay_of_two_is_enough(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with (
        serving(files, observer=accepting(refusing)) as one,
        serving(files, observer=accepting(allowing)) as other,
        joined(one, files) as refused,
        joined(other, files) as allowed,
    ):
        for sessions in ((refused, allowed), (allowed, refused)):
            async with kvcs.Publisher(*sessions).publish(prefix) as publication:
                await put(await publication.segment(), toy)
        with pytest.raises(kvcs.RequestError, match="not in this scope"):
            async with kvcs.Publisher(refused, refused).publish(prefix):  # one session, not two
                raise AssertionError("it was announced")


async def test_a_closed_session_publishes_nothing_and_says_so(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files, observer=accepting(allowing)) as relay:
        async with joined(relay, files) as session:
            with pytest.raises(kvcs.ConnectionClosed):
                async with kvcs.Publisher(session).publish(prefix) as publication:
                    segment = await publication.segment()
                    await put(segment, toy, range(2))
                    await relay.close()
                    closed = asyncio.Event()
                    session.on_closed(closed.set)
                    await closed.wait()
                    await put(segment, toy, range(2, 4))
            assert publication.progress.layers == 2
            with pytest.raises(kvcs.ConnectionClosed):
                async with kvcs.Publisher(session).publish(prefix):
                    raise AssertionError("it was published")


async def test_a_publisher_needs_a_session() -> None:
    with pytest.raises(kvcs.UsageError, match="at least one session"):
        kvcs.Publisher()


@pytest.mark.parametrize("wrong", [{"store_octets": 0}, {"retention": 0.0}, {"drain": -1.0}])
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(kvcs.UsageError, match=next(iter(wrong))):
        kvcs.PublisherSettings(**wrong)
