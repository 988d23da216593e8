"""A peer that causes ever more log lines fills no disk."""

from __future__ import annotations

import logging

import pytest

from kvcs.observe import get_logger, logs


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(logs, "LINES_AT_ONCE", 3)
    monkeypatch.setattr(logs, "LINES_PER_SECOND", 2.0)
    monkeypatch.setattr(logs.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(logs, "_lines", {})
    logs.lines_left_out.clear()
    return now


def test_lines_are_left_out_beyond_a_rate_and_told_later(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    log = get_logger("kvcs.test_lines")
    with caplog.at_level(logging.INFO, logger="kvcs.test_lines"):
        for number in range(5):
            log.warning("object_rejected", number=number)
        assert len(caplog.messages) == 3
        assert logs.lines_left_out["kvcs.test_lines"] == 2
        clock[0] += 0.5
        log.info("object_rejected", number=5)
        assert "lines_left_out=2" in caplog.messages[-1]
        clock[0] += 0.5
        log.info("object_rejected", number=6)
        assert "lines_left_out" not in caplog.messages[-1]
        assert len(caplog.messages) == 5


def test_loggers_count_apart_and_debug_lines_all_pass(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    one, other = get_logger("kvcs.test_lines"), get_logger("kvcs.test_other")
    with caplog.at_level(logging.DEBUG, logger="kvcs"):
        for _ in range(9):
            one.debug("detail")
            one.info("event")
            other.error("event")
    levels = [(record.name, record.levelname) for record in caplog.records]
    assert levels.count(("kvcs.test_lines", "DEBUG")) == 9
    assert levels.count(("kvcs.test_lines", "INFO")) == 3
    assert levels.count(("kvcs.test_other", "ERROR")) == 3
