"""The relays and publishers that a relay asks for what nobody announced to it (MOQT §7).

They are tried in the order in which they are configured; one that named a matching namespace comes
before the others. What is asked below a prefix downstream is asked of each of them once, by the
widest prefix that is wanted.

Relays say who they are in SETUP, in an option that other software ignores. So a relay finds that it
is its own upstream, and never hands to another relay what it has from there alone: two relays that
are each other's upstream do not keep a namespace alive that neither has. Longer circles are limited
by time only: nothing in a request tells how far it has come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import zip_longest

from kvcs.access.permits import Place
from kvcs.errors import UsageError
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import TrackNamespace, is_prefix, namespace_text
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.session import Session
from kvcs.relay.hub import Hub
from kvcs.relay.timers import Callback

RELAY_OPTION = 0x4B564353
"""Setup Option in which a relay names itself; not registered, and ignored by others (MOQT §9.1)."""

RELAY_ID_OCTETS = 16
"""Octets of a relay's name; others are not taken for one."""

TRIES = 8
"""Times in a row that a prefix is asked of an upstream that refuses or ends it for the moment."""

PAUSE = 0.05
"""Seconds before the second try; doubles."""

SETTLE = 1.0
"""Seconds after its answer for an upstream to name again what a narrower prefix had named; what it
has not ended by then counts as a new start."""


class Kind(Enum):
    """What is asked for a prefix."""

    NAMESPACES = auto()
    TRACKS = auto()


MAX_PREFIXES = {Kind.NAMESPACES: 320, Kind.TRACKS: 64}
"""Prefixes that are asked of one upstream at a time. Each takes a request stream as long as it is
wanted, an upstream allows some 512, and the Tracks that are followed there need theirs."""


@dataclass(slots=True, eq=False)
class _Asked:
    """One SUBSCRIBE_NAMESPACE or SUBSCRIBE_TRACKS of ours."""

    key: int
    kind: Kind
    prefix: TrackNamespace
    request_id: int | None = None
    """None while it is to be tried again."""
    answered: bool = False
    """Whether it was accepted or refused for good."""
    given_up: bool = False
    """Whether it could not be asked as often as it was tried."""
    tries: int = 0
    named: dict[TrackNamespace, None] = field(default_factory=dict)
    stale: set[TrackNamespace] = field(default_factory=set)
    """Namespaces that a narrower prefix had named, and this one has not yet."""


Heard = Callable[[int, TrackNamespace, bool, float], None]
"""Told that an upstream session has a namespace, or has it no longer, and when."""


def relay_id(options: KeyValues | None) -> bytes | None:
    """The name of the relay that sent these Setup Options; None where it is none of ours."""
    found = None if options is None else options.octets(RELAY_OPTION)
    return found if found is not None and len(found) == RELAY_ID_OCTETS else None


class Upstreams:
    """Sessions with upstreams, and what they were asked about prefixes.

    Args:
        hub: the relay's core.
        own_id: the relay's own name; empty where it has none.
        heard: see `Heard`.
    """

    def __init__(self, hub: Hub, own_id: bytes, heard: Heard) -> None:
        self.own_id = own_id
        self._hub = hub
        self._heard = heard
        self._ranks: dict[int, int] = {}
        self._ids: dict[int, bytes] = {}
        self._wanted: dict[Kind, dict[Place, TrackNamespace]] = {kind: {} for kind in Kind}
        self._asked: dict[tuple[int, Kind], dict[TrackNamespace, _Asked]] = {}
        self._by_place: dict[Place, _Asked] = {}
        self._namespaces: dict[TrackNamespace, dict[int, int]] = {}
        """What upstreams have named: by session, how many requests of ours it was told for."""
        self._waiting: dict[int, tuple[int, TrackNamespace, Callback]] = {}
        self._waited = 0
        """Entries that `_waiting` has had: they are its keys."""
        self._refreshing = False

    # Sessions

    def opened(self, key: int, rank: int) -> None:
        """A session with an upstream is there, the ``rank``-th best one."""
        self._ranks[key] = rank
        self._refresh_soon()

    def introduced(self, key: int, options: KeyValues) -> bool:
        """A session has said who its peer is; False where that is this relay."""
        peer_id = relay_id(options)
        if peer_id is not None:
            self._ids[key] = peer_id
        return peer_id is None or peer_id != self.own_id

    def closed(self, key: int, now: float) -> None:
        """A session is over, and with it what it had named."""
        self._ids.pop(key, None)
        if self._ranks.pop(key, None) is None:
            return
        for kind in Kind:
            for asked in self._asked.pop((key, kind), {}).values():
                self._drop(asked, now)
        self._tell_waiting(now)

    def relay_of(self, key: int) -> bytes | None:
        """Which relay is at the other end of a session; None where that is unknown."""
        return self._ids.get(key)

    def from_elsewhere(self, key: int, sources: list[int]) -> bool:
        """Whether one of ``sources`` is not the relay at the other end of ``key``."""
        peer_id = self._ids.get(key)
        return peer_id is None or any(self._ids.get(source) != peer_id for source in sources)

    def sessions(self, namespace: TrackNamespace) -> list[int]:
        """Upstream sessions in the order in which they are asked for a Track of a namespace."""
        naming: set[int] = set()
        for fields in range(len(namespace) + 1):
            naming.update(self._namespaces.get(namespace[:fields], ()))
        usable = [key for key in self._ranks if not self._hub.is_leaving(key)]
        return sorted(usable, key=lambda key: (key not in naming, self._ranks[key], key))

    def wants_tracks(self, key: int, namespace: TrackNamespace) -> bool:
        """Whether a session was asked for Tracks of a namespace by SUBSCRIBE_TRACKS."""
        return any(True for _ in self._covering(key, Kind.TRACKS, namespace))

    def _covering(self, key: int, kind: Kind, namespace: TrackNamespace) -> Iterator[_Asked]:
        """What a session was asked for that a namespace, or a prefix, lies below."""
        asked = self._asked.get((key, kind), {})
        for fields in range(len(namespace) + 1):
            one = asked.get(namespace[:fields])
            if one is not None:
                yield one

    # What is wanted below a prefix

    def want(self, place: Place, kind: Kind, prefix: TrackNamespace) -> None:
        """A downstream request wants to hear what lies below a prefix."""
        self._wanted[kind][place] = prefix
        if self._ranks:
            self._refresh_soon()

    def leave(self, place: Place, now: float) -> None:
        """It does not any more; upstream is told a little later, since others may ask the same."""
        found = [kind for kind in Kind if self._wanted[kind].pop(place, None) is not None]
        if found and self._ranks:
            linger = self._hub.limits.upstream_linger
            self._hub.at(now + linger, lambda later: self._refresh_soon())

    def when_heard(self, key: int, prefix: TrackNamespace, callback: Callback, now: float) -> None:
        """Call back once every upstream has answered for a prefix, or after `namespace_wait`.

        The relay that asks, at the other end of session ``key``, is not waited for.
        """
        if not self._ranks:
            callback(now)
            return
        self._waited += 1
        number = self._waited
        self._waiting[number] = (key, prefix, callback)

        def expire(later: float) -> None:
            if self._waiting.pop(number, None) is not None:
                callback(later)

        self._hub.at(now + self._hub.limits.namespace_wait, expire)

    def _tell_waiting(self, now: float) -> None:
        for number, (key, prefix, callback) in list(self._waiting.items()):
            if self._is_answered(key, prefix) and self._waiting.pop(number, None) is not None:
                callback(now)

    def _is_answered(self, asker: int, prefix: TrackNamespace) -> bool:
        if self._refreshing:
            return False
        for key in self._ranks:
            if not self.from_elsewhere(asker, [key]):
                continue
            if any(not one.answered for one in self._covering(key, Kind.NAMESPACES, prefix)):
                return False
        return True

    def is_left_out(self, asker: int, prefix: TrackNamespace) -> bool:
        """Whether an upstream could not be asked for a prefix: that it names nothing says nothing.

        Args:
            asker: session that wants to know; the relay at its other end does not count.
            prefix: what is wanted.
        """
        for key in self._ranks:
            if self._hub.session(key) is None or self._hub.is_leaving(key):
                continue
            if not self.from_elsewhere(asker, [key]):
                continue
            if all(one.given_up for one in self._covering(key, Kind.NAMESPACES, prefix)):
                return True
        return False

    # Asking

    def _refresh_soon(self) -> None:
        if not self._refreshing:
            self._refreshing = True
            self._hub.soon(self._refresh)

    def _refresh(self, now: float) -> None:
        """Ask each upstream for exactly what is wanted, by the widest prefixes."""
        self._refreshing = False
        for key in list(self._ranks):
            session = self._hub.session(key)
            if session is None or self._hub.is_leaving(key):
                continue
            for kind in Kind:
                self._ask_for(key, session, kind, now)
        self._tell_waiting(now)

    def _widest(self, key: int, kind: Kind) -> list[TrackNamespace]:
        """Prefixes to ask a session for; none for the relay itself that wants to hear of them."""
        prefixes = {
            prefix
            for place, prefix in self._wanted[kind].items()
            if self.from_elsewhere(key, [place.session])
        }
        widest: list[TrackNamespace] = []
        for prefix in sorted(prefixes):  # a wider one comes directly before what it covers
            if not widest or not is_prefix(widest[-1], prefix):
                widest.append(prefix)
        most = MAX_PREFIXES[kind]
        return widest if len(widest) <= most else self._in_turns(key, kind, widest)[:most]

    def _in_turns(self, key: int, kind: Kind, widest: list[TrackNamespace]) -> list[TrackNamespace]:
        """The same, one of each session that wants some at a time: whoever wants many does not keep
        what others want from being asked."""
        known = frozenset(widest)
        wanted: dict[int, dict[TrackNamespace, None]] = {}
        for place, prefix in self._wanted[kind].items():
            if self.from_elsewhere(key, [place.session]):
                heads = (prefix[:fields] for fields in range(len(prefix) + 1))
                head = next(head for head in heads if head in known)
                wanted.setdefault(place.session, {})[head] = None
        turns = zip_longest(*wanted.values())
        return list(dict.fromkeys(one for turn in turns for one in turn if one is not None))

    def _ask_for(self, key: int, session: Session, kind: Kind, now: float) -> None:
        asked = self._asked.setdefault((key, kind), {})
        widest = dict.fromkeys(self._widest(key, kind))
        left: dict[TrackNamespace, _Asked] = {
            prefix: asked.pop(prefix) for prefix in list(asked) if prefix not in widest
        }
        fresh = [
            asked.setdefault(prefix, _Asked(key, kind, prefix))
            for prefix in widest
            if prefix not in asked
        ]
        for one in fresh:
            for narrow in left.values():
                if is_prefix(one.prefix, narrow.prefix):
                    for namespace in narrow.named:  # it is named again, or dropped after a while
                        self._note(one, namespace, True, now)
                        one.stale.add(namespace)
        for narrow in left.values():
            if narrow.request_id is not None:
                session.requester.cancel(narrow.request_id)
            self._drop(narrow, now)
        for one in fresh:
            self._send(one, now)

    def _send(self, asked: _Asked, now: float) -> None:
        session = self._hub.session(asked.key)
        current = self._asked.get((asked.key, asked.kind), {}).get(asked.prefix)
        if session is None or current is not asked:
            return
        requester = session.requester
        ask = (
            requester.subscribe_namespace
            if asked.kind is Kind.NAMESPACES
            else requester.subscribe_tracks
        )
        try:
            asked.request_id = ask(asked.prefix)
        except UsageError:
            self._again(asked, now)
            return
        self._by_place[Place(asked.key, asked.request_id)] = asked
        self._hub.report(
            "asked_upstream",
            session=asked.key,
            what=asked.kind.name.lower(),
            prefix=namespace_text(asked.prefix),
        )

    def _again(self, asked: _Asked, now: float, wait: float = 0.0) -> None:
        """Try a prefix again later, a bounded number of times."""
        if asked.request_id is not None:
            self._by_place.pop(Place(asked.key, asked.request_id), None)
            asked.request_id = None
        asked.tries += 1
        if asked.tries >= TRIES:
            asked.answered = asked.given_up = True
            return
        pause = max(wait, PAUSE * 2**asked.tries)
        self._hub.at(now + pause, lambda later: self._send(asked, later))

    # What upstreams say

    def event(self, key: int, request_id: int, event: events.Event, now: float) -> bool:
        """An event of a session; False where it is of no request that was made here."""
        asked = self._by_place.get(Place(key, request_id))
        if asked is None:
            return False
        if isinstance(event, events.RequestAccepted):
            asked.answered = True
            self._hub.at(now + SETTLE, lambda later: self._settle(asked, request_id, later))
            # The namespaces that are there follow it directly.
            self._hub.soon(self._tell_waiting)
        elif isinstance(event, events.NamespaceAnnounced):
            self._note(asked, (*asked.prefix, *event.suffix), True, now)
        elif isinstance(event, events.NamespaceWithdrawn):
            self._note(asked, (*asked.prefix, *event.suffix), False, now)
        elif isinstance(event, events.RequestRefused):
            self._refused(asked, event, now)
        elif isinstance(event, events.RequestCancelled | events.GoawayReceived):
            for namespace in list(asked.named):
                self._note(asked, namespace, False, now)
            self._again(asked, now)
        return True

    def _refused(self, asked: _Asked, event: events.RequestRefused, now: float) -> None:
        error = event.error
        wait = (error.retry_interval - 1) / 1000 if error.retry_interval else 0.0
        overlap = error.error_code == RequestCode.PREFIX_OVERLAP
        if overlap or 0 < wait <= self._hub.limits.upstream_wait:
            # What overlaps is a narrower one of ours whose cancellation is still on its way.
            self._again(asked, now, wait)
        else:
            self._by_place.pop(Place(asked.key, event.request_id), None)
            asked.request_id, asked.answered = None, True
            self._hub.report(
                "upstream_refused",
                session=asked.key,
                prefix=namespace_text(asked.prefix),
                code=error.error_code,
                reason=error.reason,
            )
        self._tell_waiting(now)

    def _settle(self, asked: _Asked, request_id: int, now: float) -> None:
        if asked.request_id == request_id:
            asked.tries = 0  # it holds: where it ends one day, that is another matter
        for namespace in list(asked.stale):
            self._note(asked, namespace, False, now)

    def _note(self, asked: _Asked, namespace: TrackNamespace, there: bool, now: float) -> None:
        """A namespace was named for a prefix, or is no longer."""
        asked.stale.discard(namespace)
        if there == (namespace in asked.named):
            return
        counts = self._namespaces.setdefault(namespace, {})
        before = counts.get(asked.key, 0)
        counts[asked.key] = before + (1 if there else -1)
        if there:
            asked.named[namespace] = None
        else:
            del asked.named[namespace]
        if not counts[asked.key]:
            del counts[asked.key]
        if not counts:
            del self._namespaces[namespace]
        if not before or not counts.get(asked.key):
            self._heard(asked.key, namespace, there, now)

    def _drop(self, asked: _Asked, now: float) -> None:
        for namespace in list(asked.named):
            self._note(asked, namespace, False, now)
        if asked.request_id is not None:
            self._by_place.pop(Place(asked.key, asked.request_id), None)
