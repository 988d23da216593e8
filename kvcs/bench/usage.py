"""What a process uses: CPU time of a span, resident memory before it and at its peak."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any


class Meter:
    """Counts from its making on. Its clock is the machine's, so that two processes can compare."""

    def __init__(self) -> None:
        self.at = clock()
        """When it was made, seconds."""
        self._before = resident_octets()
        self._cpu = _cpu_seconds()
        self._read: dict[str, Any] | None = None

    def stop(self) -> None:
        """Take the reading now; what comes after counts for the peak of memory alone."""
        self._read = {"at": clock(), "cpu_seconds": _cpu_seconds() - self._cpu}

    def reading(self) -> dict[str, Any]:
        """Time of the stop, CPU seconds up to it, and resident memory in octets."""
        if self._read is None:
            self.stop()
        assert self._read is not None
        return {
            **self._read,
            "started_at": self.at,
            "peak_octets": peak_octets(),
            "before_octets": self._before,
        }


def clock() -> float:
    """The clock that the processes of one machine share, seconds."""
    return time.monotonic()


def peak_octets() -> int:
    """Largest resident memory so far; the system counts it in KiB but for macOS."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_octets() -> int:
    """Resident memory now; where the system does not tell, the largest so far."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except OSError:
        return peak_octets()
    return pages * os.sysconf("SC_PAGE_SIZE")


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
