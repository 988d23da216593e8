"""Certificates and the look for what a test leaves behind, as the loopback tests have them."""

from tests.loopback.conftest import authority, files, nothing_left_behind

__all__ = ["authority", "files", "nothing_left_behind"]
