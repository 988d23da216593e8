"""What a segment's sealer makes of the arrays, whatever their form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvcs.kv import HEADER_OCTETS, DataTrack, Descriptor, ProtectionKey
from kvcs.kv.opening import Opener
from kvcs.kv.payload import BlockEncoder, build_payload
from kvcs.kv.protection import Sealer, immutable_properties
from kvcs.kv.tracks import Component
from kvcs.moqt.names import FullTrackName, Location
from kvcs.publisher.sealing import SegmentSealer
from kvcs.publisher.steps import finished

KEY = ProtectionKey(2**32 + 1, b"\x05" * 32)
SPACE = (b"kvcs-1",)
BLOCKS, PADDING, TOKENS = 3, 2, 4


def descriptor(**changes: Any) -> Descriptor:
    options: dict[str, Any] = {
        "model": "toy", "weights": "none", "layers": 2, "kv_heads": 2, "head_dim": 3,
        "v_head_dim": 5, "dtype": "bfloat16", "block_tokens": TOKENS,
    }  # fmt: skip
    return Descriptor(**(options | changes))


def arrays_of(form: Descriptor, strided: bool) -> list[Any]:
    random = np.random.default_rng(7)
    made = []
    for dim in (form.head_dim, form.v_head_dim):
        shape = (BLOCKS * TOKENS, form.kv_heads, dim * (2 if strided else 1))
        raw = random.integers(1, 256, (*shape, form.numpy_dtype.itemsize), dtype=np.uint8)
        array = raw.view(form.numpy_dtype).reshape(shape)
        made.append(array[:, :, ::2] if strided else array)
    return made


@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("components", [(Component.K, Component.V), (Component.KV,)])
@pytest.mark.parametrize(
    "changes", [{}, {"dtype": "float8_e5m2", "head_dim": 5}, {"v_head_dim": 0}]
)
def test_each_block_is_sealed_as_it_would_be_published(
    components: tuple[Component, ...], changes: dict[str, Any], strided: bool
) -> None:
    form = descriptor(**changes)
    if form.latent:
        components = (Component.KV,)
    names = [DataTrack(component, "raw", 0) for component in components]
    sealer = SegmentSealer(
        names, form, BLOCKS, PADDING, lambda track: Sealer(KEY, FullTrackName(SPACE, track.name))
    )
    arrays = arrays_of(form, strided)
    of = {Component.K: arrays[:1], Component.V: arrays[1:], Component.KV: arrays}
    for layer in range(form.layers):
        rooms = sealer.rooms(memoryview(bytearray(sealer.layer_octets)))
        for name in names:
            sources = of[name.component]
            encoder = BlockEncoder(name, 10, form, 1 << 20)
            made = finished(sealer.seal(name, layer, 7, encoder, sources, rooms[name]))
            assert len(made) == BLOCKS + PADDING
            opener = Opener({KEY.key_id: KEY}, FullTrackName(SPACE, name.name))
            for block, each in enumerate(made):
                here = Location(layer, block)
                rows = slice(block * TOKENS, (block + 1) * TOKENS)
                sections = [np.ascontiguousarray(array[rows]) for array in sources]
                if block >= BLOCKS:
                    sections = [np.zeros_like(array[:TOKENS], order="C") for array in sources]
                plain = build_payload(name, here, sections, first_block=10, descriptor=form)
                (sealed,) = each.parts
                assert (each.octets, each.digest) == (len(sealed), plain.header.data_digest)
                opened = opener.open(here, 7, immutable_properties(KEY.key_id), sealed)
                assert bytes(opened) == b"".join(plain.parts())
                assert len(opened) == HEADER_OCTETS + encoder.layout.octets
