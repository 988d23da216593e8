"""Every golden vector, in both directions; what differs is named and explained here."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from kvcs.errors import RequestError, SessionError
from kvcs.moqt import messages as m
from kvcs.moqt.errors import InvalidRange, MalformedTrack, UnsupportedExtension
from kvcs.moqt.filters import RangeFilter, RangeFilters
from kvcs.moqt.framing import MessageReader
from kvcs.moqt.names import GroupOrder, Location
from kvcs.moqt.parameters import Parameters, ParameterType, Scope
from kvcs.moqt.properties import KeyValues, check_setup_options, check_track_properties
from kvcs.moqt.tokens import Token, TokenCache
from kvcs.moqt.wire import NeedMore, Reader
from tests.unit.moqt.old_corpus import show_old_message, without_names
from tests.unit.moqt.rendering import (
    file_names,
    load,
    show_message,
    show_range,
)
from tests.unit.moqt.vector_codec import (
    Stream,
    decode,
    encode,
    expected,
    only_message,
    order_of,
    parse_stream,
    read_value,
    show,
)

NOT_VECTORS = {"moqt20-compatible/dropped": "a list of what the draft-20 corpus has beyond this"}

ENCODED_OTHERWISE = {
    **{
        f"moqt22/varint:non-minimal-{octets}": "a decoder takes long forms, an encoder sends none"
        for octets in (
            "8000 8025 c00000 e000007f f000000000 f80000000001 fc000000000002 fe00000000000003"
            " ff0000000000000000 ff000000000000007f"
        ).split()
    },
    "moqt22/datagram:explicit-zero-object-id": "Object ID 0 is sent as ZERO_OBJECT_ID",
    "moqt22/fetch_stream:group-delta-without-object-delta": "a new Group is sent with an Object ID",
    "moqt22/fetch_stream:unknown-range-first": "the ID behind the marker is sent as prior + 1",
    "moqt22/fill_parameters:tolerated-bare-no-count-location": "sent with Number of Parameters",
    "moqt22/fill_parameters:tolerated-bare-timeout": "sent with Number of Parameters",
    "moqt22/fill_parameters:tolerated-zero-length": "sent with Number of Parameters 0",
    "moqt22/subgroup_stream:non-minimal-type": "the type is sent in its shortest form",
    **{
        f"moqt20-compatible/varint:non-canonical-{form}": "likewise"
        for form in ("2b-zero", "2b-37", "3b-zero", "4b-127", "9b-zero")
    },
    "moqt20-compatible/subgroup_stream:noncanonical-type-flags": "the type is sent short",
    "moqt20-compatible/datagram:datagram-4byte-payload": "Object ID 0 is sent as ZERO_OBJECT_ID",
    "moqt20-compatible/datagram:datagram-default-priority": "likewise",
    "moqt20-compatible/datagram:datagram-with-empty-properties": "likewise",
    "moqt20-compatible/datagram:datagram-with-properties-content": "likewise",
    "moqt20-compatible/datagram:noncanonical-type-flags": "the type is sent in its shortest form",
    "moqt20-compatible/fetch_stream:fetch-stream-new-group-object-id-continues": (
        "a new Group is sent with an Object ID"
    ),
    "moqt20-compatible/messages:setup-non-canonical-path-length": "Lengths are sent short",
    "moqt20-compatible/messages:goaway-non-canonical-uri-length": "Lengths are sent short",
}
"""Legal octets that our encoder, which is minimal, writes in another way."""

CHECKED_BY_SESSION = {
    "moqt22/subscribe:wrong-parity-request-id": "which Request IDs are a peer's and unused",
    "moqt22/namespace:done-without-namespace": "which namespaces were announced",
    "moqt22/publish_state_notify:from-subscriber": "which side of the request sent it",
    "moqt22/subgroup_stream:truncated-header-fin": "FIN while `read_stream_header` needs more",
}
"""Well formed for the codec; only the session knows what makes them wrong."""

DECIDED_OTHERWISE = {
    "moqt22/token:unknown-alias-used": (
        ("request_error", 0x17),
        "the draft refuses the message; only the code's space is open, and both are accepted",
    ),
}
"""Outcomes that the vectors record in one of several allowed ways."""


def vectors(key: str) -> Iterator[Any]:
    for file in file_names("moqt22") + file_names("moqt20-compatible"):
        if file not in NOT_VECTORS:
            for vector in load(file).get(key, ()):
                yield pytest.param(file, vector, id=f"{file}:{vector['name']}")


GOOD = list(vectors("vectors"))
BAD = list(vectors("negative"))


# ------------------------------------------------------------------------------ good vectors


@pytest.mark.parametrize(("file", "vector"), [p for p in GOOD if "/messages:" not in str(p.id)])
def test_decodes_to_its_fields(file: str, vector: Any) -> None:
    fields = vector["fields"]
    value = decode(file, vector)
    if "decodes_to_types" in fields:
        assert [type_ for type_, _ in value.items] == fields["decodes_to_types"]
        return
    shown, wanted = show(file, value), expected(fields)
    if not file.startswith("moqt22"):
        # That corpus gives datagrams both a status and a payload, and Properties no names.
        shown, wanted = (
            without_names({"status": 0, "payload_hex": "", **shown}),
            without_names(wanted),
        )
        shown = {key: shown[key] for key in wanted}
    elif isinstance(value, Stream):
        shown = {key: shown[key] for key in wanted}
    assert shown == wanted


@pytest.mark.parametrize(("file", "vector"), GOOD)
def test_encodes_to_its_octets(file: str, vector: Any) -> None:
    octets = bytes.fromhex(vector["hex"])
    value = decode(file, vector)
    parameter_type = vector["fields"].get("parameter_type")
    if "padding_length" in vector["fields"]:
        length = vector["fields"]["padding_length"]
        stream = getattr(value, "header", None)
        encoded = value.encode(length) if stream is None else stream.encode() + bytes(length)
    else:
        encoded = encode(value, order_of(vector), parameter_type)
    if f"{file}:{vector['name']}" in ENCODED_OTHERWISE:
        assert encoded != octets
        again = {**vector, "hex": encoded.hex()}
        assert decode(file, again) == value
    else:
        assert encoded == octets


def test_stream_and_datagram_types_are_those_of_the_vectors() -> None:
    for file in [*file_names("moqt22"), "moqt20-compatible/datagram"]:
        if file in NOT_VECTORS:
            continue
        for vector in load(file)["vectors"]:
            fields = vector["fields"]
            type_ = fields.get("type", fields.get("stream_type"))
            if type_ is not None:
                assert Reader(bytes.fromhex(vector["hex"])).vi64() == type_, vector["name"]


# ---------------------------------------------------------------- values inside a SUBSCRIBE


@pytest.mark.parametrize(
    ("file", "vector"),
    [p for p in GOOD if any(key.startswith("in_subscribe") for key in p.values[1]["fields"])],
)
def test_values_stand_in_a_whole_message(file: str, vector: Any) -> None:
    fields = vector["fields"]
    frame = bytes.fromhex(fields.get("in_subscribe_hex") or fields["in_subscribe_tracks_hex"])
    message = only_message(frame)
    assert isinstance(message, m.Subscribe | m.SubscribeTracks)
    type_ = ParameterType(fields["parameter_type"])
    assert message.parameters.all(type_) == (decode(file, vector),)


@pytest.mark.parametrize(
    "vector", load("moqt22/location_filter")["vectors"], ids=lambda vector: vector["name"]
)
def test_location_filters_resolve_to_ranges(vector: Any) -> None:
    value = read_value(bytes.fromhex(vector["hex"]), ParameterType.LOCATION_FILTER)
    for case in vector["fields"]["evaluation"]:
        largest = None if case["largest"] is None else Location(**case["largest"])
        for span, wanted in (
            (value.for_subscription(largest), case["subscription"]),
            (value.for_fetch(largest), case["fetch_or_fill"]),
        ):
            if wanted is not None and wanted["end"] is not None:
                # As an end object, null and 2^64-1 mean the same.
                if wanted["end"]["object"] == 2**64 - 1:
                    wanted["end"]["object"] = None
            assert show_range(span) == wanted, case


@pytest.mark.parametrize(
    "case", load("moqt22/range_filter")["evaluation"], ids=lambda case: case["name"]
)
def test_range_filters_choose_objects(case: Any) -> None:
    filters = RangeFilters.of(
        (
            ParameterType(p["type"]),
            RangeFilter(
                p["value"]["set_id"],
                tuple((low, high) for low, high in p["value"]["ranges"]),
                p["value"].get("property_type"),
            ),
        )
        for p in case["params"]
    )
    filters.check(100)
    for thing in case["objects"]:
        properties = KeyValues.of((p["type"], p["value"]) for p in thing["properties"])
        passes = filters.passes(
            0, thing["subgroup_id"], thing["object_id"], thing["priority"], properties
        )
        assert passes is thing["passes"], thing


@pytest.mark.parametrize(("file", "vector"), [p for p in GOOD if "/messages:" in str(p.id)])
def test_messages_of_the_old_corpus_decode(file: str, vector: Any) -> None:
    message = decode(file, vector)
    assert show_message(message)["message_type"] == vector["fields"]["message_type"]
    wanted = vector["fields"]["decoded"]
    assert show_old_message(message) == wanted


# ------------------------------------------------------------------------------- bad vectors


START, LARGEST = Location(0, 0), Location(20, 0)


@dataclass(frozen=True)
class Context:
    """What a negative vector says about its circumstances."""

    from_client: bool = True
    group_order: GroupOrder = GroupOrder.ASCENDING
    ok_scope: Scope | None = None
    namespace_request: bool = False
    fetch_start: Location = START
    largest: Location = LARGEST
    max_filter_ranges: int = 100
    token_cache_size: int = 4096
    registered: tuple[int, ...] = ()
    before: str = ""
    """Octets that came before on the stream."""
    first: Collection[int] | None = None
    """Types of the messages that may begin the stream."""
    later: Collection[int] | None = None


CONTEXTS = {
    "moqt22/setup:path-from-server": Context(from_client=False),
    "moqt22/setup:authority-from-server": Context(from_client=False),
    "moqt22/fetch_ok:end-before-start": Context(fetch_start=Location(5, 0)),
    "moqt22/fetch_stream:descending-underflow": Context(group_order=GroupOrder.DESCENDING),
    "moqt22/fetch:range-filter-without-allowance": Context(max_filter_ranges=0),
    "moqt22/range_filter:too-many-ranges": Context(max_filter_ranges=2),
    "moqt22/request_error:redirect-track-name-on-namespace-request": Context(
        from_client=False, namespace_request=True
    ),
    "moqt22/request_ok:track-properties-in-publish-ok": Context(ok_scope=Scope.PUBLISH_OK),
    "moqt22/request_ok:largest-object-in-publish-ok": Context(ok_scope=Scope.PUBLISH_OK),
    "moqt22/token:duplicate-alias": Context(registered=(5,)),
    "moqt22/token:cache-overflow": Context(token_cache_size=50),
    "moqt22/namespace:namespace-before-ok": Context(first=(0x05, 0x07)),
    "moqt22/unknown_message:goaway-opens-request-stream": Context(first=m.REQUESTS),
    "moqt22/unknown_message:setup-on-request-stream": Context(first=m.REQUESTS),
    "moqt22/unknown_message:second-setup": Context(
        before="af000000", first=(m.SETUP_TYPE,), later=(0x10,)
    ),
}


def receive(message: m.Message, context: Context) -> None:
    """Apply the checks of the codec that need to know the circumstances."""
    match message:
        case m.Setup(options):
            check_setup_options(options, context.from_client)
        case m.Goaway():
            m.check_goaway(message, context.from_client)
        case m.RequestError():
            m.check_request_error(message, context.from_client, context.namespace_request)
        case m.RequestOk() if context.ok_scope is not None:
            m.check_request_ok(message, context.ok_scope)
        case m.FetchOk():
            m.check_fetch_ok(message, context.fetch_start)
    parameters: Parameters = getattr(message, "parameters", Parameters())
    cache = TokenCache(context.token_cache_size)
    cache.process(Token.register(alias, b"old") for alias in context.registered)
    cache.process(parameters.all(ParameterType.AUTHORIZATION_TOKEN))
    RangeFilters.of(parameters).check(context.max_filter_ranges)
    if isinstance(message, m.Fetch):
        location_filter = parameters.get(ParameterType.LOCATION_FILTER)
        if location_filter is not None and location_filter.for_fetch(context.largest) is None:
            raise InvalidRange("nothing in the range")
    check_track_properties(getattr(message, "track_properties", KeyValues()))


def run(file: str, vector: Any) -> None:
    """Give a negative vector to the codec."""
    name = f"{file}:{vector['name']}"
    context = CONTEXTS.get(name, Context())
    kind = file.partition("/")[2]
    octets = bytes.fromhex(vector["hex"])
    if kind in ("subgroup_stream", "fetch_stream", "padding"):
        parse_stream(octets, context.group_order)
    elif kind in ("varint", "datagram"):
        decode(file, vector)
    else:
        reader = MessageReader(context.first, context.later)
        for message in reader.feed(bytes.fromhex(context.before)) + reader.feed(octets):
            receive(message, context)
        assert not reader.pending


def outcome(file: str, vector: Any) -> tuple[str, int | None]:
    """What the codec makes of a negative vector, in the words of the vector files."""
    try:
        run(file, vector)
    except NeedMore:
        return "incomplete", None
    except SessionError as exc:
        return "close_session", exc.code
    except MalformedTrack:
        return "malformed_track", None
    except UnsupportedExtension as exc:
        # What the peer asked with PUBLISH can be refused; a reply can only be given up.
        return (
            ("request_error", exc.code) if file.endswith("/publish") else ("cancel_request", None)
        )
    except RequestError as exc:
        return "request_error", exc.code
    return "none", None


@pytest.mark.parametrize(("file", "vector"), BAD)
def test_bad_octets_have_the_named_consequence(file: str, vector: Any) -> None:
    name = f"{file}:{vector['name']}"
    got = outcome(file, vector)
    if name in CHECKED_BY_SESSION:
        assert got[0] in ("none", "incomplete")
    elif name in DECIDED_OTHERWISE:
        assert got == DECIDED_OTHERWISE[name][0]
    else:
        assert got == (vector["expect"]["action"], vector["expect"].get("code"))


def test_tables_name_vectors_that_exist_and_nothing_twice() -> None:
    good, bad = {p.id for p in GOOD}, {p.id for p in BAD}
    assert len(good) == len(GOOD) and len(bad) == len(BAD)
    assert set(ENCODED_OTHERWISE) <= good
    assert CHECKED_BY_SESSION.keys() | DECIDED_OTHERWISE.keys() | CONTEXTS.keys() <= bad
    assert set(NOT_VECTORS) <= set(file_names("moqt20-compatible"))
