"""Hypothesis settings of this folder."""

from __future__ import annotations

from hypothesis import settings

# A loaded machine must not fail a test for its speed.
settings.register_profile("kvcs", deadline=None, max_examples=50)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile("kvcs")
