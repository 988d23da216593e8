"""Announcements and who hears of them (MOQT §4, §7; KVCS "Namespace")."""

from __future__ import annotations

import pytest

from kvcs.access.permits import Place
from kvcs.access.policy import check_announcement, check_interest
from kvcs.errors import RequestError
from kvcs.moqt import events
from kvcs.moqt.errors import RequestCode
from kvcs.relay.namespaces import NamespaceTable, Notice
from kvcs.relay.settings import RelayLimits
from kvcs.testing.actors import PUBLICATION, SCOPE, ConsumerPeer, PublisherPeer
from kvcs.testing.hub import Hub

A, B, C = Place(1, 0), Place(2, 0), Place(3, 0)


def test_table_tells_the_first_announcement_and_the_last_withdrawal_only() -> None:
    table = NamespaceTable()
    assert table.subscribe(A, (b"x",)) == []
    assert table.announce(B, (b"x", b"y")) == [Notice(A, (b"y",))]
    assert table.announce(C, (b"x", b"y")) == []
    assert table.withdraw(B) == ((b"x", b"y"), [])
    assert table.withdraw(C) == ((b"x", b"y"), [Notice(A, (b"y",))])
    assert table.withdraw(C) == (None, [])
    assert len(table) == 0


def test_table_matches_whole_fields_and_every_length_of_prefix() -> None:
    table = NamespaceTable()
    for place, namespace in ((A, (b"foo",)), (B, (b"foo", b"bar")), (C, (b"foobar",))):
        table.announce(place, namespace)
    assert list(table.under((b"foo",))) == [(b"foo",), (b"foo", b"bar")]
    assert list(table.under(())) == [(b"foo",), (b"foo", b"bar"), (b"foobar",)]
    assert table.publishers((b"foo", b"bar", b"baz")) == [2, 1]  # the most specific first
    assert table.publishers((b"foobar", b"bar")) == [3]
    assert table.publishers((b"fo",)) == []


def test_who_asks_late_hears_of_namespaces_in_the_order_in_which_they_came() -> None:
    table = NamespaceTable()
    names = [(b"x", name) for name in (b"c", b"a", b"b")]
    for number, namespace in enumerate(names):
        table.announce(Place(number, 0), namespace)
    assert table.subscribe(Place(9, 0), (b"x",)) == [(b"c",), (b"a",), (b"b",)]
    # One that was gone is the newest when it comes back.
    table.withdraw(Place(0, 0))
    table.announce(Place(0, 2), names[0])
    assert table.subscribe(Place(9, 2), (b"x",)) == [(b"a",), (b"b",), (b"c",)]


def test_table_forgets_who_unsubscribed() -> None:
    table = NamespaceTable()
    table.subscribe(A, ())
    table.unsubscribe(A)
    table.unsubscribe(A)
    assert table.announce(B, (b"x",)) == []


@pytest.mark.parametrize(
    "namespace",
    [
        (),
        (b"kvcs-1",),
        SCOPE,
        PUBLICATION[:4],
        (*PUBLICATION, b"more"),
        (*PUBLICATION[:4], b"short"),
        (b"kvcs-1", b"S" * 15, *PUBLICATION[2:]),
    ],
)
def test_a_kvcs_announcement_is_one_whole_publication(namespace: tuple[bytes, ...]) -> None:
    with pytest.raises(RequestError) as refused:
        check_announcement(namespace)
    assert refused.value.code == RequestCode.UNAUTHORIZED


def test_other_namespaces_are_free() -> None:
    check_announcement(PUBLICATION)
    check_announcement((b"moq-test", b"interop", b"x"))
    check_interest(SCOPE)
    check_interest((b"moq-test",))


@pytest.mark.parametrize("prefix", [(), (b"kvcs-1",)])
def test_a_prefix_over_several_scopes_is_refused(prefix: tuple[bytes, ...]) -> None:
    hub = Hub()
    consumer = ConsumerPeer(hub)
    request_id = consumer.end.core.requester.subscribe_namespace(prefix)
    hub.run()
    assert consumer.refused(request_id) == RequestCode.UNAUTHORIZED


def announced(peer: ConsumerPeer, request_id: int) -> list[tuple[bytes, ...]]:
    found = peer.end.of(events.NamespaceAnnounced)
    return [event.suffix for event in found if event.request_id == request_id]


def withdrawn(peer: ConsumerPeer, request_id: int) -> list[tuple[bytes, ...]]:
    found = peer.end.of(events.NamespaceWithdrawn)
    return [event.suffix for event in found if event.request_id == request_id]


def test_known_and_later_namespaces_are_told_after_the_ok() -> None:
    hub = Hub()
    first = PublisherPeer(hub)
    consumer = ConsumerPeer(hub)
    request_id = consumer.end.core.requester.subscribe_namespace(SCOPE)
    hub.run()
    assert consumer.accepted(request_id) is not None
    assert announced(consumer, request_id) == [PUBLICATION[2:]]
    other = (*PUBLICATION[:4], b"Q" * 16)
    second = PublisherPeer(hub, other)
    assert announced(consumer, request_id) == [PUBLICATION[2:], other[2:]]
    first.withdraw()
    assert withdrawn(consumer, request_id) == [PUBLICATION[2:]]
    second.vanish()
    assert withdrawn(consumer, request_id) == [PUBLICATION[2:], other[2:]]


def test_own_namespaces_are_echoed_and_the_exact_namespace_has_an_empty_suffix() -> None:
    hub = Hub()
    peer = PublisherPeer(hub)
    request_id = peer.end.core.requester.subscribe_namespace(PUBLICATION)
    hub.run()
    found = peer.end.of(events.NamespaceAnnounced)
    assert [(event.request_id, event.suffix) for event in found] == [(request_id, ())]


def test_a_cancelled_namespace_subscription_hears_nothing_more() -> None:
    hub = Hub()
    consumer = ConsumerPeer(hub)
    request_id = consumer.end.core.requester.subscribe_namespace(SCOPE)
    hub.run()
    consumer.cancel(request_id)
    PublisherPeer(hub)
    assert announced(consumer, request_id) == []
    assert not consumer.end.core.closed


def test_an_announcement_of_another_shape_is_refused_and_leaves_no_trace() -> None:
    hub = Hub()
    publisher = PublisherPeer(hub, SCOPE)
    refused = publisher.end.of(events.RequestRefused)
    assert [event.error.error_code for event in refused] == [RequestCode.UNAUTHORIZED]
    assert hub.core.snapshot().namespaces == 0


def test_namespaces_of_a_session_are_limited() -> None:
    hub = Hub(RelayLimits(max_namespaces_per_session=2))
    publisher = PublisherPeer(hub, None)
    for number in range(3):
        publisher.announce((b"free", b"%d" % number))
    refused = publisher.end.of(events.RequestRefused)
    assert [event.error.error_code for event in refused] == [RequestCode.EXCESSIVE_LOAD]
    publisher.withdraw()
    publisher.announce((b"free", b"again"))
    assert hub.core.snapshot().namespaces == 1


def test_a_prefix_with_too_many_matches_is_refused() -> None:
    hub = Hub(RelayLimits(max_namespace_matches=1))
    publisher = PublisherPeer(hub, (b"free", b"1"))
    publisher.announce((b"free", b"2"))
    consumer = ConsumerPeer(hub)
    request_id = consumer.end.core.requester.subscribe_namespace((b"free",))
    hub.run()
    assert consumer.refused(request_id) == RequestCode.NAMESPACE_TOO_LARGE
