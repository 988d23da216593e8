"""Logs of the library: silent by default, plain, and never with local variables."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import structlog

from kvcs.observe import get_logger


def test_nothing_is_printed_before_the_application_asks() -> None:
    program = (
        "from kvcs.observe import get_logger\n"
        "get_logger('kvcs.quic').error('something_happened', code=1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_events_reach_the_standard_library_with_their_facts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    structlog.reset_defaults()
    with caplog.at_level(logging.INFO, logger="kvcs.quic"):
        get_logger("kvcs.quic").bind(peer="relay").info("session_closed", code=3)
    (record,) = caplog.records
    assert record.name == "kvcs.quic"
    assert record.getMessage() == "event='session_closed' peer='relay' code=3"


def test_a_traceback_shows_no_local_variables(caplog: pytest.LogCaptureFixture) -> None:
    structlog.reset_defaults()

    def fail() -> None:
        scope_key = "".join(["sec", "ret"])
        raise ValueError(len(scope_key))

    with caplog.at_level(logging.ERROR, logger="kvcs.quic"):
        try:
            fail()
        except ValueError as exc:
            get_logger("kvcs.quic").error("handler_failed", exc_info=exc)
    text = caplog.records[0].getMessage()
    assert "ValueError" in text
    assert "secret" not in text


def test_the_application_s_configuration_decides(caplog: pytest.LogCaptureFixture) -> None:
    with structlog.testing.capture_logs() as captured:
        get_logger("kvcs.relay").warning("cache_full", octets=5)
    assert captured == [{"event": "cache_full", "octets": 5, "log_level": "warning"}]
