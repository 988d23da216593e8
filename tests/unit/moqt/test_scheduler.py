"""Which Object goes next (MOQT §5.1)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from kvcs.moqt.names import GroupOrder, TrackNamespace
from kvcs.moqt.sending.scheduler import STALE_ENTRIES, Scheduler, SendKey, send_key

ASCENDING, DESCENDING = GroupOrder.ASCENDING, GroupOrder.DESCENDING


def key(
    subscriber: int = 128,
    publisher: int = 0,
    group: int = 0,
    *,
    order: GroupOrder = ASCENDING,
    fill: bool = False,
    position: int = 0,
    datagram: bool = False,
    differs: bool = False,
) -> SendKey:
    return send_key(
        subscriber_priority=subscriber,
        publisher_priority=publisher,
        group_id=group,
        group_order=order,
        is_fill=fill,
        position=position,
        is_datagram=datagram,
        order_differs=differs,
    )


@dataclass(eq=False)
class Item:
    """A sendable with a fixed list of places in the order."""

    name: str
    keys: list[SendKey]
    family: TrackNamespace = (b"a",)
    queued: int = 0
    sent: list[SendKey] = field(default_factory=list)

    def key(self) -> SendKey:
        return self.keys[0]


def item(name: str, *keys: SendKey, family: bytes = b"a") -> Item:
    return Item(name, list(keys) or [key()], (family,))


def fill(scheduler: Scheduler, *items: Item) -> None:
    for one in items:
        scheduler.ready(one)


def drain(scheduler: Scheduler) -> list[str]:
    """Serve until nothing is ready; an item with more Objects enters again."""
    served: list[str] = []
    while (picked := scheduler.pick()) is not None:
        assert isinstance(picked, Item)
        served.append(picked.name)
        picked.sent.append(picked.keys.pop(0))
        if picked.keys:
            scheduler.ready(picked)
    return served


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(key(1, 255, 9), key(2, 0, 0), id="subscriber priority before all"),
        pytest.param(key(128, 1, 9), key(128, 2, 0), id="then publisher priority"),
        pytest.param(key(group=3), key(group=4), id="then the earlier group"),
        pytest.param(
            key(group=4, order=DESCENDING), key(group=3, order=DESCENDING), id="or the later one"
        ),
        pytest.param(key(group=3, position=9), key(group=4, fill=True), id="group before fill"),
        pytest.param(key(group=3, fill=True), key(group=3), id="fill before live"),
        pytest.param(
            key(group=9), key(group=3, fill=True, differs=True), id="unless its order differs"
        ),
        pytest.param(key(position=1), key(position=2), id="then the lower subgroup"),
        pytest.param(
            key(position=5, datagram=True), key(position=0), id="datagram before subgroup"
        ),
        pytest.param(
            key(position=5, datagram=True),
            key(position=6, datagram=True),
            id="datagrams by object",
        ),
        pytest.param(
            key(position=9, fill=True), key(position=0, datagram=True), id="fill before datagram"
        ),
    ],
)
def test_order_of_the_draft(first: SendKey, second: SendKey) -> None:
    assert first < second
    for names in ((first, second), (second, first)):
        scheduler = Scheduler()
        fill(scheduler, *(item("first" if one is first else "second", one) for one in names))
        assert drain(scheduler) == ["first", "second"]


def test_nothing_is_ready_at_first() -> None:
    assert Scheduler().pick() is None


def test_ready_twice_is_served_once() -> None:
    scheduler = Scheduler()
    one = item("one")
    fill(scheduler, one, one)
    assert len(scheduler) == 1
    assert scheduler.pick() is one
    assert scheduler.pick() is None


def test_families_of_equal_priority_take_turns() -> None:
    scheduler = Scheduler()
    fill(
        scheduler,
        item("a", *[key()] * 4, family=b"a"),
        item("b", *[key()] * 2, family=b"b"),
        item("c", *[key()] * 3, family=b"c"),
    )
    assert drain(scheduler) == ["a", "b", "c", "a", "b", "c", "a", "c", "a"]


def test_a_family_with_many_requests_gets_no_more_turns() -> None:
    scheduler = Scheduler()
    fill(scheduler, *(item(f"a{n}", *[key()] * 2) for n in range(3)))
    fill(scheduler, item("b", *[key()] * 3, family=b"b"))
    assert drain(scheduler)[:6:2] == ["a0", "a1", "a2"]


def test_equal_requests_of_a_family_take_turns() -> None:
    scheduler = Scheduler()
    fill(scheduler, item("x", *[key()] * 3), item("y", *[key()] * 3))
    assert drain(scheduler) == ["x", "y"] * 3


def test_a_family_waits_while_another_has_a_lower_priority_number() -> None:
    scheduler = Scheduler()
    fill(
        scheduler,
        item("late", key(publisher=5), key(publisher=6), family=b"a"),
        item("soon", key(publisher=0), key(publisher=5), key(publisher=7), family=b"b"),
    )
    assert drain(scheduler) == ["soon", "late", "soon", "late", "soon"]


@pytest.mark.parametrize("layers", [4, 127, 128, 129, 300])
def test_k_and_v_of_a_layer_precede_the_next_also_where_layers_share_a_priority(
    layers: int,
) -> None:
    scheduler = Scheduler()
    tracks = {
        name: [item(f"{name}{g}", key(publisher=128 * g // layers, group=g)) for g in range(layers)]
        for name in "kv"
    }
    for name in "vk":  # all of V was queued before all of K
        fill(scheduler, *reversed(tracks[name]))
    served = drain(scheduler)
    pairs = [set(served[at : at + 2]) for at in range(0, len(served), 2)]
    assert pairs == [{f"k{g}", f"v{g}"} for g in range(layers)]


def test_a_blocked_sendable_lets_others_pass_until_it_is_unblocked() -> None:
    scheduler = Scheduler()
    stuck, free = item("stuck", key(publisher=0)), item("free", key(publisher=9))
    fill(scheduler, stuck, free)
    assert scheduler.pick() is stuck
    scheduler.block(stuck)
    scheduler.ready(stuck)  # more Objects of it do not bring it back
    scheduler.unpark()
    assert scheduler.pick() is free
    assert scheduler.pick() is None
    scheduler.unblock()
    assert scheduler.pick() is stuck


def test_a_parked_sendable_lets_others_pass_until_it_is_unparked() -> None:
    scheduler = Scheduler()
    stuck, free = item("stuck", key(publisher=0)), item("free", key(publisher=9))
    fill(scheduler, stuck, free)
    assert scheduler.pick() is stuck
    scheduler.park(stuck)
    assert scheduler.waiting_for_streams == 1
    scheduler.unblock()
    assert scheduler.pick() is free
    scheduler.unpark()
    assert scheduler.waiting_for_streams == 0
    assert scheduler.pick() is stuck


def test_what_comes_back_stands_by_its_key() -> None:
    scheduler = Scheduler()
    late, soon = item("late", key(group=7)), item("soon", key(group=2))
    fill(scheduler, late)
    assert scheduler.pick() is late
    scheduler.park(late)
    fill(scheduler, soon)
    scheduler.unpark()
    assert drain(scheduler) == ["soon", "late"]


def test_a_removed_sendable_is_never_picked() -> None:
    scheduler = Scheduler()
    ready, blocked, parked, last = (item(name) for name in ("r", "b", "p", "last"))
    fill(scheduler, blocked, parked)
    for put in (scheduler.block, scheduler.park):
        picked = scheduler.pick()
        assert picked is not None
        put(picked)
    fill(scheduler, ready, last)
    for one in (ready, blocked, parked):
        scheduler.remove(one)
        scheduler.remove(one)
    assert len(scheduler) == 1
    assert scheduler.waiting_for_streams == 0
    scheduler.unblock()
    scheduler.unpark()
    assert drain(scheduler) == ["last"]


def test_requeue_moves_a_sendable_to_its_new_place() -> None:
    scheduler = Scheduler()
    changed, other = item("changed", key(subscriber=200)), item("other", key(subscriber=100))
    fill(scheduler, changed, other)
    changed.keys[0] = key(subscriber=1)
    scheduler.requeue(changed)
    assert drain(scheduler) == ["changed", "other"]
    scheduler.requeue(changed)  # it has left: nothing happens
    assert scheduler.pick() is None


def test_requeue_of_one_that_waits_for_credit_serves_it_once() -> None:
    scheduler = Scheduler()
    one = item("one")
    fill(scheduler, one)
    assert scheduler.pick() is one
    scheduler.park(one)
    scheduler.requeue(one)
    assert scheduler.waiting_for_streams == 0
    scheduler.unpark()
    assert drain(scheduler) == ["one"]


@pytest.mark.parametrize("how", ["ready", "block", "park"])
def test_sendables_that_left_leave_nothing_behind(how: str) -> None:
    scheduler = Scheduler()
    kept = item("kept", key(publisher=200))
    fill(scheduler, kept)
    for number in range(10 * STALE_ENTRIES):
        one = item(f"{number}", key(publisher=number % 128, group=number), family=b"x")
        scheduler.ready(one)
        if how != "ready":
            assert scheduler.pick() is one
            getattr(scheduler, how)(one)
        scheduler.remove(one)
    held = sum(
        len(heap) for families in scheduler._levels.values() for heap in families.values()
    ) + len(scheduler._blocked + scheduler._parked)
    assert held <= STALE_ENTRIES + 2
    assert drain(scheduler) == ["kept"]


def test_requeues_leave_nothing_behind() -> None:
    scheduler = Scheduler()
    one = item("one")
    fill(scheduler, one)
    for number in range(10 * STALE_ENTRIES):
        one.keys[0] = key(subscriber=number % 256)
        scheduler.requeue(one)
    assert sum(len(h) for families in scheduler._levels.values() for h in families.values()) <= (
        STALE_ENTRIES + 2
    )
    assert drain(scheduler) == ["one"]


def test_what_is_put_back_goes_before_its_equals_and_behind_what_is_first() -> None:
    scheduler = Scheduler()
    one, two, other = item("one"), item("two"), item("other", family=b"b")
    fill(scheduler, one, two, other)
    assert scheduler.pick() is one
    scheduler.put_back(one)
    assert scheduler.pick() is one, "its turn is not over"
    scheduler.put_back(one)
    urgent = item("urgent", key(subscriber=1))
    scheduler.ready(urgent)
    assert [scheduler.pick() for _ in range(4)] == [urgent, one, other, two]
    assert scheduler.pick() is None and len(scheduler) == 0


def test_what_is_put_back_may_be_removed_or_change_its_place() -> None:
    scheduler = Scheduler()
    one, two = item("one"), item("two")
    fill(scheduler, one, two)
    assert scheduler.pick() is one
    scheduler.put_back(one)
    one.keys = [key(group=9)]
    scheduler.requeue(one)
    assert scheduler.pick() is two
    scheduler.put_back(two)
    scheduler.remove(two)
    assert [scheduler.pick(), scheduler.pick()] == [one, None]
