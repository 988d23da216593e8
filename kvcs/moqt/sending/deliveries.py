"""What this endpoint sends for subscriptions and fetches, whoever began them (MOQT §3, §9.9).

A subscription belongs to a SUBSCRIBE of the peer or to a PUBLISH of ours; from here on both are the
same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvcs.errors import Redirected, RequestError
from kvcs.moqt import messages
from kvcs.moqt.actions import Prioritize
from kvcs.moqt.errors import PublishDoneCode, StreamCode
from kvcs.moqt.events import SubscriptionUpdated
from kvcs.moqt.filters import LocationFilter, Range, RangeFilters
from kvcs.moqt.limits import Limit
from kvcs.moqt.load import overloaded
from kvcs.moqt.names import GroupOrder, Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.requests import Kind, Request, State
from kvcs.moqt.sending.delivery import ObjectSender, RangeSender, UnknownHandler
from kvcs.moqt.sending.publishing import DEFAULT_SUBSCRIBER_PRIORITY, SubscriptionDelivery
from kvcs.moqt.track.store import Track

if TYPE_CHECKING:
    from kvcs.moqt.session import Session


class Deliveries:
    """The sending half of a session; it is the `SubscriptionHost` of what it sends.

    Args:
        session: the session that it belongs to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._subscriptions: dict[int, SubscriptionDelivery] = {}
        self._fetches: dict[int, RangeSender] = {}
        self._next_alias = 0

    def take_alias(self) -> int:
        """A Track Alias that no Track of this session has had."""
        taken = self._next_alias
        self._next_alias += 1
        return taken

    def has(self, request_id: int) -> bool:
        """Whether Objects are sent for a request."""
        return request_id in self._subscriptions or request_id in self._fetches

    def subscription(self, request_id: int) -> SubscriptionDelivery | None:
        """What is delivered for a SUBSCRIBE or PUBLISH."""
        return self._subscriptions.get(request_id)

    def subscriptions(self) -> list[SubscriptionDelivery]:
        """Everything that is delivered for SUBSCRIBEs and PUBLISHes."""
        return list(self._subscriptions.values())

    @property
    def active(self) -> bool:
        """Whether Objects are sent for any request."""
        return bool(self._subscriptions or self._fetches)

    def prepare(
        self,
        request_id: int,
        track: Track,
        alias: int,
        parameters: Parameters,
        largest: Location | None,
        on_unknown: UnknownHandler | None,
    ) -> SubscriptionDelivery:
        """A subscription that begins with `follow`; see `SubscriptionDelivery`."""
        return SubscriptionDelivery(self, request_id, track, alias, parameters, largest, on_unknown)

    def follow(self, delivery: SubscriptionDelivery) -> None:
        """Deliver from now on what the Track gets."""
        self._subscriptions[delivery.request_id] = delivery
        delivery.track.listeners.append(delivery)
        if delivery.track.on_followed is not None:
            delivery.track.on_followed()

    def fetch(
        self,
        request: Request,
        track: Track,
        span: Range,
        on_unknown: UnknownHandler | None,
    ) -> None:
        """Deliver what a FETCH that was accepted asks for (§9.11)."""
        parameters = request.parameters
        sender = RangeSender(
            self,
            track,
            request_id=request.request_id,
            span=span,
            group_order=GroupOrder(parameters.get(ParameterType.GROUP_ORDER, 1)),
            filters=RangeFilters.of(parameters.items),
            subscriber_priority=parameters.get(
                ParameterType.SUBSCRIBER_PRIORITY, DEFAULT_SUBSCRIBER_PRIORITY
            ),
            on_unknown=on_unknown,
            fill_timeout_ms=parameters.get(ParameterType.FILL_TIMEOUT),
        )
        sender.prioritized_by = request.request_id
        self._fetches[request.request_id] = sender
        sender.on_closed = lambda: self._fetch_closed(request, track)
        self.schedule(sender)

    # Changes and ends

    def check_filters(self, request_id: int, parameters: Parameters) -> None:
        """Hold range filters of a message, with those that stay, to our limit (§3.3).

        Raises:
            RequestError: INVALID_FILTER.
        """
        delivery = self._subscriptions.get(request_id)
        before = RangeFilters() if delivery is None else delivery.filters
        outer = before.replaced_by(parameters.items)
        limit = self._session.settings.max_filter_ranges
        if outer.range_count > limit:
            self._session.limits.reached(Limit.FILTER_RANGES)
        outer.check(limit)
        fill: Parameters | None = parameters.get(ParameterType.FILL_PARAMETERS)
        if fill is not None:
            outer.replaced_by(fill.items).check(limit)

    def update(self, request: Request, update: messages.RequestUpdate) -> Parameters:
        """Apply a REQUEST_UPDATE of the subscriber (§9.5); returns parameters of the reply.

        Raises:
            RequestError: it cannot be applied.
        """
        parameters = update.parameters
        self.check_filters(request.request_id, parameters)
        delivery = self._subscriptions.get(request.request_id)
        if delivery is not None:
            fills = self._session.settings.max_fills
            if ParameterType.FILL_PARAMETERS in parameters and delivery.fills >= fills:
                self._session.limits.reached(Limit.CONCURRENT_FILLS)
                raise overloaded("too many fills at a time")
            # One snapshot of the Largest Object for filter, fill and reply: the seam is exact.
            largest = delivery.track.largest
            looked_at = delivery.update(parameters, update.request_id, largest)
            self._session.load.looked_at(looked_at)
            self._session.emit(
                SubscriptionUpdated(request.request_id, update.request_id, parameters)
            )
            return largest_object(largest)
        fetch = self._fetches.get(request.request_id)
        if fetch is not None:
            priority = parameters.get(ParameterType.SUBSCRIBER_PRIORITY, fetch.subscriber_priority)
            if priority != fetch.subscriber_priority:
                fetch.subscriber_priority = priority
                self.reschedule(fetch)
                self.prioritize(request.request_id, priority)
        return Parameters()

    def update_failed(self, request: Request) -> None:
        """What follows from an update that failed, beside its REQUEST_ERROR (§9.5)."""
        if request.kind is Kind.FETCH:
            sender = self._fetches.get(request.request_id)
            if sender is not None:
                self.reset_sender(sender, StreamCode.CANCELLED)
        else:
            self.end_subscription(
                request.request_id, PublishDoneCode.UPDATE_FAILED, "REQUEST_UPDATE failed"
            )

    def end_subscription(self, request_id: int, status: int, reason: str = "") -> None:
        """Reset what is open of a subscription, then PUBLISH_DONE and FIN (§9.9)."""
        request = self._session.requests.get(request_id)
        delivery = self._subscriptions.get(request_id)
        if request is None:
            return
        if delivery is None:
            if request.ours and request.stream_id < 0:
                self._session.cancel_request(request, StreamCode.CANCELLED)  # it was never sent
            return
        delivery.end(_STREAM_CODES.get(status, StreamCode.CANCELLED))
        self._session.requests.send(
            request, messages.PublishDone(status, delivery.stream_count, reason), fin=True
        )
        self._session.end_request(request)

    def notify(
        self, request_id: int, forward: bool | None, location_filter: LocationFilter | None
    ) -> None:
        """PUBLISH_STATE_NOTIFY; see `Responder.notify_state`."""
        request = self._session.requests.get(request_id)
        delivery = self._subscriptions.get(request_id)
        if request is None or delivery is None or request.state is not State.ESTABLISHED:
            return
        parameters = Parameters.of(
            largest_object=delivery.track.largest,
            forward=None if forward is None else int(forward),
            location_filter=location_filter,
        )
        self._session.requests.send(request, messages.PublishStateNotify(parameters))

    def fail_fetch(self, request_id: int, code: int) -> None:
        """Reset the data stream of a FETCH that was accepted: it cannot be delivered (§9.11)."""
        sender = self._fetches.get(request_id)
        if sender is not None:
            sender.fail(code)

    def forget(self, request_id: int) -> None:
        """A request is over: what is still open of it is reset."""
        delivery = self._subscriptions.pop(request_id, None)
        if delivery is not None:
            delivery.end(StreamCode.CANCELLED)
        sender = self._fetches.pop(request_id, None)
        if sender is not None:
            self.reset_sender(sender, StreamCode.CANCELLED)

    # SubscriptionHost

    def schedule(self, sendable: ObjectSender) -> None:
        """``sendable`` has something to send."""
        self._session.scheduler.ready(sendable)
        self._session.wake()

    def reschedule(self, sendable: ObjectSender) -> None:
        """The place of ``sendable`` in the order has changed."""
        self._session.scheduler.requeue(sendable)

    def prioritized(self, delivery: SubscriptionDelivery) -> None:
        """The priority of ``delivery`` has changed: what it owes is put in order, now or soon."""
        now = self._session.now
        if delivery.moves_at <= now:
            delivery.move(now)
        elif not delivery.moving:
            delivery.moving = True
            self._session.at(delivery.moves_at, delivery.move)

    def prioritize(self, request_id: int, priority: int) -> None:
        """Let what was handed over for a request stand by another Subscriber Priority."""
        self._session.act(Prioritize(request_id, priority))

    def unschedule(self, sendable: ObjectSender) -> None:
        """``sendable`` will send nothing more."""
        self._session.scheduler.remove(sendable)

    def reset_sender(self, sender: ObjectSender, code: int) -> None:
        """Reset the sender's stream, if it is open, and close the sender."""
        self._session.close_sender(sender, code)

    def at(self, when: float, callback: Callable[[float], None]) -> None:
        """Call ``callback`` with the time, at ``when`` or soon after."""
        self._session.at(when, callback)

    def subscription_drained(self, delivery: SubscriptionDelivery) -> None:
        """Everything was sent: PUBLISH_DONE, a little later."""
        due = self._session.now + self._session.settings.done_delay
        delivery.done_due = due

        def done(now: float) -> None:
            track = delivery.track
            if delivery.done_due > due or delivery.ended or track.ended is None:
                return  # what ended meanwhile has set a later time
            if not delivery.open_senders() and not self._is_fetched(track):
                self.end_subscription(delivery.request_id, track.ended, track.ended_reason)

        self._session.at(due, done)

    def subscription_failed(
        self, delivery: SubscriptionDelivery, status: int, reason: str = ""
    ) -> None:
        """The subscription cannot go on."""
        self.end_subscription(delivery.request_id, status, reason)

    # Inner workings

    def _is_fetched(self, track: Track) -> bool:
        """Whether the peer still fetches a Track: a relay that fills its cache by FETCH may take
        PUBLISH_DONE of its subscription for the end of both."""
        return any(sender.track is track for sender in self._fetches.values())

    def _fetch_closed(self, request: Request, track: Track) -> None:
        self._fetches.pop(request.request_id, None)
        for delivery in self._subscriptions.values():
            if delivery.track is track:
                delivery.check_drained()
        if request.state is State.ESTABLISHED:
            self._session.requests.finish(request)
            self._session.end_request(request)


_STREAM_CODES: dict[int, StreamCode] = {
    PublishDoneCode.INTERNAL_ERROR: StreamCode.INTERNAL_ERROR,
    PublishDoneCode.GOING_AWAY: StreamCode.GOING_AWAY,
    PublishDoneCode.TOO_FAR_BEHIND: StreamCode.TOO_FAR_BEHIND,
    PublishDoneCode.EXPIRED: StreamCode.EXPIRED_AUTH_TOKEN,
    PublishDoneCode.EXCESSIVE_LOAD: StreamCode.EXCESSIVE_LOAD,
    PublishDoneCode.MALFORMED_TRACK: StreamCode.MALFORMED_TRACK,
}
"""Reset code that goes with a PUBLISH_DONE status."""


def largest_object(largest: Location | None) -> Parameters:
    """LARGEST_OBJECT, where there is one."""
    return Parameters() if largest is None else Parameters.of(largest_object=largest)


def error_message(error: RequestError) -> messages.RequestError:
    """REQUEST_ERROR as it tells an error of ours (§9.4)."""
    retry = 0 if error.retry_after_ms is None else error.retry_after_ms + 1
    redirect = None
    if isinstance(error, Redirected):
        redirect = messages.Redirect(error.uri, error.namespace, error.track_name)
    return messages.RequestError(error.code, retry, error.reason, redirect)
