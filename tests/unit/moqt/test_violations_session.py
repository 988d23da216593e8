"""Violations of the session: frames, names, pairs, SETUP, GOAWAY, parameters and filters."""

from __future__ import annotations

from kvcs.moqt.settings import Role, SessionSettings
from kvcs.moqt.wire import encode_vi64 as vi
from kvcs.testing.bench import Bench
from tests.unit.moqt.violations import (
    NAME,
    NONE,
    REQUEST_OK,
    Case,
    Do,
    announced,
    answer,
    ask,
    closes,
    datagram,
    fetch,
    fetched,
    frame,
    namespace,
    parameters,
    params,
    prefixed,
    refuses,
    request_error,
    subscribe,
    subscribed,
    uni,
    update,
    watching,
)

CLIENT = Role.CLIENT
MAX = 2**64 - 1


def track_status(name: bytes) -> bytes:
    return frame(0x0D, vi(0), name, NONE)


def setup(*octets: bytes) -> Do:
    """SETUP with these Setup Options."""
    return uni(frame(0x2F00, *octets))


def on_control(octets: bytes, *, fin: bool = False) -> Do:
    def do(bench: Bench) -> None:
        bench.data(bench.control, octets, fin=fin)

    return do


def on_request(octets: bytes, *, fin: bool = False) -> Do:
    """These octets behind a SUBSCRIBE of the peer."""

    def do(bench: Bench) -> int:
        stream_id = bench.bidi()
        bench.data(stream_id, subscribe())
        bench.data(stream_id, octets, fin=fin)
        return stream_id

    return do


def reset_control(bench: Bench) -> None:
    bench.reset(bench.control)


def stop_control(bench: Bench) -> None:
    assert bench.core.control.ours is not None
    bench.stop(bench.core.control.ours)


def twice(octets: bytes) -> Do:
    """The same message on the control stream, then once more."""
    return on_control(octets + octets)


def goaway(uri: bytes = b"") -> bytes:
    return frame(0x10, prefixed(uri), vi(0))


def redirect(uri: bytes = b"", name: bytes = b"") -> bytes:
    return request_error(0x34, redirect=prefixed(uri) + namespace(b"a") + prefixed(name))


def filters(*values: tuple[int, bytes]) -> Do:
    return ask(subscribe(*((type_, prefixed(value)) for type_, value in values)))


TOKEN = 0x03
LOCATION = 0x21
FILL = 0x23

CASES = [
    # Types that nobody defined
    *(
        Case("unknown-type", f"message {type_:#x}", do, closes(0x3))
        for type_ in (0x01, 0x20, 0x21, 0x40, 0x41, 0x1E, 0x9D, MAX)
        for do in (ask(frame(type_)),)
    ),
    Case("unknown-type", "later message", on_request(frame(0x2B)), closes(0x3)),
    Case("unknown-type", "on the control stream", on_control(frame(0x2B)), closes(0x3)),
    Case("unknown-type", "known one on the control stream", on_control(subscribe()), closes(0x3)),
    Case("unknown-type", "second SETUP", on_control(frame(0x2F00)), closes(0x3)),
    Case("unknown-type", "second control stream", setup(), closes(0x3)),
    *(
        Case("unknown-type", f"stream {type_:#x}", uni(vi(type_)), closes(0x3))
        for type_ in (0x0, 0x4, 0x6, 0x40, 0x80, 0x9D, 0x132B3E29, MAX)
    ),
    *(
        Case("unknown-type", f"datagram {type_:#x}", datagram(vi(type_) + b"\0\0\0"), closes(0x3))
        for type_ in (0x40, 0x80, 0x132B3E28, MAX)
    ),
    # Length
    Case("message-length", "octet too many", ask(frame(0x0D, vi(0), NAME, NONE, b"x")), closes(3)),
    Case("message-length", "ends in a field", ask(frame(0x0D, vi(0), NAME[:5])), closes(0x3)),
    Case("message-length", "empty body", ask(frame(0x03)), closes(0x3)),
    Case(
        "message-length",
        "count runs past the end",
        ask(frame(0x03, vi(0), NAME, vi(200), b"\x10\1")),
        closes(0x3),
    ),
    Case("message-length", "FIN within a message", on_request(update()[:3], fin=True), closes(0x3)),
    Case("message-length", "GOAWAY", on_control(frame(0x10, b"\0\0\0")), closes(0x3)),
    Case("message-length", "SETUP", setup(b"\1\x09/a"), closes(0x3), setup=False),
    # Request streams and the control stream
    *(
        Case("first-message", f"{type_:#x}", ask(frame(type_)), closes(0x3))
        for type_ in (0x02, 0x04, 0x05, 0x07, 0x08, 0x0B, 0x0E, 0x0F, 0x10, 0x18, 0x22, 0x2F00)
    ),
    Case("control-closed", "FIN", on_control(b"", fin=True), closes(0x3)),
    Case("control-closed", "reset", reset_control, closes(0x3)),
    Case("control-closed", "STOP_SENDING", stop_control, closes(0x3)),
    Case(
        "control-closed",
        "FIN behind SETUP",
        uni(frame(0x2F00), fin=True),
        closes(0x3),
        setup=False,
    ),
    # Names
    Case("names", "33 fields", ask(track_status(namespace(*[b"a"] * 33) + b"\0")), closes(0x3)),
    Case("names", "empty field", ask(track_status(namespace(b"a", b"") + b"\0")), closes(0x3)),
    Case("names", "namespace", ask(track_status(namespace(bytes(4097)) + b"\0")), closes(0x3)),
    Case(
        "names",
        "namespace and name",
        ask(track_status(namespace(bytes(4000)) + prefixed(bytes(97)))),
        closes(0x3),
    ),
    Case("names", "prefix", ask(frame(0x50, vi(0), namespace(bytes(4097)), NONE)), closes(0x3)),
    Case(
        "names",
        "prefix and suffix",
        answer(watching, REQUEST_OK, frame(0x08, namespace(bytes(4091)))),
        closes(0x3),
        role=CLIENT,
    ),
    # Key-Value-Pairs
    Case(
        "pair-overflow",
        "type",
        setup(vi(MAX - 1), vi(1), vi(2), vi(1)),
        closes(0x3),
        setup=False,
    ),
    Case("pair-overflow", "length", setup(vi(0x7F), vi(65536)), closes(0x3), setup=False),
    Case(
        "pair-overflow",
        "track property",
        answer(subscribed, frame(0x04, vi(9), NONE, vi(0x7D), vi(70000))),
        closes(0x3),
        role=CLIENT,
    ),
    Case("pair-form", "Token in SETUP", setup(vi(3), prefixed(b"\7")), closes(0x6), setup=False),
    Case(
        "pair-form",
        "MOQT_IMPLEMENTATION",
        setup(vi(7), prefixed(b"\xff")),
        closes(0x6),
        setup=False,
    ),
    *(
        Case("pair-form", f"Token {name}", ask(subscribe((TOKEN, prefixed(value)))), closes(0x6))
        for name, value in {
            "of unknown type": b"\4\0",
            "without type": b"",
            "without alias": b"\2",
            "cut in its alias": b"\0\xff\0",
            "without token type": b"\3",
            "with more behind it": b"\2\1\0",
        }.items()
    ),
    Case(
        "pair-form",
        "DEFAULT_PUBLISHER_PRIORITY",
        answer(subscribed, frame(0x04, vi(9), NONE, vi(0x0E), vi(256))),
        closes(0x6),
        role=CLIENT,
    ),
    Case(
        "reason-length",
        "REQUEST_ERROR",
        answer(subscribed, request_error(0, bytes(1025))),
        closes(0x3),
        role=CLIENT,
    ),
    Case(
        "reason-length",
        "PUBLISH_DONE",
        answer(subscribed, frame(0x04, vi(9), NONE), frame(0x0B, b"\0\0", prefixed(bytes(1025)))),
        closes(0x3),
        role=CLIENT,
    ),
    # SETUP and GOAWAY
    Case("setup-server", "PATH", setup(b"\1\2/a"), closes(0x8), role=CLIENT, setup=False),
    Case("setup-server", "AUTHORITY", setup(b"\5\1a"), closes(0x19), role=CLIENT, setup=False),
    Case("setup-token", "DELETE", setup(vi(3), prefixed(b"\0\1")), closes(0x3), setup=False),
    Case("setup-token", "USE_ALIAS", setup(vi(3), prefixed(b"\2\1")), closes(0x3), setup=False),
    Case("goaway", "twice", twice(goaway()), closes(0x3)),
    Case("goaway", "twice on a request", on_request(goaway() * 2), closes(0x3)),
    Case("goaway", "long URI", on_control(goaway(bytes(8193))), closes(0x3), role=CLIENT),
    Case("goaway", "URI for a server", on_control(goaway(b"moqt://a")), closes(0x3)),
    Case("goaway", "URI on a request", on_request(goaway(b"moqt://a")), closes(0x3)),
    Case("goaway", "first on a request stream", ask(goaway()), closes(0x3)),
    # Parameters
    Case("parameter-scope", "unknown", ask(subscribe((0x01, b"\1"))), closes(0x3)),
    Case("parameter-scope", "grease", ask(subscribe((0x9D, b"\0"))), closes(0x3)),
    Case("parameter-scope", "EXPIRES on SUBSCRIBE", ask(subscribe((8, b"\1"))), closes(0x3)),
    Case("parameter-scope", "FORWARD on FETCH", ask(fetch((0x10, b"\1"))), closes(0x3)),
    Case(
        "parameter-scope",
        "type over 64 bits",
        ask(frame(0x03, vi(0), NAME, vi(2), vi(2), vi(1), vi(MAX), vi(0))),
        closes(0x3),
    ),
    Case(
        "parameter-scope",
        "GROUP_ORDER on REQUEST_UPDATE",
        on_request(update((0x22, b"\1"))),
        closes(0x3),
    ),
    Case(
        "parameter-scope",
        "LARGEST_OBJECT on PUBLISH_NAMESPACE_OK",
        answer(announced, frame(0x07, parameters((9, b"\0\0")))),
        closes(0x3),
        role=CLIENT,
    ),
    Case(
        "parameter-scope",
        "in FETCH_OK",
        answer(fetched, frame(0x18, b"\0\0\0", parameters((8, b"\1")))),
        closes(0x3),
        role=CLIENT,
    ),
    Case(
        "parameter-twice",
        "FORWARD",
        ask(subscribe((0x10, b"\1"), (0x10, b"\1"))),
        closes(0x3),
    ),
    Case("parameter-twice", "in a fill", ask(subscribe((FILL, b"\5\2\x0a\1\0\1"))), closes(0x3)),
    *(
        Case("parameter-range", f"{name} {value}", ask(octets), closes(0x3))
        for name, type_, values, write in (
            ("FORWARD", 0x10, (2, 255), subscribe),
            ("GROUP_ORDER", 0x22, (0, 3), subscribe),
            ("GROUP_ORDER of FETCH", 0x22, (0, 3), fetch),
            ("INCLUDE_PROPERTIES", 0x35, (2, 9), subscribe),
        )
        for value in values
        for octets in (write((type_, bytes((value,)))),)
    ),
    # Filters
    Case("location-type", "6", ask(subscribe((LOCATION, b"\6"))), closes(0x3)),
    Case("location-type", "of FETCH", ask(fetch((LOCATION, vi(MAX)))), closes(0x3)),
    Case("location-type", "in a fill", ask(subscribe((FILL, b"\3\1\x21\7"))), closes(0x3)),
    *(
        Case("location-overflow", f"type {value[0]}", ask(subscribe((LOCATION, value))), closes(3))
        for value in (b"\3" + vi(MAX) + b"\0\1", b"\4" + vi(2) + b"\0" + vi(MAX - 1) + b"\0")
    ),
    Case("range-filter", "sum over 64 bits", filters((0x25, b"\0\1" + vi(MAX))), refuses(0x36)),
    Case(
        "range-filter", "same set twice", filters((0x25, b"\0\1"), (0x25, b"\0\2")), refuses(0x36)
    ),
    Case("range-filter", "priority over 255", filters((0x27, b"\0" + vi(256))), refuses(0x36)),
    Case("range-filter", "odd Property Type", filters((0x28, b"\0\3\1\1")), refuses(0x36)),
    Case("range-filter", "too many", filters((0x26, b"\0" + b"\1\1" * 17)), refuses(0x36)),
    Case(
        "range-filter",
        "none are accepted",
        filters((0x26, b"\0\1\1")),
        refuses(0x36),
        settings=SessionSettings(max_filter_ranges=0),
    ),
    Case(
        "range-filter",
        "of a fill",
        ask(subscribe((FILL, prefixed(parameters((0x27, prefixed(b"\0" + vi(256)))))))),
        refuses(0x36),
    ),
    Case(
        "range-filter", "of FETCH", ask(fetch((0x25, prefixed(b"\0\1" + vi(MAX))))), refuses(0x36)
    ),
    *(
        Case(
            "fill-scope",
            f"{type_:#x}",
            ask(subscribe((FILL, prefixed(parameters((type_, value)))))),
            closes(0x3),
        )
        for type_, value in (
            (0x02, b"\1"),
            (0x03, b"\2\3\0"),
            (0x10, b"\1"),
            (0x23, b"\1\0"),
            (0x32, b"\1"),
            (0x35, b"\1"),
            (0x9D, b"\1"),
        )
    ),
    # Tokens
    Case(
        "token-alias",
        "in use",
        ask(subscribe((TOKEN, prefixed(b"\1\1\0a")), (TOKEN, prefixed(b"\1\1\0b")))),
        closes(0x14),
        settings=SessionSettings(max_auth_token_cache_size=100),
    ),
    Case("token-alias", "no cache", ask(subscribe((TOKEN, prefixed(b"\1\1\0a")))), closes(0x13)),
    Case(
        "token-alias",
        "cache is full",
        ask(subscribe((TOKEN, prefixed(b"\1\1\0a")), (TOKEN, prefixed(b"\1\2\0" + bytes(16))))),
        closes(0x13),
        settings=SessionSettings(max_auth_token_cache_size=48),
    ),
    Case("token-alias", "unknown one", ask(subscribe((TOKEN, prefixed(b"\2\1")))), refuses(0x17)),
    # Redirects
    Case(
        "redirect",
        "URI for a server",
        answer(subscribed, redirect(b"moqt://a")),
        closes(0x3),
    ),
    Case(
        "redirect",
        "Track Name for a namespace",
        answer(watching, redirect(name=b"t")),
        closes(0x3),
        role=CLIENT,
    ),
]


@params(CASES)
def test_a_violation_has_its_consequence(case: Case) -> None:
    case.run()
