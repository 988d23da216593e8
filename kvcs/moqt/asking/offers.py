"""PUBLISH: subscriptions that begin at the publisher, from both sides (MOQT §9.8).

Once they have begun they are as any other: `kvcs.moqt.sending.deliveries` sends for those of
ours, and `kvcs.moqt.incoming.receptions` receives for those of the peer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.errors import SessionError
from kvcs.moqt import messages
from kvcs.moqt.errors import ProtocolViolation, StreamCode
from kvcs.moqt.events import PublishReceived
from kvcs.moqt.framing import encode_message
from kvcs.moqt.names import MAX_VI64, FullTrackName, GroupOrder, Location
from kvcs.moqt.parameters import SCOPES, Parameters, ParameterType, Scope
from kvcs.moqt.properties import (
    KeyValues,
    Property,
    check_track_properties,
    find_property,
)
from kvcs.moqt.requests import Request, State
from kvcs.moqt.sending.delivery import UnknownHandler
from kvcs.moqt.sending.publishing import ForwardHandler
from kvcs.moqt.tokens import ResolvedToken
from kvcs.moqt.track.store import Track

if TYPE_CHECKING:
    from kvcs.moqt.session import Session

_NOT_STATED = frozenset(
    {
        ParameterType.AUTHORIZATION_TOKEN,
        ParameterType.EXPIRES,
        ParameterType.LARGEST_OBJECT,
        ParameterType.FILL_PARAMETERS,
        ParameterType.RENDEZVOUS_TIMEOUT,
        ParameterType.NEW_GROUP_REQUEST,
        ParameterType.TRACK_PROPERTY_FILTER,
    }
)
"""Parameters of a SUBSCRIBE_TRACKS that are no settings of the subscriptions it leads to. Its token
in particular is never handed on (§8.9)."""


def initial_settings(asked: Parameters) -> Parameters:
    """Settings of the subscriptions that a SUBSCRIBE_TRACKS leads to (§9.18)."""
    return Parameters(tuple(item for item in asked.items if item[0] not in _NOT_STATED))


class Offers:
    """The PUBLISHes of a session.

    Args:
        session: the session that they belong to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ended_early: dict[int, messages.PublishDone] = {}
        """PUBLISH_DONE of the peer's PUBLISHes that have no answer yet."""

    # Ours

    def publish(
        self,
        track: Track,
        parameters: Parameters,
        on_unknown: UnknownHandler | None,
        before_forward: ForwardHandler | None = None,
    ) -> int:
        """PUBLISH a Track; returns the Request ID. See `Requester.publish`.

        The message is made when there is stream credit: the Largest Object that it names and the
        first Object that is delivered belong together.

        Raises:
            UsageError: the session is closed, too much waits, or the message cannot be encoded.
        """
        session = self._session
        alias = session.deliveries.take_alias()
        properties = track.properties
        if parameters.get(ParameterType.INCLUDE_PROPERTIES, 1) == 0:
            properties = KeyValues()
        scope = SCOPES[Scope.PUBLISH]
        stated = session.credentials.parameters(
            Parameters(tuple(item for item in parameters.items if item[0] in scope))
        )

        def message(request_id: int, largest: Location | None) -> messages.Publish:
            named = stated.replace(largest_object=largest)
            return messages.Publish(request_id, *track.name, alias, named, properties)

        def begin(request: Request) -> bytes:
            largest = track.largest
            request.message = message(request.request_id, largest)
            delivery = session.deliveries.prepare(
                request.request_id, track, alias, parameters, largest, on_unknown
            )
            delivery.before_forward = before_forward
            session.deliveries.follow(delivery)
            session.asked_prefixes.begun(request.request_id)
            delivery.check_drained()
            return encode_message(request.message)

        longest = Location(MAX_VI64, MAX_VI64)
        return session.requests.open(lambda given: message(given, longest), begin).request_id

    # The peer's

    def receive(
        self, request: Request, message: messages.Publish, tokens: tuple[ResolvedToken, ...]
    ) -> None:
        """PUBLISH of the peer: show it to the application.

        Raises:
            DuplicateTrackAlias: its alias denotes another Track.
            RequestError: its Track Properties forbid us to process it (§10).
        """
        name = FullTrackName(message.track_namespace, message.track_name)
        self._session.data_streams.check_alias(message.track_alias, name)
        check_track_properties(message.track_properties)
        self._session.emit(
            PublishReceived(
                request.request_id, name, message.parameters, message.track_properties, tokens
            )
        )

    def accept(self, request: Request, expires_ms: int | None) -> None:
        """REQUEST_OK to a PUBLISH (§9.8); what came of it already is given out now."""
        session, message = self._session, request.message
        assert isinstance(message, messages.Publish)
        reply = messages.RequestOk(Parameters.of(expires=expires_ms), KeyValues())
        session.requests.send(request, reply)
        request.state = State.ESTABLISHED
        name = FullTrackName(message.track_namespace, message.track_name)
        expected = session.receptions.expect(request, name, _group_order(message))
        expected.filtered = session.watched_prefixes.filters_objects(name.namespace)
        try:
            session.receptions.bind(request, message.track_alias, message.track_properties)
        except SessionError as exc:
            session.close(exc.code, exc.reason)
            return
        done = self._ended_early.pop(request.request_id, None)
        if done is not None and request.state is State.ESTABLISHED:
            request.state = State.DRAINING
            session.receptions.publish_done(request, done)

    def refused(self, request: Request) -> None:
        """It was refused: data streams of it that are here already are stopped."""
        message = request.message
        assert isinstance(message, messages.Publish)
        self._session.data_streams.refuse(message.track_alias, StreamCode.CANCELLED)

    def publish_done(self, request: Request, done: messages.PublishDone) -> None:
        """PUBLISH_DONE of the peer on its PUBLISH.

        Raises:
            ProtocolViolation: it is the second one.
        """
        if request.state is not State.PENDING:
            self._session.receptions.publish_done(request, done)
        elif self._ended_early.setdefault(request.request_id, done) is not done:
            raise ProtocolViolation("a second PUBLISH_DONE")

    def ended_early(self, request: Request) -> bool:
        """Whether PUBLISH_DONE of a PUBLISH that has no answer yet is here."""
        return request.request_id in self._ended_early

    def forget(self, request_id: int) -> None:
        """A request is over."""
        self._ended_early.pop(request_id, None)


def _group_order(message: messages.Publish) -> GroupOrder:
    asked = message.parameters.get(ParameterType.GROUP_ORDER)
    if asked is None:
        asked = find_property(message.track_properties, Property.DEFAULT_PUBLISHER_GROUP_ORDER)
    return GroupOrder.ASCENDING if asked is None else GroupOrder(asked)
