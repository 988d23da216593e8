"""Run one scenario, a coroutine that starts both implementations, where it can do no harm.

A scenario is ``async def name(stage: Stage, **arguments) -> Any``, at the top level of a module
under ``tests.interop``. ``run_scenario`` starts a driver process for it in a network namespace
of its own; there the scenario starts programs through its ``Stage`` and uses our Python API
directly, all over 127.0.0.1, and returns what it saw as plain JSON values. The test then
asserts on that, outside::

    async def one_relay(stage: Stage) -> dict[str, object]:
        url = await stage.peer_relay()
        client = await stage.start(peer.interop_client(url))
        ...
        return {"passed": True}

    def test_one_relay() -> None:
        assert run_scenario(one_relay) == {"passed": True}
"""

import asyncio
import contextlib
import importlib
import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Self

from tests.certificates import PemFiles, write_pem
from tests.interop import isolation, peer
from tests.interop.processes import Process, ProcessSpec

PROJECT_ROOT = Path(__file__).resolve().parents[2]
FIRST_PORT = 4433
"""The namespace is new, so every port is free; they are given out from here."""

BOUND_SECONDS = 60.0

DRIVER_GRACE_SECONDS = 90.0
"""For the driver to start, and to end everything and report after its own deadline."""


class ScenarioFailed(AssertionError):
    """A scenario raised, or ran out of time; the text has what each of its programs said."""


class Stage:
    """What one scenario works with: a folder, certificates, ports and programs.

    Leaving it ends every program it started, the last one first.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        """Empty at first, removed at the end."""

        self.pem: PemFiles = write_pem(directory / "pem")
        """A CA, and a certificate of it for localhost and 127.0.0.1, with its key."""

        self._ports = iter(range(FIRST_PORT, 65536))
        self._processes: list[Process] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            await process.stop()

    def port(self) -> int:
        """Return a port that nothing else uses."""
        return next(self._ports)

    async def start(self, spec: ProcessSpec, *, ready: str | None = None) -> Process:
        """Start a program and, if ``ready`` is given, wait until it prints a match of it.

        Raises:
            ProcessFailed: If it cannot be started, ends, or says nothing in time.
        """
        process = await Process.start(spec)
        self._processes.append(process)
        if ready is not None:
            await process.wait_ready(ready)
        return process

    async def bound(self, port: int) -> None:
        """Wait until a server of the peer, which says that it listens, really does."""
        await asyncio.to_thread(isolation.wait_bound, port, BOUND_SECONDS)

    async def peer_relay(
        self, *, upstream: str | None = None, options: tuple[str, ...] = ()
    ) -> str:
        """Start the peer's relay and return its URL."""
        port = self.port()
        spec = peer.relay(
            port=port,
            certificate=self.pem.cert,
            key=self.pem.key,
            upstream=upstream,
            options=options,
            name=f"peer relay {port}",
        )
        await self.start(spec, ready=peer.RELAY_READY)
        await self.bound(port)
        return f"moqt://127.0.0.1:{port}"

    def transcript(self) -> str:
        """Return the end of what every program said."""
        return "\n".join(process.tail() for process in self._processes)


Scenario = Callable[..., Awaitable[Any]]


def run_scenario(scenario: Scenario, *, seconds: float = 240.0, **arguments: object) -> Any:
    """Run ``scenario`` in a network namespace of its own and return what it returned.

    Args:
        scenario: A coroutine function at the top level of a module; it is called by its name.
        seconds: Deadline of the scenario.
        arguments: Passed on to it; JSON values.

    Raises:
        ScenarioFailed: If it raised or ran out of time.
        IsolationUnavailable: If this machine gives no namespace.
    """
    command = [
        *isolation.prefix(),
        *(sys.executable, "-m", "tests.interop.scenario"),
        *(scenario.__module__, scenario.__qualname__, str(seconds), json.dumps(arguments)),
    ]
    try:
        driver = subprocess.run(
            command,
            cwd=PROJECT_ROOT,
            capture_output=True,
            text=True,
            timeout=seconds + DRIVER_GRACE_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ScenarioFailed(f"the driver did not end: {error}\n{error.stderr!r}") from error
    lines = driver.stdout.splitlines()
    try:
        verdict = json.loads(lines[-1])
    except (IndexError, ValueError):
        raise ScenarioFailed(
            f"the driver gave no verdict (exit {driver.returncode})\n{driver.stderr}"
        ) from None
    if "error" in verdict:
        raise ScenarioFailed(verdict["error"])
    return verdict["value"]


async def _perform(scenario: Scenario, seconds: float, arguments: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="kvcs-interop-") as directory:
        async with Stage(Path(directory)) as stage:
            try:
                async with asyncio.timeout(seconds):
                    return {"value": await scenario(stage, **arguments)}
            except Exception:
                # Whatever went wrong is the verdict, with all that helps to see why.
                return {"error": f"{traceback.format_exc()}\n{stage.transcript()}"}


def main(argv: list[str]) -> int:
    """Run the scenario named on the command line and print its verdict as one line of JSON."""
    module, name, seconds, arguments = argv
    isolation.bring_up_loopback()
    scenario: Scenario = getattr(importlib.import_module(module), name)
    # Only the verdict goes to the standard output that the test reads.
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as report:
        with contextlib.redirect_stdout(sys.stderr):
            verdict = asyncio.run(_perform(scenario, float(seconds), json.loads(arguments)))
        report.write(json.dumps(verdict) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
