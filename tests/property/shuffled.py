"""Two session cores whose streams overtake each other in any order, by a seed.

Octets of one stream stay in order, as QUIC keeps them; everything else may arrive before or after
everything else. A reset may take what was under way with it, a stream's header included.
"""

from __future__ import annotations

import random

from kvcs.moqt.actions import CloseSession, ResetStream, Send, SendDatagram, StopSending
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.testing.pair import End

Key = tuple[Role, int]
"""Who sends, and on which stream."""


class ShuffledPair:
    """A client's and a server's core behind a network that reorders.

    Args:
        seed: of all choices.
        piece: most octets that arrive at once.
        settings: of both sides.
    """

    def __init__(
        self, seed: int, piece: int = 1 << 30, settings: SessionSettings | None = None
    ) -> None:
        self.random = random.Random(seed)
        self.piece = piece
        self.now = 0.0
        self.client = End(Role.CLIENT, settings)
        self.server = End(Role.SERVER, settings)
        self._waiting: dict[Key, list[tuple[bytes, bool]]] = {}
        self._other: list[tuple[Role, ResetStream | StopSending | SendDatagram | CloseSession]] = []
        self._ended: set[Key] = set()
        self.lost_headers = 0
        """Resets that arrived before anything of their stream did."""
        self._begun: set[Key] = set()
        for end in (self.client, self.server):
            end.core.receive_connected(self.now)

    def _ends(self, sender: Role) -> tuple[End, End]:
        if sender is Role.CLIENT:
            return self.client, self.server
        return self.server, self.client

    def collect(self) -> None:
        """What both cores want to do goes under way."""
        for role in (Role.CLIENT, Role.SERVER):
            source, _ = self._ends(role)
            source.drain_events()
            source.core.receive_credit()
            while (action := source.core.next_action(source.credit, self.now)) is not None:
                source.actions.append(action)
                if isinstance(action, Send):
                    self._queue((role, action.stream_id), b"".join(action.data), action.fin)
                else:
                    self._other.append((role, action))
            source.drain_events()

    def _queue(self, key: Key, octets: bytes, fin: bool) -> None:
        if key not in self._ended:
            self._waiting.setdefault(key, []).append((octets, fin))

    def step(self) -> bool:
        """One thing arrives; False when nothing is under way."""
        self.collect()
        keys = list(self._waiting)
        if not keys and not self._other:
            return False
        chosen = self.random.randrange(len(keys) + len(self._other))
        if chosen < len(keys):
            self._data(keys[chosen])
        else:
            self._event(*self._other.pop(chosen - len(keys)))
        self.collect()
        return True

    def run(self) -> None:
        """All that is under way arrives."""
        while self.step():
            pass

    def advance(self, seconds: float) -> None:
        """Let virtual time pass."""
        until = self.now + seconds
        self.run()
        while True:
            ends = (self.client, self.server)
            due = [time for end in ends if (time := end.core.next_timer()) is not None]
            if not due or min(due) > until:
                break
            self.now = max(self.now, min(due))
            for end in ends:
                end.core.receive_timer(self.now)
            self.run()
        self.now = until

    def _data(self, key: Key) -> None:
        queue = self._waiting[key]
        octets, fin = queue.pop(0)
        if len(octets) > self.piece:
            queue.insert(0, (octets[self.piece :], fin))
            octets, fin = octets[: self.piece], False
        if not queue:
            del self._waiting[key]
        if fin:
            self._ended.add(key)
        self._begun.add(key)
        _, target = self._ends(key[0])
        target.core.receive_stream_data(key[1], octets, fin, self.now)

    def _event(self, role: Role, action: object) -> None:
        _, target = self._ends(role)
        if isinstance(action, ResetStream):
            self._reset((role, action.stream_id), action.code)
        elif isinstance(action, StopSending):
            other = Role.SERVER if role is Role.CLIENT else Role.CLIENT
            target.core.receive_stop_sending(action.stream_id, action.code, self.now)
            # Its transport answers with a reset, unless the stream has ended.
            self._reset((other, action.stream_id), action.code)
        elif isinstance(action, SendDatagram):
            if self.random.random() < 0.9:
                target.core.receive_datagram(action.data, self.now)
        elif isinstance(action, CloseSession):
            target.core.receive_closed(action.code, action.reason, by_peer=True)

    def _reset(self, key: Key, code: int) -> None:
        if key in self._ended:
            return
        if key in self._waiting and self.random.random() < 0.5:
            while key in self._waiting and key not in self._ended:
                self._data(key)  # it had arrived before the reset
            if key in self._ended:
                return
        self._waiting.pop(key, None)
        self._ended.add(key)
        self.lost_headers += key not in self._begun
        _, target = self._ends(key[0])
        target.core.receive_reset(key[1], code, self.now)
