"""A relay's core and its peers joined in memory: no sockets, no clock, the same run every time."""

from __future__ import annotations

from collections.abc import Callable

from kvcs.moqt.actions import Action, CloseSession, ResetStream, Send, SendDatagram, StopSending
from kvcs.moqt.events import SessionClosed
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.relay.core import RelayCore
from kvcs.relay.policy import Policy
from kvcs.relay.settings import RelayLimits
from kvcs.testing.pair import End

MAX_STEPS = 2_000_000
"""Actions of one `run`; more mean that two ends never come to rest."""


class Spoke:
    """One peer of the relay: its own end, and the relay's end of the session."""

    def __init__(
        self, key: int, settings: SessionSettings | None, server: SessionSettings | None
    ) -> None:
        self.key = key
        self.peer = End(Role.CLIENT, settings)
        self.relay = End(Role.SERVER, server)
        self.lost = False


class Hub:
    """Peers around one `RelayCore`; their octets cross at once, in turns.

    Args:
        limits: limits of the relay.
        piece: stream data is cut into pieces of at most this many octets.
        order: chooses which of ``n`` ready ends acts next, for seeded runs; the first where None.
        policy: who may do what at the relay; anyone everything by default.
    """

    def __init__(
        self,
        limits: RelayLimits | None = None,
        *,
        piece: int = 1 << 30,
        order: Callable[[int], int] | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.core = RelayCore(limits, policy=policy)
        self.piece = piece
        self.now = 0.0
        self.spokes: list[Spoke] = []
        self._order = order

    def connect(
        self, settings: SessionSettings | None = None, server: SessionSettings | None = None
    ) -> Spoke:
        """A peer connects to the relay."""
        spoke = Spoke(len(self.spokes), settings, server)
        self.spokes.append(spoke)
        self.core.session_opened(spoke.key, spoke.relay.core, self.now)
        spoke.relay.on_batch = lambda event: self.core.event(spoke.key, event, self.now)
        for end in (spoke.peer, spoke.relay):
            end.core.receive_connected(self.now)
        self.run()
        return spoke

    def disconnect(self, spoke: Spoke) -> None:
        """The peer's connection is lost without a word."""
        spoke.lost = True
        for end in (spoke.peer, spoke.relay):
            end.core.receive_closed(None, "lost", by_peer=True)
            end.drain_events()

    def run(self, steps: int = MAX_STEPS) -> None:
        """Move octets until nobody has anything to do, or ``steps`` actions were done."""
        for _ in range(steps):
            if not self.step():
                return
        if steps == MAX_STEPS:
            raise RuntimeError("the sessions never come to rest")

    def step(self) -> bool:
        """One action of one end; False when all are at rest."""
        ends = [(s, end) for s in self.spokes if not s.lost for end in (s.peer, s.relay)]
        start = self._order(len(ends)) if self._order is not None and ends else 0
        turns = ends[start:] + ends[:start]
        for spoke, source in turns * 2:  # who comes last may have woken who came first
            if self._act(spoke, source):
                return True
        due = self.core.next_timer()
        if due is not None and due <= self.now:
            self.core.receive_timer(self.now)
            return True
        return False

    def advance(self, seconds: float) -> None:
        """Let virtual time pass, firing timers in order."""
        until = self.now + seconds
        self.run()
        while True:
            ends = [end for s in self.spokes if not s.lost for end in (s.peer, s.relay)]
            due = [end.core.next_timer() for end in ends] + [self.core.next_timer()]
            times = [time for time in due if time is not None and time <= until]
            if not times:
                break
            # A microsecond late: what is due is surely due.
            self.now = min(max(self.now, min(times)) + 1e-6, until)
            for end in ends:
                end.core.receive_timer(self.now)
            self.core.receive_timer(self.now)
            self.run()
            if self.now >= until:
                break
        self.now = until
        self.run()

    def _act(self, spoke: Spoke, source: End) -> bool:
        target = spoke.relay if source is spoke.peer else spoke.peer
        source.drain_events()
        source.core.receive_credit()
        action = source.core.next_action(source.credit, self.now)
        if action is None:
            return False
        source.actions.append(action)
        self._perform(action, target)
        target.drain_events()
        source.drain_events()
        closed = (SessionClosed in map(type, end.events) for end in (source, target))
        spoke.lost = spoke.lost or all(closed)
        return True

    def _perform(self, action: Action, target: End) -> None:
        core = target.core
        if isinstance(action, Send):
            data = b"".join(action.data)
            for start in range(0, max(len(data), 1), self.piece):
                end = start + self.piece
                fin = action.fin and end >= len(data)
                core.receive_stream_data(action.stream_id, data[start:end], fin, self.now)
                target.drain_events()
        elif isinstance(action, ResetStream):
            core.receive_reset(action.stream_id, action.code, self.now)
        elif isinstance(action, StopSending):
            core.receive_stop_sending(action.stream_id, action.code, self.now)
        elif isinstance(action, SendDatagram):
            core.receive_datagram(action.data, self.now)
        elif isinstance(action, CloseSession):
            core.receive_closed(action.code, action.reason, by_peer=True)
