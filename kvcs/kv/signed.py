"""Signed manifests, the payloads of "manifest.cose" (KVCS "Manifest Track").

Each version is a COSE_Sign1 with the JSON object as its payload. The draft does not bind a
signature to the publication that it is shown under, so a relay could show one publication's
manifest, or an old version, as another's. Ours are bound by two protected header parameters, which
other readers ignore: fields 1 to 4 of the Track Namespace, and the version's Group ID. Where a
signer has put them in they have to match.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from kvcs.errors import NotAuthentic, PublicationError, TrustError, UsageError
from kvcs.kv.manifest import Manifest, check_succession
from kvcs.kv.strict_json import Octets
from kvcs.kv.tracks import PublicationNamespace
from kvcs.trust import KeyRing, KeyUse, PublicKey, SigningKey, read_sign1, sign1

NAMESPACE: Final = "kvcs-namespace"
"""Protected header parameter: fields 1 to 4 of the Track Namespace, 96 octets in one piece."""

VERSION: Final = "kvcs-version"
"""Protected header parameter: the Group ID of the version."""

FRAME_OCTETS: Final = 4_096
"""What a signed version may have beyond its JSON: more than the headers may."""


def check_signing_key(key: SigningKey, namespace: PublicationNamespace, now: float) -> None:
    """Check that a key may sign a publication's manifests now.

    Args:
        key: the producer's.
        namespace: the publication.
        now: Unix seconds.

    Raises:
        UsageError: it is for tokens, for another scope, or does not count now.
    """
    public = key.public
    if public.use is not KeyUse.MANIFEST:
        raise UsageError("manifests are signed by producer keys; this one signs tokens")
    if public.scope_id not in (None, namespace.scope_id):
        raise UsageError(f"the key {key.kid.hex()} is of another scope than the publication")
    try:
        public.check_time(now)
    except TrustError as exc:
        raise UsageError(str(exc)) from exc


def sign_manifest(
    payload: bytes, key: SigningKey, namespace: PublicationNamespace, version: int
) -> bytes:
    """Sign one version of a manifest.

    Args:
        payload: its JSON.
        key: the producer's; `check_signing_key` tells whether it fits.
        namespace: the publication.
        version: its Group ID.

    Returns:
        The payload of Object 0 of that Group.
    """
    return sign1(payload, key, {NAMESPACE: b"".join(namespace), VERSION: version})


def max_signed_octets(json_octets: int) -> int:
    """Longest signed version for a limit on its JSON."""
    return json_octets + FRAME_OCTETS


@dataclass(frozen=True, slots=True)
class SignedVersion:
    """A signed version that was read."""

    version: int
    """Group ID that it came as."""

    kid: bytes
    """Key identifier that it names."""

    payload: bytes = field(repr=False)
    """Its JSON."""

    key: PublicKey | None
    """Whose signature was verified; None where it was only looked at."""


def look_at_signed(data: Octets, version: int, *, max_octets: int) -> SignedVersion:
    """Read a signed version without verifying anything: to look, not to decide.

    Raises:
        NotAuthentic: it is no COSE_Sign1 that the draft allows.
    """
    try:
        message = read_sign1(data, "manifest.cose", max_octets=max_octets, understood=_UNDERSTOOD)
    except TrustError as exc:
        raise NotAuthentic(str(exc), check=exc.check) from exc
    return SignedVersion(version, message.kid, message.payload, None)


class SignedManifests:
    """Verifies the versions of one publication's signed manifest.

    All versions of a publication are signed by one producer: the one of the first that is accepted.

    Args:
        namespace: the publication.
        keys: producer keys; looked at for each version, so that a key that is taken out counts for
            the next one no longer.
    """

    def __init__(self, namespace: PublicationNamespace, keys: KeyRing) -> None:
        self._namespace = namespace
        self._keys = keys
        self._newest: tuple[int, Manifest] | None = None
        self.key: PublicKey | None = None
        """The producer's key, once a version was accepted."""

    def verify(self, data: Octets, version: int, now: float, *, max_octets: int) -> SignedVersion:
        """Verify one version; it may be called in a thread.

        Args:
            data: payload of its Object.
            version: its Group ID.
            now: Unix seconds.
            max_octets: longest that is looked at.

        Raises:
            NotAuthentic: ``size``, ``structure``, ``header``, ``algorithm``: it is no COSE_Sign1
                that the draft allows; ``kid``: nobody has that key; ``scope``: it is a key of
                another scope; ``not_yet`` or ``expired``: the key does not count now;
                ``signature``; ``publication`` or ``version``: it was signed as that of another
                publication, or as another version.
        """
        try:
            message = read_sign1(
                data, "manifest.cose", max_octets=max_octets, understood=_UNDERSTOOD
            )
            key = self._keys.find(message.kid, self._namespace.scope_id, now)
            message.verify(key)
        except TrustError as exc:
            raise NotAuthentic(str(exc), check=exc.check) from exc
        for label, meant in ((NAMESPACE, b"".join(self._namespace)), (VERSION, version)):
            if label in message.protected and message.protected[label] != meant:
                check = "publication" if label == NAMESPACE else "version"
                raise NotAuthentic(f"the manifest was signed for another {check}", check=check)
        return SignedVersion(version, message.kid, message.payload, key)

    def accept(self, signed: SignedVersion, manifest: Manifest) -> None:
        """Take a verified version; versions only grow.

        Args:
            signed: what `verify` gave.
            manifest: its JSON, read.

        Raises:
            NotAuthentic: ``signer``: another producer has signed it than the former ones;
                ``rollback``: it is older than the newest, or the same with other content;
                ``contradiction``: it changes what a former version said.
        """
        if signed.key is None:
            raise UsageError("the version was not verified")
        if self.key is not None and signed.key != self.key:
            raise NotAuthentic(
                f"versions signed by two producers, {self.key.kid.hex()} and {signed.kid.hex()}",
                check="signer",
            )
        if self._newest is not None:
            version, former = self._newest
            if signed.version < version or (signed.version == version and former != manifest):
                raise NotAuthentic(
                    f"version {signed.version} of the manifest after version {version}",
                    check="rollback",
                )
            try:
                check_succession(former, manifest)
            except PublicationError as exc:
                raise NotAuthentic(str(exc), check="contradiction") from exc
        self.key = signed.key
        self._newest = (signed.version, manifest)


def check_lists(manifest: Manifest) -> None:
    """Check that a signed manifest lists the Objects of its complete segments.

    Without `object_digests` a signature says nothing of the Objects (KVCS "Security
    Considerations").

    Raises:
        NotAuthentic: ``digests``: a complete segment has a track without them.
    """
    for entry in manifest.segments:
        for track in entry.tracks:
            if entry.complete and len(entry.object_digests.get(track, ())) != manifest.layers:
                raise NotAuthentic(
                    f"manifest: segment {entry.segment} is complete without object_digests of"
                    f" {track}: its signature covers no object",
                    check="digests",
                )


_UNDERSTOOD: Final = frozenset({NAMESPACE, VERSION})
