"""What a publisher sends for one Object whose delivery mode is Datagram (MOQT §11.2)."""

from __future__ import annotations

from kvcs.moqt.datagrams import ObjectDatagram
from kvcs.moqt.errors import StreamCode
from kvcs.moqt.names import GroupOrder
from kvcs.moqt.sending.delivery import Host, ObjectSender, Piece
from kvcs.moqt.sending.scheduler import SendKey, send_key
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import StoredObject


class DatagramSender(ObjectSender):
    """Delivers one Object whose delivery mode is Datagram (MOQT §11.2)."""

    needs_stream = False

    def __init__(
        self,
        host: Host,
        track: Track,
        stored: StoredObject,
        *,
        track_alias: int,
        subscriber_priority: int,
        group_order: GroupOrder,
        timeout: float | None,
    ) -> None:
        super().__init__(host, track, subscriber_priority)
        self._stored = stored
        self._track_alias = track_alias
        self._group_order = group_order
        self._timeout = timeout

    def key(self) -> SendKey:
        """Place in the order; a datagram goes before a Subgroup of its Group (MOQT §5.1)."""
        header = self._stored.header
        return send_key(
            subscriber_priority=self.subscriber_priority,
            publisher_priority=self._priority,
            group_id=header.group_id,
            group_order=self._group_order,
            is_fill=False,
            position=header.object_id,
            is_datagram=True,
        )

    @property
    def _priority(self) -> int:
        """Publisher Priority; a default is written out, for its property may be hidden (§9.20)."""
        priority = self._stored.header.publisher_priority
        return self.track.default_priority if priority is None else priority

    @property
    def has_more(self) -> bool:
        """One Object, one datagram."""
        return False

    def next_piece(self, limit: int, now: float) -> Piece | None:
        """The datagram; see `ObjectSender`. One that is too late is dropped (§5.2)."""
        stored = self._stored
        if stored.is_late(self._timeout, now):
            return Piece([], reset=StreamCode.DELIVERY_TIMEOUT)
        header = stored.header
        payload = b"".join(stored.views(0, header.payload_length))
        self._count(stored)
        datagram = ObjectDatagram(
            track_alias=self._track_alias,
            group_id=header.group_id,
            object_id=header.object_id,
            publisher_priority=self._priority,
            properties=header.properties,
            status=header.status,
            payload=payload,
        )
        return Piece([], datagram=datagram.encode())
