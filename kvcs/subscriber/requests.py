"""Choosing a segment's tracks and asking for their Objects (KVCS "Consumer Procedures")."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from kvcs.errors import KvcsError, PublicationError, Redirected
from kvcs.kv import Component, DataTrack, SegmentEntry, codec_names, lookup
from kvcs.moqt import events
from kvcs.moqt.filters import LocationFilter, RangeFilter
from kvcs.moqt.incoming.expected import ObjectSink
from kvcs.moqt.intervals import FIRST
from kvcs.moqt.names import FullTrackName, GroupOrder, Location, TrackNamespace
from kvcs.moqt.parameters import Parameters
from kvcs.quic.connection import Connection

Handler = Callable[[events.Event], None]
"""Takes the events of one request."""


class Choice(NamedTuple):
    """Which encodings a consumer takes."""

    codecs: tuple[str, ...] | None = None
    """Names of codecs, the preferred one first; None stands for raw, then all others."""

    lossy: bool = False
    """Whether one may be taken that does not give back every bit."""

    def names(self) -> list[str]:
        """Codecs that may be taken, in order."""
        names = list(codec_names() if self.codecs is None else self.codecs)
        names = [name for name in names if self.lossy or lookup(name).lossless]
        if self.codecs is None:
            names.sort(key=lambda name: (name != "raw", not lookup(name).lossless, name))
        return names


DEFAULT_CHOICE = Choice()
"""Lossless, raw first."""


def choose_tracks(entry: SegmentEntry, choice: Choice = DEFAULT_CHOICE) -> list[DataTrack]:
    """The k and v track of one codec, or one kv track; lossless, raw first.

    Raises:
        PublicationError: the segment has none that can be read here.
    """
    available = set(entry.tracks)
    for codec in choice.names():
        pair = [
            DataTrack(component, codec, entry.segment) for component in (Component.K, Component.V)
        ]
        if available.issuperset(pair):
            return pair
        joint = DataTrack(Component.KV, codec, entry.segment)
        if joint in available:
            return [joint]
    shown = ", ".join(str(track) for track in entry.tracks)
    known = set(codec_names())
    lossy = [track.codec for track in entry.tracks if track.codec in known]
    if any(not lookup(codec).lossless for codec in lossy) and not choice.lossy:
        shown += "; lossy=True takes one that loses some bits"
    wanted = "encoding" if choice.lossy else "lossless encoding"
    raise PublicationError(
        f"segment {entry.segment} has no {wanted} that can be read here: {shown}"
    )


def are_readable(entries: Iterable[SegmentEntry], choice: Choice) -> bool:
    """Whether each segment has an encoding that may be taken."""
    try:
        for entry in entries:
            choose_tracks(entry, choice)
    except PublicationError:
        return False
    return True


def may_follow(redirect: Redirected, connection: Connection, name: FullTrackName) -> bool:
    """Whether a redirect of a track is one to another relay, for the very same track.

    Another Full Track Name is another publication or another track: what it has must not be
    combined with what is here (KVCS "Verification and Recovery").
    """
    same = FullTrackName(redirect.namespace, redirect.track_name) == name
    return same and bool(redirect.uri) and connection.link is not None


async def follow(redirect: Redirected, connection: Connection, name: FullTrackName) -> Connection:
    """The session that a redirect of a track leads to; opened, or used again (MOQT §9.4).

    Raises:
        Redirected: the redirect itself, where it cannot be followed.
    """
    link = connection.link
    if link is None or not may_follow(redirect, connection, name):
        raise redirect
    try:
        return await link.elsewhere(redirect.uri)
    except KvcsError as exc:
        raise redirect from exc


class TrackRequests:
    """The requests that one retrieval makes for data tracks.

    Args:
        connection: the session.
        namespace: the publication.
        subscriber_priority: SUBSCRIBER_PRIORITY of each request.
    """

    def __init__(
        self, connection: Connection, namespace: TrackNamespace, subscriber_priority: int
    ) -> None:
        self._connection = connection
        self._namespace = namespace
        self._priority = subscriber_priority
        self._request_ids: list[int] = []

    def subscribe(
        self,
        track: DataTrack,
        handler: Handler,
        *,
        start: Location = FIRST,
        rendezvous: float = 0.0,
        sink: ObjectSink | None = None,
    ) -> int:
        """Ask for Next Object and a fill from 0/0: every Object exactly once (KVCS "Retrieval
        during Production").

        Args:
            track: the data track.
            handler: takes the events.
            start: where the fill begins, if what lies before it is there.
            rendezvous: seconds that a relay which knows no publisher yet should wait for one.
            sink: takes the Objects; see `Connection.handle`.

        Returns:
            The Request ID.
        """
        parameters = Parameters.of(
            subscriber_priority=self._priority,
            group_order=GroupOrder.ASCENDING,
            location_filter=LocationFilter.next_object(),
            fill_parameters=Parameters.of(location_filter=LocationFilter.absolute_start(*start)),
        )
        if rendezvous:
            parameters = parameters.replace(rendezvous_timeout=round(rendezvous * 1000))
        request_id = self._connection.core.requester.subscribe(self._name(track), parameters)
        return self._follow(request_id, handler, sink)

    def fetch(
        self,
        track: DataTrack,
        layers: range,
        blocks: int,
        all_blocks: int,
        handler: Handler,
        *,
        start: Location | None = None,
        sink: ObjectSink | None = None,
    ) -> int:
        """Ask for what is there of some layers, and for their first blocks alone where the peer
        can filter (KVCS "Retrieval of Completed Caches").

        Args:
            track: the data track.
            layers: ascending, without gaps.
            blocks: how many leading blocks are wanted.
            all_blocks: how many the segment has.
            handler: takes the events.
            start: where to begin, if what lies before it is there.
            sink: takes the Objects; see `Connection.handle`.

        Returns:
            The Request ID.
        """
        first = Location(layers[0], 0) if start is None else start
        requester = self._connection.core.requester
        parameters = Parameters.of(
            subscriber_priority=self._priority,
            group_order=GroupOrder.ASCENDING,
            location_filter=LocationFilter.group_end(first.group, first.object, layers[-1]),
        )
        if blocks < all_blocks and requester.peer_filter_ranges >= 1:
            parameters = parameters.replace(objectid_filter=[RangeFilter(0, ((0, blocks - 1),))])
        return self._follow(requester.fetch(self._name(track), parameters), handler, sink)

    def cancel(self) -> None:
        """Cancel every request; quiet for those that are over."""
        for request_id in self._request_ids:
            self._connection.cancel(request_id)
        self._request_ids.clear()

    def _follow(self, request_id: int, handler: Handler, sink: ObjectSink | None) -> int:
        self._request_ids.append(request_id)
        self._connection.handle(request_id, handler, sink=sink)
        return request_id

    def _name(self, track: DataTrack) -> FullTrackName:
        return FullTrackName(self._namespace, track.name)
