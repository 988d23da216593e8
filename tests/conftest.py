"""Hypothesis settings of every folder, whichever of them a run collects; and codecs of tests."""

import pytest
from hypothesis import HealthCheck, settings

from kvcs.kv import codecs

# A loaded machine must not fail a test for its speed, nor one run a test that the last one passed:
# the examples are the same in each. Others are looked for with `--hypothesis-profile=thorough`.
settings.register_profile(
    "kvcs",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile("kvcs")


@pytest.fixture
def own_codecs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codecs that the test registers are gone behind it."""
    for table in ("_BY_NAME", "_BY_NUMBER"):
        monkeypatch.setattr(codecs, table, dict(getattr(codecs, table)))
