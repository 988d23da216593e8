"""What a session core reports; names are past tense.

`request_id` is that of the request the event belongs to; for a fill it is the subscription's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvcs.moqt import objects
from kvcs.moqt.data import FetchHeader, ObjectDatagram, ObjectHeader, RangeKind, SubgroupHeader
from kvcs.moqt.messages import FetchOk, RequestError, RequestOk, SubscribeOk
from kvcs.moqt.names import FullTrackName, Location, TrackNamespace
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.tokens import ResolvedToken


@dataclass(frozen=True, slots=True)
class SessionEstablished:
    """The peer's SETUP was processed (§6.3)."""

    options: KeyValues = field(repr=False)  # tokens are among them
    tokens: tuple[ResolvedToken, ...]


# Requests that the peer made


@dataclass(frozen=True, slots=True)
class SubscribeReceived:
    """The peer asks for a Track (§9.6): answer with accept_subscribe or refuse."""

    request_id: int
    full_track_name: FullTrackName
    parameters: Parameters
    tokens: tuple[ResolvedToken, ...]


@dataclass(frozen=True, slots=True)
class FetchReceived:
    """The peer asks for past Objects (§9.11): answer with accept_fetch or refuse."""

    request_id: int
    full_track_name: FullTrackName
    parameters: Parameters
    tokens: tuple[ResolvedToken, ...]


@dataclass(frozen=True, slots=True)
class TrackStatusReceived:
    """The peer asks what is known of a Track (§9.13): answer_track_status or refuse."""

    request_id: int
    full_track_name: FullTrackName
    tokens: tuple[ResolvedToken, ...]


@dataclass(frozen=True, slots=True)
class PublishNamespaceReceived:
    """The peer has Tracks under a namespace (§9.14): accept or refuse."""

    request_id: int
    track_namespace: TrackNamespace
    tokens: tuple[ResolvedToken, ...]


@dataclass(frozen=True, slots=True)
class SubscribeNamespaceReceived:
    """The peer wants to hear of namespaces under a prefix (§9.15): accept or refuse."""

    request_id: int
    track_namespace_prefix: TrackNamespace
    tokens: tuple[ResolvedToken, ...]


@dataclass(frozen=True, slots=True)
class SubscribeTracksReceived:
    """The peer wants a PUBLISH of each Track under a prefix (§9.18): accept or refuse."""

    request_id: int
    track_namespace_prefix: TrackNamespace
    parameters: Parameters
    tokens: tuple[ResolvedToken, ...]


@dataclass(frozen=True, slots=True)
class PublishReceived:
    """The peer begins a subscription to a Track of its own (§9.8): accept_publish or refuse."""

    request_id: int
    full_track_name: FullTrackName
    parameters: Parameters
    track_properties: KeyValues
    tokens: tuple[ResolvedToken, ...]


@dataclass(frozen=True, slots=True)
class RequestUpdateReceived:
    """REQUEST_UPDATE with tokens or another prefix (§9.5): accept_update or refuse_update."""

    request_id: int
    update_id: int
    parameters: Parameters
    tokens: tuple[ResolvedToken, ...]


@dataclass(frozen=True, slots=True)
class SubscriptionUpdated:
    """The peer has changed a subscription that we serve (§9.5); it is applied and answered."""

    request_id: int
    update_id: int
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class RequestCancelled:
    """The peer cancelled or ended a request that it made, or one of ours (§6.4.2.3)."""

    request_id: int
    ours: bool
    code: int | None
    """Reset or STOP_SENDING code; None for FIN."""


# What became of our requests


@dataclass(frozen=True, slots=True)
class RequestAccepted:
    """The peer answered a request of ours with its OK."""

    request_id: int
    reply: SubscribeOk | FetchOk | RequestOk


@dataclass(frozen=True, slots=True)
class RequestRefused:
    """The peer answered with REQUEST_ERROR (§9.4)."""

    request_id: int
    error: RequestError


@dataclass(frozen=True, slots=True)
class RequestUpdateAnswered:
    """The peer answered a REQUEST_UPDATE of ours (§9.5)."""

    request_id: int
    update_id: int
    reply: RequestOk | RequestError


@dataclass(frozen=True, slots=True)
class NamespaceAnnounced:
    """NAMESPACE: there is one with this suffix under our prefix (§9.16)."""

    request_id: int
    suffix: TrackNamespace


@dataclass(frozen=True, slots=True)
class NamespaceWithdrawn:
    """NAMESPACE_DONE, or the subscription ended (§9.17)."""

    request_id: int
    suffix: TrackNamespace


@dataclass(frozen=True, slots=True)
class TrackSkipped:
    """PUBLISH_SKIPPED: our SUBSCRIBE_TRACKS gets no PUBLISH of this Track (§9.19)."""

    request_id: int
    full_track_name: FullTrackName


@dataclass(frozen=True, slots=True)
class StateNotified:
    """PUBLISH_STATE_NOTIFY: what has changed at the publisher (§9.10); informational."""

    request_id: int
    parameters: Parameters


@dataclass(frozen=True, slots=True)
class SubscriptionEnded:
    """PUBLISH_DONE was received, and its streams have ended or will not come (§9.9)."""

    request_id: int
    status: int
    reason: str
    every_stream_seen: bool


@dataclass(frozen=True, slots=True)
class TrackMalformed:
    """What we received breaks a rule of §12.1; the request was cancelled, the session lives."""

    request_id: int
    reason: str


# Objects


@dataclass(frozen=True, slots=True)
class DataStreamOpened:
    """A subgroup, fetch or fill stream of a request of ours began."""

    request_id: int
    stream_id: int
    header: SubgroupHeader | FetchHeader


@dataclass(frozen=True, slots=True)
class ObjectStarted:
    """The fields of an Object are there; its payload follows in chunks."""

    request_id: int
    stream_id: int
    header: ObjectHeader


@dataclass(frozen=True, slots=True)
class ObjectChunk:
    """Payload octets: a view of what arrived. Copy it before handling the next event."""

    request_id: int
    stream_id: int
    data: memoryview


@dataclass(frozen=True, slots=True)
class ObjectEnded:
    """The payload is whole."""

    request_id: int
    stream_id: int


@dataclass(frozen=True, slots=True)
class RangeMarked:
    """A fetch or fill stream says what became of the Objects up to a Location (§11.4.1)."""

    request_id: int
    stream_id: int
    kind: RangeKind
    location: Location


class ObjectsReceived(NamedTuple):
    """What one input brought of the Objects on one stream: many of the events above in one.

    A session that moves much data reports them so, since an event for each piece costs more than
    all else that is done with it.
    """

    request_id: int
    stream_id: int
    items: list[objects.Item]
    """What came, in order; a chunk is valid until the next event is taken."""

    def singles(self) -> Iterator[ObjectStarted | ObjectChunk | ObjectEnded | RangeMarked]:
        """The same as one event each."""
        request_id, stream_id, items = self
        for item in items:
            if isinstance(item, objects.ObjectChunk):
                yield ObjectChunk(request_id, stream_id, item.data)
            elif isinstance(item, objects.ObjectStarted):
                yield ObjectStarted(request_id, stream_id, item.header)
            elif isinstance(item, objects.ObjectEnded):
                yield ObjectEnded(request_id, stream_id)
            else:
                yield RangeMarked(request_id, stream_id, item.kind, item.location)


@dataclass(frozen=True, slots=True)
class DataStreamEnded:
    """A stream ended: with FIN where ``reset_code`` is None."""

    request_id: int
    stream_id: int
    reset_code: int | None


@dataclass(frozen=True, slots=True)
class DatagramReceived:
    """An Object came as a datagram (§11.2)."""

    request_id: int
    datagram: ObjectDatagram


# The session


@dataclass(frozen=True, slots=True)
class GoawayReceived:
    """The peer will close the session, or wants one request moved (§9.2)."""

    request_id: int | None
    new_session_uri: str
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class SessionClosed:
    """The session is over; nothing follows. ``code`` is None where the transport ended it."""

    code: int | None
    reason: str
    by_peer: bool


Event = (
    SessionEstablished
    | SubscribeReceived
    | FetchReceived
    | TrackStatusReceived
    | PublishNamespaceReceived
    | SubscribeNamespaceReceived
    | SubscribeTracksReceived
    | PublishReceived
    | RequestUpdateReceived
    | SubscriptionUpdated
    | RequestCancelled
    | RequestAccepted
    | RequestRefused
    | RequestUpdateAnswered
    | NamespaceAnnounced
    | NamespaceWithdrawn
    | TrackSkipped
    | StateNotified
    | SubscriptionEnded
    | TrackMalformed
    | DataStreamOpened
    | ObjectStarted
    | ObjectChunk
    | ObjectEnded
    | RangeMarked
    | ObjectsReceived
    | DataStreamEnded
    | DatagramReceived
    | GoawayReceived
    | SessionClosed
)
