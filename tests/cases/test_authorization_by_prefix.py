"""Case 60: authorization by prefix. A member of one scope reaches no other, by no name.

Short prefixes would make a relay pour out every announcement, and announcing another's namespace
would impersonate it (KVCS "Relay Considerations", "Security Considerations").
"""

from __future__ import annotations

import pytest

from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, RequestCode
from kvcs.moqt.names import TrackNamespace
from kvcs.moqt.parameters import Parameters
from kvcs.testing.actors import PUBLICATION, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.tracks import put, put_group
from tests.unit.relay.guarded import (
    ELSEWHERE,
    OTHER_ID,
    SCOPE_ID,
    Guarded,
    other_token,
    shows,
    token,
)


def refused(peer: ConsumerPeer, request_id: int) -> int | None:
    peer.hub.run()
    return peer.refused(request_id)


@pytest.mark.parametrize(
    "prefix", [(), (b"kvcs-1",), (b"kvcs-1", OTHER_ID), (b"kvcs-1", SCOPE_ID[:15])]
)
def test_no_prefix_shows_announcements_of_others(prefix: TrackNamespace) -> None:
    hub = Guarded()
    PublisherPeer(hub, ELSEWHERE, shows(other_token()))
    peer = ConsumerPeer(hub, shows(token()))
    requester = peer.end.core.requester
    assert refused(peer, requester.subscribe_namespace(prefix)) == RequestCode.UNAUTHORIZED
    assert (
        refused(peer, requester.subscribe_tracks(prefix, Parameters())) == RequestCode.UNAUTHORIZED
    )
    assert not peer.end.of(events.NamespaceAnnounced)
    assert not peer.end.of(events.PublishReceived)


@pytest.mark.parametrize(
    "namespace",
    [
        PUBLICATION[:4],
        (*PUBLICATION, b"more"),
        (b"kvcs-1", SCOPE_ID[:15], *PUBLICATION[2:]),
        ELSEWHERE,
        (b"kvcs-1",),
        (),
        (b"elsewhere",),
    ],
)
def test_nothing_but_a_publication_of_its_own_scope_is_announced(
    namespace: TrackNamespace,
) -> None:
    hub = Guarded()
    watcher = ConsumerPeer(hub, shows(other_token()))
    watcher.end.core.requester.subscribe_namespace((b"kvcs-1", OTHER_ID))
    peer = ConsumerPeer(hub, shows(token()))
    request_id = peer.end.core.requester.publish_namespace(namespace)
    assert refused(peer, request_id) == RequestCode.UNAUTHORIZED
    assert not watcher.end.of(events.NamespaceAnnounced)
    assert hub.core.snapshot().namespaces == 0


def test_tracks_of_another_scope_are_neither_read_nor_known() -> None:
    hub = Guarded()
    theirs = PublisherPeer(hub, ELSEWHERE, shows(other_token()))
    there, nowhere = full_name(namespace=ELSEWHERE), full_name(b"v.raw.s9", ELSEWHERE)
    put_group(theirs.track(there), 0, 2)
    reader = ConsumerPeer(hub, shows(other_token()))
    assert reader.locations(reader.subscribe(there))  # it is in the cache now
    peer = ConsumerPeer(hub, shows(token()))
    answers = set()
    for name in (there, nowhere):
        for request_id in (
            peer.subscribe(name),
            peer.fetch(name),
            peer.end.core.requester.track_status(name),
        ):
            assert refused(peer, request_id) == RequestCode.UNAUTHORIZED
            error = peer.end.of(events.RequestRefused)[-1].error
            answers.add((error.error_code, error.reason, error.retry_interval))
    assert len(answers) == 1, "what is there and what is not look the same"
    assert not peer.locations()


def test_one_publication_may_come_from_two_sessions_of_its_scope() -> None:
    hub = Guarded()
    sources = [PublisherPeer(hub, PUBLICATION, shows(token())) for _ in range(2)]
    for source in sources:
        put_group(source.track(), 0, 2)
    peer = ConsumerPeer(hub, shows(token()))
    request_id = peer.subscribe()
    assert peer.locations(request_id) == [(0, 0), (0, 1)]
    assert not peer.end.of(events.TrackMalformed)
    assert hub.core.stats.malformed == 0


def test_two_sources_that_differ_make_the_track_malformed() -> None:
    hub = Guarded()
    sources = [PublisherPeer(hub, PUBLICATION, shows(token())) for _ in range(2)]
    tracks = [source.track() for source in sources]
    peer = ConsumerPeer(hub, shows(token()))
    request_id = peer.subscribe()
    for octets, track in zip((8, 9), tracks, strict=True):
        put(track, 0, 0, octets=octets)
        hub.run()
    done = peer.done(request_id)
    assert done is not None and done.status == PublishDoneCode.MALFORMED_TRACK
    assert hub.core.stats.malformed == 1
