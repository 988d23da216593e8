"""Every group of the bench, in the order in which they run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from kvcs.bench.groups import churn, growth, layers, others, paths, protection, sizes
from kvcs.bench.plan import Group, GroupMaker, Scale
from kvcs.errors import UsageError


@dataclass(frozen=True, slots=True)
class Entry:
    """How a group is made and how long it takes on a quiet machine of two cores."""

    make: GroupMaker
    seconds: int
    short_seconds: int


GROUPS: Final[Mapping[str, Entry]] = MappingProxyType(
    {
        "goodput": Entry(sizes.goodput, 250, 30),
        "objects": Entry(sizes.objects, 50, 10),
        "streams": Entry(paths.streams, 90, 20),
        "consumers": Entry(paths.consumers, 125, 30),
        "datagrams": Entry(paths.datagrams, 160, 50),
        "loops": Entry(paths.loops, 65, 35),
        "loss": Entry(paths.loss, 210, 40),
        "layers": Entry(layers.layers, 50, 30),
        "memory": Entry(growth.memory, 80, 15),
        "growth": Entry(growth.growth, 90, 12),
        "protection": Entry(protection.protection, 250, 35),
        "churn": Entry(churn.churn, 90, 20),
        "aiomoqt": Entry(others.aiomoqt, 150, 30),
        "others": Entry(others.others, 60, 40),
    }
)
"""By name."""

SHORT_DEFAULT: Final = ("goodput",)
"""What a short run measures where no group is named."""


def chosen(names: Sequence[str], scale: Scale) -> list[Group]:
    """The groups of these names, in the order in which they run; all of them where none is named.

    Raises:
        UsageError: there is no group of a name.
    """
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        raise UsageError(f"no group {unknown[0]!r}; there are {', '.join(GROUPS)}")
    wanted = names or (SHORT_DEFAULT if scale.short else tuple(GROUPS))
    return [entry.make(scale) for name, entry in GROUPS.items() if name in wanted]
