"""Every test below this folder speaks with the peer, and none may be skipped unnoticed in CI."""

import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parent

TEST_SECONDS = 400.0
"""Longer than the deadlines inside, which tell more about what went wrong."""


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, so that this folder also runs alone."""
    config.addinivalue_line("markers", "interop: speaks with another implementation")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.interop)
            if item.get_closest_marker("timeout") is None and _has_timeouts(item.config):
                item.add_marker(pytest.mark.timeout(TEST_SECONDS))


def _has_timeouts(config: pytest.Config) -> bool:
    return bool(config.pluginmanager.hasplugin("timeout"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip into a failure where CI is set: there, the peer must be there."""
    report = yield
    if not hasattr(report, "wasxfail"):
        _forbid_skip(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Do the same for a whole module that skips itself."""
    report = yield
    _forbid_skip(report)
    return report


def _forbid_skip(report: pytest.TestReport | pytest.CollectReport) -> None:
    if os.environ.get("CI", "").lower() not in ("", "0", "false") and report.skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"interop tests may not be skipped in CI: {reason}"


@pytest.fixture(scope="session")
def run() -> Callable[..., Any]:
    """Give ``run_scenario``, or skip with the reason why no scenario can run here."""
    from tests.interop import isolation, peer
    from tests.interop.scenario import run_scenario

    try:
        isolation.prefix()
        peer.install()
    except (isolation.IsolationUnavailable, peer.PeerUnavailable) as error:
        pytest.skip(str(error))
    return run_scenario
