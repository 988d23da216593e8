"""Retrieving a prefix's KV cache, verified, layer by layer (KVCS "Consumer Procedures").

`Subscriber` finds publications of a prefix and opens one; the opened `Cache` hands out each layer
as soon as every block of it is verified, while later layers are still on the wire.
"""

from kvcs.subscriber.cache import Cache
from kvcs.subscriber.coverage import Holding, Index
from kvcs.subscriber.discovery import PublicationInfo
from kvcs.subscriber.indices import FileIndex, HttpIndex, index_json
from kvcs.subscriber.last_means import MissingLayer
from kvcs.subscriber.report import CacheProgress, CacheReport, ManifestFacts
from kvcs.subscriber.settings import SubscriberSettings
from kvcs.subscriber.subscriber import Subscriber

__all__ = [
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
]
