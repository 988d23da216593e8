"""docs/limits.md names every limit, with the defaults that the code has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvcs.moqt.asking import request_streams
from kvcs.moqt.incoming import rules
from kvcs.moqt.incoming.receiving import MAX_UNENDED_STREAMS
from kvcs.moqt.limits import Limit
from kvcs.moqt.objects import MAX_OBJECT_PROPERTIES
from kvcs.moqt.settings import SessionSettings
from kvcs.observe import logs
from kvcs.relay.settings import RelayLimits
from kvcs.relay.upstreams import MAX_PREFIXES, Kind

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "limits.md").read_text()
SESSION, RELAY = PAGE.split("## A relay")
ROWS = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", SESSION, re.MULTILINE))
RELAY_ROWS = dict(re.findall(r"^\| `(\w+)`(?:, `\w+`)? \| (.+?) \|", RELAY, re.MULTILINE))
UNITS = {"MiB": 2**20, "GiB": 2**30, "s": 1}


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


def test_limits_of_a_relay_have_the_defaults_of_the_page() -> None:
    limits = RelayLimits()
    for name, text in RELAY_ROWS.items():
        if name.isupper():
            continue  # a constant
        found = re.match(r"(\d+)( MiB| GiB| s\b)?", text)
        assert found is not None, name
        number, unit = found.groups()
        assert getattr(limits, name) == int(number) * UNITS[(unit or "s").strip()], name
    assert f"8000, {limits.scope_request_burst} at once" in RELAY_ROWS["scope_requests_per_second"]


def test_prefixes_that_an_upstream_is_asked_for_are_those_of_the_page() -> None:
    most = f"{MAX_PREFIXES[Kind.NAMESPACES]} of namespaces, {MAX_PREFIXES[Kind.TRACKS]} of tracks"
    assert RELAY_ROWS["MAX_PREFIXES"].startswith(most)


def test_every_limit_of_a_relay_is_on_the_page_or_that_of_relays() -> None:
    pages = PAGE + (Path(__file__).resolve().parents[3] / "docs" / "relays.md").read_text()
    waits = {"fetch_wait", "max_fill_wait", "fill_wait", "cache_octets"}
    named = {each.name for each in fields(RelayLimits)} - waits
    assert {name for name in named if f"`{name}`" not in pages} == set()


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
