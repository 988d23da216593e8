"""Requests that a peer sends elsewhere, or asks to repeat later (MOQT §9.4)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

import kvcs
from kvcs.kv import DataTrack
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import FullTrackName
from kvcs.moqt.parameters import Parameters
from kvcs.quic.connection import Connection, PeerRequest
from kvcs.quic.endpoint import Server
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles, write_pem
from tests.loopback.kv_fixtures import accepting, serving
from tests.loopback.moving import SAFETY, SOON, Held, linked, until
from tests.loopback.raw_publication import K0

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

Judge = Callable[[PeerRequest], kvcs.RequestError | None]
"""Says with what a request is refused, if it is."""


@dataclass
class Gate:
    """Refuses some requests of a peer, and lets the others through."""

    judge: Judge
    through: Callable[[Connection, PeerRequest], bool] = lambda *_: False
    refused: list[PeerRequest] = field(default_factory=list)

    def __call__(self, connection: Connection, request: PeerRequest) -> bool:
        """An `Answerer`."""
        error = self.judge(request)
        if error is None:
            return self.through(connection, request)
        self.refused.append(request)
        connection.core.responder.refuse(request.request_id, error)
        return True


def whole() -> Held:
    """A publication that is complete."""
    raw = Held(toy_publication())
    raw.layers(0, 1, 2, 3)
    raw.end()
    raw.manifest()
    return raw


@asynccontextmanager
async def gated(files: PemFiles, gate: Gate) -> AsyncIterator[Server]:
    """A server behind a gate."""
    async with serving(files, observer=accepting(gate)) as server:
        yield server


async def retrieved(session: Connection, raw: Held, **options: object) -> kvcs.CacheReport:
    """Retrieve all of a publication."""
    subscriber = kvcs.Subscriber(session, settings=QUICK)
    async with subscriber.open(toy_prefix(), deadline=SAFETY, **options) as cache:  # type: ignore[arg-type]
        async with asyncio.timeout(SAFETY):
            assert all([same(layer, raw.toy) async for layer in cache])
        return cache.report


def to(url: Callable[[], str], kind: type[PeerRequest], name: bytes | None = None) -> Judge:
    """Redirect requests of one kind, for a track of some name, as they were asked."""

    def judge(request: PeerRequest) -> kvcs.RequestError | None:
        if not isinstance(request, kind):
            return None
        if isinstance(request, events.SubscribeNamespaceReceived):
            return kvcs.Redirected("over there", url(), request.track_namespace_prefix)
        if isinstance(request, events.PublishNamespaceReceived):
            return kvcs.Redirected("over there", url(), request.track_namespace)
        track = request.full_track_name  # type: ignore[union-attr]
        if name is not None and track.name != name:
            return None
        return kvcs.Redirected("over there", url(), track.namespace, track.name)

    return judge


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (events.SubscribeNamespaceReceived, None),
        (events.SubscribeReceived, b"manifest.cose"),
        (events.SubscribeReceived, b"manifest"),
        (events.SubscribeReceived, b"k.raw.s0"),
        (events.SubscribeReceived, None),
    ],
)
async def test_a_redirect_to_another_relay_is_followed(
    files: PemFiles, kind: type[PeerRequest], name: bytes | None
) -> None:
    first, second = whole(), whole()
    url = ""
    gate = Gate(to(lambda: url, kind, name), first.answer)
    async with gated(files, gate) as old, second.serve(files) as new:
        url = new.url
        async with linked(old.url, files) as session:
            report = await retrieved(session, first)
            assert session.newest is session and session.is_usable  # the session itself stays
    assert gate.refused
    assert (report.objects, report.duplicates) == (24, 0)
    assert second.asks(events.SubscribeReceived)


async def test_a_list_follows_a_redirect(files: PemFiles) -> None:
    first, second = whole(), whole()
    url = ""
    gate = Gate(to(lambda: url, events.SubscribeNamespaceReceived), first.answer)
    async with gated(files, gate) as old, second.serve(files) as new:
        url = new.url
        async with linked(old.url, files) as one, linked(old.url, files) as two:
            # Each session is sent to the other relay by itself.
            found = await kvcs.Subscriber(one, settings=QUICK).list(toy_prefix())
            assert [info.namespace.fields for info in found] == [second.namespace]
            assert found[0].peer != one.peer
            of_scope = kvcs.Subscriber(one, two, settings=QUICK).list(toy_prefix().scope_id)
            assert [info.namespace.fields for info in await of_scope] == [second.namespace]
    assert len(gate.refused) == 3


async def test_a_list_that_is_sent_around_ends(files: PemFiles) -> None:
    url = ""
    gate = Gate(to(lambda: url, events.SubscribeNamespaceReceived))
    async with gated(files, gate) as server:
        url = server.url
        async with linked(server.url, files) as session:
            subscriber = kvcs.Subscriber(session, settings=QUICK)
            with pytest.raises(kvcs.Redirected):
                await subscriber.list(toy_prefix())
            assert session.link is not None
            assert len(gate.refused) == session.link.policy.max_hops + 1
            url = "moqt://127.0.0.1:9"
            with pytest.raises(kvcs.ConnectionFailed):
                await subscriber.list(toy_prefix())


async def test_a_redirect_of_a_watch_for_tracks_is_a_typed_error(files: PemFiles) -> None:
    def judge(request: PeerRequest) -> kvcs.RequestError | None:
        return kvcs.Redirected("over there", "moqt://elsewhere.example", (b"news",))

    async with gated(files, Gate(judge)) as server:
        async with kvcs.connect(server.url, ca=files.ca, reconnect=None) as session:
            with pytest.raises(kvcs.Redirected) as caught:
                async for _ in session.tracks.watch((b"news",)):
                    raise AssertionError("a track was offered")
            assert caught.value.uri == "moqt://elsewhere.example"


async def test_a_redirect_without_a_link_is_a_typed_error(files: PemFiles) -> None:
    gate = Gate(to(lambda: "moqt://elsewhere.example", events.SubscribeNamespaceReceived))
    async with gated(files, gate) as server:
        async with kvcs.connect(server.url, ca=files.ca, reconnect=None) as session:
            with pytest.raises(kvcs.Redirected) as caught:
                await retrieved(session, whole())
            assert caught.value.uri == "moqt://elsewhere.example"
            assert caught.value.code == RequestCode.REDIRECT
            assert caught.value.namespace == toy_prefix().namespace_prefix()


@pytest.mark.parametrize("uri", ["https://elsewhere.example", "moqt://", "moqt://127.0.0.1:1", ""])
async def test_a_redirect_that_leads_nowhere_is_a_typed_error(files: PemFiles, uri: str) -> None:
    raw = whole()
    gate = Gate(to(lambda: uri, events.SubscribeReceived, b"manifest.cose"), raw.answer)
    async with gated(files, gate) as server, linked(server.url, files) as session:
        subscriber = kvcs.Subscriber(session, settings=QUICK)
        with pytest.raises(kvcs.Redirected) as caught:
            await subscriber.manifest(kvcs.PublicationNamespace.parse(raw.namespace))
        assert caught.value.uri == uri


async def test_a_redirect_to_another_publication_is_not_followed(files: PemFiles) -> None:
    """Objects of two publications must not be combined."""
    raw = whole()
    other = (*raw.namespace[:4], b"\x01" * 16)

    def judge(request: PeerRequest) -> kvcs.RequestError | None:
        if isinstance(request, events.SubscribeReceived) and request.full_track_name.name == (
            b"manifest"
        ):
            return kvcs.Redirected("another", "moqt://127.0.0.1:1", other, b"manifest")
        return None

    async with gated(files, Gate(judge, raw.answer)) as server:
        async with linked(server.url, files) as session:
            subscriber = kvcs.Subscriber(session, settings=QUICK)
            with pytest.raises(kvcs.Redirected, match="another"):
                await subscriber.manifest(kvcs.PublicationNamespace.parse(raw.namespace))


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> PemFiles:
    """A certificate for this machine by an authority that nobody here trusts."""
    return write_pem(tmp_path_factory.mktemp("strangers"))


async def test_whom_no_trusted_certificate_speaks_for_is_not_followed(
    files: PemFiles, strangers: PemFiles
) -> None:
    raw, url = whole(), ""
    gate = Gate(to(lambda: url, events.SubscribeReceived, b"manifest"), raw.answer)
    async with gated(files, gate) as server, whole().serve(strangers) as stranger:
        url = stranger.url
        async with linked(server.url, files) as session:
            subscriber = kvcs.Subscriber(session, settings=QUICK)
            with pytest.raises(kvcs.Redirected) as caught:
                await subscriber.manifest(kvcs.PublicationNamespace.parse(raw.namespace))
            assert isinstance(caught.value.__cause__, kvcs.CertificateError)
            (peer,) = server.connections
            peer.goaway(url, timeout=10.0)
            await until(session, lambda: session.newest is not session)
            assert session.newest.peer == server.url  # home again
            assert not stranger.connections


async def test_two_relays_that_redirect_to_each_other_are_not_followed_for_ever(
    files: PemFiles,
) -> None:
    urls = ["", ""]
    gates = [
        Gate(to(lambda there=there: urls[there], events.SubscribeNamespaceReceived))  # type: ignore[misc]
        for there in (1, 0)
    ]
    async with gated(files, gates[0]) as first, gated(files, gates[1]) as second:
        urls = [first.url, second.url]
        async with linked(first.url, files) as session:
            with pytest.raises(kvcs.Redirected):
                await retrieved(session, whole())
            assert sum(len(gate.refused) for gate in gates) <= SOON.max_hops + 1


async def test_an_announcement_is_redirected_and_comes_back_with_its_session(
    files: PemFiles,
) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    url = ""
    announced: asyncio.Queue[str] = asyncio.Queue()

    def accept(name: str) -> Callable[[Connection, PeerRequest], bool]:
        def answer(connection: Connection, request: PeerRequest) -> bool:
            if isinstance(request, events.PublishNamespaceReceived):
                connection.core.responder.accept(request.request_id)
                announced.put_nowait(name)
                return True
            return False

        return answer

    open_gate = Gate(lambda _: None, accept("second"))
    redirecting = True

    def judge(request: PeerRequest) -> kvcs.RequestError | None:
        return to(lambda: url, events.PublishNamespaceReceived)(request) if redirecting else None

    gate = Gate(judge, accept("first"))
    async with gated(files, gate) as first, gated(files, open_gate) as second:
        url = second.url
        async with linked(first.url, files) as session:
            async with kvcs.Publisher(session).publish(prefix) as publication:
                async with asyncio.timeout(SAFETY):
                    assert await announced.get() == "second"
                (peer,) = second.connections
                name = FullTrackName(publication.namespace, b"manifest")
                reply = await peer.reply(peer.core.requester.subscribe(name, Parameters()))
                assert reply is not None  # it is served there, too
                await put(await publication.segment(), toy)
                redirecting = False
                await peer.close()
                async with asyncio.timeout(SAFETY):
                    assert await announced.get() == "first"


# Retry Interval


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (events.SubscribeNamespaceReceived, None),
        (events.SubscribeReceived, b"manifest"),
        (events.SubscribeReceived, b"v.raw.s0"),
    ],
)
async def test_a_request_is_repeated_after_the_retry_interval(
    files: PemFiles, kind: type[PeerRequest], name: bytes | None
) -> None:
    raw = whole()
    loop = asyncio.get_running_loop()
    times: list[float] = []

    def judge(request: PeerRequest) -> kvcs.RequestError | None:
        if not isinstance(request, kind):
            return None
        if name is not None and request.full_track_name.name != name:  # type: ignore[union-attr]
            return None
        times.append(loop.time())
        if len(times) > 2:
            return None
        return kvcs.RequestError("busy", RequestCode.EXCESSIVE_LOAD, 30)

    async with gated(files, Gate(judge, raw.answer)) as server:
        async with linked(server.url, files) as session:
            report = await retrieved(session, raw)
    assert report.objects == 24
    assert len(times) == 3
    assert all(later - earlier >= 0.03 for earlier, later in pairwise(times))


async def test_a_fetch_in_recovery_is_repeated_after_the_retry_interval(files: PemFiles) -> None:
    raw = whole()
    hole: dict[tuple[DataTrack, int], bytes | None] = {(K0, 1): None}
    raw.live[K0] = raw.track(b"k.raw.s0", authoritative=False)
    for layer in range(4):
        raw.group(raw.live[K0], K0, layer, hole if layer == 1 else None)
    loop = asyncio.get_running_loop()
    times: list[float] = []

    def judge(request: PeerRequest) -> kvcs.RequestError | None:
        if not isinstance(request, events.FetchReceived):
            return None
        times.append(loop.time())
        if len(times) > 1:
            return None
        return kvcs.RequestError("busy", RequestCode.EXCESSIVE_LOAD, 200)

    async with gated(files, Gate(judge, raw.answer)) as server:
        async with linked(server.url, files) as session:
            report = await retrieved(session, raw)
    assert (report.objects, report.refetches) == (24, 2)
    assert times[1] - times[0] >= 0.2


async def test_an_announcement_is_repeated_after_the_retry_interval(files: PemFiles) -> None:
    busy = 2

    def judge(request: PeerRequest) -> kvcs.RequestError | None:
        nonlocal busy
        if busy and isinstance(request, events.PublishNamespaceReceived):
            busy -= 1
            return kvcs.RequestError("busy", RequestCode.EXCESSIVE_LOAD, 10)
        return None

    def accept(connection: Connection, request: PeerRequest) -> bool:
        connection.core.responder.accept(request.request_id)
        return True

    gate = Gate(judge, accept)
    async with gated(files, gate) as server, linked(server.url, files) as session:
        with pytest.raises(ZeroDivisionError):
            async with kvcs.Publisher(session).publish(toy_prefix()):
                assert len(gate.refused) == 2
                raise ZeroDivisionError


async def test_without_a_retry_interval_a_refusal_is_final(files: PemFiles) -> None:
    def judge(request: PeerRequest) -> kvcs.RequestError | None:
        if isinstance(request, events.SubscribeNamespaceReceived):
            return kvcs.RequestError("not you", RequestCode.UNAUTHORIZED)
        return None

    gate = Gate(judge)
    async with gated(files, gate) as server, linked(server.url, files) as session:
        with pytest.raises(kvcs.RequestError, match="not you"):
            await retrieved(session, whole())
        assert len(gate.refused) == 1
