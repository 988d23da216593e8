"""Takes the events of one data track's requests into the ledger (KVCS "Object Payload")."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvcs.errors import KvcsError, ObjectError, PublicationAborted, PublicationError
from kvcs.kv import DataTrack, Ledger, Slot
from kvcs.moqt import events
from kvcs.moqt.data import FetchHeader
from kvcs.moqt.errors import PublishDoneCode
from kvcs.moqt.objects import ObjectStatus, RangeKind
from kvcs.observe import get_logger
from kvcs.quic.connection import Connection

_log = get_logger("kvcs.subscriber")


class Taker(Protocol):
    """What a receiver tells the cache."""

    def verified(self) -> None:
        """An Object was verified; a layer may be whole now."""

    def lost(self, track: DataTrack, layer: int | None, reason: str) -> None:
        """Objects of a layer, or of any, did not come or were bad: they are owed again."""

    def track_ended(self, track: DataTrack) -> None:
        """One of the draft's signals: nothing more comes of itself; look what lacks."""

    def failed(self, error: KvcsError) -> None:
        """The publication cannot be used any more."""


class TrackReceiver:
    """Receives one data track, by subscription, fill or fetch.

    Args:
        connection: the session.
        ledger: where Objects go.
        track: the data track.
        taker: the cache.
    """

    def __init__(
        self, connection: Connection, ledger: Ledger, track: DataTrack, taker: Taker
    ) -> None:
        self.track = track
        self.filled = False
        """Whether its fill has ended with FIN, or there was none to come."""
        self.open_streams = 0
        self._connection = connection
        self._ledger = ledger
        self._taker = taker
        self._slots: dict[int, Slot] = {}
        self._layers: dict[int, int] = {}
        self._fetch_streams: set[int] = set()
        self._seen_end = False

    def take(self, event: events.Event, on_fetch_end: Callable[[bool], None] | None = None) -> None:
        """One event of a request of this track.

        Args:
            event: what happened.
            on_fetch_end: for a FETCH: told whether its stream ended with FIN and left nothing
                unknown.
        """
        try:
            self._take(event, on_fetch_end)
        except PublicationError as exc:
            self._taker.failed(exc)

    def _take(self, event: events.Event, on_fetch_end: Callable[[bool], None] | None) -> None:
        if isinstance(event, events.ObjectChunk):
            slot = self._slots.get(event.stream_id)
            if slot is not None:
                slot.write(event.data)
        elif isinstance(event, events.ObjectStarted):
            self._begin(event)
        elif isinstance(event, events.ObjectEnded):
            self._end(event)
        elif isinstance(event, events.DataStreamOpened):
            self.open_streams += 1
            if isinstance(event.header, FetchHeader):
                self._fetch_streams.add(event.stream_id)
        elif isinstance(event, events.DataStreamEnded):
            self._stream_ended(event, on_fetch_end)
        elif isinstance(event, events.RangeMarked):
            if event.kind is not RangeKind.NON_EXISTENT:
                self._taker.lost(self.track, None, f"range marked {event.kind.name}")
        elif isinstance(event, events.SubscriptionEnded):
            self._subscription_ended(event)
        elif isinstance(event, events.TrackMalformed):
            self._taker.failed(PublicationError(f"{self.track} is malformed: {event.reason}"))
        elif isinstance(event, events.SessionClosed):
            self._taker.failed(self._connection.close_error())
        elif isinstance(event, events.RequestCancelled | events.RequestRefused):
            if on_fetch_end is not None:
                on_fetch_end(False)
            else:
                self._taker.lost(self.track, None, "the peer ended the subscription")
                self._taker.track_ended(self.track)

    def _begin(self, event: events.ObjectStarted) -> None:
        header = event.header
        self._layers[event.stream_id] = header.group_id
        if header.status is ObjectStatus.END_OF_TRACK:
            self._seen_end = True
            self._taker.track_ended(self.track)
            return
        if header.status is ObjectStatus.END_OF_GROUP:
            self._ledger.end_of_group(self.track, header.location)
            return
        try:
            slot = self._ledger.begin(self.track, header.location, header.payload_length)
        except ObjectError as exc:
            self._rejected(exc, header.group_id)
            return
        if slot is not None:
            self._slots[event.stream_id] = slot

    def _end(self, event: events.ObjectEnded) -> None:
        slot = self._slots.pop(event.stream_id, None)
        if slot is None:
            return
        try:
            slot.finish()
        except ObjectError as exc:
            self._rejected(exc, slot.location.group)
        else:
            self._taker.verified()

    def _rejected(self, error: ObjectError, layer: int) -> None:
        _log.warning("object_rejected", track=str(self.track), check=error.check, why=str(error))
        self._taker.lost(self.track, layer, f"an object failed its {error.check} check")

    def _stream_ended(
        self, event: events.DataStreamEnded, on_fetch_end: Callable[[bool], None] | None
    ) -> None:
        self.open_streams -= 1
        slot = self._slots.pop(event.stream_id, None)
        if slot is not None:
            slot.abandon()
        layer = self._layers.pop(event.stream_id, None)
        fetched = event.stream_id in self._fetch_streams
        self._fetch_streams.discard(event.stream_id)
        if on_fetch_end is not None:
            on_fetch_end(event.reset_code is None)
        elif event.reset_code is not None:
            which = None if fetched else layer
            reason = f"a stream was reset with code {event.reset_code:#x}"
            self._taker.lost(self.track, which, reason)
            self.filled = self.filled or fetched
        elif fetched:
            self.filled = True
            self._taker.track_ended(self.track)

    def _subscription_ended(self, event: events.SubscriptionEnded) -> None:
        if event.status == PublishDoneCode.TRACK_ENDED:
            self._taker.track_ended(self.track)
        elif event.status == PublishDoneCode.INTERNAL_ERROR:
            self._taker.failed(PublicationAborted(event.reason))
        else:
            code = event.status
            self._taker.lost(self.track, None, f"the subscription ended with status {code:#x}")
            self._taker.track_ended(self.track)
