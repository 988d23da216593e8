"""PUBLISH of an origin's Tracks, for SUBSCRIBE_TRACKS of a peer or unasked (MOQT §9.8, §9.18)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, StreamCode
from kvcs.moqt.names import FullTrackName
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.track.store import Track

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvcs.quic.connection import Connection


_FORBIDDEN = StreamCode.EXPIRED_AUTH_TOKEN
"""Code of a request that has ended because its token has."""

SWEEP_AT = 64
"""PUBLISHes that are remembered, before those that are over are looked for among them."""


class Pushes:
    """PUBLISHes on one session.

    Args:
        connection: the session.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._interests: dict[int, set[int]] = {}
        """SUBSCRIBE_TRACKS of the peer, and the PUBLISHes that each has led to."""
        self._published: dict[FullTrackName, int] = {}
        """PUBLISHes, those that are over swept out from time to time."""
        self._sweep_at = SWEEP_AT

    def accept(self, event: events.SubscribeTracksReceived, tracks: Iterable[Track]) -> None:
        """Take a SUBSCRIBE_TRACKS, and PUBLISH the Tracks that it selects."""
        connection, request_id = self._connection, event.request_id
        self._interests[request_id] = set()
        connection.on_cancelled(request_id, lambda ended: self._ended(request_id, ended))
        connection.on_update(request_id, lambda update: self._moved(update, tracks))
        expires_ms = connection.expires_ms(request_id)
        connection.core.responder.accept(request_id, expires_ms=expires_ms)
        self._offer_all(request_id, tracks)

    def offer(self, track: Track) -> None:
        """PUBLISH a new Track to whoever asked for such."""
        for request_id in list(self._interests):
            self._offer(request_id, track)

    def publish(self, track: Track, parameters: Parameters | None) -> int:
        """PUBLISH a Track, asked for or not; returns the Request ID.

        Raises:
            UsageError: it cannot be published on this session.
        """
        request_id = self._connection.core.requester.publish(track, parameters)
        self._note(track, request_id)
        return request_id

    def _ended(self, request_id: int, ended: events.Event) -> None:
        """A SUBSCRIBE_TRACKS is over; if that is for want of a token, so is what it has led to."""
        led_to = self._interests.pop(request_id, set())
        if isinstance(ended, events.RequestCancelled) and ended.code == _FORBIDDEN:
            responder = self._connection.core.responder
            for offered in led_to:
                status = PublishDoneCode.UNAUTHORIZED
                responder.end_subscription(offered, status, "the token has expired")

    def _moved(self, update: events.RequestUpdateReceived, tracks: Iterable[Track]) -> None:
        self._connection.core.responder.accept_update(
            update.request_id,
            update.update_id,
            expires_ms=self._connection.expires_ms(update.request_id),
        )
        self._offer_all(update.request_id, tracks)

    def _offer_all(self, request_id: int, tracks: Iterable[Track]) -> None:
        for track in list(tracks):
            self._offer(request_id, track)

    def _offer(self, request_id: int, track: Track) -> None:
        if self._has(track.name) or not self._connection.is_usable:
            return  # where the peer sends us away, nothing new is begun (§9.2)
        offered = self._connection.core.responder.publish_tracks(request_id, track)
        if offered is not None:
            self._note(track, offered)
            self._interests[request_id].add(offered)

    def _has(self, name: FullTrackName) -> bool:
        """Whether a PUBLISH of a Track is not over."""
        request_id = self._published.get(name)
        return request_id is not None and self._connection.core.requests.get(request_id) is not None

    def _note(self, track: Track, request_id: int) -> None:
        self._published[track.name] = request_id
        if len(self._published) >= self._sweep_at:
            self._published = {
                name: number for name, number in self._published.items() if self._has(name)
            }
            alive = set(self._published.values())
            for led_to in self._interests.values():
                led_to &= alive
            self._sweep_at = 2 * len(self._published) + SWEEP_AT
