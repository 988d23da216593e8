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
