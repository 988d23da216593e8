"""Signed publications: who produced a cache is shown, or nothing of it is used."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

import kvcs
from kvcs.errors import NotAuthentic, UsageError
from kvcs.kv import MANIFEST, MANIFEST_COSE, SignedManifests, parse_manifest, sign_manifest
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import Location
from kvcs.moqt.parameters import Parameters
from kvcs.publisher import manifest_track
from kvcs.quic.endpoint import connect
from kvcs.trust import Algorithm, KeyRing, KeyUse, SigningKey, sign1
from tests.builders import BRIEF, QUICK, put, same, toy_prefix, toy_publication
from tests.certificates import PemFiles
from tests.loopback.kv_fixtures import Wire, joined, serving, subscribe
from tests.loopback.raw_publication import K0, RawPublication
from tests.loopback.retrieving import meeting
from tests.unit.kv.toy import same_place_other_bytes
from tests.virtual import virtual

pytestmark = pytest.mark.usefixtures("nothing_left_behind")

TOY = toy_publication()
PREFIX = toy_prefix()
SCOPE = PREFIX.scope_id
KEY = SigningKey.generate(scope_id=SCOPE, name="site one")
OTHER = SigningKey.generate(scope_id=SCOPE, name="site two")
RING = KeyRing([KEY.public, OTHER.public])
LAYERS = TOY.descriptor.layers


def demanding(
    *sessions: Any, keys: KeyRing = RING, settings: kvcs.SubscriberSettings = QUICK
) -> kvcs.Subscriber:
    return kvcs.Subscriber(*sessions, settings=settings, keys=keys, require_signed=True)


@asynccontextmanager
async def relaying(files: PemFiles) -> AsyncIterator[kvcs.Relay]:
    settings = kvcs.RelaySettings(
        cert=files.cert, key=files.key, port=0, allow_anyone=True, goaway_timeout=0.5
    )
    async with kvcs.Relay(settings) as relay:
        yield relay


# --- what a publisher signs ---


async def test_the_only_manifest_track_is_the_signed_one(files: PemFiles) -> None:
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(PREFIX, sign=KEY) as publication:
            await put(await publication.segment(), TOY)
            filled = Parameters.of(
                location_filter=LocationFilter.next_object(),
                fill_parameters=Parameters.of(location_filter=LocationFilter.absolute_start(0, 0)),
            )
            tape, _ = await subscribe(client, publication.namespace, MANIFEST_COSE, filled)
            await tape.until(
                lambda: sum(read.whole for read in tape.objects) == publication.progress.manifests
            )
            with pytest.raises(kvcs.RequestError) as refused:
                await subscribe(client, publication.namespace, MANIFEST, filled)
            assert refused.value.code == 0x10
    judge = SignedManifests(kvcs.PublicationNamespace.parse(publication.namespace), RING)
    reads = sorted(tape.objects, key=lambda read: read.header.group_id)
    for read in reads:
        octets = bytes(read.payload)
        signed = judge.verify(octets, read.header.group_id, 0.0, max_octets=len(octets))
        judge.accept(signed, parse_manifest(signed.payload))
    assert judge.key == KEY.public
    assert len(reads) == publication.progress.manifests >= 4


@pytest.mark.parametrize("algorithm", list(Algorithm))
async def test_through_a_relay(files: PemFiles, algorithm: Algorithm) -> None:
    key = SigningKey.generate(algorithm, scope_id=SCOPE)
    async with (
        relaying(files) as relay,
        connect(relay.url, ca=files.ca) as producer,
        connect(relay.url, ca=files.ca) as consumer,
    ):
        async with kvcs.Publisher(producer).publish(PREFIX, sign=key) as publication:
            segment = await publication.segment()
            await put(segment, TOY, [0, 1])
            subscriber = demanding(consumer, keys=KeyRing([key.public]))
            async with subscriber.open(PREFIX) as cache:
                assert same(await cache.layer(1), TOY)  # while later ones are still produced
                await put(segment, TOY, range(2, LAYERS))
                assert [same(layer, TOY) async for layer in cache] == [True] * LAYERS
                assert cache.report.signed_by == key.kid
            assert subscriber.refused == {}


async def test_what_no_signed_list_names_is_not_released(files: PemFiles) -> None:
    lazy = kvcs.ManifestCadence(first_layers=(1,), every_layers=LAYERS)
    settings = kvcs.PublisherSettings(signed_cadence=lazy)
    async with serving(files) as server, joined(server, files) as client:
        publisher = kvcs.Publisher(server, settings=settings)
        async with publisher.publish(PREFIX, sign=KEY) as publication:
            segment = await publication.segment()
            wire = Wire()
            async with joined(server, files, wire) as other:
                async with demanding(other).open(PREFIX) as cache:
                    await put(segment, TOY, [0, 1])
                    assert same(await cache.layer(0), TOY)
                    # Layer 1 has come, and nothing signed says what it should be.
                    await wire.until(lambda: wire.got.get("v.raw.s0", {}).get((1, 2), 0) == 1)
                    assert cache.progress.layers_ready == 1
                    await put(segment, TOY, range(2, LAYERS))
                    assert [same(layer, TOY) async for layer in cache] == [True] * LAYERS
            assert publication.progress.manifests == 3
        assert client.is_open


async def test_large_versions_are_signed_off_the_loop(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come a little later, may be merged, and none is missing in the end."""
    monkeypatch.setattr(manifest_track, "THREAD_OCTETS", 0)
    async with serving(files) as server, joined(server, files) as client:
        async with kvcs.Publisher(server).publish(PREFIX, sign=KEY) as publication:
            segment = await publication.segment()
            async with demanding(client).open(PREFIX) as cache:
                await put(segment, TOY)
                assert [same(layer, TOY) async for layer in cache] == [True] * LAYERS
                assert cache.report.rejected == {}
            assert 1 <= publication.progress.manifests <= 6


@pytest.mark.parametrize("how", ["left", "aborted", "failed"])
async def test_a_publication_may_end_while_a_version_is_signed(
    files: PemFiles, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(manifest_track, "THREAD_OCTETS", 0)
    async with serving(files) as server, joined(server, files) as client:
        try:
            async with kvcs.Publisher(server).publish(PREFIX, sign=KEY) as publication:
                await put(await publication.segment(), TOY)
                if how == "aborted":
                    publication.abort("enough")
                elif how == "failed":
                    raise ValueError("outside of the publication")
                else:
                    async with demanding(client).open(PREFIX) as cache:
                        assert [same(layer, TOY) async for layer in cache] == [True] * LAYERS
        except ValueError:
            assert how == "failed"
        assert not publication.is_open
        if how != "aborted":
            assert publication.progress.manifests >= 1, "closing waits for the last version"


async def test_a_key_that_does_not_fit_is_told_at_once(files: PemFiles) -> None:
    async with serving(files) as server:
        publisher = kvcs.Publisher(server)
        for key, text in (
            (SigningKey.generate(scope_id=b"f" * 16), "another scope"),
            (SigningKey.generate(expires=1), "expired"),
            (SigningKey.generate(use=KeyUse.TOKEN, name="issuer"), "signs tokens"),
        ):
            with pytest.raises(UsageError, match=text):
                async with publisher.publish(PREFIX, sign=key):
                    raise AssertionError("it was published")
        assert publisher.publications == ()
        assert publisher.held_octets == 0


# --- what a consumer refuses ---


@dataclass
class Case:
    """A publication that a demanding consumer refuses."""

    check: str
    """The failed check."""

    payload: Callable[[RawPublication], bytes] = lambda raw: sign(raw)
    keys: KeyRing = RING
    manifest: bytes = MANIFEST_COSE


def sign(raw: RawPublication, key: SigningKey = KEY, version: int = 0, **options: Any) -> bytes:
    namespace = kvcs.PublicationNamespace.parse(raw.namespace)
    return sign_manifest(raw.toy.writer(**options).to_json_bytes(), key, namespace, version)


def elsewhere(raw: RawPublication) -> bytes:
    namespace = kvcs.PublicationNamespace.parse(raw.namespace)._replace(publication_id=b"x" * 16)
    return sign_manifest(raw.toy.writer().to_json_bytes(), KEY, namespace, 0)


def without_digests(raw: RawPublication) -> bytes:
    text = raw.toy.writer().to_json_bytes()
    begin = text.index(b',"object_digests"')
    return sign1(text[:begin] + text[text.index(b"}", begin) + 1 :], KEY)


FOREIGN = SigningKey.generate(scope_id=b"f" * 16)
EXPIRED = SigningKey.generate(scope_id=SCOPE, expires=1)
COMING = SigningKey.generate(scope_id=SCOPE, not_before=2**40)
TWIN = SigningKey.generate(kid=KEY.kid, scope_id=SCOPE)

CASES = {
    "unsigned": Case("unsigned", lambda raw: raw.toy.writer().to_json_bytes(), manifest=MANIFEST),
    "JSON where a signature belongs": Case(
        "structure", lambda raw: raw.toy.writer().to_json_bytes()
    ),
    "junk": Case("structure", lambda raw: b"junk"),
    "cut": Case("structure", lambda raw: sign(raw)[:-1]),
    "changed": Case(
        "signature", lambda raw: sign(raw).replace(b'"complete":true', b'"complete":tru!')
    ),
    "a key that nobody knows": Case("kid", lambda raw: sign(raw, SigningKey.generate())),
    "no keys at all": Case("kid", keys=KeyRing()),
    "a forger": Case("signature", lambda raw: sign(raw, TWIN)),
    "another scope's key": Case("scope", lambda raw: sign(raw, FOREIGN), KeyRing([FOREIGN.public])),
    "an expired key": Case("expired", lambda raw: sign(raw, EXPIRED), KeyRing([EXPIRED.public])),
    "a key of tomorrow": Case("not_yet", lambda raw: sign(raw, COMING), KeyRing([COMING.public])),
    "another publication": Case("publication", elsewhere),
    "another version": Case("version", lambda raw: sign(raw, version=3)),
    "no digests": Case("digests", without_digests),
}


@pytest.mark.parametrize("name", list(CASES))
async def test_what_shows_no_producer_is_refused(files: PemFiles, name: str) -> None:
    case = CASES[name]
    raw = RawPublication(TOY, manifest=case.manifest)
    raw.layers(*range(LAYERS))
    raw.end()
    raw.manifest(case.payload(raw))
    wire = Wire()
    async with raw.serve(files) as server, joined(server, files, wire) as client:
        subscriber = demanding(client, keys=case.keys)
        named = kvcs.PublicationNamespace.parse(raw.namespace)
        with pytest.raises(NotAuthentic) as caught:
            async with subscriber.open(PREFIX, publication=named):
                raise AssertionError("it was opened")
        assert caught.value.check == case.check, str(caught.value)
        assert subscriber.refused == {case.check: 1}
        with pytest.raises(kvcs.PublicationNotFound) as missing:
            async with subscriber.open(PREFIX, wait=0):
                raise AssertionError("it was opened")
        assert isinstance(missing.value.__cause__, NotAuthentic)
        assert subscriber.refused == {case.check: 2}
        asked = set(wire.tracks("subscribe")) | set(wire.tracks("fetch"))
        assert asked <= {"manifest.cose"}, "no data track is asked for"


async def test_who_demands_nothing_reads_both_kinds(files: PemFiles) -> None:
    for manifest in (MANIFEST, MANIFEST_COSE):
        raw = RawPublication(TOY, manifest=manifest)
        raw.layers(*range(LAYERS))
        raw.end()
        raw.manifest(sign(raw) if manifest == MANIFEST_COSE else None)
        async with raw.serve(files) as server, joined(server, files) as client:
            subscriber = kvcs.Subscriber(client, settings=QUICK, keys=RING)
            async with subscriber.open(PREFIX) as cache:
                assert [same(layer, TOY) async for layer in cache] == [True] * LAYERS
                signed = manifest == MANIFEST_COSE
                assert cache.report.signed_by == (KEY.kid if signed else None)


async def test_a_version_by_another_producer_ends_the_use(files: PemFiles) -> None:
    raw = RawPublication(TOY, manifest=MANIFEST_COSE)
    raw.layers(0, 1)
    raw.manifest(sign(raw, layers=[2]))
    async with raw.serve(files) as server, joined(server, files) as client:
        subscriber = demanding(client)
        async with subscriber.open(PREFIX) as cache:
            assert same(await cache.layer(1), TOY)
            raw.layers(2, 3)
            raw.manifest(sign(raw, OTHER, version=1))
            with pytest.raises(NotAuthentic) as caught:
                await cache.complete()
        assert caught.value.check == "signer"
        assert subscriber.refused == {"signer": 1}


async def test_a_signed_version_that_goes_back_ends_the_use(files: PemFiles) -> None:
    raw = RawPublication(TOY, manifest=MANIFEST_COSE)
    raw.layers(0, 1)
    raw.manifest(sign(raw, layers=[2]))
    async with raw.serve(files) as server, joined(server, files) as client:
        subscriber = demanding(client)
        async with subscriber.open(PREFIX) as cache:
            assert same(await cache.layer(1), TOY)
            raw.manifest(sign(raw, version=1, layers=[1]))
            with pytest.raises(NotAuthentic) as caught:
                await cache.complete()
        assert caught.value.check == "contradiction"
        assert subscriber.refused == {"contradiction": 1}


async def test_an_object_that_is_not_the_listed_one_is_dropped(files: PemFiles) -> None:
    """A relay may change an object and its digest alike: the signed list tells."""
    raw = RawPublication(TOY, manifest=MANIFEST_COSE)
    poisoned = same_place_other_bytes(TOY.objects[K0, Location(1, 2)])
    raw.layer(0)
    raw.layer(1, live={(K0, 2): poisoned})  # a FETCH of it would bring the right one
    raw.layers(2, 3)
    raw.end()
    raw.manifest(sign(raw))
    async with raw.serve(files) as server, joined(server, files) as client:
        async with demanding(client).open(PREFIX, retrieve="subscribe") as cache:
            assert [same(layer, TOY) async for layer in cache] == [True] * LAYERS
            assert cache.report.rejected == {"listed": 1}


@virtual
async def test_a_poisoned_object_that_nobody_has_right_stays_out() -> None:
    raw = RawPublication(TOY, manifest=MANIFEST_COSE)
    poisoned = {(K0, 2): same_place_other_bytes(TOY.objects[K0, Location(1, 2)])}
    raw.layer(0)
    raw.layer(1, live=poisoned, stored=poisoned)
    raw.layers(2, 3)
    raw.end()
    raw.manifest(sign(raw))
    async with meeting(raw) as (_, client):
        async with demanding(client, settings=BRIEF).open(PREFIX) as cache:
            assert same(await cache.layer(0), TOY)
            with pytest.raises(kvcs.CacheIncomplete) as caught:
                await cache.layer(1)
            [missing] = caught.value.missing
            assert (missing.component, missing.layer, missing.first_block) == ("k", 1, 2)
            assert cache.report.rejected["listed"] >= 1


async def test_a_manifest_can_be_looked_at(files: PemFiles) -> None:
    raw = RawPublication(TOY, manifest=MANIFEST_COSE)
    raw.manifest(sign(raw))
    named = kvcs.PublicationNamespace.parse(raw.namespace)
    async with raw.serve(files) as server, joined(server, files) as client:
        facts = await kvcs.Subscriber(client).look_at(named)
        assert (facts.kid, facts.key, facts.doubt) == (KEY.kid, None, None)
        facts = await kvcs.Subscriber(client, keys=RING).look_at(named)
        assert (facts.kid, facts.key, facts.doubt) == (KEY.kid, KEY.public, None)
        facts = await kvcs.Subscriber(client, keys=KeyRing([OTHER.public])).look_at(named)
        assert facts.key is None and facts.doubt is not None and facts.doubt.check == "kid"
        manifest = await demanding(client).manifest(named)
        assert manifest == facts.manifest
        with pytest.raises(NotAuthentic):
            await kvcs.Subscriber(client).manifest(named)


def test_a_subscriber_says_what_it_needs() -> None:
    nobody: Any = None
    with pytest.raises(UsageError, match="needs keys"):
        kvcs.Subscriber(nobody, require_signed=True)
    with pytest.raises(UsageError, match="issuer keys"):
        kvcs.Subscriber(nobody, keys=KeyRing(use=KeyUse.TOKEN))
