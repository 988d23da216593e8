"""A folder that one process has for itself: relays would remove each other's files of a cache."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from kvcs.errors import FileError


class ClaimedFolder:
    """Keeps a folder from other processes until it is released, or the process is gone.

    Args:
        folder: which; it has to be there.

    Raises:
        FileError: another process has it, or another `ClaimedFolder` of this one.
        OSError: it cannot be opened.
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = None
        if sys.platform == "win32":  # folders cannot be opened there
            return
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            os.close(descriptor)
            raise FileError(
                f"{folder}: another relay keeps its cache there; give each one a folder of its own"
            ) from exc
        except OSError:
            pass  # a file system without locks: nothing can be told there
        self._descriptor = descriptor

    def release(self) -> None:
        """Let others have it; does nothing twice."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)
