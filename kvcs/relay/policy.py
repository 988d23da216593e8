"""Which namespaces a relay takes from whom: the shape of KVCS namespaces (KVCS "Namespace").

Other namespaces are free. Who may do what is decided elsewhere; this holds for everyone.
"""

from __future__ import annotations

from kvcs.errors import RequestError
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import TrackNamespace

KVCS_ROOT = b"kvcs-1"
"""First field of every KVCS namespace."""

KVCS_FIELDS = (len(KVCS_ROOT), 16, 32, 32, 16)
"""Octets of the fields: root, Scope ID, Compatibility ID, Anchor Key, Publication ID."""

SCOPE_FIELDS = 2
"""Fields of the shortest prefix that stays in one scope."""


def check_announcement(namespace: TrackNamespace) -> None:
    """Hold a PUBLISH_NAMESPACE to the shape of a publication.

    Raises:
        RequestError: UNAUTHORIZED, for a namespace that would attract requests of other
            publications: no field at all, or below `KVCS_ROOT` other than five fields of
            `KVCS_FIELDS` octets.
    """
    if namespace and namespace[0] != KVCS_ROOT:
        return
    if tuple(map(len, namespace)) != KVCS_FIELDS:
        raise RequestError(
            "a namespace below kvcs-1 has five fields of 6, 16, 32, 32 and 16 octets",
            RequestCode.UNAUTHORIZED,
        )


def check_interest(prefix: TrackNamespace) -> None:
    """Hold the prefix of a SUBSCRIBE_NAMESPACE to one scope.

    Raises:
        RequestError: UNAUTHORIZED, for a prefix that matches publications of several scopes.
    """
    if len(prefix) < SCOPE_FIELDS and prefix[:1] in ((), (KVCS_ROOT,)):
        raise RequestError(
            "a prefix that covers kvcs-1 names a scope: at least two fields",
            RequestCode.UNAUTHORIZED,
        )
