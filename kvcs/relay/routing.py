"""Who hears of announcements by SUBSCRIBE_NAMESPACE, of Tracks by SUBSCRIBE_TRACKS (MOQT §7)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kvcs.access.permits import Place
from kvcs.errors import RequestError
from kvcs.moqt.errors import PublishDoneCode, RequestCode
from kvcs.moqt.names import TrackNamespace, namespace_text
from kvcs.relay.cache import RETRY_MS
from kvcs.relay.hub import Hub
from kvcs.relay.namespaces import Interests, NamespaceTable, Notice
from kvcs.relay.peers import Peer
from kvcs.relay.tracks import RelayTrack
from kvcs.relay.upstreams import Kind, Upstreams

TracksBelow = Callable[[TrackNamespace], list[RelayTrack]]
"""Gives the Tracks in use below a namespace."""


class Routing:
    """Announced namespaces, published Tracks, and who wants to hear of them.

    Args:
        hub: the relay's core.
        tracks_below: see `TracksBelow`.
        upstreams: told of what is wanted below prefixes.
    """

    def __init__(self, hub: Hub, tracks_below: TracksBelow, upstreams: Upstreams) -> None:
        self._hub = hub
        self._tracks_below = tracks_below
        self._upstreams = upstreams
        self.namespaces = NamespaceTable(upstreams.relay_of)
        """Who announced which namespace, and SUBSCRIBE_NAMESPACEs."""
        self._track_interests = Interests()
        """SUBSCRIBE_TRACKS."""

    # Announcements

    def announce(self, place: Place, peer: Peer, namespace: TrackNamespace, now: float) -> None:
        """Take a PUBLISH_NAMESPACE; who waits for a Track below it is served from there.

        Raises:
            RequestError: the session has announced too much.
        """
        if len(peer.announced) >= self._hub.limits.max_namespaces_per_session:
            raise RequestError("too many namespaces", RequestCode.EXCESSIVE_LOAD, RETRY_MS)
        peer.announced.add(place.request_id)
        self._accept(place, peer)
        self._tell(self.namespaces.announce(place, namespace), there=True)
        self._hub.report("announced", session=place.session, namespace=namespace_text(namespace))
        for track in self._tracks_below(namespace):
            track.publisher_came(place.session, now)

    def withdraw(self, place: Place) -> None:
        """A PUBLISH_NAMESPACE is over."""
        namespace, notices = self.namespaces.withdraw(place)
        self._tell(notices, there=False)
        if namespace is not None:
            text = namespace_text(namespace)
            self._hub.report("withdrawn", session=place.session, namespace=text)

    def heard(self, key: int, namespace: TrackNamespace, there: bool) -> None:
        """An upstream has named a namespace, or has it no longer."""
        self._tell(self.namespaces.hear(key, namespace, there=there), there=there)

    # Interests

    def subscribe_namespace(
        self, place: Place, peer: Peer, prefix: TrackNamespace, now: float
    ) -> None:
        """Take a SUBSCRIBE_NAMESPACE, and name what it matches, also at upstreams.

        It is accepted when they have said what they have: who asks takes silence for nothing.
        Before that nothing is looked at, since nothing is counted; where it matches too much then,
        or nothing, and an upstream had no room for the question, it is refused.

        Raises:
            RequestError: the session has too many of them.
        """
        self._check_interests(peer)
        peer.interests[place.request_id] = prefix

        def accept(later: float) -> None:
            if place.request_id not in peer.interests or peer.core.closed:
                return  # it is over
            try:
                self._check_matches(self.namespaces.under(prefix))
                if self._upstreams.is_left_out(place.session, prefix):
                    self._check_known(prefix)
            except RequestError as exc:
                self.cancelled(place, peer, later)
                peer.core.responder.refuse(place.request_id, exc)
                return
            self._accept(place, peer)
            self._name_all(place, peer, prefix)

        self._upstreams.want(place, Kind.NAMESPACES, prefix)
        self._upstreams.when_heard(place.session, prefix, accept, now)

    def subscribe_tracks(
        self, place: Place, peer: Peer, prefix: TrackNamespace, now: float
    ) -> None:
        """Take a SUBSCRIBE_TRACKS, and PUBLISH what was published here below its prefix.

        Raises:
            RequestError: it matches too much, or the session has too many of them.
        """
        self._check_interests(peer)
        matches = self._published_below(peer, prefix)
        self._check_matches(matches)
        peer.track_interests.add(place.request_id)
        self._track_interests.add(place, prefix)
        self._upstreams.want(place, Kind.TRACKS, prefix)
        self._accept(place, peer)
        self._offer_all(place, matches, now)

    def check_move(self, place: Place, peer: Peer, prefix: TrackNamespace) -> None:
        """Whether an interest may have another prefix.

        Raises:
            RequestError: it matches too much.
        """
        if place.request_id in peer.interests:
            self._check_matches(self.namespaces.under(prefix))
        elif place.request_id in peer.track_interests:
            self._check_matches(self._published_below(peer, prefix))

    def move(self, place: Place, peer: Peer, prefix: TrackNamespace, now: float) -> None:
        """An interest has another prefix, and that is answered: what it matches is told anew."""
        if place.request_id in peer.interests:
            peer.interests[place.request_id] = prefix
            self._upstreams.want(place, Kind.NAMESPACES, prefix)
            self.namespaces.unsubscribe(place)
            self._name_all(place, peer, prefix)
        elif place.request_id in peer.track_interests:
            self._track_interests.remove(place)
            self._track_interests.add(place, prefix)
            self._upstreams.want(place, Kind.TRACKS, prefix)
            self._offer_all(place, self._published_below(peer, prefix), now)

    def published(self, track: RelayTrack, now: float, *, but_for: set[int]) -> None:
        """A Track was published here: PUBLISH it to every SUBSCRIBE_TRACKS that matches.

        Args:
            track: the Track.
            now: the caller's clock, seconds.
            but_for: sessions whose SUBSCRIBE was held for it; that is served instead.
        """
        for place, _ in list(self._track_interests.matching(track.name.namespace)):
            if place.session not in but_for:
                track.offer(place, now)

    # Ends

    def cancelled(self, place: Place, peer: Peer, now: float) -> bool:
        """A request is over; False where it is not one of those that are kept here."""
        request_id = place.request_id
        if request_id in peer.announced:
            peer.announced.remove(request_id)
            self.withdraw(place)
        elif request_id in peer.interests:
            del peer.interests[request_id]
            self._upstreams.leave(place, now)
            self.namespaces.unsubscribe(place)
        elif request_id in peer.track_interests:
            # What came of it lives on (§9.18).
            peer.track_interests.remove(request_id)
            self._track_interests.remove(place)
            self._upstreams.leave(place, now)
        else:
            return False
        return True

    def forbid(self, place: Place, reason: str) -> None:
        """A SUBSCRIBE_TRACKS is allowed no longer, and so are the subscriptions it led to."""
        prefix = self._track_interests.prefix(place)
        if prefix is None:
            return
        for track in self._tracks_below(prefix):
            track.consumers.end_offer(place, PublishDoneCode.UNAUTHORIZED, reason)

    def session_closed(self, key: int, peer: Peer, now: float) -> None:
        """A session is over, and with it what it announced and wanted to hear."""
        for request_id in (*peer.announced, *peer.interests, *peer.track_interests):
            self.cancelled(Place(key, request_id), peer, now)

    # Inner workings

    def _accept(self, place: Place, peer: Peer) -> None:
        expires_ms = self._hub.expires_ms(place)
        peer.core.responder.accept(place.request_id, expires_ms=expires_ms)

    def _published_below(self, peer: Peer, prefix: TrackNamespace) -> list[RelayTrack]:
        """Tracks that were published here; what else was looked at counts for who asks.

        These count once they are offered.
        """
        tracks = self._tracks_below(prefix)
        found = [track for track in tracks if track.sources.published]
        peer.core.load.matched(len(tracks) - len(found))
        return found

    def _check_interests(self, peer: Peer) -> None:
        """Each of them may be passed on upstream, where there is room for so many only."""
        wanted = len(peer.interests) + len(peer.track_interests)
        if wanted >= self._hub.limits.max_prefixes_per_session:
            raise RequestError("too many prefixes", RequestCode.EXCESSIVE_LOAD, RETRY_MS)

    def _check_matches(self, matches: Iterable[object]) -> None:
        for count, _ in enumerate(matches, 1):
            if count > self._hub.limits.max_namespace_matches:
                raise RequestError("too much matches", RequestCode.NAMESPACE_TOO_LARGE)

    def _check_known(self, prefix: TrackNamespace) -> None:
        """Refuse what nobody could be asked for, unless something of it is known all the same."""
        if next(iter(self.namespaces.under(prefix)), None) is None:
            reason = "no room to ask upstream for the prefix"
            raise RequestError(reason, RequestCode.EXCESSIVE_LOAD, RETRY_MS)

    def _name_all(self, place: Place, peer: Peer, prefix: TrackNamespace) -> None:
        for suffix in self.namespaces.subscribe(place, prefix):
            peer.core.responder.namespace(place.request_id, suffix)

    @staticmethod
    def _offer_all(place: Place, tracks: list[RelayTrack], now: float) -> None:
        for track in tracks:
            track.offer(place, now)

    def _tell(self, notices: list[Notice], *, there: bool) -> None:
        for (key, request_id), suffix in notices:
            session = self._hub.session(key)
            if session is None:
                continue
            if there:
                session.responder.namespace(request_id, suffix)
            else:
                session.responder.namespace_done(request_id, suffix)
