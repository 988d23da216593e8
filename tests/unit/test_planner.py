"""Fetch or recompute: the estimate says what its figures imply."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvcs
from kvcs.planner import plan, resized

LARGE = kvcs.Descriptor(
    model="70b",
    weights="sha256:00",
    layers=80,
    kv_heads=8,
    head_dim=128,
    dtype="bfloat16",
    block_tokens=16,
)
GBIT = 1e9 / 8


def test_the_size_of_a_large_cache() -> None:
    found = plan(LARGE, 32_768, link_rate=10 * GBIT, prefill_rate=2_000)
    assert found.objects == 2 * 80 * 2048
    assert found.octets == 80 * 32_768 * 2 * 8 * 128 * 2 + found.objects * 68
    assert found.reused_tokens == found.tokens == 32_768


def test_a_slow_prefill_is_beaten_and_a_fast_one_is_not() -> None:
    slow = plan(LARGE, 32_768, link_rate=GBIT, prefill_rate=100)
    fast = plan(LARGE, 32_768, link_rate=GBIT, prefill_rate=100_000)
    assert slow.fetch and slow.speedup > 1 and slow.fetch_seconds < slow.recompute_seconds
    assert not fast.fetch and fast.speedup < 1
    assert fast.break_even_rate == math.inf


@pytest.mark.parametrize(
    ("figures", "limit"),
    [
        ({"link_rate": 1e6}, "link"),
        ({"endpoint_rate": 1e6}, "endpoint"),
        ({"object_seconds": 1.0}, "objects"),
        ({"round_trip": 100.0}, "round trips"),
    ],
)
def test_who_limits_is_named(figures: dict[str, float], limit: str) -> None:
    free = {"link_rate": 1e12, "endpoint_rate": 1e12, "object_seconds": 0.0}
    assert plan(LARGE, 4096, prefill_rate=100.0, **(free | figures)).limited_by == limit


@given(
    tokens=st.integers(16, 200_000),
    link=st.floats(1e5, 1e11),
    prefill=st.floats(1.0, 1e5),
    trip=st.floats(0.0, 0.5),
)
def test_the_break_even_of_the_link_is_where_both_take_as_long(
    tokens: int, link: float, prefill: float, trip: float
) -> None:
    found = plan(LARGE, tokens, link_rate=link, prefill_rate=prefill, round_trip=trip)
    if found.break_even_rate == math.inf:
        assert not plan(LARGE, tokens, link_rate=1e15, prefill_rate=prefill, round_trip=trip).fetch
        return
    for factor, fetch in ((1.01, True), (0.99, False)):
        there = plan(
            LARGE,
            tokens,
            link_rate=found.break_even_rate * factor,
            prefill_rate=prefill,
            round_trip=trip,
        )
        assert there.fetch is fetch


def test_prompts_longer_than_the_break_even_are_fetched() -> None:
    figures = {"link_rate": 10 * GBIT, "prefill_rate": 150.0, "round_trip": 0.08}
    even = plan(LARGE, 64, **figures).break_even_tokens
    assert 16 <= even < math.inf
    assert plan(LARGE, int(even) + 16, **figures).fetch
    if even > 16:
        assert not plan(LARGE, int(even) - 16, **figures).fetch


def test_tokens_that_fill_no_block_are_computed_in_both_cases() -> None:
    figures = {"link_rate": 10 * GBIT, "prefill_rate": 10.0}
    whole, more = plan(LARGE, 160, **figures), plan(LARGE, 170, **figures)
    assert more.reused_tokens == 160
    assert more.fetch_seconds == pytest.approx(whole.fetch_seconds + 1.0)


def test_an_open_session_saves_round_trips() -> None:
    figures = {"link_rate": GBIT, "prefill_rate": 10.0, "round_trip": 0.1}
    apart = plan(LARGE, 160, **figures).fetch_seconds
    assert apart - plan(LARGE, 160, connected=True, **figures).fetch_seconds == pytest.approx(0.2)


def test_the_proposed_block_has_objects_of_the_draft_s_balance() -> None:
    for tokens in (64, 4096, 131_072):
        size = plan(LARGE, tokens, link_rate=GBIT, prefill_rate=1_000).block_tokens
        data = resized(LARGE, size).layout(LARGE.components[0]).octets
        assert 16 * 2**10 <= data <= 2**20
        assert size <= tokens
    many = plan(LARGE, 131_072, link_rate=GBIT, prefill_rate=1_000, object_seconds=1e-3)
    few = plan(LARGE, 131_072, link_rate=GBIT, prefill_rate=1.0, object_seconds=0.0)
    assert many.block_tokens > few.block_tokens


def test_a_model_of_tiny_objects_keeps_its_blocks() -> None:
    tiny = replace(LARGE, kv_heads=1, head_dim=1)
    assert plan(tiny, 64, link_rate=GBIT, prefill_rate=1_000).block_tokens == 16


@pytest.mark.parametrize(
    "wrong",
    [
        {"link_rate": 0.0},
        {"prefill_rate": -1.0},
        {"endpoint_rate": math.nan},
        {"round_trip": math.inf},
        {"object_seconds": -1e-9},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_figures_that_are_none_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(kvcs.UsageError, match=next(iter(wrong))):
        plan(LARGE, 64, **({"link_rate": GBIT, "prefill_rate": 10.0} | wrong))


def test_a_prompt_without_a_block_cannot_be_fetched() -> None:
    with pytest.raises(kvcs.UsageError, match="fill no block"):
        plan(LARGE, 15, link_rate=GBIT, prefill_rate=10)
