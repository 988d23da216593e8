"""What happened in a run, as one number: equal seeds give equal traces."""

from __future__ import annotations

from hashlib import blake2b

MAX_KEPT = 200_000
"""Lines that a trace keeps for people; the hash goes on."""


class Trace:
    """A hash over everything that was noted, in order.

    Args:
        keep: whether the lines are kept, too, to compare two runs that differ.
    """

    def __init__(self, *, keep: bool = False) -> None:
        self._hash = blake2b(digest_size=16)
        self._keep = keep
        self.events = 0
        """How many were noted."""
        self.lines: list[str] = []
        """What was noted, where it is kept."""

    def note(self, when: float, *facts: object) -> None:
        """Note one event: when it happened, in virtual seconds, and facts with a stable repr."""
        line = f"{when:.9f} {facts!r}"
        self._hash.update(line.encode())
        self.events += 1
        if self._keep and len(self.lines) < MAX_KEPT:
            self.lines.append(line)

    @property
    def digest(self) -> str:
        """The hash so far."""
        return self._hash.hexdigest()
