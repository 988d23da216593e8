"""How a list of datagrams is cut into calls of the kernel's segmentation."""

from __future__ import annotations

import random

import pytest

from kvcs.quic.aioquic_backend.ports import Train
from kvcs.quic.aioquic_backend.segments import (
    LARGEST_SEGMENT,
    MAX_OCTETS,
    MAX_SEGMENTS,
    Datagrams,
    runs,
)

HERE, THERE = ("127.0.0.1", 1), ("127.0.0.1", 2)


def sizes(datagrams: Datagrams) -> list[list[int]]:
    """Sizes of the datagrams of each run."""
    return [[len(data) for data, _ in run] for run in runs(datagrams)]


def to(address: tuple[str, int], *lengths: int) -> Datagrams:
    """Datagrams of these lengths."""
    return [(bytes(length), address) for length in lengths]


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [
        ([], []),
        ([1200], [[1200]]),
        ([1200, 1200], [[1200, 1200]]),
        ([1200, 1200, 300], [[1200, 1200, 300]]),
        ([1200, 1200, 300, 1200], [[1200, 1200, 300], [1200]]),
        ([300, 1200, 1200], [[300], [1200, 1200]]),
        ([1452, 1200, 1200], [[1452], [1200, 1200]]),  # a probe goes alone
        ([1200, 300], [[1200], [300]]),
        ([LARGEST_SEGMENT + 1] * 3, [[LARGEST_SEGMENT + 1]] * 3),
    ],
)
def test_equal_sizes_make_a_run_and_a_smaller_one_ends_it(
    lengths: list[int], expected: list[list[int]]
) -> None:
    assert sizes(to(HERE, *lengths)) == expected


def test_a_run_goes_to_one_address() -> None:
    mixed = to(HERE, 1200, 1200) + to(THERE, 1200, 1200, 300)
    assert [run[0][1] for run in runs(mixed)] == [HERE, THERE]
    assert sizes(mixed) == [[1200, 1200], [1200, 1200, 300]]


@pytest.mark.parametrize("trained", [1, 2])
@pytest.mark.parametrize("before", [0, 1, 2])
def test_a_train_is_a_run_whatever_is_beside_it(before: int, trained: int) -> None:
    train = Train(memoryview(bytes(1200 * trained)), 1200)
    datagrams = [*to(HERE, *[1200] * before), (train, HERE), *to(HERE, 1200, 1200, 300)]
    cut = list(runs(datagrams))
    assert [datagram for run in cut for datagram in run] == datagrams
    assert [(train, HERE)] in cut
    assert sizes(datagrams)[-1] == [1200, 1200, 300]


def test_a_run_fits_one_call() -> None:
    assert {len(run) for run in sizes(to(HERE, *[100] * (3 * MAX_SEGMENTS)))} == {MAX_SEGMENTS}
    for run in sizes(to(HERE, *[2000] * 200)):
        assert sum(run) <= MAX_OCTETS


@pytest.mark.parametrize("seed", range(20))
def test_runs_are_the_list_in_order(seed: int) -> None:
    rng = random.Random(seed)
    datagrams = [
        (
            rng.randbytes(rng.choice((20, 300, 1200, 1200, 1200, 1452, 8952))),
            rng.choice((HERE, THERE)),
        )
        for _ in range(100)
    ]
    cut = list(runs(datagrams))
    assert [datagram for run in cut for datagram in run] == datagrams
    for run in cut:
        size = len(run[0][0])
        assert all(len(data) == size for data, _ in run[:-1])
        assert len(run[-1][0]) <= size
        assert len({address for _, address in run}) == 1
        assert len(run) == 1 or size <= LARGEST_SEGMENT
