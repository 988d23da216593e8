"""A peer whose every move is read from octets: any octets are a run of a session core."""

from __future__ import annotations

from kvcs.errors import RequestError, UsageError
from kvcs.moqt.events import (
    Event,
    FetchReceived,
    PublishNamespaceReceived,
    PublishReceived,
    RequestUpdateReceived,
    SubscribeNamespaceReceived,
    SubscribeReceived,
    SubscribeTracksReceived,
    TrackStatusReceived,
)
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.limits import EarlyLimits
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.testing.bench import Bench
from kvcs.testing.residue import residue
from kvcs.testing.tracks import NAME, end_track, put_group, track

SETTINGS = SessionSettings(
    max_auth_token_cache_size=64,
    max_peer_requests=8,
    max_concurrent_fetches=2,
    max_fills=2,
    max_namespaces=4,
    request_burst=64,
    early=EarlyLimits(streams=4, octets=4096, seconds=2.0),
)
"""Small limits, so that runs reach them."""

FILL = Parameters.of(fill_parameters=Parameters.of(location_filter=LocationFilter.none()))
ANSWERABLE = (
    SubscribeReceived,
    FetchReceived,
    TrackStatusReceived,
    PublishNamespaceReceived,
    SubscribeNamespaceReceived,
    SubscribeTracksReceived,
    PublishReceived,
)
"""Requests of the peer that the application accepts or refuses."""

MOVES = ("bidi", "uni", "data", "data", "fin", "reset", "stop", "datagram", "wait", "answer", "ask")
"""What the peer or the application does next, by an octet."""


class Soup:
    """One run.

    Args:
        octets: the first says which side the core is and whether SETUP comes by itself; then each
            move is one octet, and what it needs.
    """

    def __init__(self, octets: bytes) -> None:
        self._octets = octets
        self._at = 0
        flags = self._take()
        role = Role.SERVER if flags & 1 else Role.CLIENT
        self.bench = Bench(role, SETTINGS, setup=not flags & 2)
        self._streams = [self.bench.control] if self.bench.control >= 0 else []
        self._track = track()
        put_group(self._track, 0, 3)
        put_group(self._track, 1, 2)
        if flags & 4:
            end_track(self._track, 2)
        self._pending: list[Event] = []
        if flags & 8:
            for number in range(6):
                self._ask(number)

    def run(self) -> None:
        """Make every move; then the transport goes, and nothing is left."""
        while self._at < len(self._octets):
            getattr(self, "_" + MOVES[self._take() % len(MOVES)])()
            self._look()
        self.bench.core.receive_closed(None, "the end", by_peer=True)
        self._look()
        left = residue(self.bench.core, self._track)
        assert left == {}, left

    def _look(self) -> None:
        core = self.bench.core
        if core.failure is not None:
            raise core.failure
        for event in self.bench.events:
            if hasattr(event, "request_id"):
                self._pending.append(event)
        self.bench.events.clear()
        del self._pending[:-16]

    def _take(self) -> int:
        self._at += 1
        return self._octets[self._at - 1] if self._at <= len(self._octets) else 0

    def _chunk(self) -> bytes:
        length = self._take()
        if length >= 0xF0:  # longer than an octet can say
            length = (length & 0xF) << 8 | self._take()
        start = self._at
        self._at += length
        return self._octets[start : self._at]

    def _stream(self) -> int | None:
        index = self._take()
        return self._streams[index % len(self._streams)] if self._streams else None

    # Moves

    def _bidi(self) -> None:
        stream_id = self.bench.bidi()
        self._streams.append(stream_id)
        self.bench.data(stream_id, self._chunk())

    def _uni(self) -> None:
        octets = self._chunk()
        self._streams.append(self.bench.uni(octets))

    def _data(self) -> None:
        stream_id = self._stream()
        octets = self._chunk()
        if stream_id is not None:
            self.bench.data(stream_id, octets)

    def _fin(self) -> None:
        stream_id = self._stream()
        if stream_id is not None:
            self._streams.remove(stream_id)
            self.bench.data(stream_id, b"", fin=True)

    def _reset(self) -> None:
        stream_id = self._stream()
        code = self._take()
        if stream_id is not None:
            self._streams.remove(stream_id)
            self.bench.reset(stream_id, code)

    def _stop(self) -> None:
        number, code = self._take(), self._take()
        opened = self.bench.opened
        if opened:
            self.bench.stop(opened[number % len(opened)], code)

    def _datagram(self) -> None:
        self.bench.datagram(self._chunk())

    def _wait(self) -> None:
        self.bench.advance(self._take() / 16)

    def _ask(self, what: int | None = None) -> None:
        """The application makes a request, or gives one up; the peer's answers are octets."""
        number = self._take() if what is None else what
        requester = self.bench.core.requester
        try:
            what = number % 8
            request_id = number // 8 * 2 + (self.bench.core.role is Role.SERVER)
            if what == 0:
                requester.subscribe(NAME, FILL)
            elif what == 1:
                requester.fetch(NAME, Parameters())
            elif what == 2:
                requester.subscribe_namespace((b"kvcs-1",))
            elif what == 3:
                requester.publish_namespace((b"kvcs-1", b"test"))
            elif what == 4:
                requester.subscribe_tracks((b"kvcs-1",))
            elif what == 5:
                requester.publish(self._track)
            elif what == 6:
                requester.cancel(request_id)
            else:
                requester.update(request_id, FILL)
        except UsageError:
            pass
        self._serve_ours()

    def _serve_ours(self) -> None:
        """Streams of our requests are the peer's to write on."""
        self.bench.drain()
        for stream_id in self.bench.opened:
            if not stream_id & 2 and stream_id not in self._streams and len(self._streams) < 64:
                self._streams.append(stream_id)

    def _answer(self) -> None:
        """The application answers a request of the peer."""
        how = self._take()
        event = self._pending.pop(0) if self._pending else None
        responder, now = self.bench.core.responder, self.bench.now
        try:
            if event is None:
                return
            request_id: int = event.request_id  # type: ignore[union-attr, assignment]
            if isinstance(event, RequestUpdateReceived):
                if how % 4:
                    responder.accept_update(request_id, event.update_id)
                else:
                    responder.refuse_update(request_id, event.update_id, RequestError("no", how))
            elif not isinstance(event, ANSWERABLE):
                return
            elif how % 4 == 0:
                responder.refuse(request_id, RequestError("no", how))
            elif isinstance(event, PublishReceived):
                responder.accept_publish(request_id)
            elif isinstance(event, SubscribeTracksReceived):
                responder.accept(request_id)
                responder.publish_tracks(request_id, self._track)
            elif isinstance(event, SubscribeReceived):
                responder.accept_subscribe(request_id, self._track, now)
            elif isinstance(event, FetchReceived):
                responder.accept_fetch(request_id, self._track, now)
            elif isinstance(event, TrackStatusReceived):
                responder.answer_track_status(request_id, self._track)
            else:
                responder.accept(request_id)
        except UsageError:
            pass
        self.bench.drain()
