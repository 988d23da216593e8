"""docs/limits.md names every limit, with the defaults that the code has."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvcs.moqt import request_streams, rules
from kvcs.moqt.limits import Limit
from kvcs.moqt.objects import MAX_OBJECT_PROPERTIES
from kvcs.moqt.receiving import MAX_UNENDED_STREAMS
from kvcs.moqt.settings import SessionSettings
from kvcs.observe import logs

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "limits.md").read_text()
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", PAGE, re.MULTILINE))
UNITS = {"MiB": 2**20, "s": 1}


def test_every_limit_has_a_row() -> None:
    assert set(ROWS) == {limit.value for limit in Limit}


@pytest.mark.parametrize("limit", Limit)
def test_settings_have_the_defaults_of_the_page(limit: Limit) -> None:
    settings = SessionSettings()
    for name, number, unit in re.findall(r"`([\w.]+)`: ([\d,]+)( MiB| s\b)?", ROWS[limit.value]):
        value = settings
        for part in name.split("."):
            value = getattr(value, part)
        size = getattr(value, "limit", value)
        assert size == int(number.replace(",", "")) * UNITS[unit.strip() or "s"]


def test_constants_have_the_numbers_of_the_page() -> None:
    assert f"{request_streams.MAX_HALF_OPEN_STREAMS} requests" in ROWS["half_open_streams"]
    assert request_streams.MAX_HELD_OCTETS == 2**20 and "1 MiB" in ROWS["held_octets"]
    assert request_streams.MAX_PARTIAL_OCTETS == 4 * 2**20 and "4 MiB" in ROWS["partial_octets"]
    unended = ROWS["unended_streams"]
    assert f"{request_streams.MAX_UNENDED_REQUESTS} request streams" in unended
    assert f"{MAX_UNENDED_STREAMS} data streams" in unended
    assert f"{rules.MAX_RULE_ENTRIES:,} of one track" in ROWS["rules_total"]
    assert f"{MAX_OBJECT_PROPERTIES:,} octets" in ROWS["object_properties"]
    assert f"{logs.LINES_AT_ONCE} at once, {logs.LINES_PER_SECOND:g} a second" in PAGE
