"""Requests for all that lies under a prefix of namespaces, from both sides (MOQT §4, §9.15, §9.18).

`WatchedPrefixes` are those that this endpoint asks for, `AskedPrefixes` those of the peer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcs.errors import RequestError, UsageError
from kvcs.moqt import messages
from kvcs.moqt.errors import ProtocolViolation, RequestCode, StreamCode
from kvcs.moqt.events import NamespaceAnnounced, NamespaceWithdrawn, RequestRefused
from kvcs.moqt.names import TrackNamespace, check_namespace, overlaps
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.requests import Request, State

if TYPE_CHECKING:
    from kvcs.moqt.session import Session


class WatchedPrefixes:
    """SUBSCRIBE_NAMESPACEs of ours, and which namespaces the peer has named.

    Args:
        session: the session that they belong to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._namespaces: dict[int, set[TrackNamespace]] = {}

    def subscribe_namespace(self, prefix: TrackNamespace, parameters: Parameters) -> int:
        """SUBSCRIBE_NAMESPACE (§9.15); returns the Request ID.

        Raises:
            UsageError: the prefix overlaps that of another one of ours on this session.
        """
        for request in self._session.requests.all():
            message = request.message
            if (
                request.ours
                and isinstance(message, messages.SubscribeNamespace)
                and overlaps(message.track_namespace_prefix, prefix)
            ):
                raise UsageError("a SUBSCRIBE_NAMESPACE of this session overlaps the prefix")
        request_id = self._session.requests.open(
            lambda request_id: messages.SubscribeNamespace(request_id, prefix, parameters)
        ).request_id
        self._namespaces[request_id] = set()
        return request_id

    def announced(self, request: Request, suffix: TrackNamespace) -> None:
        """NAMESPACE of the peer (§9.16).

        Raises:
            ProtocolViolation: the whole namespace breaks a limit.
        """
        message = request.message
        assert isinstance(message, messages.SubscribeNamespace)
        check_namespace((*message.track_namespace_prefix, *suffix))
        known = self._namespaces[request.request_id]
        if suffix in known:
            return
        if len(known) >= self._session.settings.max_namespaces:
            error = messages.RequestError(
                RequestCode.NAMESPACE_TOO_LARGE, 0, "too many namespaces", None
            )
            self._session.emit(RequestRefused(request.request_id, error))
            self._session.cancel_request(request, StreamCode.EXCESSIVE_LOAD)
            return
        known.add(suffix)
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
        self._session.emit(NamespaceWithdrawn(request.request_id, suffix))

    def withdraw_all(self, request: Request) -> None:
        """The subscription ended: its namespaces count as withdrawn."""
        for suffix in list(self._namespaces.get(request.request_id, ())):
            self._session.emit(NamespaceWithdrawn(request.request_id, suffix))

    def forget(self, request_id: int) -> None:
        """The request is over."""
        self._namespaces.pop(request_id, None)


class AskedPrefixes:
    """SUBSCRIBE_NAMESPACEs of the peer, and which namespaces it was told.

    Args:
        session: the session that they belong to.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._namespaces: dict[int, set[TrackNamespace]] = {}

    def check_overlap(self, request: Request, prefix: TrackNamespace) -> None:
        """Hold a prefix against the others of this session (§4).

        Raises:
            RequestError: PREFIX_OVERLAP.
        """
        for other in self._session.requests.all():
            message = other.message
            if (
                other is not request
                and not other.ours
                and other.state is not State.TERMINATED
                and isinstance(message, messages.SubscribeNamespace)
                and overlaps(message.track_namespace_prefix, prefix)
            ):
                raise RequestError(
                    "the prefix overlaps that of another SUBSCRIBE_NAMESPACE",
                    RequestCode.PREFIX_OVERLAP,
                )

    def namespace(self, request_id: int, suffix: TrackNamespace) -> None:
        """NAMESPACE; once for each suffix (§9.16)."""
        request = self._session.requests.get(request_id)
        if request is None or request.state is not State.ESTABLISHED:
            return
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

    def forget(self, request_id: int) -> None:
        """The request is over."""
        self._namespaces.pop(request_id, None)
