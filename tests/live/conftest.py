"""Every test below this folder runs a model: it is slow, and may not be skipped unnoticed in CI."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.certificates import PemFiles, write_pem
from tests.tiny_model import require_live

FOLDER = Path(__file__).resolve().parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark every test of this folder."""
    for item in items:
        if FOLDER in item.path.parents:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def _live() -> None:
    require_live()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> PemFiles:
    """Certificates for this machine."""
    return write_pem(tmp_path_factory.mktemp("certificates"))
