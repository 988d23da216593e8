"""No Object goes ahead of one that the order puts first, whatever happens in between."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvcs.moqt.names import GroupOrder, TrackNamespace
from kvcs.moqt.sending.scheduler import Scheduler, SendKey, send_key


@dataclass(eq=False)
class Item:
    """A sendable whose key a test sets."""

    number: int
    family: TrackNamespace
    place: SendKey
    queued: int = 0

    def key(self) -> SendKey:
        return self.place


keys = st.builds(
    send_key,
    subscriber_priority=st.integers(0, 2),
    publisher_priority=st.integers(0, 2),
    group_id=st.integers(0, 3),
    group_order=st.just(GroupOrder.ASCENDING),
    is_fill=st.booleans(),
    position=st.integers(0, 2),
    is_datagram=st.booleans(),
    order_differs=st.booleans(),
)
families = st.sampled_from([(b"a",), (b"b",), (b"c",)])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("ready"), st.integers(0, 7), keys),
        st.tuples(st.just("requeue"), st.integers(0, 7), keys),
        st.tuples(st.sampled_from(["remove"]), st.integers(0, 7), st.none()),
        st.tuples(
            st.sampled_from(["pick", "put_back", "block", "park", "unblock", "unpark"]),
            st.just(0),
            st.none(),
        ),
    ),
    max_size=60,
)


@given(st.lists(families, min_size=8, max_size=8), steps)
def test_every_pick_is_the_first_of_its_family_in_the_best_level(
    of_item: list[TrackNamespace], what: list[tuple[str, int, SendKey | None]]
) -> None:
    scheduler = Scheduler()
    items = [Item(n, family, send_key_of_nothing()) for n, family in enumerate(of_item)]
    ready: set[Item] = set()
    aside: dict[str, set[Item]] = {"block": set(), "park": set()}
    for step, number, place in what:
        item = items[number]
        waiting = ready | aside["block"] | aside["park"]
        if step == "ready" and place is not None:
            if item not in waiting:
                item.place = place
                ready.add(item)
            scheduler.ready(item)
        elif step == "requeue" and place is not None:
            if item in waiting:
                item.place = place
                for group in aside.values():
                    group.discard(item)
                ready.add(item)
            scheduler.requeue(item)
        elif step == "remove":
            scheduler.remove(item)
            for group in (ready, *aside.values()):
                group.discard(item)
        elif step in ("unblock", "unpark"):
            ready |= aside[step[2:]]
            aside[step[2:]].clear()
            getattr(scheduler, step)()
        elif step in ("pick", "put_back", "block", "park"):
            picked = scheduler.pick()
            assert (picked is None) == (not ready)
            if picked is not None:
                assert isinstance(picked, Item)
                check_first(picked, ready)
                if step == "put_back":
                    scheduler.put_back(picked)
                    assert scheduler.pick() is picked, "its turn goes on"
                    scheduler.put_back(picked)
                    continue
                ready.remove(picked)
                if step != "pick":
                    aside[step].add(picked)
                    getattr(scheduler, step)(picked)
        assert len(scheduler) == len(ready) + len(aside["block"]) + len(aside["park"])
        assert scheduler.waiting_for_streams == len(aside["park"])


def send_key_of_nothing() -> SendKey:
    return SendKey(255, 255, False, 0, False, False, 0)


def check_first(picked: Item, ready: set[Item]) -> None:
    """Hold one pick against everything that was ready."""
    level = picked.key()[:2]
    assert level == min(item.key()[:2] for item in ready)
    rivals = [item for item in ready if item.family == picked.family and item.key()[:2] == level]
    assert picked.key() == min(item.key() for item in rivals)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=4))
def test_families_of_one_level_are_never_more_than_one_turn_apart(amounts: list[int]) -> None:
    scheduler = Scheduler()
    left: Counter[TrackNamespace] = Counter()
    for index, amount in enumerate(amounts):
        family = (bytes([index]),)
        left[family] = amount
        scheduler.ready(Item(index, family, send_key_of_nothing()))
    served: Counter[TrackNamespace] = Counter()
    while (picked := scheduler.pick()) is not None:
        served[picked.family] += 1
        left[picked.family] -= 1
        if left[picked.family]:
            scheduler.ready(picked)
        waiting = [served[family] for family, count in left.items() if count]
        if waiting:
            assert max(served.values()) - min(waiting) <= 1
    assert not +left
