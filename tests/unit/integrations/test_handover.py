"""Layers between a model's thread and the event loop: order, bounds, errors, and ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvcs.errors import StoreFull, UsageError
from kvcs.integrations import handover
from kvcs.integrations.handover import HandOverEnded, Inlet, LoopBridge, Outlet, run_in_thread
from kvcs.kv import LayerTensors

SOON = 20.0
"""Seconds after which a test that waits has failed."""


class Shelf:
    """Takes layers when it is told to."""

    def __init__(self, *, opened: bool = True, error: Exception | None = None) -> None:
        self.open = asyncio.Event()
        if opened:
            self.open.set()
        self.error = error
        self.begun: list[int] = []
        self.taken: list[int] = []

    async def put(self, layer: int, k: object, v: object = None, *, lend: bool = False) -> None:
        self.begun.append(layer)
        await self.open.wait()
        if self.error is not None:
            raise self.error
        self.taken.append(layer)


class Source:
    """Gives layers when they are made."""

    def __init__(self) -> None:
        self.made: dict[int, asyncio.Future[LayerTensors]] = {}

    def future(self, index: int) -> asyncio.Future[LayerTensors]:
        return self.made.setdefault(index, asyncio.get_running_loop().create_future())

    async def layer(self, index: int) -> LayerTensors:
        return await self.future(index)


def tensors(index: int) -> LayerTensors:
    return LayerTensors(index, np.zeros((2, 1, 1)), np.zeros((2, 1, 1)))


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something is so."""
    async with asyncio.timeout(SOON):
        while not condition():  # noqa: ASYNC110 - another thread makes it so
            await asyncio.sleep(0)


async def test_layers_go_out_in_order() -> None:
    outlet, shelf = Outlet(), Shelf()
    await run_in_thread(
        lambda: [outlet.hand_over(shelf, layer, "k", "v") for layer in range(50)], outlet.stop
    )
    await outlet.finish()
    assert shelf.taken == list(range(50))


async def test_the_model_waits_when_it_is_too_far_ahead() -> None:
    outlet, shelf = Outlet(ahead=3), Shelf(opened=False)
    handed: list[int] = []

    def model() -> None:
        for layer in range(6):
            outlet.hand_over(shelf, layer, "k", "v")
            handed.append(layer)

    running = asyncio.ensure_future(run_in_thread(model, outlet.stop))
    await until(lambda: len(handed) == 3 and len(shelf.begun) == 3)
    for _ in range(20):  # the thread gets every chance to go on
        await asyncio.to_thread(threading.Event().wait, 0.001)
    assert handed == [0, 1, 2]
    shelf.open.set()
    await running
    await outlet.finish()
    assert shelf.taken == list(range(6))


def test_a_model_has_to_be_ahead() -> None:
    with pytest.raises(UsageError, match="at least 1, not 0"):
        Outlet(ahead=0)


async def test_a_failed_put_reaches_the_model_at_the_next_layer() -> None:
    outlet, shelf = Outlet(ahead=1), Shelf(error=StoreFull("no room"))
    reached: list[int] = []

    def model() -> None:
        for layer in range(6):
            outlet.hand_over(shelf, layer, "k", "v")
            reached.append(layer)

    with pytest.raises(StoreFull, match="no room"):
        await run_in_thread(model, outlet.stop)
    assert reached == [0]


async def test_a_failed_put_of_the_last_layer_reaches_finish() -> None:
    outlet, shelf = Outlet(), Shelf(error=StoreFull("no room"))
    await run_in_thread(lambda: outlet.hand_over(shelf, 0, "k", "v"), outlet.stop)
    with pytest.raises(StoreFull, match="no room"):
        await outlet.finish()


async def test_the_models_own_error_comes_out() -> None:
    def model() -> None:
        raise ArithmeticError("out of numbers")

    with pytest.raises(ArithmeticError, match="out of numbers"):
        await run_in_thread(model, Outlet().stop)


async def test_the_loops_own_thread_is_refused() -> None:
    outlet, inlet, shelf = Outlet(), Inlet(Source()), Shelf()
    with pytest.raises(UsageError, match=r"asyncio\.to_thread"):
        outlet.hand_over(shelf, 0, "k", "v")
    with pytest.raises(UsageError, match=r"asyncio\.to_thread"):
        inlet.layer(0)
    assert shelf.begun == []


async def test_a_layer_is_waited_for() -> None:
    source = Source()
    inlet = Inlet(source)
    running = asyncio.ensure_future(
        run_in_thread(lambda: [inlet.layer(index).index for index in range(3)], inlet.stop)
    )
    for index in range(3):
        await until(lambda index=index: index in source.made)  # type: ignore[misc]
        source.future(index).set_result(tensors(index))
    assert await running == [0, 1, 2]


@pytest.mark.parametrize("error", [StoreFull("gone"), TimeoutError("the layer's own")])
async def test_what_a_layer_raises_comes_out(error: Exception) -> None:
    source = Source()
    inlet = Inlet(source)
    running = asyncio.ensure_future(run_in_thread(lambda: inlet.layer(0), inlet.stop))
    await until(lambda: 0 in source.made)
    source.future(0).set_exception(error)
    with pytest.raises(type(error), match=str(error)):
        await running


async def test_a_wait_outlasts_its_looks_at_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "LIVENESS_SECONDS", 0.001)
    source = Source()
    inlet = Inlet(source)
    running = asyncio.ensure_future(run_in_thread(lambda: inlet.layer(0).index, inlet.stop))
    await until(lambda: 0 in source.made)
    await asyncio.to_thread(threading.Event().wait, 0.02)
    source.future(0).set_result(tensors(0))
    assert await running == 0


async def test_cancelling_ends_the_models_wait_and_its_thread() -> None:
    source = Source()
    inlet = Inlet(source)
    ended = threading.Event()

    def model() -> None:
        try:
            inlet.layer(0)
        finally:
            ended.set()

    running = asyncio.ensure_future(run_in_thread(model, inlet.stop))
    await until(lambda: 0 in source.made)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert ended.is_set()
    await until(source.future(0).cancelled)


async def test_after_stop_nothing_is_handed_over_or_waited_for() -> None:
    outlet, inlet, shelf = Outlet(), Inlet(Source()), Shelf()
    outlet.stop("enough")
    inlet.stop("enough")
    for call in (lambda: outlet.hand_over(shelf, 0, "k", "v"), lambda: inlet.layer(0)):
        with pytest.raises(HandOverEnded, match="enough"):
            await run_in_thread(call, outlet.stop)
    assert shelf.begun == []


def _left_behind(start: Callable[[LoopBridge], Any]) -> LoopBridge:
    """A bridge whose loop has ended."""

    async def body() -> LoopBridge:
        bridge = LoopBridge()
        start(bridge)
        return bridge

    return asyncio.run(body())


def _elsewhere(call: Callable[[], Any]) -> Any:
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(call).result(SOON)


async def _nothing() -> None:
    return None


def test_a_loop_that_has_ended_is_noticed_at_the_start() -> None:
    bridge = _left_behind(lambda bridge: None)
    with pytest.raises(HandOverEnded, match="loop has ended"):
        _elsewhere(lambda: bridge.start(_nothing()))


def test_a_loop_that_stands_still_ends_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "LIVENESS_SECONDS", 0.01)
    loop = asyncio.new_event_loop()

    async def body() -> LoopBridge:
        return LoopBridge()

    async def never() -> None:
        await asyncio.Event().wait()

    bridge = loop.run_until_complete(body())
    try:
        with pytest.raises(HandOverEnded, match="loop has ended"):
            _elsewhere(lambda: bridge.wait(bridge.start(never())))
        bridge.stop("the test is over")
        loop.run_until_complete(_settled())
    finally:
        loop.close()


async def _settled() -> None:
    """Let tasks that were cancelled end."""
    await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()})


async def test_the_thread_sees_the_callers_context() -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("the caller's")
    assert await run_in_thread(variable.get, Outlet().stop) == "the caller's"
