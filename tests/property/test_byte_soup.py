"""Any octets from a peer: our own errors only, nothing left over, memory within bounds.

The targets are those of `scripts/fuzz`; here each runs over its corpus and over what hypothesis
makes of it.
"""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.soup import Soup
from tests.fuzz.targets import TARGETS, corpus

CORPORA = {name: corpus(name) for name in TARGETS}


def mutated(octets: bytes, seed: int) -> bytes:
    """A few changes: octets replaced, removed, added or repeated."""
    choose = random.Random(seed)
    result = bytearray(octets)
    for _ in range(choose.randrange(1, 9)):
        if not result:
            break
        at = choose.randrange(len(result))
        change = choose.randrange(4)
        if change == 0:
            result[at] = choose.randrange(256)
        elif change == 1:
            del result[at : at + choose.randrange(1, 9)]
        elif change == 2:
            result[at:at] = choose.randbytes(choose.randrange(1, 9))
        else:
            result[at:at] = result[at : at + choose.randrange(1, 60)]
    return bytes(result)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_its_corpus(name: str) -> None:
    assert CORPORA[name]
    for octets in CORPORA[name]:
        TARGETS[name](octets)


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_any_octets(name: str) -> None:
    @settings(max_examples=150 if name != "session" else 60)
    @given(st.binary(max_size=300))
    def takes(octets: bytes) -> None:
        TARGETS[name](octets)

    takes()


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_takes_what_is_almost_right(name: str) -> None:
    @settings(max_examples=150)
    @given(st.sampled_from(CORPORA[name]), st.integers(0, 2**32))
    def takes(octets: bytes, seed: int) -> None:
        TARGETS[name](mutated(octets, seed))

    takes()


@settings(max_examples=60)
@given(st.lists(st.sampled_from(CORPORA["session"]), min_size=1, max_size=3), st.integers(0, 2**32))
def test_sessions_that_were_mixed_leave_nothing(runs: list[bytes], seed: int) -> None:
    joined = runs[0] + b"".join(run[1:] for run in runs[1:])
    Soup(mutated(joined, seed)).run()


@pytest.mark.slow
def test_memory_grows_with_what_the_peer_sends_only() -> None:
    """The kind of fault: a short message that makes us hold much."""
    Soup(CORPORA["session"][0]).run()  # what is made once and kept is made now
    choose = random.Random(4)
    for _ in range(25):
        octets = mutated(choose.choice(CORPORA["session"]), choose.randrange(2**32))
        gc.collect()
        tracemalloc.start()
        try:
            Soup(octets).run()
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak <= 64 * len(octets) + 2**20, octets.hex()
