"""The Compatibility Descriptor: what must agree before a KV cache means the same at both ends.

KVCS takes the descriptor from KVSP. Its members here are those of the scheme "kvcs v1": all of them
always present in the canonical form, no floats, unknown members refused.
"""

from __future__ import annotations

import operator
import reprlib
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, Final, Literal, SupportsIndex

import numpy as np
import rfc8785

from kvcs.errors import UsageError
from kvcs.kv import strict_json
from kvcs.kv.layout import BlockLayout, block_layout, numpy_dtype
from kvcs.kv.strict_json import Json
from kvcs.kv.tracks import Component

MAX_LAYERS: Final = 65_535
MAX_KV_HEADS: Final = 65_535
MAX_HEAD_DIM: Final = 65_535
MAX_BLOCK_TOKENS: Final = 65_536
MAX_TEXT_OCTETS: Final = 1_024
"""Longest model, weights, or extra value, in octets of UTF-8."""
MAX_EXTRA_MEMBERS: Final = 64
MAX_EXTRA_NAME_OCTETS: Final = 64
MAX_EXTRA_INTEGER: Final = 2**53 - 1
"""Largest integer that RFC 8785 writes exactly."""
MAX_DESCRIPTOR_OCTETS: Final = 256 * 1024
"""Longest JSON text of a descriptor that is parsed."""


class Unpinned(Enum):
    """Type of `UNPINNED`."""

    UNPINNED = "UNPINNED"

    def __repr__(self) -> str:
        return "UNPINNED"


class _Omitted(Enum):
    OMITTED = "omitted"


UNPINNED: Final = Unpinned.UNPINNED
"""Says aloud that no fingerprint of the weights is known: caches of two revisions get one name."""

_OMITTED: Final = _Omitted.OMITTED


def _integer(name: str, value: object, low: int, high: int) -> int:
    number = None
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        with suppress(TypeError):  # an array, of more than one integer or of others
            number = operator.index(value)
    if number is None:
        raise UsageError(f"descriptor {name}: expected an integer, got {reprlib.repr(value)}")
    if not low <= number <= high:
        raise UsageError(f"descriptor {name}: expected {low}..{high}, got {reprlib.repr(number)}")
    return number


def _text(name: str, value: object, limit: int = MAX_TEXT_OCTETS, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise UsageError(f"descriptor {name}: expected a string, got {reprlib.repr(value)}")
    try:
        octets = len(value.encode("utf-8"))
    except UnicodeEncodeError:
        raise UsageError(f"descriptor {name}: not valid Unicode text") from None
    if octets > limit or (octets == 0 and not empty):
        least = 0 if empty else 1
        raise UsageError(f"descriptor {name}: expected {least}..{limit} octets, got {octets}")
    return value


def _extra(extra: object) -> Mapping[str, str | int]:
    if not isinstance(extra, Mapping):
        raise UsageError(f"descriptor extra: expected an object, got {reprlib.repr(extra)}")
    if len(extra) > MAX_EXTRA_MEMBERS:
        raise UsageError(f"descriptor extra: {len(extra)} members, limit {MAX_EXTRA_MEMBERS}")
    members: dict[str, str | int] = {}
    for name, value in extra.items():
        _text("extra member name", name, MAX_EXTRA_NAME_OCTETS)
        if isinstance(value, str):
            members[name] = _text(f"extra.{name}", value, empty=True)
        else:
            members[name] = _integer(f"extra.{name}", value, -MAX_EXTRA_INTEGER, MAX_EXTRA_INTEGER)
    return MappingProxyType(dict(sorted(members.items())))


@dataclass(frozen=True, slots=True, init=False, eq=True)
class Descriptor:
    """Compatibility Descriptor of a KV cache.

    Two ends whose descriptors differ in any member never exchange a cache. All arguments are
    keyword-only.

    Args:
        model: name of the model.
        layers: layers of the whole model.
        kv_heads: KV heads per layer, before any tensor-parallel split.
        head_dim: elements per head of K.
        dtype: float16, bfloat16, float32, float8_e4m3fn, float8_e5m2, int8 or uint8.
        block_tokens: tokens per block; only whole blocks are published.
        weights: fingerprint of the weights, or `UNPINNED`; it must be given.
        v_head_dim: elements per head of V; ``head_dim`` by default, 0 for latent attention.
        extra: whatever else changes the tensors' meaning, strings or integers by name.

    Raises:
        UsageError: a member is missing, of the wrong type or out of bounds; the message names it.
    """

    model: str
    """Name of the model; for people, since ``weights`` identifies."""

    weights: str | Unpinned
    """Fingerprint of the weights, for example ``sha256:...`` or a revision; or `UNPINNED`."""

    layers: int
    """Layers of the whole model, also where a publisher covers only some, 1..65535."""

    kv_heads: int
    """KV heads per layer before any tensor-parallel split, 1..65535."""

    head_dim: int
    """Elements per head of K, 1..65535; of the joint tensor for latent attention."""

    v_head_dim: int
    """Elements per head of V, 0..65535; 0 says latent attention: one joint tensor, no V."""

    dtype: str
    """Element type, a name of `kvcs.kv.layout.DTYPES`."""

    block_tokens: int
    """Tokens per block, 1..65536."""

    extra: Mapping[str, str | int]
    """Whatever else changes the tensors' meaning: rope scaling, quantisation, scale mode."""

    def __init__(
        self,
        *,
        model: str,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        block_tokens: int,
        weights: str | Unpinned | Literal[_Omitted.OMITTED] = _OMITTED,
        v_head_dim: int | None = None,
        extra: Mapping[str, str | int] | None = None,
    ) -> None:
        if weights is _OMITTED or weights is None:
            raise UsageError(
                "descriptor weights: missing; give a fingerprint such as 'sha256:...' or a"
                " revision, or say weights=kvcs.UNPINNED to accept caches of any revision"
            )
        head_dim = _integer("head_dim", head_dim, 1, MAX_HEAD_DIM)
        values: dict[str, Any] = {
            "model": _text("model", model),
            "weights": weights if weights is UNPINNED else _text("weights", weights),
            "layers": _integer("layers", layers, 1, MAX_LAYERS),
            "kv_heads": _integer("kv_heads", kv_heads, 1, MAX_KV_HEADS),
            "head_dim": head_dim,
            "v_head_dim": head_dim
            if v_head_dim is None
            else _integer("v_head_dim", v_head_dim, 0, MAX_HEAD_DIM),
            "dtype": dtype,
            "block_tokens": _integer("block_tokens", block_tokens, 1, MAX_BLOCK_TOKENS),
            "extra": _extra({} if extra is None else extra),
        }
        try:
            numpy_dtype(dtype)
        except UsageError as exc:
            raise UsageError(f"descriptor {exc}") from None
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __hash__(self) -> int:
        # Not hash() of the parts: a mapping has none, and that of a string changes per process.
        return zlib.crc32(self.canonical())

    def __reduce__(self) -> tuple[Callable[[bytes], Descriptor], tuple[bytes]]:
        return Descriptor.parse, (self.canonical(),)

    def to_json(self) -> dict[str, Json]:
        """Every member as JSON; ``weights`` is null when `UNPINNED`."""
        return {
            "model": self.model,
            "weights": None if isinstance(self.weights, Unpinned) else self.weights,
            "layers": self.layers,
            "kv_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "v_head_dim": self.v_head_dim,
            "dtype": self.dtype,
            "block_tokens": self.block_tokens,
            "extra": dict(self.extra),
        }

    def canonical(self) -> bytes:
        """RFC 8785 canonical JSON of every member; what identity is computed from."""
        return rfc8785.dumps(self.to_json())

    @classmethod
    def from_json(cls, value: object) -> Descriptor:
        """Build a descriptor from a parsed JSON object.

        ``v_head_dim`` and ``extra`` may be left out; ``weights`` may be null but not left out.

        Raises:
            UsageError: not an object, or a member is unknown, missing or wrong; it is named.
        """
        if not isinstance(value, Mapping):
            raise UsageError(f"descriptor: expected an object, got {strict_json.kind(value)}")
        members = dict(value)
        unknown = [str(name)[:64] for name in members if name not in _MEMBERS]
        if unknown:
            raise UsageError(
                f"descriptor: unknown member {unknown[0]!r}; what changes a tensor's meaning goes"
                " into extra"
            )
        if "weights" in members and members["weights"] is None:
            members["weights"] = UNPINNED
        for name in ("v_head_dim", "extra"):
            if name in members and members[name] is None:
                raise UsageError(f"descriptor {name}: expected a value, got null; or leave it out")
        missing = [name for name in _REQUIRED if name not in members]
        if missing:
            raise UsageError(f"descriptor {missing[0]}: missing")
        return cls(**members)

    @classmethod
    def parse(cls, data: bytes) -> Descriptor:
        """Read a descriptor's JSON text, canonical or not.

        Raises:
            UsageError: not JSON, or as `from_json`.
        """
        try:
            value = strict_json.load(data, max_octets=MAX_DESCRIPTOR_OCTETS)
        except UsageError as exc:
            raise UsageError(f"descriptor: {exc}") from exc
        return cls.from_json(value)

    def differences(self, other: Descriptor) -> list[str]:
        """Say which members differ, for example ``dtype: ours bfloat16, theirs float16``."""
        ours, theirs = self.to_json(), other.to_json()
        texts = []
        for name in _MEMBERS:
            if name != "extra" and ours[name] != theirs[name]:
                absent = "UNPINNED" if name == "weights" else "absent"
                mine, its = (_shown(side[name], absent) for side in (ours, theirs))
                texts.append(f"{name}: ours {mine}, theirs {its}")
        for name in sorted({*self.extra, *other.extra}):
            if self.extra.get(name) != other.extra.get(name):
                mine, its = (_shown(side.extra.get(name), "absent") for side in (self, other))
                texts.append(f"extra.{name}: ours {mine}, theirs {its}")
        return texts

    @property
    def latent(self) -> bool:
        """Whether the model keeps one joint tensor per layer (latent attention, MLA)."""
        return self.v_head_dim == 0

    @property
    def components(self) -> tuple[Component, ...]:
        """Components that can carry the whole cache: k and v, or kv alone for latent attention."""
        return (Component.KV,) if self.latent else (Component.K, Component.V)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Numpy form of ``dtype``."""
        return numpy_dtype(self.dtype)

    def layout(self, component: Component) -> BlockLayout:
        """Sections of one block of ``component``.

        Raises:
            UsageError: a k or v track of a latent-attention model, which has no separate V.
        """
        if self.latent and component is not Component.KV:
            raise UsageError(
                f"component {component}: latent attention (MLA, v_head_dim 0) has one joint"
                " tensor per layer; use component kv"
            )
        return block_layout(
            component,
            self.block_tokens,
            self.kv_heads,
            self.head_dim,
            self.v_head_dim,
            self.dtype,
        )


def _shown(value: Json, absent: str) -> str:
    return absent if value is None else repr(value) if value == "" else str(value)


_MEMBERS: Final = (
    "model",
    "weights",
    "layers",
    "kv_heads",
    "head_dim",
    "v_head_dim",
    "dtype",
    "block_tokens",
    "extra",
)
_REQUIRED: Final = tuple(
    name for name in _MEMBERS if name not in ("weights", "v_head_dim", "extra")
)
