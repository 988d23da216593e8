"""Who announced which namespace, and who wants to hear of it (MOQT §4, §7)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

from kvcs.access.permits import Place
from kvcs.moqt.names import TrackNamespace, is_prefix


class Notice(NamedTuple):
    """What a SUBSCRIBE_NAMESPACE is to be told."""

    place: Place
    """The SUBSCRIBE_NAMESPACE."""

    suffix: TrackNamespace
    """Fields behind its prefix."""


class Interests:
    """Requests for what lies below a prefix."""

    def __init__(self) -> None:
        self._places: dict[TrackNamespace, dict[Place, None]] = {}
        self._prefixes: dict[Place, TrackNamespace] = {}

    def add(self, place: Place, prefix: TrackNamespace) -> None:
        """Add a request."""
        self._prefixes[place] = prefix
        self._places.setdefault(prefix, {})[place] = None

    def remove(self, place: Place) -> None:
        """Remove a request; quiet where there is none."""
        prefix = self._prefixes.pop(place, None)
        if prefix is not None:
            places = self._places[prefix]
            del places[place]
            if not places:
                del self._places[prefix]

    def prefix(self, place: Place) -> TrackNamespace | None:
        """The prefix of a request."""
        return self._prefixes.get(place)

    def matching(self, namespace: TrackNamespace) -> Iterator[Notice]:
        """Requests whose prefix matches a namespace, the shortest prefix first."""
        for fields in range(len(namespace) + 1):
            for place in self._places.get(namespace[:fields], ()):
                yield Notice(place, namespace[fields:])


RelayOf = Callable[[int], bytes | None]
"""Tells which relay is at the other end of a session; None where that is unknown."""


class NamespaceTable:
    """Announced namespaces and subscriptions to prefixes, matched both ways.

    A namespace is there while a session announces it, or an upstream has named it. A relay is not
    told of what comes from there alone: it would tell us in turn, and neither would ever forget.

    Args:
        relay_of: see `RelayOf`.
    """

    def __init__(self, relay_of: RelayOf = lambda key: None) -> None:
        self._relay_of = relay_of
        self._announcers: dict[TrackNamespace, dict[Place, None]] = {}
        self._heard: dict[TrackNamespace, dict[int, None]] = {}
        """Upstream sessions that have named a namespace."""
        self._announced: dict[Place, TrackNamespace] = {}
        self._sorted: list[TrackNamespace] = []
        self._came: dict[TrackNamespace, int] = {}
        """A number that grows with each namespace that is there."""
        self._serial = 0
        self._interests = Interests()

    def __len__(self) -> int:
        """Number of different namespaces that are there."""
        return len(self._sorted)

    def announce(self, place: Place, namespace: TrackNamespace) -> list[Notice]:
        """Add an announcement; returns whom to tell NAMESPACE, where it is the first for them."""
        before = self._relays(namespace)
        self._announced[place] = namespace
        self._announcers.setdefault(namespace, {})[place] = None
        return self._changed(namespace, before)

    def withdraw(self, place: Place) -> tuple[TrackNamespace | None, list[Notice]]:
        """Remove an announcement.

        Returns:
            Its namespace, None where ``place`` announced nothing; and whom to tell NAMESPACE_DONE,
            where it was the last of that namespace for them.
        """
        namespace = self._announced.pop(place, None)
        if namespace is None:
            return None, []
        before = self._relays(namespace)
        announcers = self._announcers[namespace]
        del announcers[place]
        if not announcers:
            del self._announcers[namespace]
        return namespace, self._changed(namespace, before)

    def hear(self, key: int, namespace: TrackNamespace, *, there: bool) -> list[Notice]:
        """An upstream has named a namespace, or has it no longer; returns whom to tell that."""
        before = self._relays(namespace)
        heard = self._heard.setdefault(namespace, {})
        if there:
            heard[key] = None
        else:
            heard.pop(key, None)
        if not heard:
            del self._heard[namespace]
        return self._changed(namespace, before)

    def subscribe(self, place: Place, prefix: TrackNamespace) -> list[TrackNamespace]:
        """Add a SUBSCRIBE_NAMESPACE; returns the suffixes that match now, in the order in which
        they came: who asks late learns as well as who asked early which one is the newest."""
        self._interests.add(place, prefix)
        relay = self._relay_of(place.session)
        return [
            namespace[len(prefix) :]
            for namespace in sorted(self.under(prefix), key=self._came.__getitem__)
            if _is_news(self._relays(namespace), relay)
        ]

    def unsubscribe(self, place: Place) -> None:
        """Remove a SUBSCRIBE_NAMESPACE; quiet where there is none."""
        self._interests.remove(place)

    def under(self, prefix: TrackNamespace) -> Iterator[TrackNamespace]:
        """Namespaces below ``prefix``, itself included, in order."""
        index = bisect_left(self._sorted, prefix)  # those that it matches follow it directly
        while index < len(self._sorted) and is_prefix(prefix, self._sorted[index]):
            yield self._sorted[index]
            index += 1

    def publishers(self, namespace: TrackNamespace) -> list[int]:
        """Sessions whose announcement matches a Track's namespace, most specific first."""
        found: dict[int, None] = {}
        for fields in range(len(namespace), -1, -1):
            for place in self._announcers.get(namespace[:fields], ()):
                found[place.session] = None
        return list(found)

    def _relays(self, namespace: TrackNamespace) -> set[bytes | None]:
        """Relays that a namespace comes from; None is among them for whoever is no relay."""
        keys = [place.session for place in self._announcers.get(namespace, ())]
        return {self._relay_of(key) for key in (*keys, *self._heard.get(namespace, ()))}

    def _changed(self, namespace: TrackNamespace, before: set[bytes | None]) -> list[Notice]:
        """Whom to tell that a namespace came or went."""
        after = self._relays(namespace)
        if before == after:
            return []
        if not before:
            insort(self._sorted, namespace)
            self._serial += 1
            self._came[namespace] = self._serial
        elif not after:
            del self._sorted[bisect_left(self._sorted, namespace)]
            del self._came[namespace]
        found: list[Notice] = []
        for notice in self._interests.matching(namespace):
            relay = self._relay_of(notice.place.session)
            if _is_news(before, relay) != _is_news(after, relay):
                found.append(notice)
        return found


def _is_news(relays: set[bytes | None], relay: bytes | None) -> bool:
    """Whether what comes from ``relays`` is to be told to a session of ``relay``."""
    return bool(relays) if relay is None else bool(relays - {relay})
