"""The virtual loop: order, jumps, and what it says when a run can never end."""

from __future__ import annotations

import asyncio
import time

import pytest

from kvcs.testing.network import Network, VirtualLoop, VirtualTimeError, leftovers, run
from kvcs.testing.network import loop as loop_module
from kvcs.testing.network.loop import run_on


def test_an_hour_passes_at_once_and_in_order() -> None:
    seen: list[str] = []

    async def nap(seconds: float, name: str) -> None:
        await asyncio.sleep(seconds)
        seen.append(name)

    async def main() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await asyncio.gather(nap(3000, "last"), nap(1, "first"), nap(20.5, "second"))
        return loop.time() - start

    started = time.monotonic()
    assert run(main()) == 3000
    assert time.monotonic() - started < 30
    assert seen == ["first", "second", "last"]


def test_a_time_out_comes_at_its_time() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(2.5):
                await asyncio.Event().wait()
        return loop.time() - start

    assert run(main()) == 2.5


def test_what_would_run_in_a_thread_runs_in_the_loop() -> None:
    def fail() -> None:
        raise ValueError("inside")

    async def main() -> int:
        with pytest.raises(ValueError, match="inside"):
            await asyncio.to_thread(fail)
        return await asyncio.to_thread(lambda: 6 * 7)

    assert run(main()) == 42


def test_a_wait_that_nothing_ends_is_named() -> None:
    async def forgotten() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        await asyncio.create_task(forgotten(), name="the forgotten one")

    with pytest.raises(VirtualTimeError, match=r"nothing will ever happen.*the forgotten one"):
        run(main())


def test_the_limit_ends_a_run_that_goes_on_and_on() -> None:
    async def main() -> None:
        for _ in range(100):
            await asyncio.sleep(1)

    with pytest.raises(VirtualTimeError, match="not done by 1"):
        run(main(), limit=10)


def test_turning_on_the_spot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "MAX_TURNS", 100)

    async def main() -> None:
        loop = asyncio.get_running_loop()

        def again() -> None:
            loop.call_soon(again)

        again()
        await asyncio.sleep(1)

    with pytest.raises(VirtualTimeError, match=r"time stands still at 0 s: .*again"):
        run(main())


def test_a_task_left_behind_is_cancelled() -> None:
    ended: list[str] = []

    async def left() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            ended.append("cancelled")

    async def main() -> None:
        ended.append("main")
        asyncio.create_task(left(), name="left")  # noqa: RUF006
        await asyncio.sleep(0)

    run(main())
    assert ended == ["main", "cancelled"]


def test_no_socket_of_the_operating_system_is_watched() -> None:
    async def main() -> None:
        with pytest.raises(NotImplementedError):
            asyncio.get_running_loop().add_reader(0, print)

    run(main())


def test_leftovers_names_tasks_timers_ports_and_errors() -> None:
    async def main() -> list[str]:
        network = Network()
        loop = asyncio.get_running_loop()
        assert leftovers(network) == []
        task = asyncio.create_task(asyncio.sleep(50), name="sleeper")
        port = network.host("a").open(0, lambda: None)
        loop.call_exception_handler({"message": "seen by nobody"})
        await asyncio.sleep(0)
        found = leftovers(network)
        port.close()
        task.cancel()
        return found

    found = run(main())
    assert [line.split()[0] for line in found] == ["task", "timer", "port", "error"]
    assert "sleeper" in found[0]
    assert found[2] == "port a:40000"


def test_the_time_out_of_a_test_runner_ends_the_run() -> None:
    class OutOfTime(BaseException):
        """As pytest's `Failed` is one."""

    def interrupted() -> None:
        raise OutOfTime

    async def main() -> None:
        asyncio.get_running_loop().call_later(1, interrupted)
        await asyncio.sleep(2)

    with pytest.raises(OutOfTime):
        run(main())


def test_a_network_needs_virtual_time() -> None:
    async def main() -> None:
        with pytest.raises(ValueError, match="virtual time"):
            Network()

    asyncio.run(main())


def test_a_loop_counts_from_its_start() -> None:
    loop = VirtualLoop()

    async def main() -> float:
        await asyncio.sleep(2)
        return loop.elapsed

    assert run_on(loop, main()) == 2
