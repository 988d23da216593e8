"""Two session cores joined in memory: no sockets, no clock, the same run every time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from kvcs.moqt.actions import Action, CloseSession, ResetStream, Send, SendDatagram, StopSending
from kvcs.moqt.events import Event, ObjectsReceived
from kvcs.moqt.session import Session
from kvcs.moqt.settings import Role, SessionSettings

E = TypeVar("E")


@dataclass
class Credit:
    """Send credit that a test sets; it does not shrink by itself."""

    object_octets: int = 1 << 60
    per_stream_octets: int = 1 << 60
    unidirectional: int = 1 << 30
    bidirectional: int = 1 << 30

    def octets(self) -> int:
        """Octets of Object data that may go."""
        return self.object_octets

    def stream_octets(self, stream_id: int) -> int:
        """Octets that one stream may send."""
        return self.per_stream_octets

    def uni_streams(self) -> int:
        """Unidirectional streams that may be opened."""
        return self.unidirectional

    def bidi_streams(self) -> int:
        """Bidirectional streams that may be opened."""
        return self.bidirectional


class End:
    """One side of a pair: its core, what it reported, and what it did."""

    def __init__(self, role: Role, settings: SessionSettings | None = None) -> None:
        self.core = Session(role, settings)
        self.credit = Credit()
        self.events: list[Event] = []
        self.actions: list[Action] = []
        self.ended: set[int] = set()
        """Streams whose sending direction has ended here, with FIN or a reset."""
        self.on_event: Callable[[Event], None] | None = None
        self.on_batch: Callable[[Event], None] | None = None

    def drain_events(self) -> None:
        """Take what the core reports; ``on_event`` or ``on_batch`` may answer at once."""
        while (event := self._next()) is not None:
            if isinstance(event, ObjectsReceived):
                self.events.extend(event.singles())
            else:
                self.events.append(event)
                if self.on_event is not None:
                    self.on_event(event)
            if self.on_batch is not None:
                self.on_batch(event)

    def _next(self) -> Event | None:
        return self.core.next_event() if self.on_batch is None else self.core.next_batch()

    def of(self, kind: type[E]) -> list[E]:
        """The events of one kind so far."""
        return [event for event in self.events if isinstance(event, kind)]


class SessionPair:
    """A client's and a server's core whose octets cross at once.

    Args:
        client: settings of the client.
        server: settings of the server.
        piece: stream data is cut into pieces of at most this many octets.
    """

    def __init__(
        self,
        client: SessionSettings | None = None,
        server: SessionSettings | None = None,
        *,
        piece: int = 1 << 30,
    ) -> None:
        self.client = End(Role.CLIENT, client)
        self.server = End(Role.SERVER, server)
        self.piece = piece
        self.now = 0.0
        for end in (self.client, self.server):
            end.core.receive_connected(self.now)
        self.run()

    def run(self) -> None:
        """Move octets until neither side has anything to do."""
        while self.step():
            pass

    def step(self) -> bool:
        """One action of one side, the client's first; False when neither has anything to do."""
        return self._act(self.client, self.server) or self._act(self.server, self.client)

    def advance(self, seconds: float) -> None:
        """Let virtual time pass, firing timers in order."""
        until = self.now + seconds
        while True:
            due = [end.core.next_timer() for end in (self.client, self.server)]
            times = [time for time in due if time is not None and time <= until]
            if not times:
                break
            self.now = max(self.now, min(times))
            for end in (self.client, self.server):
                end.core.receive_timer(self.now)
            self.run()
        self.now = until
        self.run()

    def _act(self, source: End, target: End) -> bool:
        source.drain_events()
        source.core.receive_credit()
        action = source.core.next_action(source.credit, self.now)
        if action is None:
            return False
        source.actions.append(action)
        self._perform(action, source, target)
        target.drain_events()
        source.drain_events()
        return True

    def _perform(self, action: Action, source: End, target: End) -> None:
        core = target.core
        if isinstance(action, Send):
            if action.stream_id in source.ended:
                return  # the peer has stopped it: a transport is quiet about this
            if action.fin:
                source.ended.add(action.stream_id)
            for data, fin in self._pieces(b"".join(action.data), action.fin):
                core.receive_stream_data(action.stream_id, data, fin, self.now)
                target.drain_events()
        elif isinstance(action, ResetStream):
            if action.stream_id not in source.ended:
                source.ended.add(action.stream_id)
                core.receive_reset(action.stream_id, action.code, self.now)
        elif isinstance(action, StopSending):
            core.receive_stop_sending(action.stream_id, action.code, self.now)
            if action.stream_id not in target.ended:
                target.ended.add(action.stream_id)  # its transport answers with a reset
                source.core.receive_reset(action.stream_id, action.code, self.now)
        elif isinstance(action, SendDatagram):
            core.receive_datagram(action.data, self.now)
        elif isinstance(action, CloseSession):
            core.receive_closed(action.code, action.reason, by_peer=True)

    def _pieces(self, data: bytes, fin: bool) -> Iterator[tuple[bytes, bool]]:
        if not data:
            yield b"", fin
            return
        for start in range(0, len(data), self.piece):
            end = start + self.piece
            yield data[start:end], fin and end >= len(data)
