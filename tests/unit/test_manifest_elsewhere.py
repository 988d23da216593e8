"""A manifest that a fallback gives: what it cannot undo of what was verified over a session."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kvcs.errors import NotAuthentic
from kvcs.fallback.source import StoredManifest
from kvcs.kv import MANIFEST, MANIFEST_COSE, ManifestWriter, PublicationNamespace, sign_manifest
from kvcs.kv.tracks import Component, DataTrack
from kvcs.moqt import events
from kvcs.moqt.objects import ObjectHeader
from kvcs.subscriber.authenticity import Authenticity
from kvcs.subscriber.last_means import read_stored
from kvcs.subscriber.manifests import ManifestFollower
from kvcs.subscriber.settings import SubscriberSettings
from kvcs.subscriber.without import NoSession
from kvcs.trust import KeyRing, SigningKey
from tests.builders import toy_prefix

PREFIX = toy_prefix(1)
NAMESPACE = PREFIX.namespace(bytes(16))
NAMED = PublicationNamespace.parse(NAMESPACE)
KEY = SigningKey.generate(scope_id=NAMED.scope_id, name="site one")


def version() -> bytes:
    writer = ManifestWriter(
        PREFIX.compat,
        layers=PREFIX.descriptor.layers,
        block_tokens=PREFIX.descriptor.block_tokens,
    )
    tracks = [DataTrack(component, "raw", 0) for component in (Component.K, Component.V)]
    writer.add_segment(1, PREFIX.block_keys_digest(0, 1), tracks)
    return writer.to_json_bytes()


def follower(*, required: bool) -> ManifestFollower:
    return ManifestFollower(
        cast(Any, NoSession("gone")),
        NAMESPACE,
        PREFIX,
        SubscriberSettings(),
        lambda: None,
        authenticity=Authenticity(KeyRing([KEY.public]), required=required),
    )


def over_a_session(of: ManifestFollower, number: int, payload: bytes) -> None:
    header = ObjectHeader(number, 0, 0, 0, payload_length=len(payload))
    of.take(events.ObjectStarted(0, 3, header))
    of.take(events.ObjectChunk(0, 3, memoryview(payload)))
    of.take(events.ObjectEnded(0, 3))


@pytest.mark.parametrize("required", [True, False])
async def test_a_signed_publication_does_not_become_an_unsigned_one(required: bool) -> None:
    ours = follower(required=required)
    signed = sign_manifest(version(), KEY, NAMED, 0)
    await read_stored(ours, StoredManifest(MANIFEST_COSE, 0, signed, b""))
    assert ours.ready and ours.newest == 0
    with pytest.raises(NotAuthentic):
        await read_stored(ours, StoredManifest(MANIFEST, 1, version(), b""))
    assert ours.newest == 0
    # What comes next is verified as before: the refusal has changed nothing.
    over_a_session(ours, 2, version())
    assert ours.newest == 0 and isinstance(ours.error, NotAuthentic)
    another = ours.on_another_session(cast(Any, None), 0.0, lambda: None)
    assert another._name == MANIFEST_COSE


async def test_an_unsigned_one_is_refused_where_a_signature_is_required() -> None:
    ours = follower(required=True)
    with pytest.raises(NotAuthentic):
        await read_stored(ours, StoredManifest(MANIFEST, 0, version(), b""))
    over_a_session(ours, 0, version())
    assert not ours.ready
