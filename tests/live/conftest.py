"""Every test below this folder runs a model: it is slow, and may not be skipped unnoticed in CI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import tiny_model as tiny
from tests.certificates import PemFiles, write_pem

FOLDER = Path(__file__).resolve().parent

SECONDS = 300.0
"""Bound of one test: the first one reads torch and transformers from the disk."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture(scope="session")
def _warm() -> None:
    """Compute once: what that imports must not take the time of a retrieval."""
    tiny.require_live()
    model = tiny.tiny_model()
    tiny.computed(model, tiny.tiny_prefix(model, tiny.prompt(8)))


@pytest.fixture(autouse=True)
def _live(_warm: None) -> None:
    tiny.require_live()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> PemFiles:
    """Certificates for this machine."""
    return write_pem(tmp_path_factory.mktemp("certificates"))
