"""REQUEST_UPDATE from both sides (MOQT §9.5).

Updates of the peer are answered in order. Those that need no judgement are applied at once; one
that brings tokens or another prefix is shown to the application, and what comes after it waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.errors import RequestError, UsageError
from kvcs.moqt import messages
from kvcs.moqt.errors import TooManyRequestUpdates
from kvcs.moqt.events import RequestCancelled, RequestUpdateAnswered, RequestUpdateReceived
from kvcs.moqt.limits import Limit
from kvcs.moqt.parameters import Parameters, ParameterType, Scope
from kvcs.moqt.properties import KeyValues, SetupOption
from kvcs.moqt.requests import Kind, Request, State
from kvcs.moqt.sending.deliveries import error_message

if TYPE_CHECKING:
    from kvcs.moqt.session import Session

_DELIVERED = (Kind.SUBSCRIBE, Kind.PUBLISH, Kind.FETCH)
"""Requests that Objects are sent for."""

_SUBSCRIPTIONS = (Kind.SUBSCRIBE, Kind.PUBLISH)


class Updates:
    """Changes of requests that are under way.

    Args:
        session: the session that they belong to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._held: dict[int, list[messages.RequestUpdate]] = {}
        """Updates of the peer that wait for an answer of ours that goes out before theirs."""
        self._asked: dict[int, messages.RequestUpdate] = {}
        """Updates that wait for the application, one for each request."""
        self._unready: dict[int, int | None] = {}
        """Those of them that it has judged, and that wait for what they resume; with EXPIRES."""

    # Ours

    def send(self, request_id: int, parameters: Parameters) -> int:
        """Change a request of ours, or the subscription that a PUBLISH of the peer began.

        Returns:
            The Request ID of the update; a fill that it asks for carries this one.

        Raises:
            UsageError: it is not established, the peer's MAX_REQUEST_UPDATES are out, or the
                parameters have no place there.
        """
        session = self._session
        request = session.requests.get(request_id)
        if (
            request is None
            or request.state is not State.ESTABLISHED
            or not (request.ours or request.kind is Kind.PUBLISH)
        ):
            raise UsageError(f"request {request_id} is not established")
        options = session.peer_options
        limit = None if options is None else options.integer(SetupOption.MAX_REQUEST_UPDATES)
        if limit and len(request.updates) >= limit:
            raise UsageError(f"{limit} REQUEST_UPDATEs of request {request_id} have no answer yet")
        session.watched_prefixes.check_update(request, parameters)
        update_id = session.requests.update(request, parameters)
        session.receptions.updated(request, update_id, parameters)
        session.watched_prefixes.updated(request, update_id, parameters)
        return update_id

    def take_answer(self, request: Request, message: messages.Message) -> bool:
        """Take a message that answers an update of ours; False when it is something else.

        Raises:
            SessionError: the answer breaks a rule.
        """
        if not request.updates:
            return False
        if not isinstance(message, (messages.RequestOk, messages.RequestError)):
            return False
        if request.state not in (State.ESTABLISHED, State.TERMINATED):
            return False  # it answers the request itself, or comes behind PUBLISH_DONE
        update_id = request.updates.pop(0)
        if request.state is not State.ESTABLISHED:
            return True  # a FETCH that was complete before its update was
        if isinstance(message, messages.RequestOk):
            subscription = request.kind in _SUBSCRIPTIONS
            messages.check_request_ok(
                message, Scope.UPDATE_SUBSCRIPTION_OK if subscription else Scope.UPDATE_OTHER_OK
            )
        else:
            self._session.requester.check_error(request, message)
        self._session.watched_prefixes.update_answered(request, update_id, message)
        self._session.emit(RequestUpdateAnswered(request.request_id, update_id, message))
        return True

    # The peer's

    def receive(self, request: Request, update: messages.RequestUpdate) -> None:
        """An update of the peer, on a request of its own or on a PUBLISH of ours.

        Raises:
            TooManyRequestUpdates: more have no answer than we accept.
        """
        request_id = request.request_id
        owed = not request.ours and request.state is State.PENDING
        if not owed and request_id not in self._asked:
            self._take(request, update)
            return
        held = self._held.setdefault(request_id, [])
        held.append(update)
        limit = self._session.settings.max_request_updates
        if limit and len(held) + (request_id in self._asked) > limit:
            self._session.limits.reached(Limit.REQUEST_UPDATES)
            raise TooManyRequestUpdates(f"more than {limit} REQUEST_UPDATEs without answer")

    def take_held(self, request: Request) -> None:
        """Take what waited, now that what was owed before is sent."""
        request_id = request.request_id
        while request.state is State.ESTABLISHED and request_id not in self._asked:
            held = self._held.get(request_id)
            if not held:
                break
            update = held.pop(0)
            if not held:
                del self._held[request_id]
            self._take(request, update)

    def answer(
        self,
        request_id: int,
        update_id: int,
        refusal: RequestError | None,
        expires_ms: int | None = None,
    ) -> None:
        """The application has judged the update that it was shown.

        Raises:
            UsageError: it was answered already.
        """
        request = self._session.requests.get(request_id)
        if request is None or request.state is State.TERMINATED:
            return  # the peer has cancelled it meanwhile
        update = self._asked.get(request_id)
        if update is None or update.request_id != update_id or request_id in self._unready:
            raise UsageError(f"update {update_id} of request {request_id} was answered already")
        del self._asked[request_id]
        if refusal is None:
            self._apply(request, update, expires_ms)
        else:
            self._fail(request, refusal)
        self.take_held(request)

    def forward_ready(self, request_id: int) -> None:
        """What a subscription is resumed for is there: the update that waited for it is applied."""
        request = self._session.requests.get(request_id)
        if request is None or request_id not in self._unready:
            return
        expires_ms = self._unready.pop(request_id)
        self._apply(request, self._asked.pop(request_id), expires_ms, ready=True)
        self.take_held(request)

    def forget(self, request_id: int) -> None:
        """A request is over."""
        self._unready.pop(request_id, None)
        self._held.pop(request_id, None)
        self._asked.pop(request_id, None)

    # Inner workings

    def _take(self, request: Request, update: messages.RequestUpdate) -> None:
        session, parameters = self._session, update.parameters
        try:
            tokens = session.tokens.process(parameters.all(ParameterType.AUTHORIZATION_TOKEN))
            session.load.check_rate()
            session.load.check_tokens(parameters)
            session.asked_prefixes.check_update(request, parameters)
        except RequestError as exc:
            self._fail(request, exc)
            return
        if tokens or ParameterType.TRACK_NAMESPACE_PREFIX in parameters:
            self._asked[request.request_id] = update
            session.emit(
                RequestUpdateReceived(request.request_id, update.request_id, parameters, tokens)
            )
        else:
            self._apply(request, update)

    def _apply(
        self,
        request: Request,
        update: messages.RequestUpdate,
        expires_ms: int | None = None,
        *,
        ready: bool = False,
    ) -> None:
        session, reply = self._session, Parameters()
        delivery = session.deliveries.subscription(request.request_id)
        if not ready and delivery is not None and delivery.must_wait(update.parameters):
            self._asked[request.request_id] = update
            self._unready[request.request_id] = expires_ms
            return
        try:
            if request.kind in _DELIVERED:
                reply = session.deliveries.update(request, update)
            else:
                session.asked_prefixes.update(request, update.parameters)
        except RequestError as exc:
            self._fail(request, exc)
            return
        stated = reply.replace(expires=expires_ms)
        session.requests.send(request, messages.RequestOk(stated, KeyValues()))

    def _fail(self, request: Request, error: RequestError) -> None:
        session = self._session
        session.requests.send(request, error_message(error))
        session.emit(RequestCancelled(request.request_id, request.ours, None))
        if request.kind in _DELIVERED and session.deliveries.has(request.request_id):
            session.deliveries.update_failed(request)
        else:
            session.complete_request(request)
