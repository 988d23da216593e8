"""Requests of ours for all that lies under a prefix of namespaces (MOQT §4, §9.15 to §9.19).

The peer's are in `kvcs.moqt.asking.asked_prefixes`. SUBSCRIBE_NAMESPACE and SUBSCRIBE_TRACKS have
a space of prefixes each: two of one kind may not overlap on a session, one of each may be equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.errors import UsageError
from kvcs.moqt import messages
from kvcs.moqt.errors import ProtocolViolation, RequestCode, StreamCode
from kvcs.moqt.events import (
    NamespaceAnnounced,
    NamespaceWithdrawn,
    RequestRefused,
    TrackSkipped,
)
from kvcs.moqt.filters import RangeFilters
from kvcs.moqt.limits import Limit
from kvcs.moqt.load import weigh
from kvcs.moqt.names import (
    FullTrackName,
    TrackNamespace,
    check_namespace,
    is_prefix,
    overlaps,
)
from kvcs.moqt.parameters import Parameters, ParameterType
from kvcs.moqt.requests import Kind, Request, State

if TYPE_CHECKING:
    from kvcs.moqt.session import Session

PREFIX_KINDS = (Kind.SUBSCRIBE_NAMESPACE, Kind.SUBSCRIBE_TRACKS)
"""Requests for a prefix."""


def prefix_of(request: Request) -> TrackNamespace:
    """The prefix that a SUBSCRIBE_NAMESPACE or SUBSCRIBE_TRACKS began with."""
    message = request.message
    assert isinstance(message, messages.SubscribeNamespace | messages.SubscribeTracks)
    return message.track_namespace_prefix


class WatchedPrefixes:
    """SUBSCRIBE_NAMESPACEs and SUBSCRIBE_TRACKS of ours.

    Args:
        session: the session that they belong to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._prefixes: dict[int, TrackNamespace] = {}
        self._namespaces: dict[int, set[TrackNamespace]] = {}
        """Suffixes that the peer has named to a SUBSCRIBE_NAMESPACE."""
        self._octets: dict[int, int] = {}
        """What these take in memory."""
        self._filters: dict[int, RangeFilters] = {}
        """Range filters of a SUBSCRIBE_TRACKS."""
        self._changes: dict[int, dict[int, TrackNamespace]] = {}
        """By request, prefixes that updates without an answer ask for."""

    def subscribe_namespace(self, prefix: TrackNamespace, parameters: Parameters) -> int:
        """SUBSCRIBE_NAMESPACE; returns the Request ID.

        Raises:
            UsageError: the prefix overlaps that of another one of ours on this session.
        """
        self._check_overlap(Kind.SUBSCRIBE_NAMESPACE, prefix)
        request_id = self._session.requests.open(
            lambda request_id: messages.SubscribeNamespace(request_id, prefix, parameters)
        ).request_id
        self._prefixes[request_id] = prefix
        self._namespaces[request_id] = set()
        self._octets[request_id] = 0
        return request_id

    def subscribe_tracks(self, prefix: TrackNamespace, parameters: Parameters) -> int:
        """SUBSCRIBE_TRACKS; returns the Request ID.

        Raises:
            UsageError: the prefix overlaps that of another one of ours on this session.
        """
        self._check_overlap(Kind.SUBSCRIBE_TRACKS, prefix)
        request_id = self._session.requests.open(
            lambda request_id: messages.SubscribeTracks(request_id, prefix, parameters)
        ).request_id
        self._prefixes[request_id] = prefix
        self._filters[request_id] = RangeFilters.of(parameters.items)
        return request_id

    def filters_objects(self, namespace: TrackNamespace) -> bool:
        """Whether a PUBLISH under ``namespace`` may leave Objects out, for we asked it to."""
        return any(
            any(type_ is not ParameterType.TRACK_PROPERTY_FILTER for type_ in filters)
            and is_prefix(self._prefixes[request_id], namespace)
            for request_id, filters in self._filters.items()
        )

    # Changes

    def check_update(self, request: Request, parameters: Parameters) -> None:
        """Hold the prefix of an update of ours against the others.

        Raises:
            UsageError: it overlaps one of the same kind.
        """
        prefix = parameters.get(ParameterType.TRACK_NAMESPACE_PREFIX)
        if prefix is not None and request.kind in PREFIX_KINDS:
            self._check_overlap(request.kind, prefix, request.request_id)

    def updated(self, request: Request, update_id: int, parameters: Parameters) -> None:
        """An update is on its way; its prefix counts from the peer's OK on."""
        request_id = request.request_id
        prefix = parameters.get(ParameterType.TRACK_NAMESPACE_PREFIX)
        if prefix is not None:
            self._changes.setdefault(request_id, {})[update_id] = prefix
        filters = self._filters.get(request_id)
        if filters is not None:
            # What they left out may still come so: FIN tells less for either.
            changed = filters.replaced_by(parameters.items)
            self._filters[request_id] = changed or filters

    def update_answered(
        self,
        request: Request,
        update_id: int,
        reply: messages.RequestOk | messages.RequestError,
    ) -> None:
        """With its OK the suffixes are those below the new prefix, and are named anew (§9.5)."""
        changes = self._changes.get(request.request_id)
        if changes is None:
            return
        prefix = changes.pop(update_id, None)
        if not changes:
            del self._changes[request.request_id]
        if prefix is not None and isinstance(reply, messages.RequestOk):
            self.withdraw_all(request)
            self._prefixes[request.request_id] = prefix

    # What the peer tells

    def announced(self, request: Request, suffix: TrackNamespace) -> None:
        """NAMESPACE of the peer (§9.16).

        Raises:
            ProtocolViolation: the whole namespace breaks a limit.
        """
        check_namespace((*self._prefixes[request.request_id], *suffix))
        known = self._namespaces[request.request_id]
        if suffix in known:
            return
        settings, octets = self._session.settings, self._octets[request.request_id] + weigh(suffix)
        if len(known) >= settings.max_namespaces or octets > settings.max_namespace_octets:
            self._session.limits.reached(Limit.NAMESPACES)
            error = messages.RequestError(
                RequestCode.NAMESPACE_TOO_LARGE, 0, "too many namespaces", None
            )
            self._session.emit(RequestRefused(request.request_id, error))
            self._session.cancel_request(request, StreamCode.EXCESSIVE_LOAD)
            return
        known.add(suffix)
        self._octets[request.request_id] = octets
        self._session.emit(NamespaceAnnounced(request.request_id, suffix))

    def withdrawn(self, request: Request, suffix: TrackNamespace) -> None:
        """NAMESPACE_DONE of the peer (§9.17).

        Raises:
            ProtocolViolation: it was not announced.
        """
        known = self._namespaces[request.request_id]
        if suffix not in known:
            raise ProtocolViolation("NAMESPACE_DONE without a NAMESPACE")
        known.remove(suffix)
        self._octets[request.request_id] -= weigh(suffix)
        self._session.emit(NamespaceWithdrawn(request.request_id, suffix))

    def skipped(self, request: Request, message: messages.PublishSkipped) -> None:
        """PUBLISH_SKIPPED of the peer (§9.19).

        Raises:
            ProtocolViolation: the whole name breaks a limit.
        """
        namespace = (*self._prefixes[request.request_id], *message.track_namespace_suffix)
        check_namespace(namespace, message.track_name)
        name = FullTrackName(namespace, message.track_name)
        self._session.emit(TrackSkipped(request.request_id, name))

    def withdraw_all(self, request: Request) -> None:
        """The subscription ended, or its prefix changed: its namespaces count as withdrawn."""
        known = self._namespaces.get(request.request_id, set())
        for suffix in sorted(known):
            self._session.emit(NamespaceWithdrawn(request.request_id, suffix))
        known.clear()
        if request.request_id in self._octets:
            self._octets[request.request_id] = 0

    def forget(self, request_id: int) -> None:
        """The request is over."""
        for table in (
            self._prefixes,
            self._namespaces,
            self._octets,
            self._filters,
            self._changes,
        ):
            table.pop(request_id, None)

    # Inner workings

    def _check_overlap(
        self, kind: Kind, prefix: TrackNamespace, but_for: int | None = None
    ) -> None:
        for request in self._session.requests.all():
            if request.ours and request.kind is kind and request.request_id != but_for:
                if request.state is not State.TERMINATED and any(
                    overlaps(other, prefix) for other in self._all_of(request.request_id)
                ):
                    raise UsageError(f"a {kind.name} of this session overlaps the prefix")

    def _all_of(self, request_id: int) -> list[TrackNamespace]:
        """The prefix of a request, and those that it may soon have."""
        return [self._prefixes[request_id], *self._changes.get(request_id, {}).values()]
