"""A producer that listens and asks for tokens: a relay's rules, on virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import kvcs
from kvcs.access.guard import ISSUERS_INTERVAL
from kvcs.errors import ConnectionClosed, FileError, RequestError, UsageError
from kvcs.keyfiles import save_key_ring
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, RequestCode, SessionCode, StreamCode
from kvcs.moqt.names import FullTrackName, TrackNamespace
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.tokens import Token
from kvcs.moqt.track.store import Track
from kvcs.observe import metrics
from kvcs.quic.answers import PeerRequest
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import Server, open_connection
from kvcs.testing.network import Network, Trace, leftovers, run
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
from kvcs.trust.tokens import CLOCK_SKEW
from tests.builders import put, same, toy_prefix, toy_publication

BASE = 1_000_000_000
"""Unix seconds at the start of virtual time."""

PREFIX, TOY = toy_prefix(), toy_publication()
LAYERS = TOY.descriptor.layers
ISSUER = SigningKey.generate(use=KeyUse.TOKEN, name="issuer", scope_id=PREFIX.scope_id)
OTHER_ID = bytes(16)
OTHER = SigningKey.generate(use=KeyUse.TOKEN, name="other", scope_id=OTHER_ID)
NAME, URL = "producer.example", "moqt://producer:4433"


def token(
    actions: frozenset[Action] = CONSUMER,
    *,
    lifetime: int = 600,
    key: SigningKey = ISSUER,
    audience: str = NAME,
) -> bytes:
    return issue(
        key,
        audience=[audience],
        rules=[scope_rule(key.public.scope_id or OTHER_ID, actions)],
        issued_at=int(time.time()),
        lifetime=lifetime,
        token_id=time.time_ns().to_bytes(8, "big"),
    )


@dataclass
class Seen:
    """What one session was told."""

    events: list[events.Event] = field(default_factory=list)
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def observe(self, connection: Connection, event: events.Event) -> None:
        """Note an event."""
        self.events.append(event)
        self.changed.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until something holds; it is looked at after each event."""
        while not condition():
            self.changed.clear()
            await self.changed.wait()

    def of(self, *kinds: type) -> list[Any]:
        """Those of some kinds."""
        return [event for event in self.events if isinstance(event, kinds)]


@dataclass
class World:
    """A listening producer."""

    network: Network
    server: Server
    ring: Path
    seen: list[Seen] = field(default_factory=list)

    @asynccontextmanager
    async def peer(self, shown: Any = None) -> AsyncIterator[tuple[Connection, Seen]]:
        """A session with the producer, and what it was told."""
        seen = Seen()
        with self.network.host(f"peer {len(self.seen)}"):
            self.seen.append(seen)
            connection = await open_connection(URL, token=shown, observer=seen.observe)
            try:
                yield connection, seen
            finally:
                await connection.close()

    async def read(self, shown: Any = None, deadline: float = 30.0) -> int:
        """Retrieve the toy; how many layers of it were right."""
        with self.network.host(f"reader {len(self.network.sessions)}"):
            async with kvcs.connect(URL, token=shown, reconnect=None) as session:
                async with kvcs.Subscriber(session).open(PREFIX, deadline=deadline) as cache:
                    return sum([same(layer, TOY) async for layer in cache])


Scenario = Callable[[World], Coroutine[Any, Any, None]]


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    """Runs a scenario with a guarded producer, with Unix time in step with virtual time."""
    ring = tmp_path / "issuers"
    save_key_ring(ring, KeyRing([ISSUER.public, OTHER.public], use=KeyUse.TOKEN))

    async def main(scenario: Scenario) -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(time, "time", lambda: BASE + loop.time())
        monkeypatch.setattr(time, "time_ns", lambda: int(loop.time() * 1e9))
        network = Network(seed=1)
        host = network.host("producer")
        with host:
            async with kvcs.serve(
                host.address, 4433, cert="c", key="k", issuers=ring, audience=(NAME,)
            ) as server:
                await scenario(World(network, server, ring))
        await asyncio.sleep(60)
        assert leftovers(network) == []

    return lambda scenario: run(main(scenario), limit=7200.0)


def guard_of(world: World) -> Any:
    """The guard of the producer."""
    assert world.server.guard is not None
    return world.server.guard


def test_who_has_a_token_reads_and_nobody_else(simulated: Any) -> None:
    async def scenario(world: World) -> None:
        async with kvcs.Publisher(world.server).publish(PREFIX) as publication:
            await put(await publication.segment(), TOY)
            assert await world.read(token()) == LAYERS
            assert guard_of(world).unauthorized == 0
            for shown in (None, token(PRODUCER), token(key=OTHER)):
                with pytest.raises(RequestError) as refused:
                    await world.read(shown)
                assert refused.value.code == RequestCode.UNAUTHORIZED
            assert guard_of(world).unauthorized == 3
            counted = metrics.requests_unauthorized.values
            assert counted["SubscribeNamespace", "UNAUTHORIZED"] >= 3

    simulated(scenario)


def test_a_token_that_does_not_count_closes_the_session(simulated: Any) -> None:
    async def scenario(world: World) -> None:
        old = token(lifetime=1)
        await asyncio.sleep(2 + CLOCK_SKEW)
        stranger = SigningKey.generate(use=KeyUse.TOKEN, name="x", scope_id=PREFIX.scope_id)
        for shown, code in (
            (old, SessionCode.EXPIRED_AUTH_TOKEN),
            (token(audience="another"), SessionCode.MALFORMED_AUTH_TOKEN),
            (token(key=stranger), SessionCode.MALFORMED_AUTH_TOKEN),
            (b"password", SessionCode.UNAUTHORIZED),
        ):
            with pytest.raises(ConnectionClosed) as closed:
                async with world.peer(shown) as (connection, _):
                    await connection.reply(ask(connection, "track_status", PREFIX.namespace(ID)))
            assert (closed.value.code, closed.value.by_peer) == (code, True)

    simulated(scenario)


ID = bytes(16)


def ask(connection: Connection, kind: str, namespace: TrackNamespace) -> int:
    """Make a request of a kind for a name."""
    requester, name = connection.core.requester, FullTrackName(namespace, b"manifest")
    if kind == "subscribe":
        return requester.subscribe(name, Parameters())
    if kind == "fetch":
        return requester.fetch(name, Parameters())
    if kind == "track_status":
        return requester.track_status(name)
    if kind == "publish_namespace":
        return requester.publish_namespace(namespace)
    if kind == "publish":
        return requester.publish(Track(name, authoritative=True), Parameters())
    if kind == "subscribe_namespace":
        return requester.subscribe_namespace(namespace[:4])
    return requester.subscribe_tracks(namespace[:4], Parameters())


KINDS = [
    *("subscribe", "fetch", "track_status", "publish_namespace", "publish"),
    *("subscribe_namespace", "subscribe_tracks"),
]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there_and_what_is_not_get_one_answer(simulated: Any, kind: str) -> None:
    async def scenario(world: World) -> None:
        async with kvcs.Publisher(world.server).publish(PREFIX) as publication:
            await put(await publication.segment(), TOY)
            there = publication.namespace
            absent = (*there[:4], ID)
            elsewhere = (there[0], OTHER_ID, *there[2:])
            answers = []
            for namespace in (there, absent, elsewhere):
                async with world.peer() as (connection, seen):
                    with pytest.raises(RequestError) as refused:
                        await connection.reply(ask(connection, kind, namespace))
                    answers.append((refused.value.code, refused.value.reason))
                    assert seen.of(*PeerRequest.__args__) == [], "nothing is offered unasked"
            assert set(answers) == {(RequestCode.UNAUTHORIZED, "not authorized")}

    simulated(scenario)


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_refusal_takes_the_same_packets_at_the_same_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, shown: bool
) -> None:
    """What an outsider can measure is the same for what is there and for what is not."""
    ring = tmp_path / "issuers"
    save_key_ring(ring, KeyRing([ISSUER.public, OTHER.public], use=KeyUse.TOKEN))

    async def main(there: bool, seen: list[str]) -> None:
        loop = asyncio.get_running_loop()
        monkeypatch.setattr(time, "time", lambda: BASE + loop.time())
        monkeypatch.setattr(time, "time_ns", lambda: int(loop.time() * 1e9))
        trace = Trace(keep=True)
        network = Network(seed=1, trace=trace)
        host = network.host("producer")
        with host:
            async with kvcs.serve(
                host.address, 4433, cert="c", key="k", issuers=ring, audience=(NAME,)
            ) as server:
                async with kvcs.Publisher(server).publish(PREFIX) as publication:
                    await put(await publication.segment(), TOY)
                    namespace = publication.namespace
                    if not there:
                        namespace = (*namespace[:3], b"#" * 32, ID)
                    with network.host("stranger"):
                        stranger = await open_connection(
                            URL, token=token(key=OTHER) if shown else None
                        )
                        began = len(trace.lines)
                        with pytest.raises(RequestError):
                            await stranger.reply(ask(stranger, kind, namespace))
                        trace.note(loop.time(), "answered")
                        seen += trace.lines[began:]
                        await stranger.close()
                    publication.abort("enough")

    views: list[list[str]] = [[], []]
    for there, seen in zip((True, False), views, strict=True):
        run(main(there, seen))
    assert len(views[0]) > 2 and views[0] == views[1]


def test_names_are_offered_to_those_alone_that_may_hear_them(simulated: Any) -> None:
    async def scenario(world: World) -> None:
        async with (
            world.peer(token()) as (_, told),
            world.peer(token(key=OTHER)) as (_, other),
            world.peer() as (_, nothing),
        ):
            async with kvcs.Publisher(world.server).publish(PREFIX) as publication:
                await told.until(lambda: told.of(events.PublishNamespaceReceived))
                async with world.peer(token()) as (_, later):  # of a session that comes then, too
                    await later.until(lambda: later.of(events.PublishNamespaceReceived))
                # Whatever had been offered to the others is here by now: theirs is no longer way.
                await asyncio.sleep(5)
                for seen in (other, nothing):
                    assert seen.of(*PeerRequest.__args__) == []
                [offered] = told.of(events.PublishNamespaceReceived)
                assert offered.track_namespace == publication.namespace
                publication.abort("enough")

    simulated(scenario)


def test_what_a_token_allowed_ends_with_it(simulated: Any) -> None:
    async def scenario(world: World) -> None:
        async with kvcs.Publisher(world.server).publish(PREFIX) as publication:
            await put(await publication.segment(), TOY, [0])
            async with world.peer(token(lifetime=60)) as (connection, seen):
                names = ask(connection, "subscribe_namespace", publication.namespace)
                track = ask(connection, "subscribe", publication.namespace)
                _, accepted = await asyncio.gather(connection.reply(names), connection.reply(track))
                within = accepted.parameters.get(ParameterType.EXPIRES)
                assert 80_000 < within <= 90_000, "the token's 60 s, and what clocks may differ"
                began = asyncio.get_running_loop().time()
                await seen.until(lambda: seen.of(events.SubscriptionEnded))
                took = asyncio.get_running_loop().time() - began
                assert 80 < took < 92
                [ended] = seen.of(events.SubscriptionEnded)
                assert ended.status == PublishDoneCode.UNAUTHORIZED
                await seen.until(lambda: seen.of(events.RequestCancelled))
                [cancelled] = seen.of(events.RequestCancelled)
                assert cancelled.request_id == names
                assert cancelled.code == StreamCode.EXPIRED_AUTH_TOKEN
                assert guard_of(world).ended == 2
                told = len(seen.of(events.NamespaceAnnounced))
                with pytest.raises(RequestError):
                    await connection.reply(ask(connection, "subscribe", publication.namespace))
                assert len(seen.of(events.NamespaceAnnounced)) == told
            publication.abort("enough")

    simulated(scenario)


def test_tracks_that_were_published_for_a_token_end_with_it(simulated: Any) -> None:
    async def scenario(world: World) -> None:
        async with kvcs.Publisher(world.server).publish(PREFIX) as publication:
            await put(await publication.segment(), TOY, [0])
            async with world.peer(token(lifetime=60)) as (connection, seen):
                connection.answer_with(take_publish)
                await connection.reply(ask(connection, "subscribe_tracks", publication.namespace))
                await seen.until(lambda: len(seen.of(events.PublishReceived)) == 3)
                await seen.until(lambda: len(seen.of(events.SubscriptionEnded)) == 3)
                assert {event.status for event in seen.of(events.SubscriptionEnded)} == {
                    PublishDoneCode.UNAUTHORIZED
                }
            publication.abort("enough")

    simulated(scenario)


def take_publish(connection: Connection, event: PeerRequest) -> bool:
    """Accept what is published, refuse the rest."""
    if isinstance(event, events.PublishReceived):
        connection.core.responder.accept_publish(event.request_id)
        return True
    return False


def test_a_fresh_token_prolongs_what_is_under_way(simulated: Any) -> None:
    given: list[float] = []

    def fresh() -> bytes:
        given.append(asyncio.get_running_loop().time())
        return token(lifetime=60)

    async def scenario(world: World) -> None:
        async with kvcs.Publisher(world.server).publish(PREFIX) as publication:
            segment = await publication.segment()

            async def slowly() -> None:
                for layer in range(LAYERS):
                    await put(segment, TOY, [layer])
                    await asyncio.sleep(100.0)

            task = asyncio.create_task(slowly())
            assert await world.read(fresh, 900.0) == LAYERS
            await task
        assert (guard_of(world).ended, guard_of(world).unauthorized) == (0, 0)

    simulated(scenario)
    assert len(given) >= 5


def test_an_update_without_a_right_ends_its_request(simulated: Any) -> None:
    only = frozenset({Action.SETUP, Action.SUBSCRIBE_NAMESPACE})

    async def scenario(world: World) -> None:
        async with world.peer(token(only)) as (connection, seen):
            names = ask(connection, "subscribe_namespace", PREFIX.namespace(ID))
            await connection.reply(names)
            shown = Parameters.of(authorization_token=Token.use_value(token(only), TOKEN_TYPE))
            connection.core.requester.update(names, shown)
            await seen.until(lambda: connection.core.requests.get(names) is None)
            assert guard_of(world).unauthorized == 1
            async with kvcs.Publisher(world.server).publish(PREFIX) as publication:
                await asyncio.sleep(5)
                assert seen.of(events.NamespaceAnnounced) == []
                publication.abort("enough")

    simulated(scenario)


def test_issuers_are_rotated_while_it_listens(simulated: Any) -> None:
    async def scenario(world: World) -> None:
        async with kvcs.Publisher(world.server).publish(PREFIX) as publication:
            await put(await publication.segment(), TOY)
            async with world.peer(token()) as (connection, seen):
                await connection.reply(ask(connection, "subscribe", publication.namespace))
                save_key_ring(world.ring, KeyRing([OTHER.public], use=KeyUse.TOKEN))
                loop = asyncio.get_running_loop()
                began = loop.time()
                await seen.until(
                    lambda: seen.of(events.SubscriptionEnded)
                )  # seen without being told
                assert loop.time() - began < ISSUERS_INTERVAL + 1.0  # the token has longer
            world.ring.write_bytes(b"junk")
            with pytest.raises(FileError):
                world.server.reload_issuers()
            save_key_ring(world.ring, KeyRing([ISSUER.public], use=KeyUse.TOKEN))
            world.server.reload_issuers()
            assert await world.read(token()) == LAYERS

    simulated(scenario)


async def test_a_server_says_what_it_needs(tmp_path: Path) -> None:
    def serve(host: str, **options: Any) -> Any:
        return kvcs.serve(host, 0, cert="c", key="k", **options)

    with pytest.raises(UsageError, match="audience needs issuers"):
        async with serve("127.0.0.1", audience=("name",)):
            pass
    with pytest.raises(UsageError, match="--audience"):
        async with serve("0.0.0.0", issuers=tmp_path / "ring"):
            pass
    with pytest.raises(FileError):
        async with serve("127.0.0.1", issuers=tmp_path / "ring"):
            pass
