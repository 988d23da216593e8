"""Whether a prefix's cache is better fetched or computed anew, and in blocks of which size.

An estimate from a few figures that one knows or measures; nothing is sent. It says what the fetch
waits for: round trips before the first octet, the slowest part of the way for the rest, and the
tokens that fill no block and are computed in any case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from kvcs.errors import UsageError
from kvcs.kv import Descriptor
from kvcs.kv.payload import HEADER_OCTETS

SETUP_ROUND_TRIPS: Final = 4
"""Before the first Object: QUIC's handshake, MOQT's SETUP, discovery, the first request."""

CONNECTED_ROUND_TRIPS: Final = 2
"""The same where a session is open already."""

DEFAULT_ENDPOINT_RATE: Final = 100e6
"""Octets per second that one process takes, verified; `kvcs bench` tells a machine's own."""

DEFAULT_OBJECT_SECONDS: Final = 60e-6
"""Processor time that one Object costs besides its octets, sender and receiver together."""

SMALLEST_OBJECT: Final = 16 * 2**10
LARGEST_OBJECT: Final = 2**20
"""Data of one Object, in octets, that KVCS "Operational Considerations" calls balanced."""

LARGEST_BLOCK: Final = 4096
"""Tokens of the largest block that is proposed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What fetching and recomputing would take."""

    tokens: int
    """Tokens of the prompt."""

    reused_tokens: int
    """Tokens of whole blocks, which a fetch brings; the others are computed in both cases."""

    octets: int
    """Payload octets of the fetch."""

    objects: int
    """Objects of the fetch."""

    fetch_seconds: float
    """From asking to the last layer, and the left-over tokens computed."""

    first_layer_seconds: float
    """From asking to the first verified layer."""

    recompute_seconds: float
    """Prefill of all tokens."""

    fetch: bool
    """Whether fetching is the faster way."""

    limited_by: str
    """What bounds the fetch: "link", "endpoint", "objects" or "round trips"."""

    break_even_rate: float
    """Octets per second of the link from which on fetching is faster; infinite if none is."""

    break_even_tokens: float
    """Tokens of a prompt from which on fetching is faster over this link; infinite if none is."""

    block_tokens: int
    """Block size, in tokens, with the shortest fetch for prompts of this length on average."""

    speedup: float
    """Recompute time over fetch time."""


def plan(
    descriptor: Descriptor,
    tokens: int,
    *,
    link_rate: float,
    prefill_rate: float,
    round_trip: float = 0.001,
    connected: bool = False,
    endpoint_rate: float = DEFAULT_ENDPOINT_RATE,
    object_seconds: float = DEFAULT_OBJECT_SECONDS,
) -> Plan:
    """Say whether to fetch a prefix's cache or to compute it, where the break-even lies, and what
    block size to use (KVCS "Verification and Recovery": recovery is bounded by recomputing).

    Args:
        descriptor: the model's geometry.
        tokens: length of the prompt.
        link_rate: octets per second that the slowest link on the way carries.
        prefill_rate: tokens per second that this machine would prefill.
        round_trip: seconds to the relay and back.
        connected: whether a session to it is open already.
        endpoint_rate: octets per second that the consumer can verify.
        object_seconds: processor time of one Object besides its octets.

    Raises:
        UsageError: a figure is not positive, or the prompt fills no block.
    """
    for name, value in (
        ("link_rate", link_rate),
        ("prefill_rate", prefill_rate),
        ("endpoint_rate", endpoint_rate),
    ):
        if not (value > 0 and math.isfinite(value)):
            raise UsageError(f"{name} must be a positive number, not {value}")
    for name, value in (("round_trip", round_trip), ("object_seconds", object_seconds)):
        if not (value >= 0 and math.isfinite(value)):
            raise UsageError(f"{name} must be a number of seconds from 0 on, not {value}")
    if tokens < descriptor.block_tokens:
        raise UsageError(
            f"{tokens} tokens fill no block of {descriptor.block_tokens}: nothing can be fetched"
        )
    way = _Way(
        link_rate,
        prefill_rate,
        round_trip * (CONNECTED_ROUND_TRIPS if connected else SETUP_ROUND_TRIPS),
        endpoint_rate,
        object_seconds,
    )
    blocks = tokens // descriptor.block_tokens
    octets, objects = _size(descriptor, blocks)
    fetch_seconds = way.fetch(descriptor, tokens)
    recompute_seconds = tokens / prefill_rate
    return Plan(
        tokens=tokens,
        reused_tokens=blocks * descriptor.block_tokens,
        octets=octets,
        objects=objects,
        fetch_seconds=fetch_seconds,
        first_layer_seconds=way.overhead + way.transfer(octets, objects) / descriptor.layers,
        recompute_seconds=recompute_seconds,
        fetch=fetch_seconds < recompute_seconds,
        limited_by=way.limit(octets, objects),
        break_even_rate=_break_even_rate(way, descriptor, tokens),
        break_even_tokens=_break_even_tokens(way, descriptor),
        block_tokens=_best_block(way, descriptor, tokens),
        speedup=recompute_seconds / fetch_seconds,
    )


@dataclass(frozen=True, slots=True)
class _Way:
    """What a fetch goes through."""

    link_rate: float
    prefill_rate: float
    overhead: float
    endpoint_rate: float
    object_seconds: float

    def transfer(self, octets: float, objects: float) -> float:
        """Seconds of the octets alone: the slower of link and endpoint."""
        return max(octets / self.link_rate, self._endpoint(octets, objects))

    def _endpoint(self, octets: float, objects: float) -> float:
        return octets / self.endpoint_rate + objects * self.object_seconds

    def fetch(self, descriptor: Descriptor, tokens: float, left_over: float | None = None) -> float:
        """Seconds of a fetch, with the tokens computed that fill no block."""
        blocks = tokens // descriptor.block_tokens
        if left_over is None:
            left_over = tokens - blocks * descriptor.block_tokens
        octets, objects = _size(descriptor, blocks)
        return self.overhead + self.transfer(octets, objects) + left_over / self.prefill_rate

    def limit(self, octets: float, objects: float) -> str:
        """The largest part of the fetch."""
        parts = {
            "link": octets / self.link_rate,
            "endpoint": octets / self.endpoint_rate,
            "objects": objects * self.object_seconds,
            "round trips": self.overhead,
        }
        return max(parts, key=lambda name: parts[name])


def _size(descriptor: Descriptor, blocks: float) -> tuple[int, int]:
    """Payload octets and Objects of so many blocks in codec raw."""
    objects = int(blocks) * descriptor.layers * len(descriptor.components)
    data = sum(descriptor.layout(part).octets for part in descriptor.components)
    return int(blocks) * descriptor.layers * data + objects * HEADER_OCTETS, objects


def _break_even_rate(way: _Way, descriptor: Descriptor, tokens: int) -> float:
    """The link rate at which a fetch takes as long as recomputing."""
    octets, objects = _size(descriptor, tokens // descriptor.block_tokens)
    left_over = tokens % descriptor.block_tokens
    spare = (tokens - left_over) / way.prefill_rate - way.overhead
    if spare <= octets / way.endpoint_rate + objects * way.object_seconds:
        return math.inf
    return octets / spare


def _break_even_tokens(way: _Way, descriptor: Descriptor) -> float:
    """The shortest prompt of whole blocks that is fetched faster than computed."""
    octets, objects = _size(descriptor, 1)
    gained = descriptor.block_tokens / way.prefill_rate - way.transfer(octets, objects)
    if gained <= 0:
        return math.inf
    return max(1, math.ceil(way.overhead / gained)) * descriptor.block_tokens


def _best_block(way: _Way, descriptor: Descriptor, tokens: int) -> int:
    """The block size with the shortest fetch; a prompt leaves half a block over on average."""
    best, shortest = descriptor.block_tokens, math.inf
    size = 1
    while size <= min(LARGEST_BLOCK, tokens):
        candidate = resized(descriptor, size)
        data = [candidate.layout(part).octets for part in candidate.components]
        if min(data) >= SMALLEST_OBJECT and max(data) <= LARGEST_OBJECT:
            seconds = way.fetch(candidate, tokens, left_over=size / 2)
            if seconds < shortest:
                best, shortest = size, seconds
        size *= 2
    return best


def resized(descriptor: Descriptor, block_tokens: int) -> Descriptor:
    """The same model in blocks of another size; it has another Compatibility ID."""
    return replace(descriptor, block_tokens=block_tokens)
