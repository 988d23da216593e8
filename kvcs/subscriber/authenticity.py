"""Whose manifests count: with which keys, and whether a signature is needed."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable

from kvcs.errors import NotAuthentic, UsageError
from kvcs.kv import PublicationNamespace, SignedManifests
from kvcs.moqt.names import TrackNamespace
from kvcs.observe import get_logger
from kvcs.subscriber.protection import Protection
from kvcs.trust import KeyRing, KeyUse

_log = get_logger("kvcs.subscriber")

MAX_REMEMBERED = 64
"""Publications that are remembered to have let a retrieval down."""


class Authenticity:
    """What one Subscriber asks of producers (KVCS "Security Considerations").

    Args:
        keys: producer keys; without them no signed manifest can be used.
        required: use nothing that is not signed.
        protection: opens what is sealed; without it nothing is.
        clock: Unix seconds; the system's by default.

    Raises:
        UsageError: a signature is required and there are no keys to verify it with, or they are
            keys for tokens.
    """

    def __init__(
        self,
        keys: KeyRing | None = None,
        *,
        required: bool = False,
        protection: Protection | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        if required and keys is None:
            raise UsageError("require_signed needs keys: the producers' public ones")
        if keys is not None and not isinstance(keys, KeyRing):
            raise UsageError(
                f"keys takes what kvcs.load_key_ring(path) gives, not {type(keys).__name__}"
            )
        if keys is not None and keys.use is not KeyUse.MANIFEST:
            raise UsageError("manifests are verified with producer keys, not with issuer keys")
        self.keys = keys
        """Producer keys."""
        self.required = required
        """Whether only signed manifests count."""
        self.protection = Protection() if protection is None else protection
        """What opens what is sealed, and whether only that counts."""
        self.clock = time.time if clock is None else clock
        """Unix seconds."""
        self.refused: Counter[str] = Counter()
        """Publications refused because their producer was not shown, by check."""
        self._let_down: deque[TrackNamespace] = deque(maxlen=MAX_REMEMBERED)

    def let_down(self, namespace: TrackNamespace) -> None:
        """A publication did not bring what it should: the next time others come first."""
        if namespace not in self._let_down:
            self._let_down.append(namespace)

    def rank(self, namespace: TrackNamespace, is_signed: bool) -> int:
        """In which order publications are trusted; lowest first.

        Those that have let a retrieval down come last. Where there are keys, those that one of them
        has signed come first: anybody in the scope could have made the others.
        """
        return 2 if namespace in self._let_down else int(not is_signed)

    def judge(self, namespace: TrackNamespace) -> SignedManifests | None:
        """Verifier of the versions of one publication; None where there are no keys."""
        if self.keys is None:
            return None
        return SignedManifests(PublicationNamespace.parse(namespace), self.keys)

    def check_keys(self) -> None:
        """The publication is signed.

        Raises:
            NotAuthentic: ``keys``: there are none to verify it with.
        """
        if self.keys is None:
            raise NotAuthentic(
                "the publication is signed (manifest.cose), and this consumer has no producer keys"
                " to verify it with; pass them as keys (--keys-file)",
                check="keys",
            )

    def check_unsigned(self) -> None:
        """The publisher says that a publication is not signed.

        Raises:
            NotAuthentic: ``unsigned``: a signature is required.
        """
        if self.required:
            raise NotAuthentic(
                "the publication is not signed: its publisher has no manifest.cose, and this"
                " consumer requires one",
                check="unsigned",
            )

    def note(self, error: NotAuthentic) -> None:
        """Count a publication that was refused, and say so."""
        self.refused[error.check] += 1
        _log.warning("publication_refused", check=error.check, why=str(error))
