"""A codec that loses bits is taken only by who says so, and the report names it (case 26)."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import kvcs
from kvcs.kv import RAW, BlockLayout, register
from tests.builders import same
from tests.simulation.finding import SETTINGS, Field, play, prefix_of
from tests.unit.kv.toy import toy_publication

TOY = toy_publication((3,))
PREFIX = prefix_of(range(12))


class Squeeze:
    """Lossless: zlib over the raw sections."""

    name, number, lossless, in_place = "squeeze", 0xFF11, True, False

    def data_octets(self, layout: BlockLayout) -> int | None:
        return None

    def encode(self, sections: Sequence[Any], layout: BlockLayout) -> list[bytes]:
        return [zlib.compress(b"".join(RAW.encode(sections, layout)))]

    def decode(self, data: memoryview, layout: BlockLayout) -> Sequence[memoryview]:
        plain = zlib.decompressobj().decompress(data, layout.octets)
        return RAW.decode(memoryview(plain), layout)


class Coarse:
    """Lossy: one octet for each element, in steps of 1/16; gives pieces that are views."""

    name, number, lossless, in_place = "coarse8", 0xFF12, False, False
    error_bound = 1 / 32

    def __init__(self) -> None:
        self._scratch = np.empty(0, np.int8)

    def data_octets(self, layout: BlockLayout) -> int | None:
        return layout.octets // layout.dtype.itemsize

    def encode(self, sections: Sequence[Any], layout: BlockLayout) -> list[memoryview]:
        values = np.concatenate([section.astype(np.float32).ravel() for section in sections])
        if self._scratch.size != values.size:
            self._scratch = np.empty(values.size, np.int8)
        self._scratch[:] = np.clip(np.round(values * 16), -128, 127)
        return [memoryview(self._scratch).cast("B")]  # used again for the next block

    def decode(self, data: memoryview, layout: BlockLayout) -> Sequence[memoryview]:
        values = (np.frombuffer(data, np.int8).astype(np.float32) / 16).astype(layout.dtype)
        return RAW.decode(memoryview(values.view(np.uint8)), layout)


@pytest.fixture(autouse=True)
def _registered(own_codecs: None) -> None:
    register(Squeeze())
    register(Coarse())


def coarse(layer: kvcs.Layer) -> bool:
    """Whether a layer is the producer's, as far as the lossy codec keeps it."""
    for got, meant in ((layer.k, TOY.k[layer.index]), (layer.v, TOY.v[layer.index])):
        kept = np.clip(np.round(meant.astype(np.float32) * 16), -128, 127) / 16
        if not np.array_equal(got.astype(np.float32), kept.astype(got.dtype).astype(np.float32)):
            return False
    return True


@pytest.mark.parametrize(
    ("encodings", "options", "tracks", "lossless"),
    [
        (("raw", "kv.coarse8"), {}, ("k.raw.s0", "v.raw.s0"), True),
        (("raw", "kv.coarse8"), {"lossy": True}, ("k.raw.s0", "v.raw.s0"), True),
        (
            ("raw", "kv.coarse8"),
            {"lossy": True, "codecs": ("coarse8", "raw")},
            ("kv.coarse8.s0",),
            False,
        ),
        (("coarse8", "squeeze"), {"lossy": True}, ("k.squeeze.s0", "v.squeeze.s0"), True),
        (("kv.coarse8", "kv.squeeze"), {}, ("kv.squeeze.s0",), True),
        (("coarse8",), {"lossy": True}, ("k.coarse8.s0", "v.coarse8.s0"), False),
        (("squeeze", "raw"), {"codecs": ("squeeze",)}, ("k.squeeze.s0", "v.squeeze.s0"), True),
        (("kv.raw",), {}, ("kv.raw.s0",), True),
    ],
)
@pytest.mark.parametrize("lend", [False, True])
def test_what_is_taken(
    encodings: tuple[str, ...],
    options: dict[str, Any],
    tracks: tuple[str, ...],
    lossless: bool,
    lend: bool,
) -> None:
    async def scenario(field: Field) -> None:
        async with field.session("producer") as producer, field.session("consumer") as session:
            publisher = kvcs.Publisher(producer)
            async with publisher.publish(PREFIX, encodings=encodings) as publication:
                segment = await publication.segment()
                for layer in range(4):
                    await segment.put(layer, TOY.k[layer], TOY.v[layer], lend=lend)
                opening = kvcs.Subscriber(session, settings=SETTINGS).open(PREFIX, **options)
                async with opening as cache:
                    layers = [layer async for layer in cache]
                report = cache.report
            assert publisher.held_octets == 0
        assert report.tracks == tracks
        assert report.lossless is lossless
        assert report.codecs == (tracks[0].split(".")[1],)
        assert report.error_bounds == ({} if lossless else {"coarse8": 1 / 32})
        assert len(layers) == 4
        assert all(same(layer, TOY) if lossless else coarse(layer) for layer in layers)

    play(scenario)


def test_only_a_lossy_one_is_refused_unless_the_caller_said_so() -> None:
    async def scenario(field: Field) -> None:
        async with (
            field.published(PREFIX, TOY, encodings=("kv.coarse8",)),
            field.session("consumer") as session,
        ):
            subscriber = kvcs.Subscriber(session, settings=SETTINGS)
            with pytest.raises(kvcs.PublicationError, match=r"no lossless.*lossy=True"):
                async with subscriber.open(PREFIX):
                    pass
            with pytest.raises(kvcs.PublicationError, match="no lossless"):
                async with subscriber.open(PREFIX, codecs=("coarse8",)):
                    pass
            with pytest.raises(kvcs.UsageError, match="'zip' is unknown here"):
                async with subscriber.open(PREFIX, codecs=("zip",)):
                    pass
            async with subscriber.open(PREFIX, lossy=True) as cache:
                assert all([coarse(layer) async for layer in cache])

    play(scenario)


def test_a_lossless_publication_is_taken_before_a_newer_lossy_one() -> None:
    async def scenario(field: Field) -> None:
        async with (
            field.published(PREFIX, TOY, host="first") as exact,
            field.published(PREFIX, TOY, host="second", encodings=("kv.coarse8",)) as lossy,
            field.session("consumer") as session,
        ):
            subscriber = kvcs.Subscriber(session, settings=SETTINGS)
            async with subscriber.open(PREFIX) as cache:
                assert cache.namespace == exact.namespace
                assert all([same(layer, TOY) async for layer in cache])
            async with subscriber.open(PREFIX, lossy=True) as cache:
                assert cache.namespace == lossy.namespace
                assert all([coarse(layer) async for layer in cache])

    play(scenario)


@pytest.mark.parametrize(
    ("encodings", "why"),
    [
        ((), "expected a list"),
        ("raw", "expected a list"),
        (("raw", "raw"), "named twice"),
        (("zip",), "unknown here"),
        (("kv.zip",), "unknown here"),
    ],
)
def test_encodings_that_nobody_can_make_are_refused(encodings: Any, why: str) -> None:
    async def scenario(field: Field) -> None:
        async with field.session("producer") as producer:
            with pytest.raises(kvcs.UsageError, match=why):
                async with kvcs.Publisher(producer).publish(PREFIX, encodings=encodings):
                    pass

    play(scenario)


def test_a_codec_that_fails_publishes_nothing() -> None:
    class Broken(Squeeze):
        name, number = "broken", 0xFF13

        def encode(self, sections: Sequence[Any], layout: BlockLayout) -> list[bytes]:
            raise ArithmeticError("codec bug")

    register(Broken())

    async def scenario(field: Field) -> None:
        async with field.session("producer") as producer:
            publisher = kvcs.Publisher(producer)
            with pytest.raises(ArithmeticError):
                async with publisher.publish(PREFIX, encodings=("raw", "broken")) as publication:
                    segment = await publication.segment()
                    try:
                        await segment.put(0, TOY.k[0], TOY.v[0])
                    finally:
                        assert publication.progress.objects == 0
            assert publisher.held_octets == 0

    play(scenario)
