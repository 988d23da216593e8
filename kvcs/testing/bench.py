"""One session core, and a peer of which a test writes every octet."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeVar

from kvcs.moqt.actions import CloseSession, ResetStream, Send, SendDatagram, StopSending
from kvcs.moqt.events import Event
from kvcs.moqt.framing import MessageReader, encode_message
from kvcs.moqt.messages import Message, Setup
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.session import Session
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.testing.pair import Credit

E = TypeVar("E")


class Bench:
    """A session core under test.

    What the core reports and does is collected after each input. Stream IDs of the peer are
    counted as QUIC counts them.

    Args:
        role: role of the core.
        settings: its settings.
        options: Setup Options of the peer.
        setup: whether the peer's SETUP comes at once; else `send_setup` sends it.
    """

    def __init__(
        self,
        role: Role = Role.SERVER,
        settings: SessionSettings | None = None,
        *,
        options: KeyValues | None = None,
        setup: bool = True,
    ) -> None:
        self.core = Session(role, settings)
        self.credit = Credit()
        self.now = 0.0
        self.events: list[Event] = []
        """What the core reported and no `take` has taken."""
        self.sent: dict[int, bytes] = defaultdict(bytes)
        """Octets that the core sent, by stream."""
        self.fins: set[int] = set()
        """Streams that the core ended with FIN."""
        self.resets: dict[int, int] = {}
        """Streams that the core reset, with their codes."""
        self.stops: dict[int, int] = {}
        """Streams that the core stopped, with their codes."""
        self.datagrams: list[bytes] = []
        self.opened: list[int] = []
        """Streams in the order in which the core first sent on them."""
        self.close: CloseSession | None = None
        """How the core closed the session."""
        client = role is Role.SERVER
        self._next_bidi = 0 if client else 1
        self._next_uni = 2 if client else 3
        self._read: dict[int, int] = defaultdict(int)
        self.core.receive_connected(self.now)
        self.drain()
        self._options = KeyValues() if options is None else options
        self.control = -1
        """The peer's control stream, once it is open."""
        if setup:
            self.send_setup()

    # What the peer does

    def send_setup(self) -> None:
        """The peer opens its control stream with SETUP."""
        self.control = self.uni(encode_message(Setup(self._options)))

    def bidi(self) -> int:
        """The ID of a new bidirectional stream of the peer."""
        taken = self._next_bidi
        self._next_bidi += 4
        return taken

    def open(self, *messages: Message, fin: bool = False) -> int:
        """The peer opens a request stream; returns its ID."""
        stream_id = self.bidi()
        self.say(stream_id, *messages, fin=fin)
        return stream_id

    def say(self, stream_id: int, *messages: Message, fin: bool = False) -> None:
        """The peer sends messages on a stream."""
        self.data(stream_id, b"".join(map(encode_message, messages)), fin=fin)

    def uni(self, octets: bytes, *, fin: bool = False) -> int:
        """The peer opens a unidirectional stream; returns its ID."""
        stream_id = self._next_uni
        self._next_uni += 4
        self.data(stream_id, octets, fin=fin)
        return stream_id

    def data(self, stream_id: int, octets: bytes, *, fin: bool = False) -> None:
        """The peer sends octets on a stream."""
        self.core.receive_stream_data(stream_id, octets, fin, self.now)
        self.drain()

    def reset(self, stream_id: int, code: int = 0x1) -> None:
        """The peer resets its direction of a stream."""
        self.core.receive_reset(stream_id, code, self.now)
        self.drain()

    def stop(self, stream_id: int, code: int = 0x1) -> None:
        """The peer stops the core's direction of a stream."""
        self.core.receive_stop_sending(stream_id, code, self.now)
        self.drain()

    def datagram(self, octets: bytes) -> None:
        """The peer sends a datagram."""
        self.core.receive_datagram(octets, self.now)
        self.drain()

    # Time and credit

    def advance(self, seconds: float) -> None:
        """Let virtual time pass, firing timers in order."""
        until = self.now + seconds
        while (due := self.core.next_timer()) is not None and due <= until:
            self.now = max(self.now, due)
            self.core.receive_timer(self.now)
            self.drain()
        self.now = until

    def drain(self) -> None:
        """Collect what the core reports and does."""
        while True:
            while (event := self.core.next_event()) is not None:
                self.events.append(event)
            self.core.receive_credit()
            action = self.core.next_action(self.credit, self.now)
            if action is None:
                break
            if isinstance(action, Send):
                if action.stream_id not in self.sent:
                    self.opened.append(action.stream_id)
                self.sent[action.stream_id] += b"".join(action.data)
                if action.fin:
                    self.fins.add(action.stream_id)
            elif isinstance(action, ResetStream):
                self.resets[action.stream_id] = action.code
            elif isinstance(action, StopSending):
                self.stops[action.stream_id] = action.code
            elif isinstance(action, SendDatagram):
                self.datagrams.append(action.data)
            elif isinstance(action, CloseSession):
                self.close = action

    # What came of it

    def take(self, kind: type[E]) -> list[E]:
        """Take the events of one kind; the others stay."""
        found: list[E] = [event for event in self.events if isinstance(event, kind)]
        self.events = [event for event in self.events if not isinstance(event, kind)]
        return found

    def replies(self, stream_id: int) -> list[Message]:
        """Messages that the core sent on a stream since the last call."""
        octets = self.sent[stream_id][self._read[stream_id] :]
        self._read[stream_id] += len(octets)
        return MessageReader().feed(octets)

    @property
    def close_code(self) -> int | None:
        """The session code with which the core closed; None while it has not."""
        return None if self.close is None else self.close.code
