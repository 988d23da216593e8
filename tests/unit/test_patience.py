"""How long an interruption may last, and when one is a new one."""

from __future__ import annotations

import asyncio

import pytest

import kvcs
from kvcs.subscriber.patience import Patience
from tests.virtual import virtual


class Ended:
    """Notes when patience was over, in seconds since it was made."""

    def __init__(self, seconds: float | None) -> None:
        self.loop = asyncio.get_running_loop()
        self.began = self.loop.time()
        self.at: list[float] = []
        self.patience = Patience(seconds, self.note)

    def note(self) -> None:
        self.at.append(round(self.loop.time() - self.began, 3))


@virtual
async def test_it_ends_once_and_only_where_it_is_bounded() -> None:
    bounded, endless = Ended(5.0), Ended(None)
    for each in (bounded, endless):
        each.patience.interrupted(0)
        each.patience.interrupted(0)
    await asyncio.sleep(1000)
    assert (bounded.at, endless.at) == ([5.0], [])


@virtual
async def test_who_comes_back_in_time_is_in_time() -> None:
    it = Ended(5.0)
    it.patience.interrupted(0)
    await asyncio.sleep(4.9)
    it.patience.resumed()
    await asyncio.sleep(100)
    it.patience.interrupted(0)  # long after: another interruption
    await asyncio.sleep(4.9)
    it.patience.stop()
    await asyncio.sleep(100)
    assert it.at == []


@virtual
async def test_taken_up_and_sent_away_again_is_one_interruption() -> None:
    it = Ended(5.0)
    for _ in range(3):
        it.patience.interrupted(7)
        await asyncio.sleep(1.0)
        it.patience.resumed()
        await asyncio.sleep(0.5)
    it.patience.interrupted(7)
    await asyncio.sleep(10)
    assert it.at == [5.0]  # since the first of them


@virtual
async def test_what_has_come_between_makes_it_another_one() -> None:
    it = Ended(5.0)
    for progress in range(10):
        it.patience.interrupted(progress)
        await asyncio.sleep(3.0)
        it.patience.resumed()
        await asyncio.sleep(0.5)
    assert it.at == []


@pytest.mark.parametrize("patience", [0, -1.0, float("nan")])
def test_it_is_more_than_nothing(patience: float) -> None:
    with pytest.raises(kvcs.UsageError, match="patience"):
        kvcs.SubscriberSettings(patience=patience)
