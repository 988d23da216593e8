"""The datagram size prober, as plain logic."""

from __future__ import annotations

from kvcs.quic.aioquic_backend.prober import (
    MAX_FALLS,
    RAISE_INTERVAL,
    TRIES,
    DatagramSizeProber,
)

SIZES = (16_000, 8952, 1452)


def probes(prober: DatagramSizeProber, carries: int, now: float = 0.0) -> tuple[list[int], int]:
    """Run a prober on a path that carries so many octets: sizes probed, and size in use."""
    probed, used = [], prober.size
    while (size := prober.next_probe(now)) is not None:
        assert prober.next_probe(now) is None, "one probe at a time"
        probed.append(size)
        used = prober.probe_ended(size <= carries, now) or used
    assert prober.size == used
    return probed, used


def test_the_largest_size_is_used_where_it_arrives() -> None:
    assert probes(DatagramSizeProber(SIZES), 65_000) == ([16_000], 16_000)


def test_smaller_sizes_follow_after_some_losses() -> None:
    probed, used = probes(DatagramSizeProber(SIZES), 1500)
    assert probed == [16_000] * TRIES + [8952] * TRIES + [1452]
    assert used == 1452


def test_the_order_and_repeats_of_sizes_do_not_matter() -> None:
    probed, used = probes(DatagramSizeProber((1452, 16_000, 1200, 8952, 1452)), 9000)
    assert probed == [16_000] * TRIES + [8952]
    assert used == 8952


def test_a_path_that_carries_no_more_is_left_alone() -> None:
    probed, used = probes(DatagramSizeProber((1452,)), 1300)
    assert probed == [1452] * TRIES
    assert used == 1200


def test_nothing_is_probed_where_nothing_more_is_wanted() -> None:
    assert probes(DatagramSizeProber((1200, 600)), 65_000) == ([], 1200)
    prober = DatagramSizeProber(())
    assert prober.next_probe(1e9) is None


def test_sizes_that_did_not_pass_are_tried_again_after_some_minutes() -> None:
    prober = DatagramSizeProber(SIZES)
    assert probes(prober, 1500, now=10.0)[1] == 1452
    assert prober.next_probe(10.0 + RAISE_INTERVAL - 1.0) is None
    probed, used = probes(prober, 9000, now=10.0 + RAISE_INTERVAL)
    assert probed == [16_000] * TRIES + [8952]
    assert used == 8952
    assert probes(prober, 9000, now=20.0 + 2 * RAISE_INTERVAL) == ([16_000] * TRIES, 8952)


def test_the_largest_size_is_never_searched_above() -> None:
    prober = DatagramSizeProber(SIZES)
    assert probes(prober, 16_000)[1] == 16_000
    assert prober.next_probe(1e9) is None


def test_a_path_that_no_longer_carries_the_size_is_searched_from_the_smallest() -> None:
    prober = DatagramSizeProber(SIZES)
    assert probes(prober, 16_000)[1] == 16_000
    prober.fell()
    assert prober.size == 1200
    probed, used = probes(prober, 1500)
    assert probed == [16_000] * TRIES + [8952] * TRIES + [1452]
    assert used == 1452


def test_a_size_that_passes_probes_and_swallows_data_is_left_alone_in_the_end() -> None:
    prober = DatagramSizeProber(SIZES)
    for _ in range(MAX_FALLS):
        assert probes(prober, 16_000) == ([16_000], 16_000)
        prober.fell()
    assert probes(prober, 16_000) == ([8952], 8952)
    assert prober.next_probe(1e9) is None


def test_falling_below_every_size_ends_the_search() -> None:
    prober = DatagramSizeProber((1452,))
    for _ in range(MAX_FALLS):
        assert probes(prober, 1500)[1] == 1452
        prober.fell()
    assert probes(prober, 1500) == ([], 1200)


def test_a_probe_that_was_out_when_the_path_fell_counts_for_its_own_size_only() -> None:
    prober = DatagramSizeProber(SIZES)
    assert probes(prober, 1500, now=0.0)[1] == 1452
    assert prober.next_probe(RAISE_INTERVAL) == 16_000
    prober.fell()
    assert prober.next_probe(RAISE_INTERVAL) is None, "still out"
    assert prober.probe_ended(False, RAISE_INTERVAL) is None
    assert prober.next_probe(RAISE_INTERVAL) == 16_000


def test_an_outcome_without_a_probe_changes_nothing() -> None:
    prober = DatagramSizeProber(SIZES)
    assert prober.probe_ended(True, 0.0) is None
    assert prober.size == 1200
