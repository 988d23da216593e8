"""Looks from time to time at what the peers of a relay do not take (MOQT §7, §9.9).

A subscription that falls behind what is published ends with TOO_FAR_BEHIND, and whoever reads at
its own pace is left alone: a fill, a FETCH. Where too much waits below the cache, streams of the
lowest priority are reset first. A session, or a scope, that holds no more than an equal share of
what may wait loses nothing to the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from math import ceil
from operator import eq

from kvcs.moqt.names import TrackNamespace
from kvcs.moqt.sending.delivery import ObjectSender
from kvcs.moqt.session import Session
from kvcs.relay.hub import Hub
from kvcs.relay.peers import Peer
from kvcs.relay.pressure import Stoppable, give_up
from kvcs.relay.scopes import scope_of

LOOK_SECONDS = 1.0
"""From one look to the next, while something waits."""

IDLE_SECONDS = 5.0
"""The same while nothing does, and something is served."""

PRESSED_SECONDS = 0.2
"""The same where streams were just reset: what that has freed is seen then."""

MAX_LOOKED = 4096
"""Subscriptions that are looked at in one look; the others of busy sessions come next time."""

MAX_RESETS = 256
"""Streams that one look resets."""


class Backlogs:
    """What waits for the peers of a relay.

    Args:
        hub: the relay's core.
        peers: its sessions.
    """

    def __init__(self, hub: Hub, peers: Mapping[int, Peer]) -> None:
        self._hub = hub
        self._peers = peers
        self._watching = False
        self._next = 0
        """Session that the next look begins with."""

    def watch(self, now: float) -> None:
        """Something is served: look in a while, and as long as anything is."""
        if not self._watching:
            self._watching = True
            self._hub.at(now + LOOK_SECONDS, self._look)

    def _look(self, now: float) -> None:
        peers = [(key, peer) for key, peer in self._peers.items() if not peer.core.closed]
        served = any(peer.core.deliveries.active for _, peer in peers)
        waits = any(len(peer.core.scheduler) for _, peer in peers)
        self._look_behind(peers, now)
        queued = {key: octets for key, peer in peers if (octets := peer.queued())}
        pressed = self._look_queued(queued)
        if served or queued:
            pause = LOOK_SECONDS if waits or queued else IDLE_SECONDS
            self._hub.at(now + (PRESSED_SECONDS if pressed else pause), self._look)
        else:
            self._watching = False

    # Behind

    def _look_behind(self, peers: list[tuple[int, Peer]], now: float) -> None:
        """End subscriptions that are too far behind."""
        start = next((at for at, (key, _) in enumerate(peers) if key == self._next), 0)
        looked = 0
        for key, peer in (*peers[start:], *peers[:start]):
            if not len(peer.core.scheduler):
                peer.lag_octets = 0  # it has taken all there is
            elif looked >= MAX_LOOKED:
                self._next = key
                break
            else:
                looked += self._look_at(key, peer, now)

    def _look_at(self, key: int, peer: Peer, now: float) -> int:
        """Look at one session; returns how many subscriptions it has."""
        limits, stats = self._hub.limits, self._hub.stats
        subscriptions = peer.core.deliveries.subscriptions()
        peer.lag_octets = 0
        for delivery in subscriptions:
            seconds, octets = delivery.look(now)
            if seconds <= limits.max_lag_seconds and octets <= limits.max_lag_octets:
                peer.lag_octets += octets
                continue
            stats.too_far_behind += 1
            self._hub.report(
                "too_far_behind",
                session=key,
                track=str(delivery.track.name),
                seconds=round(seconds, 3),
                octets=octets,
            )
            delivery.fall_behind("it does not keep up with what is published")
        return len(subscriptions)

    # Queued

    def _look_queued(self, queued: Mapping[int, int]) -> bool:
        """Reset streams where too much waits below the cache; whether there were any."""
        shares: dict[int, dict[TrackNamespace, float]] = {}
        scopes: Counter[TrackNamespace] = Counter()
        for key, octets in queued.items():
            open_of = self._hub.scopes.shares(key)
            total = sum(open_of.values())
            shares[key] = {name: octets * count / total for name, count in open_of.items()}
            for name, part in shares[key].items():
                scopes[name] += ceil(part)
        pressed = False
        for name in self._hub.scopes.set_queued(scopes):
            excess = scopes[name] - self._hub.limits.scope_queued_octets
            parts = {key: part[name] for key, part in shares.items() if name in part}
            pressed |= self._relieve(parts, excess, partial(eq, name))
        excess = sum(queued.values()) - self._hub.limits.max_queued_octets
        if excess > 0:
            pressed |= self._relieve(queued, excess, lambda each: True)
        return pressed

    def _relieve(
        self,
        queued: Mapping[int, float],
        excess: float,
        concerns: Callable[[TrackNamespace], bool],
    ) -> bool:
        """Reset streams of the lowest priority until ``excess`` octets less wait.

        Those of sessions for which more waits than an equal share of what may are looked at: of a
        session's own priorities others shall not suffer.
        """
        fair = _equal_share(queued.values(), sum(queued.values()) - excess)
        found: list[Stoppable] = []
        for key, octets in queued.items():
            session = self._hub.session(key)
            if session is None or octets <= fair:
                continue
            senders = [each for each in session.senders() if concerns(scope_of(each.family))]
            for sender in senders:
                rank = (*sender.key()[:2], octets)
                found.append(
                    Stoppable(rank, octets / len(senders), partial(_reset, session, sender))
                )
        count = give_up(found, excess, MAX_RESETS)
        self._hub.stats.pressure_resets += count
        self._hub.report("queues_too_long", excess=round(excess), resets=count)
        return count > 0


def _equal_share(amounts: Iterable[float], allowed: float) -> float:
    """The most that each may hold for all to hold what is allowed: what some leave of their part is
    the others', or many sessions that hold next to nothing would make it small."""
    share, waiting = allowed, sorted(amounts)
    for number, amount in enumerate(waiting):
        share = allowed / (len(waiting) - number)
        if amount > share:
            break
        allowed -= amount
    return share


def _reset(session: Session, sender: ObjectSender, code: int) -> None:
    """Reset a stream, for good."""
    sender.may_reopen = False
    session.close_sender(sender, code)
