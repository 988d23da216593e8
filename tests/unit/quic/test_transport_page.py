"""docs/transport.md has the numbers that the code has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvcs.quic.aioquic_backend import LARGEST_DATAGRAM, SMALLEST_DATAGRAM, QuicSettings, udp
from kvcs.quic.aioquic_backend.private.congestion import BLACK_HOLE_LOSSES
from kvcs.quic.aioquic_backend.private.filling import TURN_OCTETS
from kvcs.quic.aioquic_backend.private.packets import BURST_OCTETS, BURST_PACKETS
from kvcs.quic.aioquic_backend.prober import MAX_FALLS, RAISE_INTERVAL
from kvcs.quic.aioquic_backend.resets import LONGEST_RESET
from kvcs.quic.aioquic_backend.segments import LARGEST_SEGMENT
from kvcs.quic.aioquic_backend.settings import LARGEST_UNDECLARED
from kvcs.quic.stream_wait import LONG_SECONDS
from kvcs.relay.settings import REQUEST_STREAMS
from kvcs.relay.uplinks import UPSTREAM_STREAMS

ROOT = Path(__file__).resolve().parents[3]
PAGE = " ".join((ROOT / "docs" / "transport.md").read_text().split())
ROWS = re.findall(r"\| `(\w+)` \| ([\d,]+)( MiB| s)? \|", PAGE)
UNITS = {" MiB": 2**20, " s": 1, "": 1}

ELSEWHERE = {"alpn", "datagram_size", "max_datagram_frame_size"}
"""Settings that are no limits."""


def test_every_limit_has_a_row() -> None:
    assert {name for name, _, _ in ROWS} | ELSEWHERE == {each.name for each in fields(QuicSettings)}


@pytest.mark.parametrize(("name", "number", "unit"), ROWS)
def test_rows_have_the_defaults(name: str, number: str, unit: str) -> None:
    assert getattr(QuicSettings(), name) == int(number.replace(",", "")) * UNITS[unit]


@pytest.mark.parametrize(
    "said",
    [
        f"runs at {SMALLEST_DATAGRAM} octets",
        f"allows {LARGEST_DATAGRAM:,} octets",
        f"up to {udp.BATCH} datagrams are read in one wake-up",
        f"datagrams of up to {LARGEST_SEGMENT} octets",
        f"may always send {BURST_PACKETS} packets, or {BURST_OCTETS // 1024**2} MiB",
        f"{udp.BATCH_OCTETS // 1024} KiB or a little more",
        f"Others get {LARGEST_UNDECLARED:,} at most",
        f"a relay's upstream {UPSTREAM_STREAMS:,}; more",
        f"for requests, {REQUEST_STREAMS:,} at a relay",
        f"never longer than {LONGEST_RESET} octets",
        f"net.core.rmem_max={QuicSettings().socket_buffer}",
    ],
)
def test_numbers_are_those_of_the_code(said: str) -> None:
    assert said in PAGE


def test_numbers_in_words_are_those_of_the_code() -> None:
    assert BLACK_HOLE_LOSSES == MAX_FALLS == 3 and "after three losses in a row" in PAGE
    assert RAISE_INTERVAL == 600 and "every ten minutes" in PAGE
    assert TURN_OCTETS == 120 * 1024 and "take turns of 120 KiB" in PAGE
    assert LONG_SECONDS == 1 and "opened for a second" in PAGE
