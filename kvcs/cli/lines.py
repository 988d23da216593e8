"""``--lines``: what happens, one JSON object a line, for programs that watch a command."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


class Lines:
    """Prints events as JSON lines on standard output, if asked to.

    Args:
        wanted: whether lines are printed at all.
    """

    def __init__(self, wanted: bool) -> None:
        self.wanted = wanted

    def event(self, name: str, **facts: Any) -> None:
        """Print one event with the time in seconds since 1970."""
        if self.wanted:
            line = json.dumps({"event": name, "at": time.time(), **facts})
            # In one piece: events may come from several threads.
            sys.stdout.write(f"{line}\n")
            sys.stdout.flush()
