"""A pass that goes from one lost layer to the next: who waits for whom, and what ends it."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvcs.integrations import model_passes
from kvcs.integrations.handover import HandOverEnded
from kvcs.integrations.model_passes import RunningPass, Turns


class Model:
    """Has six layers, and notes how it went."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at
        self.reached: list[int] = []
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def run(self, turns: Turns) -> None:
        """One pass."""
        try:
            for layer in range(6):
                if layer == self.fails_at:
                    raise ArithmeticError("a test")
                self.reached.append(layer)
                turns.reached(layer, f"k{layer}", f"v{layer}")
        except BaseException as exc:
            self.error = exc
            raise
        finally:
            self.ended.set()

    async def has_ended(self) -> None:
        """Wait for the end of the pass."""
        assert await asyncio.to_thread(self.ended.wait, 60)


async def test_it_stands_at_each_layer_that_was_asked_for() -> None:
    model = Model()
    running = RunningPass(0, 8, model.run)
    assert await running.layer(1) == ("k1", "v1")
    assert model.reached == [0, 1] and not model.ended.is_set()
    assert running.covers(2, 0, 8) and running.covers(5, 3, 4)
    assert not running.covers(1, 0, 8) and not running.covers(2, 0, 9)
    assert await running.layer(4) == ("k4", "v4")
    assert model.reached == [0, 1, 2, 3, 4]
    running.stop()
    await model.has_ended()
    assert isinstance(model.error, HandOverEnded)
    assert await running.layer(5) is None


async def test_one_that_nobody_asks_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_passes, "KEEP_SECONDS", 0.0)
    model = Model()
    running = RunningPass(0, 8, model.run)
    assert await running.layer(5) == ("k5", "v5")
    await model.has_ended()
    assert isinstance(model.error, HandOverEnded)
    assert await running.layer(6) is None


async def test_who_waits_gets_what_the_model_raises() -> None:
    model = Model(fails_at=3)
    running = RunningPass(0, 8, model.run)
    with pytest.raises(ArithmeticError):
        await running.layer(4)
    assert await running.layer(5) is None


async def test_a_layer_that_the_model_does_not_have_is_told() -> None:
    model = Model()
    running = RunningPass(0, 8, model.run)
    with pytest.raises(HandOverEnded, match="the pass has ended"):
        await running.layer(9)


async def test_a_cancelled_wait_ends_it() -> None:
    stands, go = threading.Event(), threading.Event()
    model = Model()

    def run(turns: Turns) -> None:
        stands.set()
        assert go.wait(60)
        model.run(turns)

    running = RunningPass(0, 8, run)
    waiting = asyncio.create_task(running.layer(4))
    assert await asyncio.to_thread(stands.wait, 60)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    await model.has_ended()
    assert model.reached == [0]
    assert isinstance(model.error, HandOverEnded)
