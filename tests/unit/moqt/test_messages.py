"""Control messages and the checks that need to know their circumstances (MOQT §9)."""

from __future__ import annotations

import pytest

from kvcs.errors import UsageError
from kvcs.moqt import messages as m
from kvcs.moqt.errors import ProtocolViolation, RequestCode
from kvcs.moqt.framing import MessageReader, encode_message
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import Parameters, Scope
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.wire import FIELDS, MESSAGES, TYPE_IDS

DRAFT_TYPES = {
    0x2F00: "Setup",
    0x10: "Goaway",
    0x03: "Subscribe",
    0x04: "SubscribeOk",
    0x1D: "Publish",
    0x0B: "PublishDone",
    0x22: "PublishStateNotify",
    0x16: "Fetch",
    0x18: "FetchOk",
    0x0D: "TrackStatus",
    0x06: "PublishNamespace",
    0x50: "SubscribeNamespace",
    0x08: "Namespace",
    0x0E: "NamespaceDone",
    0x51: "SubscribeTracks",
    0x0F: "PublishSkipped",
    0x02: "RequestUpdate",
    0x07: "RequestOk",
    0x05: "RequestError",
}

REDIRECT = m.Redirect("moqt://other.example/x", (b"live",), b"video")


def test_every_message_of_the_draft_is_declared_and_no_other() -> None:
    assert {type_id: cls.__name__ for type_id, cls in MESSAGES.items()} == DRAFT_TYPES
    assert {cls: type_id for type_id, cls in MESSAGES.items()} == TYPE_IDS
    assert set(FIELDS) == set(m.Message.__args__)


def test_requests_and_what_may_follow_them() -> None:
    assert {MESSAGES[type_id] for type_id in m.REQUESTS} == {
        *(m.Subscribe, m.Publish, m.Fetch, m.TrackStatus),
        *(m.PublishNamespace, m.SubscribeNamespace, m.SubscribeTracks),
    }
    assert m.FOLLOWUPS | m.REQUESTS | {m.SETUP_TYPE} == set(MESSAGES)
    assert not m.FOLLOWUPS & m.REQUESTS


def test_goaway_uri_has_a_limit_and_only_servers_name_one() -> None:
    longest = m.Goaway("u" * m.MAX_GOAWAY_URI_OCTETS, 0)
    assert MessageReader().feed(encode_message(longest)) == [longest]
    with pytest.raises(UsageError):
        encode_message(m.Goaway("u" * (m.MAX_GOAWAY_URI_OCTETS + 1), 0))
    m.check_goaway(longest, from_client=False)
    m.check_goaway(m.Goaway("", 0), from_client=True)
    with pytest.raises(ProtocolViolation):
        m.check_goaway(longest, from_client=True)


@pytest.mark.parametrize(
    "bad",
    [
        m.RequestError(RequestCode.REDIRECT, 0, ""),
        m.RequestError(RequestCode.TIMEOUT, 0, "", REDIRECT),
        m.RequestError(RequestCode.REDIRECT, 0, "", m.Redirect("", (b"a" * 4000,), b"b" * 97)),
    ],
)
def test_a_redirect_goes_with_its_code_and_with_short_names(bad: m.RequestError) -> None:
    with pytest.raises(UsageError):
        encode_message(bad)


def test_a_redirect_is_held_to_its_sender_and_request() -> None:
    to_track = m.RequestError(RequestCode.REDIRECT, 1, "", REDIRECT)
    m.check_request_error(to_track, from_client=False, namespace_request=False)
    with pytest.raises(ProtocolViolation, match="client"):
        m.check_request_error(to_track, from_client=True, namespace_request=False)
    with pytest.raises(ProtocolViolation, match="Track Name"):
        m.check_request_error(to_track, from_client=False, namespace_request=True)
    plain = m.RequestError(RequestCode.TIMEOUT, 0, "")
    m.check_request_error(plain, from_client=True, namespace_request=True)
    here = m.RequestError(RequestCode.REDIRECT, 1, "", m.Redirect("", (b"live",), b""))
    m.check_request_error(here, from_client=True, namespace_request=True)


@pytest.mark.parametrize(("interval", "wait"), [(0, None), (1, 0), (5001, 5000)])
def test_retry_interval_is_the_wait_plus_one(interval: int, wait: int | None) -> None:
    assert m.retry_after_ms(m.RequestError(0x9, interval, "busy")) == wait


def test_an_unknown_error_code_is_no_error() -> None:
    message = m.RequestError(0x7777, 0, "?")
    assert MessageReader().feed(encode_message(message)) == [message]


def test_only_track_status_ok_has_track_properties() -> None:
    ok = m.RequestOk(Parameters.of(largest_object=Location(1, 2)), KeyValues(((0x04, 5),)))
    m.check_request_ok(ok, Scope.TRACK_STATUS_OK)
    with pytest.raises(ProtocolViolation, match="Track Properties"):
        m.check_request_ok(ok, Scope.UPDATE_SUBSCRIPTION_OK)
    with pytest.raises(ProtocolViolation, match="LARGEST_OBJECT"):
        m.check_request_ok(ok, Scope.PUBLISH_OK)


def test_fetch_ok_may_end_where_the_range_starts_and_not_before() -> None:
    ok = m.FetchOk(False, Location(5, 3), Parameters(), KeyValues())
    m.check_fetch_ok(ok, Location(5, 3))
    with pytest.raises(ProtocolViolation):
        m.check_fetch_ok(ok, Location(5, 4))


def test_names_behind_a_prefix_are_limited_too() -> None:
    with pytest.raises(UsageError):
        encode_message(m.PublishSkipped((b"a" * 4000,), b"b" * 97))
