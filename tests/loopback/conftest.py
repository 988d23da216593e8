"""Certificates of the run, event loops, and a fixture that finds what a test leaves behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

try:
    import uvloop
except ImportError:
    uvloop = None

from tests.certificates import Certified, PemFiles, make_ca, make_certificate, write_pem

ON_EVERY_LOOP = ("test_udp", "test_aioquic_")
"""Files whose tests run on each event loop: those of the transport."""


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """asyncio's own loop, and for the transport uvloop's, where it is installed."""
    factories: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
        "asyncio": asyncio.new_event_loop
    }
    if uvloop is not None and item.path.name.startswith(ON_EVERY_LOOP):
        factories["uvloop"] = uvloop.new_event_loop
    return factories


@pytest.fixture(scope="session")
def authority() -> Certified:
    """The authority of the run."""
    return make_ca()


@pytest.fixture(scope="session")
def files(authority: Certified, tmp_path_factory: pytest.TempPathFactory) -> PemFiles:
    """Certificate and key for localhost, 127.0.0.1 and ::1, and the authority."""
    certificate = make_certificate(authority, ("localhost", "127.0.0.1", "::1"))
    return write_pem(Path(tmp_path_factory.mktemp("certificates")), authority, certificate)


@pytest.fixture
async def nothing_left_behind() -> AsyncIterator[None]:
    """No task, and no error that only the loop's handler saw."""
    loop = asyncio.get_running_loop()
    errors: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda loop, context: errors.append(context))
    yield
    assert not errors
    assert asyncio.all_tasks() == {asyncio.current_task()}
