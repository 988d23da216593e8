"""The data tracks of one retrieval: how each is asked for, and what still comes of itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from kvcs.errors import RequestError
from kvcs.kv import DataTrack, Ledger, Manifest, SegmentEntry
from kvcs.moqt import events
from kvcs.moqt.intervals import EVERYTHING, FIRST, Span
from kvcs.moqt.names import MAX_VI64, Location, TrackNamespace
from kvcs.observe import get_logger
from kvcs.quic.connection import Connection
from kvcs.quic.replies import refusal
from kvcs.subscriber.group_fetches import GroupByGroup
from kvcs.subscriber.receiver import Taker, TrackReceiver
from kvcs.subscriber.requests import Handler, TrackRequests

_log = get_logger("kvcs.subscriber")

MAX_DROPS = 16
"""Subscriptions that a peer may end early before no more are made for a retrieval."""

Retrieve = Literal["auto", "subscribe", "fetch"]
"""How Objects are asked for: a subscription with a fill, a FETCH, or what fits."""

Answered = Callable[[RequestError | None], None]
"""Told the answer to a request: None where it was accepted."""


class Reception:
    """Asks for the data tracks of each segment over one session, and receives them.

    Args:
        connection: the session.
        namespace: the publication.
        ledger: where Objects go, and what is selected.
        taker: told of what happens.
        subscriber_priority: SUBSCRIBER_PRIORITY of each request.
        retrieve: how Objects are asked for.
        selective: whether less than the whole prefix is wanted.
    """

    def __init__(
        self,
        connection: Connection,
        namespace: TrackNamespace,
        ledger: Ledger,
        taker: Taker,
        *,
        subscriber_priority: int,
        retrieve: Retrieve,
        selective: bool,
    ) -> None:
        self._connection = connection
        self._ledger = ledger
        self._taker = taker
        self._retrieve = retrieve
        self._selective = selective
        self._requests = TrackRequests(connection, namespace, subscriber_priority)
        self._receivers: dict[DataTrack, TrackReceiver] = {}
        self._drops = 0

    def begin(self, track: DataTrack, entry: SegmentEntry) -> None:
        """Ask for a track of which nothing is there yet; its segment is in the ledger."""
        self._request(track, entry, self._receive(track))

    def resume(
        self,
        track: DataTrack,
        entry: SegmentEntry,
        missing: Location | None,
        rendezvous: float,
        answered: Answered,
    ) -> None:
        """Ask for what lacks of a track that another session has brought a part of.

        Args:
            track: the track.
            entry: its segment, as the newest manifest has it.
            missing: the first Location that is not there; None where nothing lacks.
            rendezvous: seconds that a relay should wait for the publisher.
            answered: told what the peer has answered.
        """
        receiver = self._receive(track)
        if missing is None:
            receiver.nothing_lacks()
            answered(None)
        else:
            self._request(track, entry, receiver, missing, rendezvous, answered)

    def ask_again(self, track: DataTrack, entry: SegmentEntry, missing: Location | None) -> None:
        """Repeat a request that was refused for now."""
        receiver = self._receivers[track]
        if missing is None:
            receiver.end()
        else:
            receiver.start_again()
            self._request(track, entry, receiver, missing)

    def _receive(self, track: DataTrack) -> TrackReceiver:
        receiver = TrackReceiver(self._connection, self._ledger, track, self._taker)
        self._receivers[track] = receiver
        return receiver

    def receiver(self, track: DataTrack) -> TrackReceiver:
        """Receiver of a data track."""
        return self._receivers[track]

    def dropped(
        self, track: DataTrack, entry: SegmentEntry, missing: Location | None, reason: str
    ) -> None:
        """The peer serves a subscription no longer: make another, if more is to be published.

        Args:
            track: its track.
            entry: the track's segment, as the newest manifest has it.
            missing: first Location that is not there; None where all is.
            reason: why, for people.
        """
        receiver = self._receivers[track]
        self._drops += 1
        if entry.complete or missing is None or self._drops > MAX_DROPS:
            receiver.give_up(reason)
            return
        _log.info("subscribing_again", track=str(track), reason=reason)
        receiver.start_again()
        self._requests.subscribe(track, receiver.take, start=missing, sink=receiver)

    def blocks_wanted(self, entry: SegmentEntry) -> int:
        """How many of a segment's blocks are selected."""
        return max(0, min(entry.blocks, self._ledger.blocks - entry.first_block))

    def comes_of_itself(self, track: DataTrack, manifest: Manifest) -> bool:
        """Whether Objects of a track that were not published yet will come unasked."""
        receiver = self._receivers[track]
        # Through a relay that loses the signs of an end, the manifest alone counts.
        published = receiver.filled and manifest.segments[track.segment].complete
        return not (receiver.over or published)

    def anything_comes(self, manifest: Manifest) -> bool:
        """Whether that is so for any track."""
        return any(self.comes_of_itself(track, manifest) for track in self._receivers)

    def listed(self, manifest: Manifest) -> Iterator[tuple[DataTrack, Span]]:
        """For each track, the layers whose Objects a manifest lists."""
        for track in self._receivers:
            groups = manifest.segments[track.segment].object_digests.get(track, ())
            if groups:
                yield track, Span(FIRST, Location(len(groups) - 1, MAX_VI64))

    @property
    def octets(self) -> int:
        """Payload octets so far, on all tracks."""
        return sum(receiver.octets for receiver in self._receivers.values())

    @property
    def open_streams(self) -> int:
        """Streams that may still bring something."""
        return sum(receiver.open_streams for receiver in self._receivers.values())

    def cancel(self) -> None:
        """Cancel every request, and give up what is on its way."""
        self._requests.cancel()
        for receiver in self._receivers.values():
            receiver.drop()

    def _request(
        self,
        track: DataTrack,
        entry: SegmentEntry,
        receiver: TrackReceiver,
        start: Location | None = None,
        rendezvous: float = 0.0,
        answered: Answered | None = None,
    ) -> None:
        if self._retrieve == "fetch" or (
            self._retrieve == "auto" and self._selective and entry.complete
        ):
            self._fetch(track, entry, receiver, start, answered)
        else:
            self._requests.subscribe(
                track,
                self._watched(receiver.take, answered),
                start=FIRST if start is None else start,
                rendezvous=rendezvous,
                sink=receiver,
            )

    def _fetch(
        self,
        track: DataTrack,
        entry: SegmentEntry,
        receiver: TrackReceiver,
        start: Location | None,
        answered: Answered | None,
    ) -> None:
        """Ask for what is there, in one FETCH or, of a peer that takes no long ones, in several."""

        def ask(layers: range, start: Location | None, handler: Handler) -> None:
            wanted = self.blocks_wanted(entry)
            self._requests.fetch(
                track, layers, wanted, entry.blocks, handler, start=start, sink=receiver
            )

        def ended(failure: str | None) -> None:
            self._taker.lost(track, EVERYTHING, failure or "a fetch left objects out")
            receiver.end()

        layers = self._ledger.layers
        if start is not None:
            layers = range(start.group, layers.stop)
        by_group = GroupByGroup(layers, start, ask, receiver.take, ended)
        deliver = self._watched(lambda event: receiver.take(event, ended), answered)

        def first(event: events.Event) -> None:
            if by_group.is_called_for(event):
                by_group.start(lambda deliver: self._watched(deliver, answered))
            else:
                deliver(event)

        ask(layers, start, first)

    def _watched(self, deliver: Handler, answered: Answered | None) -> Handler:
        """A handler that tells of the answer, and is out of the way after it."""
        if answered is None:
            return deliver

        def first(event: events.Event) -> None:
            if isinstance(event, events.RequestRefused):
                answered(refusal(event.error))
                return
            accepted = isinstance(event, events.RequestAccepted)
            if isinstance(event, events.RequestAccepted):
                self._connection.handle(event.request_id, deliver)
            deliver(event)
            if accepted:
                answered(None)

        return first
