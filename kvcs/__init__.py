"""kvcs: KV caches of language models, published layer by layer over Media over QUIC Transport.

import kvcs

prefix = kvcs.Prefix(kvcs.Scope(key=scope_key), descriptor, token_ids)

async with kvcs.connect("moqt://relay.example:4433", ca="ca.pem") as session:
    async with kvcs.Publisher(session).publish(prefix) as publication:       # a producer
        segment = await publication.segment()
        for layer, (k, v) in enumerate(prefill()):
            await segment.put(layer, k, v)

    async with kvcs.Subscriber(session).open(prefix) as cache:               # a consumer
        async for layer in cache:
            attend(layer.index, layer.k, layer.v)
"""

from __future__ import annotations

import os
import threading
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcs.errors import (
        CacheIncomplete,
        CertificateError,
        ConnectionClosed,
        ConnectionFailed,
        DescriptorMismatch,
        FileError,
        KvcsError,
        MissingBlocks,
        NotAuthentic,
        NotProtected,
        ObjectError,
        PublicationAborted,
        PublicationError,
        PublicationNotFound,
        Redirected,
        RequestError,
        SessionError,
        StoreFull,
        StreamError,
        TrustError,
        UsageError,
    )
    from kvcs.fallback import BlockSource, HttpServer, HttpSource
    from kvcs.keyfiles import (
        load_key_ring,
        load_protection_ring,
        load_signing_key,
        save_key_ring,
        save_protection_ring,
        save_signing_key,
    )
    from kvcs.kv import (
        UNPINNED,
        CipherSuite,
        Descriptor,
        Manifest,
        ManifestCadence,
        ManifestLimits,
        Prefix,
        ProtectionKey,
        ProtectionRing,
        PublicationNamespace,
        Scheme,
        Scope,
        convert,
    )
    from kvcs.kv import LayerTensors as Layer
    from kvcs.kvfile import KvFile, KvLayer, load_kv_file, save_kv_file
    from kvcs.moqt.settings import SessionSettings
    from kvcs.planner import Plan, plan
    from kvcs.publisher import (
        Pass,
        Passes,
        Publication,
        PublicationProgress,
        Publisher,
        PublisherSettings,
        Segment,
    )
    from kvcs.quic.aioquic_backend import QuicSettings
    from kvcs.quic.connection import Connection
    from kvcs.quic.endpoint import Server, connect, serve
    from kvcs.quic.reconnect import Reconnect
    from kvcs.quic.transport import TransportStats
    from kvcs.relay.server import Relay, RelaySettings
    from kvcs.relay.settings import RelayLimits
    from kvcs.subscriber import (
        Cache,
        CacheProgress,
        CacheReport,
        FileIndex,
        Holding,
        HttpIndex,
        Index,
        ManifestFacts,
        MissingLayer,
        PublicationInfo,
        Subscriber,
        SubscriberSettings,
        index_json,
    )
    from kvcs.trust import Algorithm, KeyRing, KeyUse, PublicKey, SigningKey

__version__ = "0.1.0"

__all__ = [
    "UNPINNED",
    "Algorithm",
    "BlockSource",
    "Cache",
    "CacheIncomplete",
    "CacheProgress",
    "CacheReport",
    "CertificateError",
    "CipherSuite",
    "Connection",
    "ConnectionClosed",
    "ConnectionFailed",
    "Descriptor",
    "DescriptorMismatch",
    "FileError",
    "FileIndex",
    "Holding",
    "HttpIndex",
    "HttpServer",
    "HttpSource",
    "Index",
    "KeyRing",
    "KeyUse",
    "KvFile",
    "KvLayer",
    "KvcsError",
    "Layer",
    "Manifest",
    "ManifestCadence",
    "ManifestFacts",
    "ManifestLimits",
    "MissingBlocks",
    "MissingLayer",
    "NotAuthentic",
    "NotProtected",
    "ObjectError",
    "Pass",
    "Passes",
    "Plan",
    "Prefix",
    "ProtectionKey",
    "ProtectionRing",
    "PublicKey",
    "Publication",
    "PublicationAborted",
    "PublicationError",
    "PublicationInfo",
    "PublicationNamespace",
    "PublicationNotFound",
    "PublicationProgress",
    "Publisher",
    "PublisherSettings",
    "QuicSettings",
    "Reconnect",
    "Redirected",
    "Relay",
    "RelayLimits",
    "RelaySettings",
    "RequestError",
    "Scheme",
    "Scope",
    "Segment",
    "Server",
    "SessionError",
    "SessionSettings",
    "SigningKey",
    "StoreFull",
    "StreamError",
    "Subscriber",
    "SubscriberSettings",
    "TransportStats",
    "TrustError",
    "UsageError",
    "__version__",
    "connect",
    "convert",
    "index_json",
    "load_key_ring",
    "load_kv_file",
    "load_protection_ring",
    "load_signing_key",
    "plan",
    "save_key_ring",
    "save_kv_file",
    "save_protection_ring",
    "save_signing_key",
    "serve",
]

_HOMES: dict[str, tuple[str, ...]] = {
    "kvcs.errors": (
        "CacheIncomplete",
        "CertificateError",
        "ConnectionClosed",
        "ConnectionFailed",
        "DescriptorMismatch",
        "FileError",
        "KvcsError",
        "MissingBlocks",
        "NotAuthentic",
        "NotProtected",
        "ObjectError",
        "PublicationAborted",
        "PublicationError",
        "PublicationNotFound",
        "Redirected",
        "RequestError",
        "SessionError",
        "StoreFull",
        "StreamError",
        "TrustError",
        "UsageError",
    ),
    "kvcs.fallback": (
        "BlockSource",
        "HttpServer",
        "HttpSource",
    ),
    "kvcs.keyfiles": (
        "load_key_ring",
        "load_protection_ring",
        "load_signing_key",
        "save_key_ring",
        "save_protection_ring",
        "save_signing_key",
    ),
    "kvcs.kv": (
        "UNPINNED",
        "CipherSuite",
        "Descriptor",
        "Manifest",
        "ManifestCadence",
        "ManifestLimits",
        "Prefix",
        "ProtectionKey",
        "ProtectionRing",
        "PublicationNamespace",
        "Scheme",
        "Scope",
        "convert",
        "Layer",
    ),
    "kvcs.kvfile": (
        "KvFile",
        "KvLayer",
        "load_kv_file",
        "save_kv_file",
    ),
    "kvcs.moqt.settings": ("SessionSettings",),
    "kvcs.planner": (
        "Plan",
        "plan",
    ),
    "kvcs.publisher": (
        "Pass",
        "Passes",
        "Publication",
        "PublicationProgress",
        "Publisher",
        "PublisherSettings",
        "Segment",
    ),
    "kvcs.quic.aioquic_backend": ("QuicSettings",),
    "kvcs.quic.connection": ("Connection",),
    "kvcs.quic.endpoint": (
        "Server",
        "connect",
        "serve",
    ),
    "kvcs.quic.reconnect": ("Reconnect",),
    "kvcs.quic.transport": ("TransportStats",),
    "kvcs.relay.server": (
        "Relay",
        "RelaySettings",
    ),
    "kvcs.relay.settings": ("RelayLimits",),
    "kvcs.subscriber": (
        "Cache",
        "CacheProgress",
        "CacheReport",
        "FileIndex",
        "Holding",
        "HttpIndex",
        "Index",
        "ManifestFacts",
        "MissingLayer",
        "PublicationInfo",
        "Subscriber",
        "SubscriberSettings",
        "index_json",
    ),
    "kvcs.trust": (
        "Algorithm",
        "KeyRing",
        "KeyUse",
        "PublicKey",
        "SigningKey",
    ),
}
"""Where the public names are from; a test compares it with the imports above."""

_OTHERWISE = {"Layer": "LayerTensors"}
"""What a name is called at home, where that is another one."""

_WHEN_CALLED = {"load_protection_ring": "kvcs.kv.protection_keys"}
"""What a function imports when it is called, which may be in a thread: it comes with its name."""

_ROOMS = frozenset(
    {"access", "errors", "fallback", "keyfiles", "kv", "kvfile", "moqt", "observe", "planner"}
    | {"publisher", "quic", "recovery", "relay", "subscriber", "trust"}
)
"""Modules that `import kvcs` alone gives, too, such as `kvcs.observe.metrics`."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

_one_by_one = threading.RLock()
"""Held while names are imported. Python itself lets two threads import parts of one package, each
of which needs what the other has begun, and shows one of them a module that is half made."""


def _forked() -> None:
    """A thread that held the lock is not in this process."""
    global _one_by_one
    _one_by_one = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)

if not TYPE_CHECKING:
    # Unseen by type checkers, which would take every misspelt name for one that this gives.
    def __getattr__(name: str) -> Any:
        """Import what a name stands for, when it is first used.

        All of them together take half a second: a relay needs no arrays, a producer no fallback,
        and a look at the version nothing at all.
        """
        home = f"{__name__}.{name}" if name in _ROOMS else _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        with _one_by_one:
            module = import_module(home)
            if name in _WHEN_CALLED:
                import_module(_WHEN_CALLED[name])
        if name in _ROOMS:
            return module  # importing it has made it an attribute of this one
        value = globals()[name] = getattr(module, _OTHERWISE.get(name, name))
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
