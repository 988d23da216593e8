"""What KVCS adds to MOQT, as plain logic on bytes and arrays: no I/O, no clock, no asyncio.

Identity (`Scope`, `Descriptor`, `Prefix`), names (`DataTrack`, `PublicationNamespace`), payloads
(`build_payload`, `PayloadHeader`), the manifest (`Manifest`, `ManifestWriter`) and what a consumer
holds (`Ledger`).
"""

from kvcs.kv.arrays import as_host_array, byte_view, convert
from kvcs.kv.cadence import ManifestCadence
from kvcs.kv.codecs import RAW, Codec, codec_names, lookup, register
from kvcs.kv.descriptor import UNPINNED, Descriptor, Unpinned
from kvcs.kv.holdings import LayerTensors, LedgerCounters
from kvcs.kv.identity import KVCS_SCHEME, KvcsScheme, Prefix, Scheme, Scope
from kvcs.kv.layer_memory import GivenMemory, LayerMemory
from kvcs.kv.layout import DTYPES, BlockLayout, BlockShape, numpy_dtype
from kvcs.kv.ledger import MAX_ASIDE_OCTETS, Ledger
from kvcs.kv.manifest import Manifest, SegmentEntry, check_succession
from kvcs.kv.manifest_json import (
    ManifestLimits,
    ManifestWriter,
    manifest_json_bytes,
    parse_manifest,
)
from kvcs.kv.payload import (
    DIGEST_OCTETS,
    HEADER_OCTETS,
    MAX_DATA_OCTETS,
    Payload,
    PayloadHeader,
    build_payload,
    check_digest,
    check_header,
    check_length,
)
from kvcs.kv.protection import CipherSuite, ProtectionKey
from kvcs.kv.protection_keys import ProtectionRing
from kvcs.kv.signed import (
    SignedManifests,
    SignedVersion,
    check_lists,
    check_signing_key,
    look_at_signed,
    max_signed_octets,
    sign_manifest,
)
from kvcs.kv.slots import Outcome, Slot
from kvcs.kv.tracks import (
    APPLICATION,
    MANIFEST,
    MANIFEST_COSE,
    Component,
    DataTrack,
    PublicationNamespace,
    holder_uri,
    parse_holder_uri,
    parse_track_name,
)

__all__ = [
    "APPLICATION",
    "DIGEST_OCTETS",
    "DTYPES",
    "HEADER_OCTETS",
    "KVCS_SCHEME",
    "MANIFEST",
    "MANIFEST_COSE",
    "MAX_ASIDE_OCTETS",
    "MAX_DATA_OCTETS",
    "RAW",
    "UNPINNED",
    "BlockLayout",
    "BlockShape",
    "CipherSuite",
    "Codec",
    "Component",
    "DataTrack",
    "Descriptor",
    "GivenMemory",
    "KvcsScheme",
    "LayerMemory",
    "LayerTensors",
    "Ledger",
    "LedgerCounters",
    "Manifest",
    "ManifestCadence",
    "ManifestLimits",
    "ManifestWriter",
    "Outcome",
    "Payload",
    "PayloadHeader",
    "Prefix",
    "ProtectionKey",
    "ProtectionRing",
    "PublicationNamespace",
    "Scheme",
    "Scope",
    "SegmentEntry",
    "SignedManifests",
    "SignedVersion",
    "Slot",
    "Unpinned",
    "as_host_array",
    "build_payload",
    "byte_view",
    "check_digest",
    "check_header",
    "check_length",
    "check_lists",
    "check_signing_key",
    "check_succession",
    "codec_names",
    "convert",
    "holder_uri",
    "look_at_signed",
    "lookup",
    "manifest_json_bytes",
    "max_signed_octets",
    "numpy_dtype",
    "parse_holder_uri",
    "parse_manifest",
    "parse_track_name",
    "register",
    "sign_manifest",
]
