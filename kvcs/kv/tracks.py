"""Names on the wire: the publication's Track Namespace, Track Names and holder URIs.

KVCS "Track Namespace" and "Track Names". This module is where KV words meet MOQT's.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, NamedTuple

from kvcs.errors import PublicationError, UsageError
from kvcs.moqt.names import TrackNamespace, namespace_text, parse_namespace_text

APPLICATION: Final = b"kvcs-1"
"""Field 0 of every KVCS Track Namespace."""

SCOPE_ID_OCTETS: Final = 16
COMPAT_ID_OCTETS: Final = 32
BLOCK_KEY_OCTETS: Final = 32
PUBLICATION_ID_OCTETS: Final = 16

MANIFEST: Final = b"manifest"
"""Track Name of the manifest as plain JSON."""

MANIFEST_COSE: Final = b"manifest.cose"
"""Track Name of the signed manifest."""

MAX_SEGMENT: Final = 2**32 - 1
"""Largest segment number; the draft's syntax has no bound, our tables need one."""

MAX_BLOCK: Final = 2**32 - 1
"""Largest block index: the payload header has 32 bits for it."""

_CODEC_NAME = re.compile(r"[a-z0-9-]{1,32}")
_DATA_TRACK = re.compile(rb"(k|v|kv)\.([a-z0-9-]{1,32})\.s(0|[1-9][0-9]{0,9})")
_HOLDER_FRAGMENT = "#kvcs:"


class Component(StrEnum):
    """Tensor kind that a data track carries (KVCS "KVCS Components")."""

    K = "k"
    """Keys."""

    V = "v"
    """Values."""

    KV = "kv"
    """Keys and values jointly encoded; also the one tensor of latent attention."""

    __hash__ = str.__hash__  # an enumeration's own is slow, and tracks are looked up per Object

    @property
    def number(self) -> int:
        """Value of the payload header's Component field."""
        return _COMPONENT_NUMBERS[self]

    @classmethod
    def from_number(cls, number: int) -> Component | None:
        """Component of a payload header's field, None where the number is not registered."""
        return _COMPONENTS.get(number)


_COMPONENT_NUMBERS = {Component.K: 1, Component.V: 2, Component.KV: 3}
_COMPONENTS = {number: component for component, number in _COMPONENT_NUMBERS.items()}


def is_codec_name(name: str) -> bool:
    """Whether ``name`` has the syntax of a KVSP codec name (KVCS "Track Names")."""
    return _CODEC_NAME.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, order=True)
class DataTrack:
    """Track Name of a data track, in parts (KVCS "Track Names").

    Raises:
        UsageError: a part does not fit the draft's syntax.
    """

    component: Component
    """Tensor kind."""

    codec: str
    """Codec name, 1 to 32 of a-z, 0-9 and hyphen."""

    segment: int
    """Segment number."""

    def __post_init__(self) -> None:
        if not isinstance(self.component, Component):
            raise UsageError(f"component must be a Component, got {self.component!r}")
        if not isinstance(self.codec, str) or not is_codec_name(self.codec):
            raise UsageError(
                f"codec name {self.codec!r} is not 1 to 32 lower-case letters, digits and hyphens"
            )
        if type(self.segment) is not int or not 0 <= self.segment <= MAX_SEGMENT:
            raise UsageError(f"segment must be an integer 0..{MAX_SEGMENT}, got {self.segment!r}")

    @property
    def name(self) -> bytes:
        """The Track Name, for example ``b"k.raw.s0"``."""
        return str(self).encode("ascii")

    def __str__(self) -> str:
        return f"{self.component.value}.{self.codec}.s{self.segment}"

    @classmethod
    def parse(cls, name: bytes | str) -> DataTrack:
        """Read the Track Name of a data track.

        Raises:
            UsageError: ``name`` is not one; the two manifest names are not either.
        """
        try:
            octets = name.encode("ascii") if isinstance(name, str) else bytes(name)
        except UnicodeEncodeError as exc:
            raise UsageError(f"Track Name {name[:64]!r} is not ASCII") from exc
        match = _DATA_TRACK.fullmatch(octets)
        if match is None or int(match[3]) > MAX_SEGMENT:
            raise UsageError(
                f"Track Name {octets[:64]!r} is not component.codec.sN, for example k.raw.s0"
            )
        return cls(Component(match[1].decode()), match[2].decode(), int(match[3]))


def parse_track_name(name: bytes) -> DataTrack | None:
    """Read any KVCS Track Name: None stands for one of the two manifest names.

    Raises:
        UsageError: ``name`` is none of the draft's three forms.
    """
    if name in (MANIFEST, MANIFEST_COSE):
        return None
    return DataTrack.parse(name)


class PublicationNamespace(NamedTuple):
    """Fields 1 to 4 of a publication's Track Namespace (KVCS "Track Namespace")."""

    scope_id: bytes
    """Scope ID, 16 octets."""

    compat_id: bytes
    """Compatibility ID, 32 octets."""

    anchor_key: bytes
    """Anchor Key: Block Key of the last block of segment 0, 32 octets."""

    publication_id: bytes
    """Publication ID, 16 octets, random for each production."""

    @property
    def fields(self) -> TrackNamespace:
        """The five Track Namespace Fields."""
        return (APPLICATION, *self)

    @classmethod
    def parse(cls, namespace: TrackNamespace) -> PublicationNamespace:
        """Check the five fields and their lengths 6, 16, 32, 32 and 16.

        Raises:
            PublicationError: the namespace is not that of a KVCS publication.
        """
        if len(namespace) != 5 or namespace[0] != APPLICATION:
            raise PublicationError(
                f"Track Namespace {namespace_text(namespace)[:200]!r} is not five fields that"
                " start with kvcs-1"
            )
        lengths = (SCOPE_ID_OCTETS, COMPAT_ID_OCTETS, BLOCK_KEY_OCTETS, PUBLICATION_ID_OCTETS)
        for number, (field, length) in enumerate(zip(namespace[1:], lengths, strict=True), 1):
            if len(field) != length:
                raise PublicationError(
                    f"Track Namespace field {number} has {len(field)} octets, expected {length}"
                )
        return cls(*map(bytes, namespace[1:]))


def holder_uri(url: str, namespace: PublicationNamespace) -> str:
    """Name one publication at one endpoint, ``moqt://host:port/path#kvcs:...``.

    Args:
        url: a ``moqt://`` URL without fragment.
        namespace: the publication's Track Namespace; its text form becomes the fragment.

    Raises:
        UsageError: ``url`` is not a ``moqt://`` URL or already has a fragment.
    """
    if not url.startswith("moqt://") or "#" in url:
        raise UsageError(f"{url!r} is not a moqt:// URL without fragment")
    return f"{url}{_HOLDER_FRAGMENT}{namespace_text(namespace.fields)}"


def parse_holder_uri(uri: str) -> tuple[str, PublicationNamespace]:
    """Take a holder URI apart into the endpoint's URL and the publication's namespace.

    Raises:
        UsageError: ``uri`` is not a holder URI, or its namespace is not that of a publication.
    """
    url, fragment, text = uri.partition(_HOLDER_FRAGMENT)
    if not url.startswith("moqt://") or not fragment or "#" in url:
        raise UsageError(f"{uri[:200]!r} is not a holder URI, moqt://host:port/path#kvcs:...")
    try:
        return url, PublicationNamespace.parse(parse_namespace_text(text))
    except PublicationError as exc:
        raise UsageError(f"holder URI names no publication: {exc}") from exc
