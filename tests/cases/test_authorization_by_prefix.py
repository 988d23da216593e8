"""Case 60: authorization by prefix. A member of one scope reaches no other, by no name.

Short prefixes would make a relay pour out every announcement, and announcing another's namespace
would impersonate it (KVCS "Relay Considerations", "Security Considerations").
"""

from __future__ import annotations

import pytest

from kvcs.access.policy import Policy
from kvcs.moqt import events
from kvcs.moqt.errors import PublishDoneCode, RequestCode
from kvcs.moqt.names import TrackNamespace
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.settings import SessionSettings
from kvcs.moqt.tokens import ResolvedToken
from kvcs.testing.actors import PUBLICATION, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.tracks import put, put_group
from kvcs.trust import (
    CONSUMER,
    PRODUCER,
    TOKEN_TYPE,
    Authority,
    KeyRing,
    KeyUse,
    SigningKey,
    TokenVerifier,
    issue,
    scope_rule,
)

FIRST, SECOND = PUBLICATION[1], b"2" * 16
THEIRS: TrackNamespace = (b"kvcs-1", SECOND, *PUBLICATION[2:])
ISSUERS = {
    scope: SigningKey.generate(use=KeyUse.TOKEN, name="issuer", scope_id=scope)
    for scope in (FIRST, SECOND)
}
NOW = 1_000_000


def guarded() -> Hub:
    ring = KeyRing([key.public for key in ISSUERS.values()], use=KeyUse.TOKEN)
    return Hub(policy=Policy(Authority(TokenVerifier(ring, ["relay"])), lambda: NOW))


def member(scope: bytes = FIRST) -> SessionSettings:
    """What a member of a scope shows when it connects."""
    token = issue(
        ISSUERS[scope],
        audience=["relay"],
        rules=[scope_rule(scope, PRODUCER | CONSUMER)],
        issued_at=NOW,
        lifetime=600,
        token_id=bytes(8),
    )
    return SessionSettings(tokens=(ResolvedToken(TOKEN_TYPE, token),))


def refused(peer: ConsumerPeer, request_id: int) -> int | None:
    peer.hub.run()
    return peer.refused(request_id)


@pytest.mark.parametrize("prefix", [(), (b"kvcs-1",), (b"kvcs-1", SECOND), (b"kvcs-1", FIRST[:15])])
def test_no_prefix_shows_announcements_of_others(prefix: TrackNamespace) -> None:
    hub = guarded()
    PublisherPeer(hub, THEIRS, member(SECOND))
    peer = ConsumerPeer(hub, member())
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
        (b"kvcs-1", FIRST[:15], *PUBLICATION[2:]),
        THEIRS,
        (b"kvcs-1",),
        (),
        (b"elsewhere",),
    ],
)
def test_nothing_but_a_publication_of_its_own_scope_is_announced(
    namespace: TrackNamespace,
) -> None:
    hub = guarded()
    watcher = ConsumerPeer(hub, member(SECOND))
    watcher.end.core.requester.subscribe_namespace((b"kvcs-1", SECOND))
    peer = ConsumerPeer(hub, member())
    request_id = peer.end.core.requester.publish_namespace(namespace)
    assert refused(peer, request_id) == RequestCode.UNAUTHORIZED
    assert not watcher.end.of(events.NamespaceAnnounced)
    assert hub.core.snapshot().namespaces == 0


def test_tracks_of_another_scope_are_neither_read_nor_known() -> None:
    hub = guarded()
    theirs = PublisherPeer(hub, THEIRS, member(SECOND))
    there, nowhere = full_name(namespace=THEIRS), full_name(b"v.raw.s9", THEIRS)
    put_group(theirs.track(there), 0, 2)
    reader = ConsumerPeer(hub, member(SECOND))
    assert reader.locations(reader.subscribe(there))  # it is in the cache now
    peer = ConsumerPeer(hub, member())
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
    hub = guarded()
    sources = [PublisherPeer(hub, PUBLICATION, member()) for _ in range(2)]
    for source in sources:
        put_group(source.track(), 0, 2)
    peer = ConsumerPeer(hub, member())
    request_id = peer.subscribe()
    assert peer.locations(request_id) == [(0, 0), (0, 1)]
    assert not peer.end.of(events.TrackMalformed)
    assert hub.core.stats.malformed == 0


def test_two_sources_that_differ_make_the_track_malformed() -> None:
    hub = guarded()
    sources = [PublisherPeer(hub, PUBLICATION, member()) for _ in range(2)]
    tracks = [source.track() for source in sources]
    peer = ConsumerPeer(hub, member())
    request_id = peer.subscribe()
    for octets, track in zip((8, 9), tracks, strict=True):
        put(track, 0, 0, octets=octets)
        hub.run()
    done = peer.done(request_id)
    assert done is not None and done.status == PublishDoneCode.MALFORMED_TRACK
    assert hub.core.stats.malformed == 1
