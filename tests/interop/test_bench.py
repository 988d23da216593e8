"""The bench lets the peer's own programs send to each other, and reads what they say of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvcs.bench.peer import runner
from kvcs.bench.transfer import Certificates

SIZE = 32 * 1024


@pytest.mark.parametrize("relay", [False, True])
async def test_the_peer_is_measured(run: Callable[..., Any], tmp_path: Path, relay: bool) -> None:
    found = await runner(SIZE, relay=relay, seconds=1)(Certificates(tmp_path), 0)
    assert found.objects > 0
    assert found.octets >= found.objects * SIZE
    assert found.rate > 0
