"""NEW_GROUP_REQUESTs of the subscribers of one Track, handed on (MOQT §7)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.errors import UsageError
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.properties import Property, find_property
from kvcs.relay.hub import Hub

if TYPE_CHECKING:
    from kvcs.relay.tracks import RelayTrack

NEW_GROUP_PAUSE = 0.1
"""Seconds from one NEW_GROUP_REQUEST of a Track to the next."""


class NewGroups:
    """What was asked of the publishers of one Track.

    Args:
        hub: the relay's core.
        owner: the Track.
    """

    def __init__(self, hub: Hub, owner: RelayTrack) -> None:
        self._hub = hub
        self._owner = owner
        self._new_group: tuple[int, int | None] | None = None
        """What was sent, or soon is, and the largest Group at that time."""
        self._asking_group = False
        """Whether one was sent a moment ago, or is about to be."""

    def ask(self, parameters: Parameters) -> None:
        """Hand a NEW_GROUP_REQUEST on, unless an equal or larger one is outstanding (§7)."""
        value: int | None = parameters.get(ParameterType.NEW_GROUP_REQUEST)
        track = self._owner.track
        if value is None or find_property(track.properties, Property.DYNAMIC_GROUPS) != 1:
            return
        largest = None if track.largest is None else track.largest.group
        if value and largest is not None and value <= largest:
            return  # there is such a Group already
        if self._new_group is not None and self._new_group[1] == largest:
            if self._new_group[0] >= value:
                return
        self._new_group = (value, largest)
        if not self._asking_group:
            self._asking_group = True
            self._hub.soon(self._request_group)

    def _request_group(self, now: float) -> None:
        """Hand on what was asked last; what is asked soon after waits, however many ask.

        Too many updates in a time would have the publisher end the subscription of everybody.
        """
        assert self._new_group is not None
        value, _ = self._new_group
        for upstream in self._owner.sources.subscriptions():
            place = upstream.place
            session = self._hub.session(place.session)
            if session is None:
                continue
            try:
                asked = Parameters.of(new_group_request=value)
                session.requester.update(place.request_id, asked)
            except UsageError:
                continue  # it has ended, or has many updates to answer

        asked_then = self._new_group

        def look(later: float) -> None:
            self._asking_group = self._new_group != asked_then
            if self._asking_group:
                self._request_group(later)

        self._hub.at(now + NEW_GROUP_PAUSE, look)
