"""What the scenarios make known to the process is forgotten behind each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcs.kv import codecs


@pytest.fixture(autouse=True)
def codecs_as_before() -> Iterator[None]:
    """Codecs that a scenario registers; other tests must not notice, in whatever order they run."""
    tables = (codecs._BY_NAME, codecs._BY_NUMBER)
    before = [dict(table) for table in tables]
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)  # type: ignore[arg-type]
