"""What is measured: cases that take turns, and the ratios between them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvcs.bench.figures import Ratio, Sample
from kvcs.bench.transfer import Certificates, Transfer

ROUNDS: Final = 3
"""How often each case runs where nothing else is said."""

SHORT_ROUNDS: Final = 2


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    short: bool = False
    """Less data and fewer sizes: to see that it works, and for a rough answer."""

    rounds: int | None = None
    """How often each case runs; None lets each group say."""

    compute_ms: float = 20.0
    """What computing each layer takes, where a group looks at overlap."""

    publications: int = 2000
    """How many go through a relay, where a group looks at what it keeps of them."""

    def pick(self, full: int, short: int) -> int:
        """One of two numbers."""
        return short if self.short else full


@dataclass(frozen=True, slots=True)
class Case:
    """One thing that is measured once a round."""

    name: str
    """Its name in the result, unlike that of any other case of any group."""

    label: str
    """What it is, for people."""

    run: Callable[[Certificates, int], Awaitable[Sample]]
    """Measures it once; the number decides what is left to chance."""

    @classmethod
    def of(cls, name: str, label: str, transfer: Transfer) -> Case:
        """A transfer as a case."""
        return cls(name, label, transfer.run)


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that are measured together and may be compared with each other."""

    name: str
    about: str
    """What it measures, in one line."""

    cases: Sequence[Case]
    ratios: Sequence[Ratio]

    rounds: int = ROUNDS
    """How often each case runs when not short."""

    def rounds_of(self, scale: Scale) -> int:
        """How often each case runs."""
        if scale.rounds is not None:
            return scale.rounds
        return min(self.rounds, SHORT_ROUNDS) if scale.short else self.rounds


GroupMaker = Callable[[Scale], Group]


def in_turn(items: Sequence[Any], round_number: int) -> list[Any]:
    """The items of a round, which begins with another one each time."""
    start = round_number % len(items)
    return [*items[start:], *items[:start]]
