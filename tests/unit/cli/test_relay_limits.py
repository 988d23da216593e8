"""``kvcs relay --limit``: every limit is reached by its name, from a flag, a variable, the file."""

from __future__ import annotations

from dataclasses import fields

import pytest

from kvcs.cli.relay_limits import QUIC, RELAY, SESSION, Limits, read_limits
from kvcs.errors import UsageError
from kvcs.moqt.settings import SessionSettings
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.relay.settings import RelayLimits

BEFORE = Limits(
    relay=RelayLimits(cache_octets=12345678),
    session=SessionSettings(),
    quic=QuicSettings(),
    max_sessions=1024,
)


def test_what_is_not_set_stays() -> None:
    assert read_limits((), BEFORE) == BEFORE


def test_settings_reach_what_they_name() -> None:
    given = (
        "max_lag_seconds=7.5",
        "scope-fetches=9",
        "scope_fetches=10",
        " max_concurrent_fetches=3",
        "max_handshakes=99",
        "max_sessions=7",
    )
    limits = read_limits(given, BEFORE)
    assert limits.relay.max_lag_seconds == 7.5 and limits.relay.scope_fetches == 10
    assert limits.relay.cache_octets == 12345678
    assert limits.session.max_concurrent_fetches == 3
    assert limits.quic.max_handshakes == 99 and limits.max_sessions == 7


@pytest.mark.parametrize("name", [*RELAY, *SESSION, *QUIC])
def test_every_limit_can_be_set(name: str) -> None:
    limits = read_limits([f"{name}=25000000"], BEFORE) if "send_buffer" != name else BEFORE
    owners = [limits.relay, limits.session, limits.quic]
    [owner] = [each for each in owners if hasattr(each, name)]
    assert getattr(owner, name) in (25000000, QuicSettings().send_buffer)


def test_limits_have_names_of_their_own() -> None:
    assert len({*RELAY, *SESSION, *QUIC}) == len(RELAY) + len(SESSION) + len(QUIC)
    named = {each.name for each in fields(SessionSettings)}
    limits = {name for name in named if name.startswith("max_")}
    assert limits <= set(SESSION)


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("max_lag_seconds", "is not NAME=VALUE"),
        ("max_lag_second=3", "did you mean max_lag_seconds"),
        ("zzz=3", "no limit 'zzz'"),
        ("scope_fetches=many", "not a whole number"),
        ("scope_fetches=1.5", "not a whole number"),
        ("max_lag_seconds=soon", "not a number"),
        ("max_lag_seconds=-1", "must be 0 or more"),
        ("max_lag_seconds=nan", "must be 0 or more"),
        ("max_lag_seconds=inf", "must be 0 or more"),
        ("scope_fetches=0", "scope_fetches must be at least 1"),
        ("send_buffer=0", "send_buffer must be at least 1"),
        ("cache_octets=3", "no limit"),
    ],
)
def test_what_does_not_fit_is_told(setting: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        read_limits([setting], BEFORE)
