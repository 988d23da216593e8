"""Retrieval over HTTP when no MOQT path works (KVCS "Operational Considerations": Fallback).

The text that defines KVSP over HTTP is not available to us. So what a retrieval needs is one small
interface, `BlockSource`; `HttpSource` and `HttpServer` are our own form of it, to be replaced by
whoever has another. Both need aiohttp (``pip install '.[http]'``), which is imported when one
of them begins to work and not before.
"""

from kvcs.fallback.client import HttpSource
from kvcs.fallback.folder import SavedPublication, save_tracks
from kvcs.fallback.server import HttpServer
from kvcs.fallback.source import BlockSource, SourceFailed, StoredBlock, StoredManifest

__all__ = [
    "BlockSource",
    "HttpServer",
    "HttpSource",
    "SavedPublication",
    "SourceFailed",
    "StoredBlock",
    "StoredManifest",
    "save_tracks",
]
