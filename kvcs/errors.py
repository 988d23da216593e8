"""One tree of exceptions: each says what was expected, what came, and what to do.

The branch says who is affected (see the table below); the class says what went wrong.

| branch | effect |
|---|---|
| `UsageError` | our caller asked for what is not allowed; nothing changed |
| `SessionError` | the peer broke a rule of the session; the session closes with `code` |
| `RequestError` | one request cannot be served or was refused; the session lives |
| `StreamError` | one stream ended with `code` |
| `ObjectError` | one object's header, digest or codec is wrong; it is dropped and owed again |
| `PublicationError` | the manifest is wrong or objects contradict; that publication is given up |
| `TrustError` | a key, a signature or a token does not pass; nothing of it is used |
| `CacheIncomplete` | the deadline passed before every object came; what is verified stays usable |
| `ConnectionFailed`, `ConnectionClosed` | there is no session, or none any more |

MOQT's code spaces are in `kvcs.moqt.errors`.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "CacheIncomplete",
    "CertificateError",
    "ConnectionClosed",
    "ConnectionFailed",
    "DescriptorMismatch",
    "FileError",
    "KvcsError",
    "MissingBlocks",
    "NotAuthentic",
    "ObjectError",
    "PublicationAborted",
    "PublicationError",
    "PublicationNotFound",
    "Redirected",
    "RequestError",
    "SessionError",
    "StoreFull",
    "StreamError",
    "TrustError",
    "UsageError",
]


class KvcsError(Exception):
    """Root of everything that kvcs raises on purpose."""


class UsageError(KvcsError, ValueError):
    """The caller asked for what is not allowed; raised before any state changes."""


class FileError(UsageError):
    """A file is missing, truncated, of another kind, or disagrees with its own metadata."""


class DescriptorMismatch(UsageError):
    """Two Compatibility Descriptors that must agree differ; the message names the members."""


class SessionError(KvcsError):
    """The peer broke a rule of the session.

    Attributes:
        code: the session close code (MOQT 19.1).
        reason: one line for the log and for CONNECTION_CLOSE.
    """

    code: int = 0x1

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        if code is not None:
            self.code = code


class RequestError(KvcsError):
    """One request was refused, by us or by the peer.

    Attributes:
        code: the REQUEST_ERROR code (MOQT 19.2).
        reason: the reason phrase.
        retry_after_ms: smallest wait before the same request may be repeated; None means do not.
    """

    code: int = 0x0

    def __init__(
        self, reason: str, code: int | None = None, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_ms = retry_after_ms
        if code is not None:
            self.code = code


class Redirected(RequestError):
    """The peer says that a request is to be made elsewhere (MOQT 9.4), and it was not followed.

    Attributes:
        uri: `moqt` URI of the session to use; empty for the one that was asked.
        namespace: Track Namespace to ask for there.
        track_name: Track Name to ask for; empty for a request for a namespace.
    """

    code = 0x34

    def __init__(
        self,
        reason: str,
        uri: str,
        namespace: tuple[bytes, ...],
        track_name: bytes = b"",
        retry_after_ms: int | None = None,
    ) -> None:
        super().__init__(reason or "redirected", retry_after_ms=retry_after_ms)
        self.uri = uri
        self.namespace = namespace
        self.track_name = track_name


class StreamError(KvcsError):
    """One stream ended early with a reset or STOP_SENDING code (MOQT 19.4)."""

    code: int = 0x0

    def __init__(self, reason: str, code: int | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        if code is not None:
            self.code = code


class ObjectError(KvcsError):
    """One object failed a check; it is dropped, counted under `check`, and owed again.

    Attributes:
        check: short name of the failed check, for example "digest" or "token_start".
    """

    def __init__(self, message: str, *, check: str) -> None:
        super().__init__(message)
        self.check = check


class PublicationError(KvcsError):
    """A publication contradicts itself or its namespace; it is given up, the session lives."""


class PublicationAborted(PublicationError):
    """The publisher gave its publication up; `reason` is what it said."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"the publisher aborted the publication: {reason or 'no reason given'}")
        self.reason = reason


class NotAuthentic(PublicationError):
    """A publication whose producer no signature shows; nothing of it is used any more.

    Attributes:
        check: short name of the failed check, for example "signature", "kid" or "unsigned".
    """

    def __init__(self, message: str, *, check: str) -> None:
        super().__init__(message)
        self.check = check


class NotProtected(PublicationError):
    """A publication whose protection and this side's protection keys do not fit.

    Attributes:
        check: ``key``: it is sealed under a key that is not known here; ``unprotected``: it is not
            sealed, and only what is sealed counts here.
        key_id: Key ID of the key that lacks; None where none does.
    """

    def __init__(self, message: str, *, check: str, key_id: int | None = None) -> None:
        super().__init__(message)
        self.check = check
        self.key_id = key_id


class TrustError(KvcsError):
    """A signed message, a key or a token that is not to be trusted.

    The message holds no octet of a key or a token.

    Attributes:
        check: short name of the failed check, for example "signature", "kid" or "expired".
    """

    def __init__(self, message: str, *, check: str) -> None:
        super().__init__(message)
        self.check = check


class PublicationNotFound(KvcsError):
    """No usable publication of the prefix was there before the wait ended.

    Attributes:
        absent: whether every peer that was asked has said that it knows of none. False means
            unknown: a peer did not answer in time, or what is announced could not be used.
    """

    def __init__(self, message: str, *, absent: bool = False) -> None:
        super().__init__(message)
        self.absent = absent


class StoreFull(KvcsError):
    """A publisher's store, or what a retrieval may hold, has no room left, and nothing in it can be
    freed."""


class ConnectionFailed(KvcsError):
    """No session could be established; the message says with whom and why."""


class CertificateError(ConnectionFailed):
    """The peer's certificate does not verify, or the peer refuses this side's, or wants one."""


class ConnectionClosed(KvcsError):
    """The session ended.

    Attributes:
        code: session close code (MOQT 19.1), or None where the transport ended it.
        reason: what the peer or the transport said.
        by_peer: whether the peer closed it.
    """

    def __init__(self, reason: str, *, code: int | None = None, by_peer: bool = False) -> None:
        who = "the peer" if by_peer else "this side"
        shown = "no code" if code is None else f"code {code:#x}"
        super().__init__(f"session closed by {who} ({shown}): {reason or 'no reason given'}")
        self.code = code
        self.reason = reason
        self.by_peer = by_peer


@dataclass(frozen=True, slots=True)
class MissingBlocks:
    """A run of blocks that one layer of one component lacks."""

    segment: int
    """Segment number."""

    component: str
    """"k", "v" or "kv"."""

    layer: int
    """Layer index."""

    first_block: int
    """Index within the segment of the first missing block."""

    last_block: int
    """Index within the segment of the last missing block, inclusive."""

    first_token: int
    """Absolute position of the first missing token."""

    last_token: int
    """Absolute position of the last missing token, inclusive."""

    def __str__(self) -> str:
        return (
            f"{self.component} layer {self.layer} blocks {self.first_block}-{self.last_block}"
            f" (tokens {self.first_token}-{self.last_token})"
        )


class CacheIncomplete(KvcsError):
    """The cache did not become whole; what was verified stays usable.

    Attributes:
        missing: what lacks, in runs of blocks, by segment, layer and component.
        usable_tokens: tokens from the start that are verified in every selected layer.
        reason: why no more came.
    """

    SHOWN = 4
    """Runs named in the message; all are in `missing`."""

    def __init__(
        self, reason: str, missing: tuple[MissingBlocks, ...] = (), usable_tokens: int = 0
    ) -> None:
        shown = "; ".join(str(run) for run in missing[: self.SHOWN])
        more = len(missing) - self.SHOWN
        if more > 0:
            shown += f"; and {more} more"
        text = f"cache incomplete: {reason}"
        if shown:
            text += f"; missing {shown}"
        super().__init__(f"{text}; {usable_tokens} tokens are usable in every layer")
        self.reason = reason
        self.missing = missing
        self.usable_tokens = usable_tokens
