"""Half-open handshakes are shared among the networks that they come from."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvcs.quic.aioquic_backend.handshakes import Handshakes, site


class Connection:
    """Stands for one; only what it is matters."""

    def datagrams_received(self, datagrams: list[bytes], address: object, now: float) -> None:
        """Never called."""

    def batch_ended(self, now: float) -> None:
        """Never called."""

    def wire_unblocked(self) -> None:
        """Never called."""


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.250", True),
        ("10.0.0.1", "10.0.1.1", False),
        ("::ffff:10.0.0.1", "10.0.0.2", True),
        ("2001:db8:1:1::1", "2001:db8:1:ffff::9", True),
        ("2001:db8:1::1", "2001:db8:2::1", False),
        ("fe80::1%eth0", "fe80::2", True),
        ("host-a", "host-b", False),
    ],
)
def test_a_site_is_a_network(one: str, other: str, same: bool) -> None:
    assert (site((one, 1)) == site((other, 2, 0, 0))) is same


def test_one_site_may_have_all_and_loses_down_to_an_equal_share() -> None:
    held = Handshakes()
    flood = [Connection() for _ in range(8)]
    for each in flood:
        held.add(each, ("10.0.0.1", 1))
    assert held.displaced(("10.0.0.99", 1)) is None
    gone = []
    while (victim := held.displaced(("10.0.1.1", 1))) is not None:
        gone.append(victim)
        held.discard(victim)
        held.add(Connection(), ("10.0.1.1", 1))
    assert gone == flood[:4] and len(held) == 8
    assert held.displaced(("10.0.0.99", 1)) is None
    assert held.displaced(("10.0.2.1", 1)) is not None


def test_nothing_is_displaced_where_nothing_is_held() -> None:
    held = Handshakes()
    assert held.displaced(("10.0.0.1", 1)) is None
    only = Connection()
    held.add(only, ("10.0.0.1", 1))
    held.discard(only)
    held.discard(only)
    assert len(held) == 0 and held.displaced(("10.0.0.1", 1)) is None


@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_and_goes_no_site_is_kept_below_its_share(seed: int) -> None:
    chance = random.Random(seed)
    held, slots, alive = Handshakes(), 16, {}
    for _ in range(2000):
        if alive and chance.random() < 0.2:
            gone = chance.choice(list(alive))
            held.discard(gone)
            del alive[gone]
        place = f"10.0.{min(chance.randrange(8), chance.randrange(8))}.1"
        if len(held) >= slots:
            victim = held.displaced((place, 1))
            if victim is None:
                assert Counter(alive.values())[place] + 1 >= max(Counter(alive.values()).values())
                continue
            held.discard(victim)
            del alive[victim]
        new = Connection()
        held.add(new, (place, 1))
        alive[new] = place
        assert len(held) == len(alive) <= slots
