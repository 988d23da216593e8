"""Several waits as one, which end in the order in which they began."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any


async def all_of(waits: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Wait for all; where one fails, or the caller is cancelled, none goes on.

    A TaskGroup cancels in the order of a set of tasks, which is another one in each run; what a
    simulation does may depend on its seed alone.
    """
    tasks = [asyncio.get_running_loop().create_task(each) for each in waits]
    try:
        await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
