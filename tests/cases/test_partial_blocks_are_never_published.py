"""A block is published whole or not at all: no partial block under the name of a full one."""

from __future__ import annotations

import numpy as np
import pytest

import kvcs
from kvcs.kv import PayloadHeader
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import Parameters
from tests.builders import QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import joined, serving, subscribe

pytestmark = pytest.mark.usefixtures("nothing_left_behind")


async def test_a_block_of_three_of_four_tokens_is_refused(files: PemFiles) -> None:
    toy, prefix = toy_publication(), toy_prefix()
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            segment = await publication.segment()
            for tokens in (11, 3, 8, 13, 0):
                k, v = (np.resize(tensor[0], (tokens, 2, 8)) for tensor in (toy.k, toy.v))
                with pytest.raises(kvcs.UsageError, match=r"expected shape \[12, 2, 8\]"):
                    await segment.put(0, k, v)
            assert publication.progress.objects == 0
            await put(segment, toy)
            async with kvcs.Subscriber(client, settings=QUICK).open(prefix) as cache:
                assert all([same(layer, toy) async for layer in cache])


async def test_a_prompt_that_ends_inside_a_block_leaves_the_rest_out(files: PemFiles) -> None:
    toy = toy_publication((2,))
    ours = toy_prefix(2)
    prefix = kvcs.Prefix(ours.scope, ours.descriptor, range(10))
    assert (prefix.blocks, prefix.tokens_left_over) == (2, 2)
    assert prefix.block_keys == ours.block_keys  # the tokens left over are in no key
    live = Parameters.of(location_filter=LocationFilter.next_object())
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(prefix) as publication:
            tape, _ = await subscribe(client, publication.namespace, b"k.raw.s0", live)
            segment = await publication.segment()
            assert (segment.blocks, segment.tokens) == (2, 8)
            with pytest.raises(kvcs.UsageError, match=r"expected shape \[8, 2, 8\]"):
                await segment.put(0, np.resize(toy.k[0], (10, 2, 8)), toy.v[0])
            await put(segment, toy)
            with pytest.raises(kvcs.UsageError, match="0 of the prefix's 2 blocks are left"):
                await publication.segment()
        await tape.until_done()
    headers = [PayloadHeader.unpack(r.payload) for r in tape.objects if not r.is_status]
    assert {header.token_count for header in headers} == {4}
    assert [(header.layer, header.block, header.token_start) for header in headers] == [
        (layer, block, 4 * block) for layer in range(4) for block in range(2)
    ]
    ends = {read.header.location for read in tape.objects if read.is_status}
    assert ends == {*(Location(layer, 2) for layer in range(4)), Location(4, 0)}
