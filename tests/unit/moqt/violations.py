"""The index of violations: what a peer can break, and what has to come of it.

Each row is covered by cases in `test_violations_session`, `test_violations_requests` and
`test_violations_data`, which name it in their test ids; `test_violations_rows` holds that none is
left out. The peer's octets are written by hand here, so that nothing of ours has to agree to write
what nobody may send.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kvcs.moqt import messages as m
from kvcs.moqt.events import RequestRefused, TrackMalformed
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.settings import Role, SessionSettings
from kvcs.moqt.wire import encode_vi64 as vi
from kvcs.testing.bench import Bench
from kvcs.testing.tracks import NAME as FULL_NAME

CLOSE_3 = "closes 0x3"

ROWS = {
    "unknown-type": ("message, stream or datagram of a type nobody defined", "MUST", "closes"),
    "message-length": ("Length that is not what the fields take", "MUST", CLOSE_3),
    "first-message": ("a request stream that begins with no request", "MUST", CLOSE_3),
    "control-closed": ("an end of the control stream", "MUST", CLOSE_3),
    "request-id": ("Request ID of the other side's parity, or a used one", "MUST", "closes 0x4"),
    "names": ("33 fields, a field of nothing, 4,097 octets of name", "MUST", CLOSE_3),
    "pair-overflow": ("Key-Value-Pair: type over 64 bits, value over 65,535", "MUST", CLOSE_3),
    "pair-form": ("known pair of the wrong form, Token that is none", "MUST", "closes 0x6"),
    "reason-length": ("Reason Phrase over 1,024 octets", "MUST", CLOSE_3),
    "parameter-scope": ("a parameter nobody knows, or in the wrong message", "MUST", CLOSE_3),
    "parameter-twice": ("a parameter twice that may be there once", "SHOULD", CLOSE_3),
    "parameter-range": ("FORWARD, GROUP_ORDER, INCLUDE_PROPERTIES beyond it", "MUST", CLOSE_3),
    "location-type": ("Location Filter of an unknown type", "-", CLOSE_3),
    "location-overflow": ("Location Filter whose last Group is over 64 bits", "MUST", CLOSE_3),
    "range-filter": ("what a range filter may not say", "MUST", "error 0x36"),
    "fill-scope": ("FILL_PARAMETERS with what a fill cannot have", "MUST", CLOSE_3),
    "setup-server": ("PATH or AUTHORITY of a server", "MUST", "closes 0x8, 0x19"),
    "setup-token": ("SETUP that deletes or uses an alias", "MUST", CLOSE_3),
    "goaway": ("GOAWAY twice, with a long URI, or with one for a server", "MUST", CLOSE_3),
    "redirect": ("Redirect with a URI for a server, a name for a namespace", "MUST", CLOSE_3),
    "ok-properties": ("Track Properties in an OK that has none", "MUST", CLOSE_3),
    "update-side": ("REQUEST_UPDATE of the wrong side, or of TRACK_STATUS", "MUST", CLOSE_3),
    "update-count": ("more REQUEST_UPDATEs than were allowed", "MUST", "closes 0x1B"),
    "notify-side": ("PUBLISH_STATE_NOTIFY of the wrong side, or request", "MUST", CLOSE_3),
    "first-reply": ("a namespace request that is answered otherwise", "MUST", CLOSE_3),
    "done-first": ("NAMESPACE_DONE of what no NAMESPACE named", "MUST", CLOSE_3),
    "two-replies": ("a second final reply", "SHOULD", CLOSE_3),
    "track-alias": ("Track Alias of another Track", "MUST", "closes 0x5"),
    "token-alias": ("token alias in use, cache over its size", "MUST", "closes 0x14, 0x13"),
    "fetch-range": ("FETCH of nothing, or from behind the Largest Object", "MUST", "error 0x11"),
    "fetch-ok-range": ("FETCH_OK that ends before the start", "MUST", CLOSE_3),
    "subgroup-type": ("subgroup type of mode 3, without bit 4, from 128 on", "MUST", CLOSE_3),
    "id-overflow": ("Object ID or Group ID over 64 bits, or below 0", "MUST", CLOSE_3),
    "object-status": ("Object Status that is not defined", "SHOULD", CLOSE_3),
    "status-properties": ("Properties on End of Group or Track", "MUST", CLOSE_3),
    "datagram-flags": ("datagram flags that do not go together", "MUST", CLOSE_3),
    "fetch-flags": ("unknown markers; a first Object that refers back", "MUST", CLOSE_3),
    "fin-inside": ("FIN within an Object", "SHOULD", CLOSE_3),
    "stream-count": ("more streams than PUBLISH_DONE counts", "MAY", "tolerated, counted"),
    "malformed": ("Objects of one Track that contradict each other", "MUST", "cancelled 0x12"),
    "mandatory": ("Mandatory Track Property nobody knows", "MUST", "error 0x33, cancelled"),
    "track-range": ("DYNAMIC_GROUPS or default order beyond their range", "MUST", CLOSE_3),
}
"""Rows by name: what is broken, the draft's word for the duty, and what comes of it."""


# ------------------------------------------------------------------------------ octets by hand


def prefixed(octets: bytes) -> bytes:
    return vi(len(octets)) + octets


def frame(type_: int, *parts: bytes) -> bytes:
    body = b"".join(parts)
    return vi(type_) + len(body).to_bytes(2, "big") + body


def namespace(*fields: bytes) -> bytes:
    return vi(len(fields)) + b"".join(map(prefixed, fields))


def parameters(*pairs: tuple[int, bytes]) -> bytes:
    """Number of Parameters and each, whose type is given whole and written as a delta."""
    parts, last = [vi(len(pairs))], 0
    for type_, value in pairs:
        parts += (vi(type_ - last), value)
        last = type_
    return b"".join(parts)


NAME = namespace(b"kvcs-1", b"test") + prefixed(b"k.raw.s0")
"""Octets of `kvcs.testing.tracks.NAME`."""

NONE = parameters()
PREFIX = namespace(b"kvcs-1")


def subscribe(*pairs: tuple[int, bytes], request_id: int = 0, name: bytes = NAME) -> bytes:
    return frame(0x03, vi(request_id), name, parameters(*pairs))


def fetch(*pairs: tuple[int, bytes], request_id: int = 0, name: bytes = NAME) -> bytes:
    return frame(0x16, vi(request_id), name, parameters(*pairs))


def update(*pairs: tuple[int, bytes], request_id: int = 2) -> bytes:
    return frame(0x02, vi(request_id), parameters(*pairs))


SUBSCRIBE_OK = frame(0x04, vi(9), NONE)
FETCH_OK = frame(0x18, b"\0", vi(9), vi(9), NONE)
REQUEST_OK = frame(0x07, NONE)
NOTIFY = frame(0x22, NONE)


def request_error(code: int, reason: bytes = b"", redirect: bytes = b"") -> bytes:
    return frame(0x05, vi(code), vi(0), prefixed(reason), redirect)


# ------------------------------------------------------------------------------------- cases

Do = Callable[[Bench], int | None]
"""What the peer does; returns the request stream that the outcome is looked for on."""

Outcome = Callable[[Bench, int | None], None]


@dataclass(frozen=True, slots=True)
class Case:
    """One way to break a row, and what comes of it."""

    row: str
    label: str
    do: Do
    outcome: Outcome
    role: Role = Role.SERVER
    """Role of the session under test; the peer has the other one."""
    settings: SessionSettings | None = None
    setup: bool = True
    """Whether the peer's SETUP came before."""

    def run(self) -> None:
        bench = Bench(self.role, self.settings, setup=self.setup)
        stream_id = self.do(bench)
        self.outcome(bench, stream_id)
        assert bench.core.failure is None


def params(cases: list[Case]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "case", cases, ids=[f"{case.row}:{case.label}" for case in cases]
    )


def closes(code: int) -> Outcome:
    """The session closes with ``code``."""

    def check(bench: Bench, stream_id: int | None) -> None:
        assert bench.close_code == code, bench.close

    return check


def refuses(code: int) -> Outcome:
    """REQUEST_ERROR with ``code``, then FIN; the session lives."""

    def check(bench: Bench, stream_id: int | None) -> None:
        assert bench.close is None and stream_id is not None
        (error,) = bench.replies(stream_id)
        assert isinstance(error, m.RequestError) and error.error_code == code
        assert stream_id in bench.fins

    return check


def malformed(bench: Bench, stream_id: int | None) -> None:
    """All that was asked of the Track is cancelled with 0x12; the session lives."""
    assert bench.close is None and stream_id is not None
    assert bench.take(TrackMalformed)
    assert bench.stops[stream_id] == 0x12
    assert bench.core.requester is not None and bench.core.requests.get(0) is None


def unsupported(bench: Bench, stream_id: int | None) -> None:
    """The request is cancelled, and its caller told 0x33; the session lives."""
    assert bench.close is None and stream_id is not None
    (refused,) = bench.take(RequestRefused)
    assert refused.error.error_code == 0x33
    assert stream_id in bench.stops


# ------------------------------------------------------------- what a case often begins with


def asked(bench: Bench, replies: tuple[bytes, ...]) -> int:
    """The session has made its first request: the peer answers; returns the stream."""
    stream_id = 0 if bench.core.role is Role.CLIENT else 1
    bench.drain()
    bench.data(stream_id, b"".join(replies))
    return stream_id


def subscribed(bench: Bench, *replies: bytes) -> int:
    """A SUBSCRIBE of the session, and what the peer says to it; returns its stream."""
    bench.core.requester.subscribe(FULL_NAME, Parameters())
    return asked(bench, replies)


def fetched(bench: Bench, *replies: bytes) -> int:
    """A FETCH of the session, and what the peer says to it; returns its stream."""
    bench.core.requester.fetch(FULL_NAME, Parameters())
    return asked(bench, replies)


def status_asked(bench: Bench, *replies: bytes) -> int:
    """A TRACK_STATUS of the session, and what the peer says to it; returns its stream."""
    bench.core.requester.track_status(FULL_NAME)
    return asked(bench, replies)


def announced(bench: Bench, *replies: bytes) -> int:
    """A PUBLISH_NAMESPACE of the session, and what the peer says to it; returns its stream."""
    bench.core.requester.publish_namespace((b"kvcs-1",))
    return asked(bench, replies)


def watching(bench: Bench, *replies: bytes) -> int:
    """A SUBSCRIBE_NAMESPACE of the session, and what the peer says to it; returns its stream."""
    bench.core.requester.subscribe_namespace((b"kvcs-1",))
    return asked(bench, replies)


def ask(octets: bytes) -> Do:
    """The peer opens a request stream with these octets."""

    def do(bench: Bench) -> int:
        stream_id = bench.bidi()
        bench.data(stream_id, octets)
        return stream_id

    return do


def uni(octets: bytes, *, fin: bool = False) -> Do:
    """The peer opens a unidirectional stream."""

    def do(bench: Bench) -> None:
        bench.uni(octets, fin=fin)

    return do


def datagram(octets: bytes) -> Do:
    """The peer sends a datagram."""

    def do(bench: Bench) -> None:
        bench.datagram(octets)

    return do


def answer(begin: Callable[..., int], *replies: bytes) -> Do:
    """The session asks (``begin``), the peer answers with these octets."""

    def do(bench: Bench) -> int:
        return begin(bench, *replies)

    return do
