"""MOQT sessions over QUIC for asyncio: opening them, serving them, following Tracks.

With `kvcs.moqt` this is a library of its own, without KV caches; docs/moqt.md shows it.
"""

from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import RELAY_PORT, Server, connect, serve
from kvcs.quic.following import follow, follow_tracks
from kvcs.quic.origin import Origin
from kvcs.quic.reconnect import Reconnect
from kvcs.quic.subscription import ReceivedObject, Subscription, subscribe, take
from kvcs.quic.tracks import OfferedTrack, TrackWatch
from kvcs.quic.transport import TransportStats

__all__ = [
    "RELAY_PORT",
    "Connection",
    "OfferedTrack",
    "Origin",
    "QuicSettings",
    "ReceivedObject",
    "Reconnect",
    "Server",
    "Subscription",
    "TrackWatch",
    "TransportStats",
    "connect",
    "follow",
    "follow_tracks",
    "serve",
    "subscribe",
    "take",
]
