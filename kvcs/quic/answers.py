"""Who answers the requests of a peer: the first of those who were asked to, else a refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import (
    DoesNotExist,
    NotSupported,
    PublishDoneCode,
    RequestCode,
    StreamCode,
)
from kvcs.moqt.parameters import ParameterType
from kvcs.moqt.requests import Kind, State

if TYPE_CHECKING:
    from kvcs.access.guard import Guard
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
        self.guard: Guard | None = None
        """Lets requests pass, before anybody is asked; everything passes where None."""

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
        if self.guard is not None:
            self.guard.forget(self._connection, event.request_id)
        self._updates.pop(event.request_id, None)
        handler = self._cancellations.pop(event.request_id, None)
        if handler is not None:
            handler(event)

    def take(self, event: PeerRequest) -> None:
        """A request of the peer: what an endpoint does not do it says (§1.6)."""
        if self.guard is not None and not self._connection.tracks.wants(event):
            try:
                self.guard.check(self._connection, event)
            except RequestError as exc:
                self._connection.core.responder.refuse(event.request_id, exc)
                return
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
        request = self._connection.core.requests.get(event.request_id)
        if self.guard is not None and request is not None and not request.ours:
            try:
                self.guard.check_update(self._connection, event)
            except RequestError as exc:
                responder.refuse_update(event.request_id, event.update_id, exc)
                self.cancelled(_forbidden(event.request_id))
                return
        if handler is not None:
            handler(event)
        elif ParameterType.TRACK_NAMESPACE_PREFIX in event.parameters:
            refusal = NotSupported("the prefix cannot be changed here; make a new request")
            responder.refuse_update(event.request_id, event.update_id, refusal)
        else:
            expires_ms = self.expires_ms(event.request_id)
            responder.accept_update(event.request_id, event.update_id, expires_ms=expires_ms)

    def expires_ms(self, request_id: int) -> int | None:
        """Milliseconds after which a request of the peer will be ended; None where nothing does."""
        return None if self.guard is None else self.guard.expires_ms(self._connection, request_id)

    def end(self, request_id: int, error: RequestError) -> None:
        """End a request of the peer that is allowed no longer; who follows it is told."""
        responder = self._connection.core.responder
        request = self._connection.core.requests.get(request_id)
        if request is None:
            return
        if request.state is State.PENDING:
            responder.refuse(request_id, error)
        elif request.kind is Kind.SUBSCRIBE:
            responder.end_subscription(request_id, PublishDoneCode.UNAUTHORIZED, error.reason)
        elif request.kind is Kind.FETCH:
            responder.fail_fetch(request_id, StreamCode.EXPIRED_AUTH_TOKEN)
        else:
            responder.revoke(request_id, StreamCode.EXPIRED_AUTH_TOKEN)
        self.cancelled(_forbidden(request_id))

    def clear(self) -> None:
        """The session is over."""
        self._cancellations.clear()
        self._updates.clear()


def _forbidden(request_id: int) -> events.RequestCancelled:
    """What followers of a request hear that is allowed no longer."""
    return events.RequestCancelled(request_id, False, StreamCode.EXPIRED_AUTH_TOKEN)
