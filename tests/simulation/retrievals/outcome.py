"""What came of one run."""

from __future__ import annotations

from dataclasses import dataclass, field

from tests.simulation.retrievals.plan import RetrievalsPlan


@dataclass
class Outcome:
    """What came of one run."""

    plan: RetrievalsPlan
    ends: dict[str, str] = field(default_factory=dict)
    """How each retrieval ended."""

    problems: list[str] = field(default_factory=list)
    """Rules that were broken, other than those below."""

    wrong: list[str] = field(default_factory=list)
    """Tensors that were handed out, or counted as there, and are nobody's."""

    hangs: list[str] = field(default_factory=list)
    """Waits that did not end by their deadline."""

    false: list[str] = field(default_factory=list)
    """Caches that were called complete, and are not."""

    lists: list[str] = field(default_factory=list)
    """Lists of what is missing that are not exact."""

    objects: int = 0
    digest: str = ""
    events: int = 0

    @property
    def broken(self) -> list[str]:
        """Everything that must never be."""
        return [*self.wrong, *self.hangs, *self.false, *self.lists, *self.problems]
