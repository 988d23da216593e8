"""Requests of the peer for all that lies under a prefix of namespaces (MOQT §4, §9.15 to §9.19)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.errors import RequestError, UsageError
from kvcs.moqt import messages
from kvcs.moqt.asking.offers import initial_settings
from kvcs.moqt.asking.prefixes import PREFIX_KINDS, prefix_of
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.filters import RangeFilters
from kvcs.moqt.names import FullTrackName, TrackNamespace, is_prefix, overlaps
from kvcs.moqt.parameters import REPEATABLE, Parameters, ParameterType
from kvcs.moqt.requests import Kind, Request, State
from kvcs.moqt.sending.delivery import UnknownHandler
from kvcs.moqt.sending.publishing import ForwardHandler
from kvcs.moqt.track.store import Track

if TYPE_CHECKING:
    from kvcs.moqt.session import Session


class AskedPrefixes:
    """SUBSCRIBE_NAMESPACEs and SUBSCRIBE_TRACKS of the peer, and what it was told.

    Args:
        session: the session that they belong to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._prefixes: dict[int, TrackNamespace] = {}
        self._namespaces: dict[int, set[TrackNamespace]] = {}
        """Suffixes that a SUBSCRIBE_NAMESPACE was told."""
        self._settings: dict[int, Parameters] = {}
        """Parameters of a SUBSCRIBE_TRACKS, updates applied."""
        self._offers: dict[int, int] = {}
        """PUBLISHes of ours that wait for stream credit, and the SUBSCRIBE_TRACKS of each."""

    def begin(self, request: Request) -> None:
        """A request of the peer for a prefix.

        Raises:
            RequestError: PREFIX_OVERLAP, INVALID_FILTER, or EXCESSIVE_LOAD.
        """
        prefix = prefix_of(request)
        self._session.load.check_matches()
        self._check_overlap(request, prefix)
        if request.kind is Kind.SUBSCRIBE_TRACKS:
            RangeFilters.of(request.parameters.items).check(
                self._session.settings.max_filter_ranges
            )
            self._settings[request.request_id] = request.parameters
        self._prefixes[request.request_id] = prefix

    def prefix(self, request_id: int) -> TrackNamespace | None:
        """The prefix that a request has now."""
        return self._prefixes.get(request_id)

    # Changes

    def check_update(self, request: Request, parameters: Parameters) -> None:
        """Hold an update to the rules, before the application judges it.

        Raises:
            RequestError: PREFIX_OVERLAP, INVALID_FILTER, or EXCESSIVE_LOAD.
        """
        if request.kind not in PREFIX_KINDS:
            return
        prefix = parameters.get(ParameterType.TRACK_NAMESPACE_PREFIX)
        if prefix is not None:
            self._session.load.check_matches()
            self._check_overlap(request, prefix)
        settings = self._settings.get(request.request_id)
        if settings is not None:
            filters = RangeFilters.of(settings.items).replaced_by(parameters.items)
            filters.check(self._session.settings.max_filter_ranges)

    def update(self, request: Request, parameters: Parameters) -> None:
        """Apply an update: what follows is below the new prefix, and is told anew (§9.5).

        Raises:
            RequestError: PREFIX_OVERLAP, for one that was answered meanwhile.
        """
        request_id = request.request_id
        prefix = parameters.get(ParameterType.TRACK_NAMESPACE_PREFIX)
        if prefix is not None:
            self._check_overlap(request, prefix)
            self._prefixes[request_id] = prefix
            self._namespaces.pop(request_id, None)
        settings = self._settings.get(request_id)
        if settings is not None:
            self._settings[request_id] = _changed(settings, parameters)

    # What it is told

    def namespace(self, request_id: int, suffix: TrackNamespace) -> None:
        """NAMESPACE; once for each suffix (§9.16)."""
        request = self._session.requests.get(request_id)
        if request is None or request.state is not State.ESTABLISHED:
            return
        self._session.load.matched()
        told = self._namespaces.setdefault(request_id, set())
        if suffix not in told:
            told.add(suffix)
            self._session.requests.send(request, messages.Namespace(suffix))

    def namespace_done(self, request_id: int, suffix: TrackNamespace) -> None:
        """NAMESPACE_DONE, where NAMESPACE was sent before (§9.17)."""
        request = self._session.requests.get(request_id)
        told = self._namespaces.get(request_id)
        if request is None or told is None or suffix not in told:
            return
        told.remove(suffix)
        self._session.requests.send(request, messages.NamespaceDone(suffix))

    def selects(self, request_id: int, track: Track) -> bool:
        """Whether a SUBSCRIBE_TRACKS wants to hear of a Track."""
        self._session.load.matched()
        prefix, settings = self._prefixes.get(request_id), self._settings.get(request_id)
        if prefix is None or settings is None or not is_prefix(prefix, track.name.namespace):
            return False
        return RangeFilters.of(settings.items).for_track(track.properties) is not None

    def forwards(self, request_id: int) -> bool:
        """Whether a SUBSCRIBE_TRACKS wants the Objects of its Tracks at once."""
        settings = self._settings.get(request_id)
        return settings is not None and settings.get(ParameterType.FORWARD, 1) == 1

    def offer(
        self,
        request_id: int,
        track: Track,
        on_unknown: UnknownHandler | None,
        before_forward: ForwardHandler | None,
    ) -> int | None:
        """PUBLISH a Track to a SUBSCRIBE_TRACKS that selects it; PUBLISH_SKIPPED where that fails.

        Returns:
            The Request ID of the PUBLISH; None where there is none.
        """
        request = self._session.requests.get(request_id)
        if request is None or request.state is not State.ESTABLISHED:
            return None
        if not self.selects(request_id, track):
            return None
        settings = self._settings[request_id]
        filters = RangeFilters.of(settings.items).for_track(track.properties) or RangeFilters()
        parameters = _with_filters(initial_settings(settings), filters)
        try:
            offer = self._session.offers.publish(track, parameters, on_unknown, before_forward)
        except UsageError:
            self.skip(request_id, track.name)
            return None
        self._offers[offer] = request_id
        return offer

    def skip(self, request_id: int, name: FullTrackName) -> None:
        """PUBLISH_SKIPPED: no PUBLISH will be sent for a Track (§9.19)."""
        request, prefix = self._session.requests.get(request_id), self._prefixes.get(request_id)
        if request is None or request.state is not State.ESTABLISHED or prefix is None:
            return
        if request.kind is Kind.SUBSCRIBE_TRACKS and is_prefix(prefix, name.namespace):
            suffix = name.namespace[len(prefix) :]
            self._session.requests.send(request, messages.PublishSkipped(suffix, name.name))

    def begun(self, offer: int) -> None:
        """A PUBLISH of ours has its stream: the end of what led to it does not take it back."""
        self._offers.pop(offer, None)

    def forget(self, request_id: int) -> None:
        """A request is over: PUBLISHes on its account that were not sent are not sent (§9.18)."""
        self._prefixes.pop(request_id, None)
        self._namespaces.pop(request_id, None)
        if self._settings.pop(request_id, None) is not None:
            for offer in [offer for offer, owner in self._offers.items() if owner == request_id]:
                self._session.requester.cancel(offer)

    # Inner workings

    def _check_overlap(self, request: Request, prefix: TrackNamespace) -> None:
        for other_id, other_prefix in self._prefixes.items():
            other = self._session.requests.get(other_id)
            if other is request or other is None or other.kind is not request.kind:
                continue
            if overlaps(other_prefix, prefix):
                raise RequestError(
                    f"the prefix overlaps that of another {request.kind.name}",
                    RequestCode.PREFIX_OVERLAP,
                )


def _changed(settings: Parameters, update: Parameters) -> Parameters:
    """Parameters after an update; a type that is present replaces that type."""
    present = {type_ for type_, _ in update.items} - {
        ParameterType.TRACK_NAMESPACE_PREFIX,
        ParameterType.AUTHORIZATION_TOKEN,
    }
    kept = [item for item in settings.items if item[0] not in present]
    new = [item for item in update.items if item[0] in present]
    return Parameters(tuple(sorted(kept + new, key=lambda item: item[0])))


def _with_filters(settings: Parameters, filters: RangeFilters) -> Parameters:
    """The settings with these range filters instead of their own."""
    ranges = REPEATABLE - {ParameterType.AUTHORIZATION_TOKEN}
    items = [item for item in settings.items if item[0] not in ranges]
    items += [(type_, value) for type_, values in filters.items() for value in values]
    return Parameters(tuple(sorted(items, key=lambda item: item[0])))
