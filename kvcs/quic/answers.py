"""Who answers the requests of a peer: the first of those who were asked to, else a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import DoesNotExist, NotSupported, RequestCode
from kvcs.moqt.parameters import ParameterType

if TYPE_CHECKING:
    from kvcs.quic.connection import Connection

Handler = Callable[[events.Event], None]
"""Takes the events of one request; called in the loop's thread, must not block."""

PeerRequest = (
    events.SubscribeReceived
    | events.FetchReceived
    | events.TrackStatusReceived
    | events.PublishReceived
    | events.PublishNamespaceReceived
    | events.SubscribeNamespaceReceived
    | events.SubscribeTracksReceived
)

Answerer = Callable[["Connection", PeerRequest], bool]
"""Asked for each request of the peer; True when it has taken it."""

UpdateHandler = Callable[[events.RequestUpdateReceived], None]
"""Takes updates of one request, and answers each with accept_update or refuse_update."""


class Answers:
    """Answerers of one session, and who follows the requests that they took.

    Args:
        connection: the session.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._answerers: list[Answerer] = []
        self._cancellations: dict[int, Handler] = {}
        self._updates: dict[int, UpdateHandler] = {}
        self.every_update: UpdateHandler | None = None
        """Judges updates of requests that have no handler of their own."""

    def add(self, answerer: Answerer) -> None:
        """Ask ``answerer`` before all others."""
        self._answerers.insert(0, answerer)

    def remove(self, answerer: Answerer) -> None:
        """Undo `add`; quiet where it is not asked."""
        if answerer in self._answerers:
            self._answerers.remove(answerer)

    def on_cancelled(self, request_id: int, handler: Handler) -> None:
        """Tell ``handler`` when the peer cancels a request of its own."""
        self._cancellations[request_id] = handler

    def off_cancelled(self, request_id: int) -> None:
        """Undo `on_cancelled`; quiet where nobody follows the request."""
        self._cancellations.pop(request_id, None)

    def on_update(self, request_id: int, handler: UpdateHandler) -> None:
        """Let ``handler`` judge updates of a request of the peer."""
        self._updates[request_id] = handler

    def cancelled(self, event: events.RequestCancelled) -> None:
        """The peer has cancelled a request of its own."""
        self._updates.pop(event.request_id, None)
        handler = self._cancellations.pop(event.request_id, None)
        if handler is not None:
            handler(event)

    def take(self, event: PeerRequest) -> None:
        """A request of the peer: what an endpoint does not do it says (§1.6)."""
        for answerer in list(self._answerers):
            if answerer(self._connection, event):
                return
        if isinstance(event, events.PublishNamespaceReceived | events.PublishReceived):
            refusal = RequestError("not interested", RequestCode.UNINTERESTED)
        elif isinstance(event, events.SubscribeNamespaceReceived):
            refusal = NotSupported("no namespaces are published here")
        elif isinstance(event, events.SubscribeTracksReceived):
            refusal = NotSupported("no tracks are published here")
        else:
            refusal = DoesNotExist("no such track here")
        self._connection.core.responder.refuse(event.request_id, refusal)

    def take_update(self, event: events.RequestUpdateReceived) -> None:
        """An update that has to be judged: new tokens do no harm, another prefix may."""
        handler = self._updates.get(event.request_id, self.every_update)
        responder = self._connection.core.responder
        if handler is not None:
            handler(event)
        elif ParameterType.TRACK_NAMESPACE_PREFIX in event.parameters:
            refusal = NotSupported("the prefix cannot be changed here; make a new request")
            responder.refuse_update(event.request_id, event.update_id, refusal)
        else:
            responder.accept_update(event.request_id, event.update_id)

    def clear(self) -> None:
        """The session is over."""
        self._cancellations.clear()
        self._updates.clear()
