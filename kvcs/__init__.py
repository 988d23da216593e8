"""KV caches of language models, published layer by layer over Media over QUIC Transport."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
