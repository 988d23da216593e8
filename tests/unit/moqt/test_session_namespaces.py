"""PUBLISH_NAMESPACE and SUBSCRIBE_NAMESPACE from both sides (MOQT §4, §9.14 to §9.17)."""

from __future__ import annotations

import pytest

from kvcs.errors import RequestError, UsageError
from kvcs.moqt import messages as m
from kvcs.moqt.errors import NotSupported, RequestCode, SessionCode
from kvcs.moqt.events import (
    Event,
    NamespaceAnnounced,
    NamespaceWithdrawn,
    PublishNamespaceReceived,
    RequestAccepted,
    RequestCancelled,
    RequestRefused,
    RequestUpdateAnswered,
    RequestUpdateReceived,
    SubscribeNamespaceReceived,
)
from kvcs.moqt.names import TrackNamespace
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.properties import KeyValues
from kvcs.moqt.settings import Role
from kvcs.testing.bench import Bench
from kvcs.testing.pair import SessionPair
from kvcs.testing.residue import residue

NONE, BARE = Parameters(), KeyValues()
OK = m.RequestOk(NONE, BARE)
PREFIX = (b"kvcs-1", b"scope")


def accepting(pair: SessionPair) -> None:
    """The server accepts what is announced and asked for."""

    def answer(event: Event) -> None:
        if isinstance(event, (PublishNamespaceReceived, SubscribeNamespaceReceived)):
            pair.server.core.responder.accept(event.request_id)

    pair.server.on_event = answer


def subscribed(prefix: TrackNamespace = PREFIX) -> tuple[SessionPair, int]:
    pair = SessionPair()
    accepting(pair)
    request_id = pair.client.core.requester.subscribe_namespace(prefix)
    pair.run()
    return pair, request_id


def watching(prefix: TrackNamespace = PREFIX, *, accepted: bool = True) -> Bench:
    """A core with SUBSCRIBE_NAMESPACE on stream 0."""
    bench = Bench(Role.CLIENT)
    bench.core.requester.subscribe_namespace(prefix)
    bench.drain()
    if accepted:
        bench.say(0, OK)
    return bench


# Announcing


def test_a_namespace_is_announced_accepted_and_withdrawn() -> None:
    pair = SessionPair()
    accepting(pair)
    request_id = pair.client.core.requester.publish_namespace(PREFIX)
    pair.run()
    (received,) = pair.server.of(PublishNamespaceReceived)
    assert received.track_namespace == PREFIX
    (accepted,) = pair.client.of(RequestAccepted)
    assert accepted == RequestAccepted(request_id, OK)
    pair.client.core.requester.cancel(request_id)
    pair.run()
    assert pair.server.of(RequestCancelled) == [RequestCancelled(request_id, False, 0x1)]
    assert residue(pair.client.core) == residue(pair.server.core) == {}


def test_a_refused_namespace_leaves_nothing() -> None:
    pair = SessionPair()
    request_id = pair.client.core.requester.publish_namespace(PREFIX)
    pair.run()
    error = RequestError("not interested", RequestCode.UNINTERESTED)
    pair.server.core.responder.refuse(request_id, error)
    pair.run()
    (refused,) = pair.client.of(RequestRefused)
    assert refused.error.error_code == RequestCode.UNINTERESTED
    assert residue(pair.client.core) == residue(pair.server.core) == {}


def test_fin_of_its_publisher_withdraws_no_namespace() -> None:
    bench = Bench()
    stream = bench.open(m.PublishNamespace(0, PREFIX, NONE), fin=True)
    bench.core.responder.accept(0)
    bench.drain()
    assert bench.take(RequestCancelled) == []
    assert bench.replies(stream) == [OK]
    assert stream not in bench.fins
    bench.stop(stream)
    assert bench.take(RequestCancelled) == [RequestCancelled(0, False, 0x1)]
    assert residue(bench.core) == {}


@pytest.mark.parametrize("how", ["fin", "reset", "stop"])
def test_an_acceptance_can_be_revoked(how: str) -> None:
    bench = Bench(Role.CLIENT)
    bench.core.requester.publish_namespace(PREFIX)
    bench.drain()
    bench.say(0, OK)
    if how == "fin":
        bench.data(0, b"", fin=True)
    else:
        getattr(bench, how)(0, 0x7)
    code = None if how == "fin" else 0x7
    assert bench.take(RequestCancelled) == [RequestCancelled(0, True, code)]
    if how == "stop":
        bench.reset(0)
    assert residue(bench.core) == {}


def test_the_accepting_side_revokes_with_a_code() -> None:
    pair = SessionPair()
    accepting(pair)
    request_id = pair.client.core.requester.publish_namespace(PREFIX)
    pair.run()
    pair.server.core.responder.revoke(request_id, 0x7)
    pair.run()
    assert pair.client.of(RequestCancelled) == [RequestCancelled(request_id, True, 0x7)]
    assert residue(pair.client.core) == residue(pair.server.core) == {}


# Watching


def test_namespaces_come_and_go_under_their_prefix() -> None:
    pair, request_id = subscribed()
    responder = pair.server.core.responder
    for suffix in ((b"a",), (), (b"a",)):
        responder.namespace(request_id, suffix)
    responder.namespace_done(request_id, (b"never",))
    responder.namespace_done(request_id, (b"a",))
    responder.namespace_done(request_id, (b"a",))
    responder.namespace(request_id, (b"a",))
    pair.run()
    assert pair.client.events[-4:] == [
        NamespaceAnnounced(request_id, (b"a",)),
        NamespaceAnnounced(request_id, ()),
        NamespaceWithdrawn(request_id, (b"a",)),
        NamespaceAnnounced(request_id, (b"a",)),
    ]


def test_nothing_is_named_before_the_reply_or_for_a_request_that_is_over() -> None:
    bench = Bench()
    stream = bench.open(m.SubscribeNamespace(0, PREFIX, NONE))
    bench.core.responder.namespace(0, (b"a",))
    bench.core.responder.namespace(44, (b"a",))
    bench.core.responder.namespace_done(0, (b"a",))
    bench.core.responder.accept(0)
    bench.drain()
    assert bench.replies(stream) == [OK]
    assert residue(bench.core).get("asked_prefixes._namespaces") is None


@pytest.mark.parametrize("first", [m.Namespace((b"a",)), m.PublishDone(0x2, 0, "")])
def test_a_first_reply_that_is_none_closes(first: m.Message) -> None:
    bench = watching(accepted=False)
    bench.say(0, first)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_namespace_done_without_namespace_closes() -> None:
    bench = watching()
    bench.say(0, m.Namespace((b"a",)), m.NamespaceDone((b"a",)))
    assert bench.close is None
    bench.say(0, m.NamespaceDone((b"a",)))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_a_namespace_twice_is_told_once() -> None:
    bench = watching()
    bench.say(0, m.Namespace((b"a",)), m.Namespace((b"a",)))
    assert bench.take(NamespaceAnnounced) == [NamespaceAnnounced(0, (b"a",))]


def test_prefix_and_suffix_together_keep_the_limits_of_names() -> None:
    bench = watching((b"x" * 3000,))
    bench.say(0, m.Namespace((b"y" * 1096,)))
    assert bench.close is None
    bench.say(0, m.Namespace((b"y" * 1097,)))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize("how", ["fin", "reset"])
def test_the_end_of_the_subscription_withdraws_what_it_named(how: str) -> None:
    bench = watching()
    bench.say(0, m.Namespace((b"a",)), m.Namespace((b"b",)), m.NamespaceDone((b"a",)))
    bench.events.clear()
    if how == "fin":
        bench.data(0, b"", fin=True)
    else:
        bench.reset(0)
    assert bench.events == [
        NamespaceWithdrawn(0, (b"b",)),
        RequestCancelled(0, True, None if how == "fin" else 0x1),
    ]
    assert residue(bench.core) == {}


# Overlap


@pytest.mark.parametrize(
    ("first", "second", "overlap"),
    [
        ((b"a",), (b"a",), True),
        ((b"a",), (b"a", b"b"), True),
        ((b"a", b"b"), (b"a",), True),
        ((), (b"z",), True),
        ((b"a", b"b"), (b"a", b"c"), False),
        ((b"a",), (b"ab",), False),
    ],
)
def test_overlapping_prefixes_are_refused(
    first: TrackNamespace, second: TrackNamespace, overlap: bool
) -> None:
    bench = Bench()
    bench.open(m.SubscribeNamespace(0, first, NONE))
    stream = bench.open(m.SubscribeNamespace(2, second, NONE))
    replies = bench.replies(stream)
    if overlap:
        (error,) = replies
        assert isinstance(error, m.RequestError)
        assert error.error_code == RequestCode.PREFIX_OVERLAP
    else:
        assert replies == []
        assert len(bench.take(SubscribeNamespaceReceived)) == 2


def test_prefixes_overlap_only_while_both_are_active_and_of_one_kind() -> None:
    bench = Bench()
    first = bench.open(m.SubscribeNamespace(0, PREFIX, NONE))
    bench.open(m.PublishNamespace(2, PREFIX, NONE))
    assert len(bench.take(PublishNamespaceReceived)) == 1
    bench.reset(first)
    bench.take(SubscribeNamespaceReceived)
    bench.open(m.SubscribeNamespace(4, PREFIX, NONE))
    assert len(bench.take(SubscribeNamespaceReceived)) == 1


def test_our_own_prefixes_do_not_overlap_either() -> None:
    bench = Bench(Role.CLIENT)
    requester = bench.core.requester
    first = requester.subscribe_namespace((b"a",))
    with pytest.raises(UsageError):
        requester.subscribe_namespace((b"a", b"b"))
    requester.subscribe_namespace((b"b",))
    requester.cancel(first)
    requester.subscribe_namespace((b"a", b"b"))


# Updates


def test_an_empty_update_is_answered_and_a_new_prefix_may_be_refused() -> None:
    pair, request_id = subscribed()
    requester = pair.client.core.requester
    requester.update(request_id, NONE)
    pair.run()
    (answered,) = pair.client.of(RequestUpdateAnswered)
    assert answered.reply == OK
    update_id = requester.update(request_id, Parameters.of(track_namespace_prefix=(b"other",)))
    pair.run()
    (asked,) = pair.server.of(RequestUpdateReceived)
    assert (asked.request_id, asked.update_id) == (request_id, update_id)
    pair.server.core.responder.refuse_update(request_id, update_id, NotSupported("no"))
    pair.run()
    (_, refused) = pair.client.of(RequestUpdateAnswered)
    assert isinstance(refused.reply, m.RequestError)
    assert refused.reply.error_code == RequestCode.NOT_SUPPORTED
    assert pair.client.of(RequestCancelled) == [RequestCancelled(request_id, True, None)]
    assert pair.server.of(RequestCancelled) == [RequestCancelled(request_id, False, None)]
    assert residue(pair.client.core) == residue(pair.server.core) == {}


@pytest.mark.parametrize(
    ("message", "parameters"),
    [
        (m.PublishNamespace(0, PREFIX, NONE), Parameters.of(track_namespace_prefix=(b"x",))),
        (m.PublishNamespace(0, PREFIX, NONE), Parameters.of(forward=1)),
        (m.SubscribeNamespace(0, PREFIX, NONE), Parameters.of(subscriber_priority=1)),
    ],
)
def test_an_update_with_parameters_of_another_kind_closes(
    message: m.PublishNamespace, parameters: Parameters
) -> None:
    bench = Bench()
    stream = bench.open(message)
    bench.say(stream, m.RequestUpdate(2, parameters))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


# Replies with more than they may hold


@pytest.mark.parametrize("reply", [m.RequestOk(NONE, KeyValues.of({0x78: 1}))])
def test_track_properties_in_a_reply_to_a_namespace_close(reply: m.RequestOk) -> None:
    bench = watching(accepted=False)
    bench.say(0, reply)
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


def test_expires_is_the_only_parameter_of_the_reply() -> None:
    bench = watching(accepted=False)
    bench.say(0, m.RequestOk(Parameters.of(expires=5), BARE))
    assert bench.close is None
    bench = watching(accepted=False)
    bench.say(0, m.RequestOk(Parameters.of(largest_object=(0, 0)), BARE))
    assert bench.close_code == SessionCode.PROTOCOL_VIOLATION


@pytest.mark.parametrize(
    ("role", "redirect", "closes"),
    [
        (Role.CLIENT, m.Redirect("moqt://other", PREFIX, b""), False),
        (Role.CLIENT, m.Redirect("", PREFIX, b"track"), True),
        (Role.SERVER, m.Redirect("", PREFIX, b""), False),
        (Role.SERVER, m.Redirect("moqt://other", PREFIX, b""), True),
    ],
)
def test_redirects_of_a_namespace_request(role: Role, redirect: m.Redirect, closes: bool) -> None:
    bench = Bench(role)
    bench.core.requester.subscribe_namespace(PREFIX)
    bench.drain()
    stream = 0 if role is Role.CLIENT else 1
    bench.say(stream, m.RequestError(RequestCode.REDIRECT, 0, "", redirect))
    assert bench.close_code == (SessionCode.PROTOCOL_VIOLATION if closes else None)
    assert len(bench.take(RequestRefused)) == (0 if closes else 1)
