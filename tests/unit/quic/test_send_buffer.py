"""The buffer of a stream that keeps octets where they lie, held against a plain bytearray."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcs.quic.aioquic_backend.private.sending import SMALL_OCTETS, SendBuffer

SIZES = st.one_of(st.integers(0, 80), st.integers(SMALL_OCTETS - 2, SMALL_OCTETS * 3))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.lists(SIZES, max_size=4)),
        st.tuples(st.just("look"), st.tuples(st.floats(0, 1), st.floats(0, 1))),
        st.tuples(st.just("drop"), st.floats(0, 1)),
    ),
    max_size=30,
)


@given(STEPS)
def test_it_holds_what_a_bytearray_would(steps: list[tuple[str, object]]) -> None:
    buffer, plain, made = SendBuffer(), bytearray(), 0
    for kind, value in steps:
        if kind == "append":
            assert isinstance(value, list)
            parts = [bytes((made + n + i) % 251 for i in range(s)) for n, s in enumerate(value)]
            made += 1
            views = [memoryview(p) if n % 2 else bytearray(p) for n, p in enumerate(parts)]
            assert buffer.extend(views) == sum(value)
            plain += b"".join(parts)
        elif kind == "look":
            assert isinstance(value, tuple)
            start, stop = sorted(round(part * len(plain)) for part in value)
            if start < stop:
                assert buffer[start:stop] == plain[start:stop]
        else:
            assert isinstance(value, float)
            size = round(value * len(plain))
            del buffer[:size], plain[:size]
        assert len(buffer) == len(plain)
    if plain:
        assert buffer[0 : len(plain)] == plain


def test_large_octets_are_not_copied_until_they_are_sent() -> None:
    source = bytearray(b"a" * SMALL_OCTETS * 4)
    buffer = SendBuffer()
    buffer.extend([memoryview(source)])
    source[100] = ord("b")
    assert buffer[99:102] == b"aba"


def test_appending_one_piece_copies_it() -> None:
    source = bytearray(b"a" * SMALL_OCTETS * 4)
    buffer = SendBuffer()
    buffer += source
    source[100] = ord("b")
    assert buffer[99:102] == b"aaa"


def test_views_of_larger_items_are_counted_in_octets() -> None:
    buffer = SendBuffer()
    assert buffer.extend([memoryview(bytes(range(16))).cast("I")]) == 16
    assert buffer[0:16] == bytes(range(16))


@given(
    st.lists(st.integers(1, 3 * SMALL_OCTETS), min_size=1, max_size=8),
    st.integers(1, 4 * SMALL_OCTETS),
    st.floats(0, 1),
)
def test_runs_that_follow_each_other_are_cut_as_one_by_one(
    sizes: list[int], size: int, begin: float
) -> None:
    buffer = SendBuffer()
    buffer.extend([bytes((n + at) % 251 for at in range(octets)) for n, octets in enumerate(sizes)])
    start = round(begin * len(buffer))
    count = (len(buffer) - start) // size
    runs = [b"".join(pieces) for pieces in buffer.cuts(start, size, count)] if count else []
    assert runs == [buffer[at : at + size] for at in range(start, start + count * size, size)]
    assert [bytes(piece) for piece in buffer.slices(start, size, count)] == runs
