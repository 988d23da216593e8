"""Who announced which namespace, and who wants to hear of it (MOQT §4, §7)."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import NamedTuple

from kvcs.moqt.names import TrackNamespace, is_prefix


class Place(NamedTuple):
    """A request of a peer: the session's key in the relay, and the Request ID."""

    session: int
    """Key of the session."""

    request_id: int
    """Request ID on that session."""


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


class NamespaceTable:
    """Announced namespaces and subscriptions to prefixes, matched both ways."""

    def __init__(self) -> None:
        self._announcers: dict[TrackNamespace, dict[Place, None]] = {}
        self._announced: dict[Place, TrackNamespace] = {}
        self._sorted: list[TrackNamespace] = []
        self._interests = Interests()

    def __len__(self) -> int:
        """Number of different namespaces that are announced."""
        return len(self._sorted)

    def announce(self, place: Place, namespace: TrackNamespace) -> list[Notice]:
        """Add an announcement; returns whom to tell NAMESPACE, where it is the first."""
        self._announced[place] = namespace
        announcers = self._announcers.get(namespace)
        if announcers is not None:
            announcers[place] = None
            return []
        self._announcers[namespace] = {place: None}
        insort(self._sorted, namespace)
        return list(self._interests.matching(namespace))

    def withdraw(self, place: Place) -> tuple[TrackNamespace | None, list[Notice]]:
        """Remove an announcement.

        Returns:
            Its namespace, None where ``place`` announced nothing; and whom to tell NAMESPACE_DONE,
            where it was the last of that namespace.
        """
        namespace = self._announced.pop(place, None)
        if namespace is None:
            return None, []
        announcers = self._announcers[namespace]
        del announcers[place]
        if announcers:
            return namespace, []
        del self._announcers[namespace]
        del self._sorted[bisect_left(self._sorted, namespace)]
        return namespace, list(self._interests.matching(namespace))

    def subscribe(self, place: Place, prefix: TrackNamespace) -> list[TrackNamespace]:
        """Add a SUBSCRIBE_NAMESPACE; returns the suffixes that match now."""
        self._interests.add(place, prefix)
        return [namespace[len(prefix) :] for namespace in self.under(prefix)]

    def unsubscribe(self, place: Place) -> None:
        """Remove a SUBSCRIBE_NAMESPACE; quiet where there is none."""
        self._interests.remove(place)

    def under(self, prefix: TrackNamespace) -> Iterator[TrackNamespace]:
        """Announced namespaces below ``prefix``, itself included, in order."""
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
