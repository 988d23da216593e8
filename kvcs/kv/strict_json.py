"""JSON as identity and manifests need it: no floats, no duplicate members, bounded.

RFC 8259 lets a parser choose what a duplicate member or `16` against `16.0` means. Two readers that
choose differently would compute two names for one thing, so both are refused here.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, NoReturn, TypeAlias

from kvcs.errors import UsageError

Json: TypeAlias = "bool | int | str | list[Json] | dict[str, Json] | None"
"""What `load` returns: JSON without floats."""

Octets: TypeAlias = bytes | bytearray | memoryview
"""Anything that holds unsigned bytes."""

MAX_CONTAINERS = 2**20
"""Arrays and objects in one document; an empty one costs 20 times its two octets in memory."""


def _refuse_float(text: str) -> NoReturn:
    raise UsageError(f"number {text[:32]} is not an integer; floats are not allowed here")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        names = Counter(name for name, _ in pairs)
        [(twice, _)] = names.most_common(1)
        raise UsageError(f"member {twice[:64]!r} appears twice in one object")
    return members


def load(
    data: Octets,
    *,
    max_octets: int,
    max_containers: int = MAX_CONTAINERS,
    max_values: int | None = None,
) -> Json:
    """Parse one JSON text in UTF-8.

    Args:
        data: the whole text.
        max_octets: longest text that is parsed at all.
        max_containers: most arrays and objects, counted by their opening brackets, also those
            that stand inside strings.
        max_values: most values, counted by their commas likewise; no limit where None.

    Raises:
        UsageError: too long, too many containers or values, too deeply nested, not UTF-8, not JSON,
            a float, or a duplicate member.
    """
    view = memoryview(data)
    if view.nbytes > max_octets:
        raise UsageError(f"JSON text of {view.nbytes} octets, limit {max_octets}")
    octets = bytes(data)
    containers = octets.count(b"[") + octets.count(b"{")
    if containers > max_containers:
        raise UsageError(f"JSON text with {containers} arrays and objects, limit {max_containers}")
    if max_values is not None and (values := octets.count(b",") + 1) > max_values:
        raise UsageError(f"JSON text with {values} values, limit {max_values}")
    try:
        value: Json = json.loads(
            octets.decode("utf-8"),
            object_pairs_hook=_refuse_duplicates,
            parse_float=_refuse_float,
            parse_constant=_refuse_float,
        )
    except UsageError:
        raise
    except UnicodeDecodeError as exc:
        raise UsageError(f"JSON text is not UTF-8 at octet {exc.start}") from exc
    except RecursionError:
        # The chain of a thousand frames helps nobody.
        raise UsageError("JSON text is nested too deeply") from None
    except ValueError as exc:
        raise UsageError(f"not JSON: {exc}") from exc
    return value


_KINDS = {
    type(None): "null",
    bool: "boolean",
    int: "integer",
    float: "float",
    str: "string",
    list: "array",
    dict: "object",
}


def kind(value: object) -> str:
    """Name of a JSON value's kind, for messages that must not repeat a peer's whole value."""
    return _KINDS.get(type(value), type(value).__name__)
