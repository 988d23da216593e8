"""A relay's core and its peers joined in memory: no sockets, no clock, the same run every time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from kvcs.access.policy import Policy
from kvcs.moqt.actions import Action, CloseSession, ResetStream, Send, SendDatagram, StopSending
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.relay.core import RelayCore
from kvcs.relay.settings import RelayLimits
from kvcs.relay.upstreams import RELAY_OPTION
from kvcs.testing.pair import End

MAX_STEPS = 2_000_000
"""Actions of one `run`; more mean that two ends never come to rest."""

LINK_KEYS = 1 << 32
"""Keys of a relay's sessions with its upstreams begin behind it."""


class Spoke:
    """One peer of the relay: its own end, and the relay's end of the session."""

    def __init__(
        self, key: int, settings: SessionSettings | None, server: SessionSettings | None
    ) -> None:
        self.key = key
        self.peer = End(Role.CLIENT, settings)
        self.relay = End(Role.SERVER, server)
        self.lost = False
        self.queued = 0
        """Octets that wait for the peer below the relay, as the relay is told."""


class _World:
    """Hubs that are linked: they have one clock."""

    def __init__(self, hub: Hub) -> None:
        self.hubs = [hub]
        self.now = 0.0


class Hub:
    """Peers around one `RelayCore`; their octets cross at once, in turns.

    Hubs may be linked to chains and trees, one relay being another's upstream; then `run` and
    `advance` of one are those of all.

    Args:
        limits: limits of the relay.
        piece: stream data is cut into pieces of at most this many octets.
        order: chooses which of ``n`` ready ends acts next, for seeded runs; the first where None.
        policy: who may do what at the relay; anyone everything by default.
        relay_id: what the relay tells other relays that it is; nothing where empty.
    """

    def __init__(
        self,
        limits: RelayLimits | None = None,
        *,
        piece: int = 1 << 30,
        order: Callable[[int], int] | None = None,
        policy: Policy | None = None,
        relay_id: bytes = b"",
    ) -> None:
        self.core = RelayCore(limits, policy=policy, relay_id=relay_id)
        self.piece = piece
        self._world = _World(self)
        self.spokes: list[Spoke] = []
        self._links = 0
        self._order = order

    @property
    def now(self) -> float:
        """The clock, seconds."""
        return self._world.now

    @now.setter
    def now(self, now: float) -> None:
        self._world.now = now

    def link(
        self,
        upstream: Hub,
        rank: int = 0,
        settings: SessionSettings | None = None,
        server: SessionSettings | None = None,
    ) -> Spoke:
        """Connect this relay to another one, its ``rank``-th best upstream; the spoke is there."""
        world = self._world
        if upstream._world is not world:
            world.now = max(world.now, upstream.now)
            world.hubs += upstream._world.hubs
            for hub in world.hubs:
                hub._world = world
        self._links += 1
        key = LINK_KEYS + self._links
        theirs = upstream._introduced(server)
        spoke = Spoke(len(upstream.spokes), self._introduced(settings), theirs)
        self.core.session_opened(key, spoke.peer.core, self.now, rank)
        spoke.peer.on_batch = lambda event: self.core.event(key, event, self.now)
        upstream._join(spoke)
        return spoke

    def _introduced(self, settings: SessionSettings | None) -> SessionSettings | None:
        if not self.core.relay_id:
            return settings
        option = (RELAY_OPTION, self.core.relay_id)
        return replace(settings or SessionSettings(), further_options=(option,))

    def connect(
        self, settings: SessionSettings | None = None, server: SessionSettings | None = None
    ) -> Spoke:
        """A peer connects to the relay."""
        spoke = Spoke(len(self.spokes), settings, self._introduced(server))
        self._join(spoke)
        return spoke

    def _join(self, spoke: Spoke) -> None:
        self.spokes.append(spoke)
        waiting = partial(getattr, spoke, "queued")
        self.core.session_opened(spoke.key, spoke.relay.core, self.now, queued=waiting)
        spoke.relay.on_batch = lambda event: self.core.event(spoke.key, event, self.now)
        for end in (spoke.peer, spoke.relay):
            end.core.receive_connected(self.now)
        self.run()

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
        return any(hub._step() for hub in self._world.hubs)

    def _step(self) -> bool:
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
            hubs = self._world.hubs
            spokes = [spoke for hub in hubs for spoke in hub.spokes if not spoke.lost]
            ends = [end for spoke in spokes for end in (spoke.peer, spoke.relay)]
            due = [end.core.next_timer() for end in ends]
            due += [hub.core.next_timer() for hub in hubs]
            times = [time for time in due if time is not None and time <= until]
            if not times:
                break
            # A microsecond late: what is due is surely due.
            self.now = min(max(self.now, min(times)) + 1e-6, until)
            for end in ends:
                end.core.receive_timer(self.now)
            for hub in hubs:
                hub.core.receive_timer(self.now)
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
        spoke.lost = spoke.lost or (source.core.closed and target.core.closed)
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
