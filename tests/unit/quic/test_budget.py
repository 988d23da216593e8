"""The send budget, as plain logic."""

from __future__ import annotations

from kvcs.quic.aioquic_backend.budget import SendBudget

MIB = 1024 * 1024
FLOOR, CEILING = 2 * MIB, 64 * MIB


def limit_after(rate: float, rtt: float, seconds: float) -> int:
    """The limit after acknowledgements at `rate` octets per second every 10 ms."""
    budget = SendBudget(FLOOR, CEILING)
    for tick in range(int(seconds * 100) + 1):
        budget.acknowledged(int(rate / 100), tick / 100, rtt)
    return budget.limit


def test_the_floor_holds_where_the_delay_is_small() -> None:
    assert limit_after(350e6, 0.001, 5.0) == FLOOR
    assert limit_after(0.0, 0.1, 5.0) == FLOOR


def test_the_limit_is_twice_what_the_path_holds() -> None:
    limit = limit_after(100e6, 0.1, 5.0)
    assert 1.99 * 100e6 * 0.1 <= limit <= 2.2 * 100e6 * 0.1


def test_the_ceiling_holds() -> None:
    assert limit_after(5e9, 0.5, 5.0) == CEILING


def test_nothing_is_concluded_before_the_delay_is_known() -> None:
    assert limit_after(1e9, float("inf"), 5.0) == FLOOR


def test_an_idle_sender_falls_back_to_the_floor() -> None:
    budget = SendBudget(FLOOR, CEILING)
    for tick in range(100):
        budget.acknowledged(1_000_000, tick / 100, 0.1)
    assert budget.limit > FLOOR
    for tick in range(100, 2000):
        budget.acknowledged(0, tick / 100, 0.1)
    assert budget.limit == FLOOR
