"""Tokens on real sessions: a guarded relay, tokens that are renewed, issuers that come and go."""

from __future__ import annotations

import base64
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import kvcs
from kvcs.errors import ConnectionClosed, ConnectionFailed, FileError, RequestError, UsageError
from kvcs.keyfiles import save_key_ring
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode, SessionCode
from kvcs.moqt.messages import RequestOk
from kvcs.moqt.names import FullTrackName
from kvcs.quic.answers import PeerRequest
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import open_connection
from kvcs.trust import (
    CONSUMER,
    PRODUCER,
    TOKEN_TYPE,
    Action,
    KeyRing,
    KeyUse,
    SigningKey,
    issue,
    scope_rule,
)
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import HOST, Wire

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TOY = toy_publication()
PREFIX = toy_prefix()


@dataclass
class Site:
    """A scope's issuer, and the ring file that a relay reads."""

    ring: Path
    key: SigningKey = field(
        default_factory=lambda: SigningKey.generate(
            use=KeyUse.TOKEN, name="site", scope_id=PREFIX.scope_id
        )
    )
    asked: int = 0
    """How often `fresh` was called."""
    lifetime: int = 600

    def trust(self, *keys: SigningKey) -> None:
        """Write the ring: this site's key, or others."""
        chosen = keys or (self.key,)
        save_key_ring(self.ring, KeyRing([key.public for key in chosen], use=KeyUse.TOKEN))

    def token(
        self,
        actions: frozenset[Action] = PRODUCER | CONSUMER,
        lifetime: int | None = None,
        issued: int = 0,
    ) -> bytes:
        """A token for the scope, from now on."""
        return issue(
            self.key,
            audience=[HOST],
            rules=[scope_rule(PREFIX.scope_id, actions)],
            issued_at=int(time.time()) + issued,
            lifetime=self.lifetime if lifetime is None else lifetime,
            token_id=self.asked.to_bytes(8, "big"),
        )

    def fresh(self) -> bytes:
        """What a caller gives as ``token=`` to have it renewed."""
        self.asked += 1
        return self.token()


NAME = FullTrackName(PREFIX.namespace(bytes(16)), b"k.raw.s0")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    made = Site(tmp_path / "issuers")
    made.trust()
    return made


@asynccontextmanager
async def guarded(files: PemFiles, site: Site, **settings: Any) -> AsyncIterator[kvcs.Relay]:
    chosen = kvcs.RelaySettings(
        cert=files.cert,
        key=files.key,
        port=0,
        issuers=site.ring,
        goaway_timeout=0.5,
        **{"token_skew": 0, "issuers_interval": 0.05, **settings},
    )
    async with kvcs.Relay(chosen) as relay:
        yield relay


@asynccontextmanager
async def session(
    relay: kvcs.Relay, files: PemFiles, wire: Wire | None = None, **options: Any
) -> AsyncIterator[Connection]:
    observer = None if wire is None else wire.observe
    connection = await open_connection(relay.url, ca=files.ca, observer=observer, **options)
    if wire is not None:
        wire.attach(connection)
    try:
        yield connection
    finally:
        await connection.close()


async def read(connection: Connection) -> int:
    """Retrieve the toy; how many layers of it were right."""
    async with kvcs.Subscriber(connection, settings=QUICK).open(PREFIX, wait=5.0) as cache:
        return sum([same(layer, TOY) async for layer in cache])


async def test_producer_and_consumer_with_their_own_rights(files: PemFiles, site: Site) -> None:
    async with (
        guarded(files, site) as relay,
        session(relay, files, token=site.token(PRODUCER)) as producer,
        session(relay, files, token=site.token(CONSUMER)) as consumer,
    ):
        async with kvcs.Publisher(producer).publish(PREFIX) as publication:
            await put(await publication.segment(), TOY)
            assert await read(consumer) == TOY.descriptor.layers
            with pytest.raises(RequestError) as refused:
                async with kvcs.Publisher(consumer).publish(PREFIX):
                    pass
            assert refused.value.code == RequestCode.UNAUTHORIZED
            with pytest.raises(RequestError) as refused:
                await read(producer)
            assert refused.value.code == RequestCode.UNAUTHORIZED


async def test_an_outsider_learns_nothing(files: PemFiles, site: Site) -> None:
    async with (
        guarded(files, site) as relay,
        session(relay, files, token=site.token()) as producer,
        session(relay, files) as outsider,
    ):
        async with kvcs.Publisher(producer).publish(PREFIX) as publication:
            await put(await publication.segment(), TOY)
            there = kvcs.PublicationNamespace.parse(publication.namespace)
            answers = []
            for name in (there, there._replace(publication_id=bytes(16))):
                with pytest.raises(RequestError) as refused:
                    await kvcs.Subscriber(outsider, settings=QUICK).manifest(name)
                answers.append((refused.value.code, refused.value.reason))
            assert answers[0] == answers[1]
            with pytest.raises(RequestError):
                await kvcs.Subscriber(outsider, settings=QUICK).list(PREFIX.scope_id)


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda site: b"password", SessionCode.UNAUTHORIZED),
        (lambda site: Site(site.ring).token(), SessionCode.MALFORMED_AUTH_TOKEN),
        (lambda site: site.token(issued=-700), SessionCode.EXPIRED_AUTH_TOKEN),
    ],
)
async def test_a_session_with_a_bad_token_is_closed(
    files: PemFiles, site: Site, make: Callable[[Site], bytes], code: int
) -> None:
    async with guarded(files, site) as relay:
        with pytest.raises(ConnectionClosed) as closed:
            # The relay's SETUP may come before the end, or not.
            async with session(relay, files, token=make(site)) as connection:
                await connection.reply(connection.core.requester.track_status(NAME))
        assert (closed.value.code, closed.value.by_peer) == (code, True)
        assert relay.stats.sessions_refused == 1


async def test_tokens_are_renewed_on_what_is_under_way(files: PemFiles, site: Site) -> None:
    site.lifetime = 2  # whole seconds: the next one is surely later
    wires = (Wire(), Wire())
    async with (
        guarded(files, site, token_skew=60) as relay,
        session(relay, files, wires[0], token=site.fresh) as producer,
        session(relay, files, wires[1], token=site.fresh) as consumer,
    ):
        async with kvcs.Publisher(producer).publish(PREFIX) as publication:
            segment = await publication.segment()
            await put(segment, TOY, [0])
            subscriber = kvcs.Subscriber(consumer, settings=QUICK)
            async with subscriber.open(PREFIX, deadline=30.0) as cache:
                await cache.layer(0)
                for wire in wires:
                    await wire.until(lambda wire=wire: bool(renewed(wire)), 20)
                await put(segment, TOY, range(1, TOY.descriptor.layers))
                assert [same(layer, TOY) async for layer in cache] == [True] * 4
    assert all(isinstance(reply, RequestOk) for wire in wires for reply in renewed(wire))


def renewed(wire: Wire) -> list[object]:
    """Answers to REQUEST_UPDATEs."""
    return [event.reply for event in wire.of(events.RequestUpdateAnswered)]


async def test_what_a_token_allowed_ends_with_it(files: PemFiles, site: Site) -> None:
    reader = Site(site.ring)
    site.trust(site.key, reader.key)
    async with (
        guarded(files, site) as relay,
        session(relay, files, token=site.token()) as producer,
        session(relay, files, token=reader.token()) as consumer,
    ):
        async with kvcs.Publisher(producer).publish(PREFIX) as publication:
            await put(await publication.segment(), TOY, [0])
            subscriber = kvcs.Subscriber(consumer, settings=QUICK)
            async with subscriber.open(PREFIX, deadline=20.0) as cache:
                await cache.layer(0)
                site.trust(site.key)
                relay.reload_issuers()
                assert relay.stats.permits_ended == 3  # two tracks and the manifest
                with pytest.raises(kvcs.KvcsError):
                    await cache.layer(1)
                assert (await cache.layer(0)).index == 0
            publication.abort("enough")


async def test_a_coroutine_gives_tokens_too(files: PemFiles, site: Site) -> None:
    async def ask() -> str:
        return base64.urlsafe_b64encode(site.fresh()).decode()

    async with guarded(files, site) as relay, session(relay, files, token=ask) as connection:
        assert await kvcs.Subscriber(connection, settings=QUICK).list(PREFIX) == []
        assert site.asked == 1


async def test_a_source_that_fails_says_no_more_than_its_kind(files: PemFiles, site: Site) -> None:
    def fails() -> bytes:
        raise RuntimeError("secret")

    async with guarded(files, site) as relay:
        with pytest.raises(ConnectionFailed, match="RuntimeError") as caught:
            await open_connection(relay.url, ca=files.ca, token=fails)
        assert "secret" not in str(caught.value)
        with pytest.raises(UsageError, match="base64url"):
            await open_connection(relay.url, ca=files.ca, token=lambda: "not base64url!")


async def test_issuers_are_rotated_while_the_relay_runs(files: PemFiles, site: Site) -> None:
    fresh, wire = Site(site.ring), Wire()
    async with (
        guarded(files, site) as relay,
        session(relay, files, wire, token=site.token()) as producer,
    ):
        async with kvcs.Publisher(producer).publish(PREFIX) as publication:
            wire.clear()
            await put(await publication.segment(), TOY)
            site.trust(site.key, fresh.key)
            relay.reload_issuers()
            async with session(relay, files, token=fresh.token()) as consumer:
                assert await read(consumer) == TOY.descriptor.layers
            assert relay.stats.permits_ended == 0
            site.trust(fresh.key)  # seen without being told
            await wire.until(lambda: any(e.ours for e in wire.of(events.RequestCancelled)), 20)
            assert relay.stats.namespaces == 0
            with pytest.raises((ConnectionClosed, RequestError)):
                async with session(relay, files, token=site.token()) as consumer:
                    await read(consumer)


async def test_a_ring_that_breaks_changes_nothing(files: PemFiles, site: Site) -> None:
    async with guarded(files, site) as relay:
        site.ring.write_bytes(b"junk")
        with pytest.raises(FileError):
            relay.reload_issuers()
        async with session(relay, files, token=site.token()) as connection:
            assert await kvcs.Subscriber(connection, settings=QUICK).list(PREFIX) == []


async def test_a_server_shows_its_token_to_its_peers(files: PemFiles, site: Site) -> None:
    site.lifetime = 2
    async with kvcs.serve(HOST, 0, cert=files.cert, key=files.key, token=site.fresh) as server:
        wire = Wire()
        connection = await open_connection(server.url, ca=files.ca, observer=wire.observe)
        connection.answer_with(accept)
        async with kvcs.Publisher(server).publish(PREFIX) as publication:
            await wire.until(lambda: bool(wire.of(events.PublishNamespaceReceived)), 20)
            await wire.until(lambda: bool(wire.of(events.RequestUpdateReceived)), 20)
            publication.abort("enough")
        [established] = wire.of(events.SessionEstablished)
        assert [kind for kind, _ in established.tokens] == [TOKEN_TYPE]
        assert wire.of(events.RequestUpdateReceived)[0].tokens != established.tokens
        await connection.close()


def accept(connection: Connection, event: PeerRequest) -> bool:
    """Take whatever the peer announces."""
    connection.core.responder.accept(event.request_id)
    return True


async def test_a_relay_says_what_it_needs(files: PemFiles, site: Site) -> None:
    def settings(**options: Any) -> kvcs.RelaySettings:
        return kvcs.RelaySettings(cert=files.cert, key=files.key, **options)

    with pytest.raises(UsageError, match="--issuers"):
        kvcs.Relay(settings())
    with pytest.raises(UsageError, match="not both"):
        settings(issuers=site.ring, allow_anyone=True)
    with pytest.raises(UsageError, match="audience"):
        settings(audience=("name",), allow_anyone=True)
    with pytest.raises(UsageError, match="--audience"):
        settings(issuers=site.ring, host="0.0.0.0")
    with pytest.raises(FileError):
        kvcs.Relay(settings(issuers=site.ring.with_name("absent")))
