"""An asyncio event loop on virtual time: it never sleeps, it jumps to the next timer."""

from __future__ import annotations

import asyncio
import gc
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, Final, TypeVar, TypeVarTuple

T = TypeVar("T")
Args = TypeVarTuple("Args")

START: Final = 1000.0
"""Where the clock begins, seconds: not at 0, so that "not set" and "now" are never equal."""

DEFAULT_LIMIT: Final = 3600.0
"""Virtual seconds that one run may take."""

MAX_TURNS: Final = 200_000
"""Turns of the loop at one instant; more mean that two callbacks wake each other for ever."""

CLEAN_UP: Final = 60.0
"""Virtual seconds that cancelled tasks have to end after a run that failed."""

MAX_NAMED: Final = 10
"""Tasks that a message names."""


class VirtualTimeError(Exception):
    """A run cannot go on: nothing will ever happen, time is up, or it turns on the spot."""


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order of their virtual times; equal times in the order of their calls.

    `time` is virtual: it moves only when nothing is left to do at this instant, and then straight
    to the next timer. What would run in a thread runs at once, in the loop. There is no way to
    watch a file or socket of the operating system, only sockets of a virtual network.

    Args:
        limit: virtual seconds after which the run fails: an `await` that never ends shows up here.

    Attributes:
        errors: contexts that the loop's exception handler was called with, such as exceptions of
            tasks that nobody awaited.
    """

    _scheduled: list[asyncio.TimerHandle]  # of BaseEventLoop: a heap by time
    _ready: deque[asyncio.Handle]  # of BaseEventLoop: what runs in this turn

    def __init__(self, limit: float = DEFAULT_LIMIT) -> None:
        super().__init__()
        self._now = START
        self._until = START + limit
        self._turns = 0
        self._clock_resolution = 1e-9
        self._selector = _Jump(self)
        self._resolve: Callable[[str], str | None] = lambda host: None
        self._readers: dict[object, Callable[[], object]] = {}
        self.errors: list[dict[str, Any]] = []

    def time(self) -> float:
        """Now, in virtual seconds."""
        return self._now

    @property
    def elapsed(self) -> float:
        """Virtual seconds since the loop was made."""
        return self._now - START

    def allow(self, seconds: float) -> None:
        """Set the limit anew: so many virtual seconds from now."""
        self._until = self._now + seconds

    def resolve_with(self, resolve: Callable[[str], str | None]) -> None:
        """Look names up with ``resolve``, which gives an address literal or None."""
        self._resolve = resolve

    def timers(self) -> list[asyncio.TimerHandle]:
        """Timers that are set, the next one first."""
        live = [handle for handle in self._scheduled if not handle.cancelled()]
        return sorted(live, key=asyncio.TimerHandle.when)

    # Sockets of a virtual network

    def add_reader(self, fd: Any, callback: Callable[[*Args], Any], *args: *Args) -> None:
        """Watch a socket of a virtual network.

        Raises:
            NotImplementedError: it is one of the operating system.
        """
        if isinstance(fd, int) or not hasattr(fd, "virtual_host"):
            raise NotImplementedError("virtual time knows no sockets of the operating system")
        self._readers[fd] = lambda: callback(*args)

    def remove_reader(self, fd: Any) -> bool:
        """Watch a socket no longer."""
        return self._readers.pop(fd, None) is not None

    def add_writer(self, fd: Any, callback: Callable[[*Args], Any], *args: *Args) -> None:
        """A socket of a virtual network can always be written."""

    def remove_writer(self, fd: Any) -> bool:
        """As `add_writer`."""
        return False

    def readable(self, fd: object) -> None:
        """A socket has something to read: call whoever watches it."""
        reader = self._readers.get(fd)
        if reader is not None:
            reader()

    # What asyncio calls

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Args], T], *args: *Args
    ) -> asyncio.Future[T]:
        """Run ``func`` at once: threads would make each run another one."""
        future: asyncio.Future[T] = self.create_future()
        try:
            result = func(*args)
        except Exception as exc:
            future.set_exception(exc)
        else:
            future.set_result(result)
        return future

    async def getaddrinfo(
        self,
        host: bytes | str | None,
        port: bytes | str | int | None,
        *,
        family: int = 0,
        type: int = 0,
        proto: int = 0,
        flags: int = 0,
    ) -> list[Any]:
        """Look a name up in the virtual network; nobody else is asked.

        Raises:
            socket.gaierror: no host of the network has that name.
        """
        address = self._resolve(host.decode() if isinstance(host, bytes) else host or "")
        if address is None:
            raise socket.gaierror(socket.EAI_NONAME, f"no host {host!r} in the virtual network")
        return [(socket.AF_INET, socket.SOCK_DGRAM, 17, "", (address, port))]

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep the context in `errors`, and handle it as asyncio does.

        What is no `Exception`, such as the time-out of a test runner, ends the run instead: it
        says nothing about the code that happened to run.
        """
        exception = context.get("exception")
        if isinstance(exception, BaseException) and not isinstance(
            exception, Exception | asyncio.CancelledError | GeneratorExit
        ):
            raise exception
        self.errors.append(context)
        super().call_exception_handler(context)

    def _process_events(self, event_list: list[Any]) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """No selector sleeps that would have to be woken."""

    def _jump(self, timeout: float | None) -> None:
        """Move time to the next timer when nothing is ready."""
        if timeout == 0:
            self._turns += 1
            if self._turns > MAX_TURNS:
                turning = "; ".join(repr(handle) for handle in list(self._ready)[:MAX_NAMED])
                raise VirtualTimeError(
                    f"time stands still at {self.elapsed:g} s: {turning}; {self._tasks()}"
                )
            return
        if timeout is None or not self._scheduled:
            raise VirtualTimeError(f"nothing will ever happen: {self._tasks()}")
        self._turns = 0
        when = max(self._now, self._scheduled[0].when())
        if when > self._until:
            raise VirtualTimeError(f"not done by {self.elapsed:g} s: {self._tasks()}")
        self._now = when

    def _tasks(self) -> str:
        """What waits, for a message."""
        tasks = sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
        names = [f"{task.get_name()} in {_place(task)}" for task in tasks[:MAX_NAMED]]
        more = f" and {len(tasks) - MAX_NAMED} more" if len(tasks) > MAX_NAMED else ""
        return "; ".join(names) + more


class _Jump:
    """Stands where a loop has its selector: it waits by moving the clock."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout: float | None) -> list[Any]:
        """Wait."""
        self._loop._jump(timeout)
        return []


def _place(task: asyncio.Task[Any]) -> str:
    """Where a task waits: file and line of its innermost frames, outermost first."""
    frames: list[str] = []
    waits: Any = task.get_coro()
    while waits is not None and len(frames) < MAX_NAMED:
        frame = getattr(waits, "cr_frame", None) or getattr(waits, "ag_frame", None)
        if frame is not None:
            name = frame.f_code.co_filename.rpartition("/")[2]
            frames.append(f"{name}:{frame.f_lineno}")
        waits = getattr(waits, "cr_await", None) or getattr(waits, "ag_await", None)
    return " > ".join(frames) or "?"


def run(main: Coroutine[Any, Any, T], *, limit: float = DEFAULT_LIMIT) -> T:
    """Run a coroutine on virtual time, to its end.

    Args:
        main: what to run. Tasks that it leaves behind are cancelled.
        limit: virtual seconds that it may take.

    Raises:
        VirtualTimeError: it never ends: nothing will ever happen, the limit has passed, or
            callbacks wake each other at one instant for ever. The message names what waits.
    """
    return run_on(VirtualLoop(limit), main)


def run_on(loop: VirtualLoop, main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on a loop made for it, and close the loop; see `run`."""
    try:
        return loop.run_until_complete(main)
    finally:
        try:
            _clean_up(loop)
        finally:
            loop.close()


def _clean_up(loop: VirtualLoop) -> None:
    tasks = asyncio.all_tasks(loop)
    loop._turns = 0
    loop.allow(CLEAN_UP)
    for task in tasks:
        task.cancel()
    try:
        if tasks:
            loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    except VirtualTimeError:
        # What still waits ends here, where it cannot meddle with another loop.
        del tasks
        loop._ready.clear()
        gc.collect()
