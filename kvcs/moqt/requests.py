"""Requests and their states, as tables (MOQT §3.1, §6.4).

One machine per request. A message that the tables do not name for a request's kind and state, from
the side that sent it, breaks the protocol.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from heapq import heappop, heappush

from kvcs.moqt import messages
from kvcs.moqt.errors import ProtocolViolation
from kvcs.moqt.framing import MessageReader
from kvcs.moqt.messages import Message
from kvcs.moqt.parameters import Parameters, Scope


class Kind(Enum):
    """What a request asks for."""

    SUBSCRIBE = auto()
    PUBLISH = auto()
    FETCH = auto()
    TRACK_STATUS = auto()
    PUBLISH_NAMESPACE = auto()
    SUBSCRIBE_NAMESPACE = auto()
    SUBSCRIBE_TRACKS = auto()


class State(Enum):
    """Where a request stands."""

    PENDING = auto()
    ESTABLISHED = auto()
    DRAINING = auto()
    """PUBLISH_DONE was received; data streams that it overtook still come."""

    TERMINATED = auto()


RequestMessage = (
    messages.Subscribe
    | messages.Publish
    | messages.Fetch
    | messages.TrackStatus
    | messages.PublishNamespace
    | messages.SubscribeNamespace
    | messages.SubscribeTracks
)
"""Messages that may begin a request stream (§6.4)."""

KINDS: dict[type[RequestMessage], Kind] = {
    messages.Subscribe: Kind.SUBSCRIBE,
    messages.Publish: Kind.PUBLISH,
    messages.Fetch: Kind.FETCH,
    messages.TrackStatus: Kind.TRACK_STATUS,
    messages.PublishNamespace: Kind.PUBLISH_NAMESPACE,
    messages.SubscribeNamespace: Kind.SUBSCRIBE_NAMESPACE,
    messages.SubscribeTracks: Kind.SUBSCRIBE_TRACKS,
}
"""What each of them asks for."""

_OK: dict[Kind, type[Message]] = {
    Kind.SUBSCRIBE: messages.SubscribeOk,
    Kind.PUBLISH: messages.RequestOk,
    Kind.FETCH: messages.FetchOk,
    Kind.TRACK_STATUS: messages.RequestOk,
    Kind.PUBLISH_NAMESPACE: messages.RequestOk,
    Kind.SUBSCRIBE_NAMESPACE: messages.RequestOk,
    Kind.SUBSCRIBE_TRACKS: messages.RequestOk,
}

_Table = dict[tuple[Kind, State, type[Message]], State]

FROM_RESPONDER: _Table = {
    **{(kind, State.PENDING, ok): State.ESTABLISHED for kind, ok in _OK.items()},
    (Kind.TRACK_STATUS, State.PENDING, messages.RequestOk): State.TERMINATED,
    **{(kind, State.PENDING, messages.RequestError): State.TERMINATED for kind in Kind},
    (Kind.SUBSCRIBE, State.ESTABLISHED, messages.PublishDone): State.DRAINING,
    (Kind.SUBSCRIBE, State.ESTABLISHED, messages.PublishStateNotify): State.ESTABLISHED,
    (Kind.PUBLISH, State.PENDING, messages.RequestUpdate): State.PENDING,
    (Kind.PUBLISH, State.ESTABLISHED, messages.RequestUpdate): State.ESTABLISHED,
    (Kind.SUBSCRIBE_NAMESPACE, State.ESTABLISHED, messages.Namespace): State.ESTABLISHED,
    (Kind.SUBSCRIBE_NAMESPACE, State.ESTABLISHED, messages.NamespaceDone): State.ESTABLISHED,
    (Kind.SUBSCRIBE_TRACKS, State.ESTABLISHED, messages.PublishSkipped): State.ESTABLISHED,
}
"""Messages of the side that answers. OK and error for a REQUEST_UPDATE are counted apart."""

FROM_REQUESTER: _Table = {
    **{
        (kind, state, messages.RequestUpdate): state
        for kind in Kind
        if kind is not Kind.TRACK_STATUS
        for state in (State.PENDING, State.ESTABLISHED)
    },
    (Kind.PUBLISH, State.PENDING, messages.PublishDone): State.PENDING,
    (Kind.PUBLISH, State.ESTABLISHED, messages.PublishDone): State.DRAINING,
    (Kind.PUBLISH, State.ESTABLISHED, messages.PublishStateNotify): State.ESTABLISHED,
}
"""Messages of the side that asked, after its first."""

OK_SCOPES: dict[Kind, Scope] = {
    Kind.PUBLISH: Scope.PUBLISH_OK,
    Kind.TRACK_STATUS: Scope.TRACK_STATUS_OK,
    Kind.PUBLISH_NAMESPACE: Scope.PUBLISH_NAMESPACE_OK,
    Kind.SUBSCRIBE_NAMESPACE: Scope.SUBSCRIBE_NAMESPACE_OK,
    Kind.SUBSCRIBE_TRACKS: Scope.SUBSCRIBE_TRACKS_OK,
}
"""Parameters that REQUEST_OK may carry, by the request that it answers (§9.20)."""

UPDATE_SCOPES: dict[Kind, Scope] = {
    Kind.SUBSCRIBE: Scope.UPDATE_SUBSCRIPTION,
    Kind.PUBLISH: Scope.UPDATE_SUBSCRIPTION,
    Kind.FETCH: Scope.UPDATE_FETCH,
    Kind.PUBLISH_NAMESPACE: Scope.UPDATE_PUBLISH_NAMESPACE,
    Kind.SUBSCRIBE_NAMESPACE: Scope.UPDATE_SUBSCRIBE_NAMESPACE,
    Kind.SUBSCRIBE_TRACKS: Scope.UPDATE_SUBSCRIBE_TRACKS,
}
"""Parameters that REQUEST_UPDATE may carry, by the request that it changes."""


@dataclass(slots=True, eq=False)
class Request:
    """One request and its bidirectional stream."""

    request_id: int
    kind: Kind
    stream_id: int
    """-1 while a request of ours waits for stream credit."""

    message: RequestMessage
    """The message that began it."""

    ours: bool
    """Whether this endpoint made it."""

    state: State = State.PENDING
    reader: MessageReader = field(default_factory=MessageReader)
    sending_ended: bool = False
    """Whether our direction has ended (FIN or reset)."""

    receiving_ended: bool = False
    """Whether the peer's direction has ended."""

    updates: list[int] = field(default_factory=list)
    """Request IDs of REQUEST_UPDATEs that have no answer yet, in order."""

    goaway_sent: bool = False
    """Whether we asked the peer to move it."""

    goaway_received: bool = False
    """Whether the peer asked us to."""

    weight: int = 0
    """What its message takes of our memory, in octets; 0 for a request of ours."""

    abandoned: bool = False
    """Whether we gave it up: what the peer had sent before it knew is read over."""

    @property
    def parameters(self) -> Parameters:
        """Parameters of the message that began the request."""
        return self.message.parameters

    def receive(self, message: Message) -> None:
        """Take the state on by a message of the peer.

        Raises:
            ProtocolViolation: the message has no place here.
        """
        table = FROM_RESPONDER if self.ours else FROM_REQUESTER
        after = table.get((self.kind, self.state, type(message)))
        if after is None:
            raise ProtocolViolation(
                f"{type(message).__name__} has no place on a {self.kind.name} request that is"
                f" {self.state.name}"
            )
        self.state = after


class RequestIds:
    """Request IDs that were used, kept as one bound and the few that ran ahead of it."""

    MAX_AHEAD = 65536

    def __init__(self) -> None:
        self._below = 0
        self._ahead: set[int] = set()
        self._heap: list[int] = []
        """The same numbers, the smallest first: a peer chooses them, and may leave many gaps."""

    def add(self, number: int) -> bool:
        """Add a number; False when it was used already.

        Gaps are legal (§6.4.2.1). Where more numbers run ahead of a gap than are remembered, the
        gap counts as used.
        """
        if number < self._below or number in self._ahead:
            return False
        self._ahead.add(number)
        heappush(self._heap, number)
        if len(self._ahead) > self.MAX_AHEAD:
            self._below = self._heap[0]
        while self._heap and self._heap[0] == self._below:
            self._ahead.remove(heappop(self._heap))
            self._below += 1
        return True
