"""What a run left behind: tasks, timers, ports, and state of sessions that are over."""

from __future__ import annotations

import asyncio

from kvcs.testing.network.loop import VirtualLoop
from kvcs.testing.network.network import Network
from kvcs.testing.residue import residue


def leftovers(network: Network) -> list[str]:
    """Say what is left once everything was closed and packets under way have arrived.

    Call it in the run's main task, as the last thing. It looks for tasks beside that one, timers,
    ready callbacks, open ports, sessions that are open or failed by a fault of ours, tables of
    their cores that are not empty, and errors that only the loop's handler saw.

    Returns:
        One line for each; empty when nothing is left.
    """
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualLoop)  # a Network runs on no other
    found = [f"task {task.get_name()}" for task in _tasks(loop)]
    found += [f"timer {handle!r}" for handle in loop.timers()]
    found += [f"port {port}" for port in network.open_ports]
    found += [f"error {_error(context)}" for context in loop.errors]
    for number, session in enumerate(network.sessions):
        name = f"session {number} with {session.peer}"
        if session.is_open:
            found.append(f"{name} is open")
        if session.core.failure is not None:
            found.append(f"{name} failed: {session.core.failure!r}")
        found += [f"{name}: {table} {size}" for table, size in residue(session.core).items()]
    return found


def _tasks(loop: VirtualLoop) -> list[asyncio.Task[object]]:
    current = asyncio.current_task()
    left = [task for task in asyncio.all_tasks(loop) if task is not current]
    return sorted(left, key=lambda task: task.get_name())


def _error(context: dict[str, object]) -> str:
    return f"{context.get('message')}: {context.get('exception')!r}"
