"""Every reach into private parts of the QUIC library, each with its reason.

The library has no public means for send accounting, for stream and receive credit, or for the
size of a burst. This package alone touches what the library's documentation does not name;
`tests/unit/quic/test_private.py` has a test for each reach, which fails when a release moves it.
"""

from __future__ import annotations

from typing import Final

import aioquic

SUPPORTED: Final = (1, 7)
"""Release line whose private parts are known here."""


def check_version(version: str) -> None:
    """Refuse a release whose private parts are not known.

    Raises:
        ImportError: `version` is not of the supported line.
    """
    if tuple(int(part) for part in version.split(".")[:2]) != SUPPORTED:
        line = ".".join(str(part) for part in SUPPORTED)
        raise ImportError(
            f"kvcs works with aioquic {line}.x, not {version}: install aioquic=={line}.*"
        )


check_version(aioquic.__version__)
