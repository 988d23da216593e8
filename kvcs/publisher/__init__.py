"""Publishing a prefix's KV cache, layer by layer, while it is computed (KVCS "Publisher Behavior").

`Publisher` offers publications on one or more sessions; a `Publication` is one production of one
prefix; a `Segment` takes the layers of a run of its blocks, and `Passes` those of chunks of any
length.
"""

from kvcs.publisher.passes import Pass, Passes
from kvcs.publisher.publication import Publication, PublicationProgress
from kvcs.publisher.publisher import Publisher, PublisherSettings
from kvcs.publisher.segment import Segment

__all__ = [
    "Pass",
    "Passes",
    "Publication",
    "PublicationProgress",
    "Publisher",
    "PublisherSettings",
    "Segment",
]
