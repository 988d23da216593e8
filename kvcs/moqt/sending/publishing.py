"""The publisher's side of a subscription: what follows a Track, and its fills (MOQT §3, §9.9)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from kvcs.moqt.errors import PublishDoneCode, StreamCode
from kvcs.moqt.filters import LocationFilter, Range, RangeFilters
from kvcs.moqt.names import MAX_VI64, GroupOrder, Location
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import Property, find_property
from kvcs.moqt.sending.datagram_sender import DatagramSender
from kvcs.moqt.sending.delivery import (
    Host,
    ObjectSender,
    RangeSender,
    SubgroupSender,
    UnknownHandler,
)
from kvcs.moqt.sending.lag import Lag
from kvcs.moqt.sending.pieces import passes
from kvcs.moqt.sending.timeouts import AskedTimeouts
from kvcs.moqt.track.store import Track
from kvcs.moqt.track.stored import Group, StoredObject, Subgroup

DEFAULT_SUBSCRIBER_PRIORITY = 128

MOVE_SECONDS = 100e-6
"""From one time that what is owed is put in order again to the next, for each stream: several times
what that takes, for a peer may change its priority with every few octets."""

MOST_BELOW = 4096
"""Streams of a subscription that are taken, at most, to wait below the session: it cannot know how
many of those that it handed over whole still do."""

TIMEOUT_LOOK_SECONDS = 5.0
"""Longest wait of one timer for a delivery timeout, which a peer may set to centuries: what a timer
refers to stays in memory until it is due."""


ForwardHandler = Callable[[], bool]
"""Asked before a paused subscription goes on: True where that may be at once; False where the
update has to wait, until `Responder.forward_ready` says so. A relay has its own upstream resumed
first, so that the Largest Object in its answer is where the delivery begins."""


class SubscriptionHost(Host, Protocol):
    """What a session offers to the subscriptions that it serves."""

    def at(self, when: float, callback: Callable[[float], None]) -> None:
        """Call ``callback`` with the time, at ``when`` or soon after."""

    def prioritized(self, delivery: SubscriptionDelivery) -> None:
        """Its priority has changed: call `SubscriptionDelivery.move`, now or soon."""

    def prioritize(self, request_id: int, priority: int) -> None:
        """Let what was handed over for a request stand by another Subscriber Priority."""

    def subscription_drained(self, delivery: SubscriptionDelivery) -> None:
        """The Track has ended and every stream of the subscription is closed."""

    def subscription_failed(
        self, delivery: SubscriptionDelivery, status: int, reason: str = ""
    ) -> None:
        """The subscription cannot go on: end it with PUBLISH_DONE ``status``."""


def location_filter(parameters: Parameters) -> LocationFilter | None:
    """LOCATION_FILTER of a parameter list, if it is there."""
    found: LocationFilter | None = parameters.get(ParameterType.LOCATION_FILTER)
    return found


def group_order(track: Track, parameters: Parameters) -> GroupOrder:
    """Group Order of a subscription: asked for, else the publisher's default (§5.1)."""
    asked = parameters.get(ParameterType.GROUP_ORDER)
    if asked is None:
        asked = find_property(track.properties, Property.DEFAULT_PUBLISHER_GROUP_ORDER)
    return GroupOrder.ASCENDING if asked is None else GroupOrder(asked)


class SubscriptionDelivery:
    """Follows a Track for one subscriber.

    Args:
        host: the session.
        request_id: of the SUBSCRIBE.
        track: what is followed; the caller adds this to its listeners.
        track_alias: alias in SUBSCRIBE_OK.
        parameters: of the SUBSCRIBE.
        largest: Largest Object at the moment at which the SUBSCRIBE is processed; the range of the
            subscription and that of its fill come from this one value.
        on_unknown: asked by fills; see `kvcs.moqt.sending.delivery.UnknownHandler`.
    """

    def __init__(
        self,
        host: SubscriptionHost,
        request_id: int,
        track: Track,
        track_alias: int,
        parameters: Parameters,
        largest: Location | None,
        on_unknown: UnknownHandler | None,
    ) -> None:
        self.host = host
        self.request_id = request_id
        self.track = track
        self.track_alias = track_alias
        self.group_order = group_order(track, parameters)
        self.forward = parameters.get(ParameterType.FORWARD, 1) == 1
        self.subscriber_priority: int = parameters.get(
            ParameterType.SUBSCRIBER_PRIORITY, DEFAULT_SUBSCRIBER_PRIORITY
        )
        self.streams_opened = 0
        self.streams_missed = False
        """Whether streams of the Track that were for it too never came here: a relay's upstream."""
        self.ended = False
        self.moves_at = 0.0
        """Not before this time it is put in order again, in the session's clock."""
        self.moving = False
        """Whether it will be."""
        self.done_due = 0.0
        """Not before this time PUBLISH_DONE is sent, in the session's clock."""
        self.before_forward: ForwardHandler | None = None
        """Asked when the subscriber resumes it; see `ForwardHandler`."""
        self._on_unknown = on_unknown
        self._filter = location_filter(parameters)
        self._filters = RangeFilters.of(parameters.items)
        self._timeouts = AskedTimeouts().updated(parameters)
        self._span = self._resolve(largest)
        self._senders: dict[Subgroup, SubgroupSender] = {}
        self._fills: dict[RangeSender, bool] = {}
        """Fills under way, and whether each follows the subscription's priority."""
        self._datagrams: dict[DatagramSender, None] = {}
        self._lag = Lag()
        self._behind: str | None = None
        """Why it ends with TOO_FAR_BEHIND once its fills have come to their end."""

    def _resolve(self, largest: Location | None) -> Range:
        chosen = LocationFilter.none() if self._filter is None else self._filter
        return chosen.for_subscription(largest)

    def must_wait(self, parameters: Parameters) -> bool:
        """Whether an update resumes it before what it resumes is there."""
        resumes = not self.forward and parameters.get(ParameterType.FORWARD) == 1
        return resumes and self.before_forward is not None and not self.before_forward()

    @property
    def filters(self) -> RangeFilters:
        """Its range filters."""
        return self._filters

    @property
    def fills(self) -> int:
        """Fills that are under way."""
        return len(self._fills)

    def start_fill(
        self, fill: Parameters, request_id: int, largest: Location | None
    ) -> RangeSender | None:
        """Begin the fill that FILL_PARAMETERS asks for (§3.4); None where its range is empty.

        Args:
            fill: the nested parameters.
            request_id: of the message that carried them.
            largest: the same Largest Object that the message's subscription range came from.
        """
        if not self.forward:
            return None
        chosen = location_filter(fill) or self._filter or LocationFilter.none()
        span = chosen.for_fetch(largest)
        if span is None:
            return None
        asked = fill.get(ParameterType.GROUP_ORDER)
        sender = RangeSender(
            self.host,
            self.track,
            request_id=request_id,
            span=span,
            group_order=self.group_order if asked is None else GroupOrder(asked),
            filters=self._filters.replaced_by(fill.items),
            subscriber_priority=fill.get(
                ParameterType.SUBSCRIBER_PRIORITY, self.subscriber_priority
            ),
            on_unknown=self._on_unknown,
            fill_timeout_ms=fill.get(ParameterType.FILL_TIMEOUT),
            live_order=self.group_order,
        )
        follows = self._fills[sender] = ParameterType.SUBSCRIBER_PRIORITY not in fill
        sender.prioritized_by = self.request_id if follows else None
        sender.on_opened = self._count_stream
        sender.on_closed = lambda: self._fill_closed(sender)
        self.host.schedule(sender)
        return sender

    def update(self, parameters: Parameters, update_id: int, largest: Location | None) -> int:
        """Apply a REQUEST_UPDATE; what is absent stays as it was (§9.5).

        Returns:
            How many streams were looked at for it; a change of priority looks at them later.
        """
        priority = parameters.get(ParameterType.SUBSCRIBER_PRIORITY)
        if priority is not None:
            self._set_priority(priority)
        looked_at = 0
        filters = self._filters.replaced_by(parameters.items)
        timeouts = self._timeouts.updated(parameters)
        if (filters, timeouts) != (self._filters, self._timeouts):
            self._filters, self._timeouts = filters, timeouts
            looked_at = len(self._senders)
            for live in self._senders.values():
                live.filters = filters
                live.timeouts = timeouts.of(self.track, live.subgroup)
        changed = location_filter(parameters)
        if changed is not None:
            self._filter = changed
            self._span = self._resolve(largest)
            for live in self._senders.values():
                live.span = self._span
        forward = parameters.get(ParameterType.FORWARD)
        if forward is not None:
            self._set_forward(forward == 1)
        fill = parameters.get(ParameterType.FILL_PARAMETERS)
        if fill is not None:
            self.start_fill(fill, update_id, largest)
        return looked_at

    def _set_priority(self, priority: int) -> None:
        if priority == self.subscriber_priority:
            return
        self.subscriber_priority = priority
        self.host.prioritized(self)

    def move(self, now: float) -> None:
        """Let what is owed, and what was handed over, stand by the priority of now."""
        followers = [fill for fill, follows in self._fills.items() if follows]
        senders = (*self._senders.values(), *self._datagrams, *followers)
        for sender in senders:
            sender.subscriber_priority = self.subscriber_priority
            self.host.reschedule(sender)
        self.host.prioritize(self.request_id, self.subscriber_priority)
        streams = len(senders) + min(self.streams_opened, MOST_BELOW)
        self.moves_at, self.moving = now + streams * MOVE_SECONDS, False

    def _set_forward(self, forward: bool) -> None:
        if self.forward and not forward:
            for sender in (*self._senders.values(), *self._datagrams):
                # A FIN would say that all Objects were sent (§11.3.2).
                self.host.reset_sender(sender, StreamCode.CANCELLED)
            self._senders.clear()
        self.forward = forward

    # TrackListener

    def object_added(self, subgroup: Subgroup, count: int = 1) -> None:
        """Objects were published or began to arrive."""
        sender = self._senders.get(subgroup)
        if sender is not None and sender.queued:
            return  # it goes on to them by itself
        if not self.forward or self.ended:
            return
        objects = subgroup.objects
        first = len(objects) - count
        if objects[first].header.subgroup_id is None:
            for stored in objects[first:]:
                self._send_datagram(subgroup, stored)
            return
        if sender is None:
            for index in range(first, len(objects)):
                if objects[index].header.location in self._span:
                    sender = self._open(subgroup, index)
                    break
            else:
                return
        if not sender.closed:
            self.host.schedule(sender)

    def _send_datagram(self, subgroup: Subgroup, stored: StoredObject) -> None:
        header = stored.header
        if header.location in self._span and passes(
            self._filters, header, self.track.default_priority
        ):
            sender = DatagramSender(
                self.host,
                self.track,
                stored,
                track_alias=self.track_alias,
                subscriber_priority=self.subscriber_priority,
                group_order=self.group_order,
                timeout=self._timeouts.of(self.track, subgroup).datagram,
            )
            self._datagrams[sender] = None
            sender.on_closed = lambda: self._datagram_closed(sender)
            self.host.schedule(sender)

    def subgroup_ended(self, subgroup: Subgroup) -> None:
        """The Subgroup has its last Object, or was reset."""
        sender = self._senders.get(subgroup)
        if sender is None:
            return
        if sender.closed:
            del self._senders[subgroup]
        else:
            self.host.schedule(sender)
            self._limit_subgroup(sender)

    def _limit_subgroup(self, sender: SubgroupSender) -> None:
        """Give up a Subgroup that is whole and takes longer than its timeout (§5.2)."""
        timeout, objects = sender.timeouts.subgroup, sender.subgroup.objects
        if timeout is None or not sender.subgroup.finished or not objects:
            return

        deadline = objects[-1].born + timeout

        def look(now: float) -> None:
            if sender.closed:
                return
            if now < deadline:
                self.host.at(min(deadline, now + TIMEOUT_LOOK_SECONDS), look)
                return
            sender.may_reopen = False
            self.host.reset_sender(sender, StreamCode.DELIVERY_TIMEOUT)

        self.host.at(min(deadline, objects[-1].born + TIMEOUT_LOOK_SECONDS), look)

    def group_evicted(self, group: Group) -> None:
        """The Group is gone: Objects of it that are still owed cannot be delivered."""
        for subgroup, sender in list(self._senders.items()):
            if subgroup.group_id != group.group_id:
                continue
            if not sender.closed:
                self.fall_behind("what it was owed has left the cache")
                return
            del self._senders[subgroup]

    # Too far behind

    def look(self, now: float) -> tuple[float, int]:
        """How far it is behind what is published.

        Returns:
            Seconds, at least, of which none count while a fill is under way, since that goes first;
            and octets that are here and were not handed over.
        """
        lag = self._lag
        seconds = lag.look(self._live_senders(), now)
        if self._fills:
            lag.excuse()
            seconds = 0.0
        return seconds, lag.octets

    def fall_behind(self, reason: str) -> None:
        """End it with TOO_FAR_BEHIND (§9.9); fills that are under way come to their end before."""
        if self._behind is not None:
            return
        self._behind = reason
        self.track.leave(self)
        for sender in self._live_senders():
            self.host.reset_sender(sender, StreamCode.TOO_FAR_BEHIND)
        self._senders.clear()
        self.check_drained()

    def track_ended(self) -> None:
        """No more Objects come."""
        track = self.track
        if track.abandoned and track.ended is not None:
            self.host.subscription_failed(self, track.ended, track.ended_reason)
        else:
            self.check_drained()

    # Inner workings

    def _open(self, subgroup: Subgroup, index: int) -> SubgroupSender:
        sender = SubgroupSender(
            self.host,
            self.track,
            subgroup,
            index,
            track_alias=self.track_alias,
            span=self._span,
            filters=self._filters,
            subscriber_priority=self.subscriber_priority,
            group_order=self.group_order,
            timeouts=self._timeouts.of(self.track, subgroup),
        )
        self._senders[subgroup] = sender
        sender.prioritized_by = self.request_id
        sender.on_opened = self._count_stream
        sender.on_closed = lambda: self._subgroup_closed(sender)
        self._limit_subgroup(sender)
        return sender

    def _subgroup_closed(self, sender: SubgroupSender) -> None:
        subgroup = sender.subgroup
        if sender.continues_at is not None and not self.ended:
            # The next-object rule (§7): what follows needs a stream of its own.
            self.host.schedule(self._open(subgroup, sender.continues_at))
        elif sender.may_reopen or subgroup.finished or subgroup.reset_code is not None:
            # One that may not be opened again stays known until its Subgroup ends.
            self._senders.pop(subgroup, None)
        self.check_drained()

    @property
    def stream_count(self) -> int:
        """Stream Count of PUBLISH_DONE; 2^64-1 where it is not known what there was (§9.9)."""
        return MAX_VI64 if self.streams_missed else self.streams_opened

    def _count_stream(self) -> None:
        self.streams_opened += 1

    def _fill_closed(self, sender: RangeSender) -> None:
        del self._fills[sender]
        self.check_drained()

    def _datagram_closed(self, sender: DatagramSender) -> None:
        self._datagrams.pop(sender, None)
        self.check_drained()

    def check_drained(self) -> None:
        """Tell the session once nothing more will be sent."""
        if self._behind is not None:
            if not self.ended and not self._fills:
                status = PublishDoneCode.TOO_FAR_BEHIND
                self.host.subscription_failed(self, status, self._behind)
            return
        if self.ended or self.track.ended is None or self._fills or self._datagrams:
            return
        if all(sender.closed for sender in self._senders.values()):
            self.host.subscription_drained(self)

    def open_senders(self) -> list[ObjectSender]:
        """Streams that are open or will be, fills included."""
        return [*self._live_senders(), *self._fills]

    def _live_senders(self) -> list[ObjectSender]:
        live = [sender for sender in self._senders.values() if not sender.closed]
        return [*live, *self._datagrams]

    def end(self, code: int) -> None:
        """Leave the Track and reset every open stream with ``code``."""
        if self.ended:
            return
        self.ended = True
        self.track.leave(self)
        for sender in self.open_senders():
            self.host.reset_sender(sender, code)
        self._senders.clear()
