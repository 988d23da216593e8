"""Scenarios that go wrong in the ways that a scenario can, to see what the harness makes of it."""

import os
import socket
import sys
import threading

from tests.interop.processes import Process, ProcessSpec
from tests.interop.scenario import Stage


async def surroundings(stage: Stage) -> dict[str, object]:
    """Tell what a scenario can see around it."""
    return {
        "interfaces": [name for _, name in socket.if_nameindex()],
        "pid": os.getpid(),
        "folder": str(stage.directory),
    }


async def refused(stage: Stage, words: str) -> None:
    """Fail while a program is running that has said ``words``."""
    await _program(stage, words)
    raise RuntimeError("the scenario went wrong")


async def silent(stage: Stage, words: str) -> None:
    """Wait for what a program never says."""
    program = await _program(stage, words)
    await program.wait_ready("no such line", seconds=0.2)


async def ended(stage: Stage) -> None:
    """Wait for what a program cannot say any more."""
    spec = ProcessSpec("short", (sys.executable, "-c", "print('last words')"))
    program = await stage.start(spec)
    await program.wait_ready("no such line")


async def endless(stage: Stage, words: str) -> None:
    """Never end, but let the driver see its deadline."""
    program = await _program(stage, words)
    await program.collect(seconds=3600.0)


async def stuck(stage: Stage, words: str) -> None:
    """Never end, and block the driver too."""
    await _program(stage, words)
    threading.Event().wait()


async def _program(stage: Stage, words: str) -> Process:
    # It ends only when it is made to, even if the driver has ended.
    code = "import signal, sys; print(sys.argv[1], flush=True); signal.pause()"
    spec = ProcessSpec("waiting program", (sys.executable, "-c", code, words))
    return await stage.start(spec, ready=words)
