"""In which order Objects leave, and what credit does to it (MOQT §5.1, §6.4.1)."""

from __future__ import annotations

import random

import pytest

from kvcs.moqt import session as session_module
from kvcs.moqt.actions import Action, Send
from kvcs.moqt.events import DataStreamOpened, Event, ObjectEnded, ObjectStarted, SubscribeReceived
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.track.store import Track
from kvcs.testing.pair import Credit, SessionPair
from kvcs.testing.tracks import end_track, locations, put, put_group, track

SCOPE = (b"kvcs-1", b"scope", b"big")
K, V = FullTrackName(SCOPE, b"k.raw.s0"), FullTrackName(SCOPE, b"v.raw.s0")
JOIN = Parameters.of(
    location_filter=LocationFilter.next_object(),
    fill_parameters=Parameters.of(location_filter=LocationFilter.absolute_start(0, 0)),
)


class Window(Credit):
    """Flow control as a peer gives it: few streams at a time, and a window for each."""

    def __init__(self, *, at_once: int = 1 << 30) -> None:
        super().__init__()
        self.at_once = at_once
        self.open: set[int] = set()
        self.shut: set[int] = set()
        self.most_open = 0

    def note(self, action: Action) -> None:
        """Count an action of the publisher."""
        if isinstance(action, Send) and action.stream_id & 2:
            self.open.add(action.stream_id)
            self.most_open = max(self.most_open, len(self.open))
            if action.fin:
                self.open.discard(action.stream_id)

    def uni_streams(self) -> int:
        return self.at_once - len(self.open)

    def stream_octets(self, stream_id: int) -> int:
        return 0 if stream_id in self.shut else 1 << 40


class Publishing:
    """A server with Tracks, and a client that subscribes to them."""

    def __init__(self, *tracks: Track, window: Window | None = None) -> None:
        self.pair = SessionPair()
        self.tracks = {source.name: source for source in tracks}
        self.window = Window() if window is None else window
        self.pair.server.credit = self.window
        self.pair.server.on_event = self._answer

    def _answer(self, event: Event) -> None:
        if isinstance(event, SubscribeReceived):
            source = self.tracks[event.full_track_name]
            self.pair.server.core.responder.accept_subscribe(event.request_id, source, 0.0)

    def subscribe(self, name: FullTrackName, parameters: Parameters = JOIN) -> int:
        return self.pair.client.core.requester.subscribe(name, parameters)

    def run(self) -> None:
        """Run to the end, counting streams."""
        seen = len(self.pair.server.actions)
        while self.pair.step():
            for action in self.pair.server.actions[seen:]:
                self.window.note(action)
            seen = len(self.pair.server.actions)

    def order(self) -> list[tuple[int, int, int]]:
        """Request, Group and Object of each NORMAL Object, in the order of its first octet."""
        return [
            (event.request_id, event.header.group_id, event.header.object_id)
            for event in self.pair.client.of(ObjectStarted)
            if event.header.status == 0
        ]


def model(name: FullTrackName, layers: int, *, blocks: int = 2, octets: int = 100) -> Track:
    """All layers of a component, with the priority of each."""
    source = track(name)
    for layer in range(layers):
        put_group(source, layer, blocks, octets=octets, priority=128 * layer // layers)
    end_track(source, layers, priority=127)
    return source


def check_layers_in_order(order: list[tuple[int, int, int]]) -> None:
    """K and V of a layer before both of the next, and no Group before the last is through."""
    groups = [group for _, group, _ in order]
    assert groups == sorted(groups)


@pytest.mark.parametrize("layers", [8, 128, 130, 300])
@pytest.mark.parametrize("live", [True, False])
def test_k_and_v_of_a_layer_arrive_before_both_of_the_next(layers: int, live: bool) -> None:
    k, v = track(K), track(V)
    publishing = Publishing(k, v)
    requests = [publishing.subscribe(K), publishing.subscribe(V)]

    def publish() -> None:
        for source in (v, k):  # all of V was put before all of K
            for layer in range(layers):
                put_group(source, layer, 2, octets=100, priority=128 * layer // layers)

    if live:
        publishing.run()
        publishing.window.object_octets = 0
        publish()
        publishing.run()
        assert publishing.order() == []
    else:
        publish()
    publishing.window.object_octets = 1 << 40
    publishing.run()
    order = publishing.order()
    assert len(order) == layers * 2 * 2
    check_layers_in_order(order)
    for request_id in requests:
        own = [place[1:] for place in order if place[0] == request_id]
        assert own == sorted(own)


def test_a_second_consumer_of_some_layers_gets_them_in_order_too() -> None:
    publishing = Publishing(model(K, 8), model(V, 8))
    whole = publishing.subscribe(K)
    some = Parameters.of(
        location_filter=LocationFilter.next_object(),
        fill_parameters=Parameters.of(location_filter=LocationFilter.group_end(4, 0, 7)),
    )
    part = publishing.subscribe(V, some)
    publishing.run()
    check_layers_in_order(publishing.order())
    assert {group for request, group, _ in publishing.order() if request == part} == {4, 5, 6, 7}
    assert {group for request, group, _ in publishing.order() if request == whole} == set(range(8))


def test_the_last_octet_of_a_group_goes_before_the_first_of_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "QUANTUM_OCTETS", 7)
    source = track(K)
    publishing = Publishing(source)
    publishing.subscribe(K)
    publishing.run()
    publishing.window.object_octets = 0
    for layer in range(8):
        put_group(source, layer, 2, octets=50, priority=16 * layer)
    publishing.window.object_octets = 1 << 40
    publishing.run()
    places: dict[int, int] = {}
    sequence: list[int] = []
    for event in publishing.pair.client.events:
        if isinstance(event, ObjectStarted):
            places[event.stream_id] = event.header.group_id
        if isinstance(event, (ObjectStarted, ObjectEnded)):
            sequence.append(places[event.stream_id])
    assert sequence == sorted(sequence)


def test_a_large_object_is_overtaken_by_one_of_lower_priority_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session_module, "QUANTUM_OCTETS", 1000)
    source = track(K)
    publishing = Publishing(source)
    publishing.subscribe(K)
    publishing.run()
    put(source, 5, 0, octets=10_000, priority=9)
    publishing.pair.step()
    put(source, 6, 0, octets=10, priority=0)
    publishing.run()
    ended = [event.stream_id for event in publishing.pair.client.of(ObjectEnded)]
    opened = {e.header.group_id: e.stream_id for e in publishing.pair.client.of(DataStreamOpened)}
    assert ended == [opened[6], opened[5]]


def test_a_fill_does_not_go_ahead_of_a_live_object_that_is_first() -> None:
    k, v = model(K, 8), track(V)
    publishing = Publishing(k, v)
    publishing.subscribe(V)
    publishing.run()
    publishing.window.object_octets = 0
    late = Parameters.of(
        location_filter=LocationFilter.next_object(),
        fill_parameters=Parameters.of(location_filter=LocationFilter.absolute_start(6, 0)),
    )
    publishing.subscribe(K, late)
    for layer in range(8):
        put_group(v, layer, 2, octets=100, priority=16 * layer)
    publishing.run()
    publishing.window.object_octets = 1 << 40
    publishing.run()
    check_layers_in_order(publishing.order())


# Stream credit


def test_few_streams_at_a_time_are_enough_for_many_layers() -> None:
    small = FullTrackName((b"kvcs-1", b"scope", b"small"), b"manifest")
    manifest = track(small)
    put(manifest, 0, 0, octets=500)
    manifest.finish_subgroup(0, 0)
    window = Window(at_once=4)
    k, v = track(K), track(V)
    publishing = Publishing(k, v, manifest, window=window)
    for name in (K, V):
        publishing.subscribe(name)
    publishing.run()
    for layer in range(300):
        for source in (k, v):
            put_group(source, layer, 1, priority=128 * layer // 300)
    late = publishing.subscribe(small)
    publishing.run()
    assert window.most_open <= 4
    order = publishing.order()
    assert len(order) == 601
    check_layers_in_order([place for place in order if place[0] != late])
    # The manifest of another publication has its turn at once.
    assert [place[0] for place in order].index(late) < 20


def test_requests_wait_for_stream_credit_and_are_not_lost() -> None:
    publishing = Publishing(model(K, 4))
    publishing.window.at_once = 0
    publishing.subscribe(K)
    publishing.run()
    assert publishing.order() == []
    assert publishing.pair.server.core.scheduler.waiting_for_streams == 1
    publishing.window.at_once = 1
    publishing.run()
    assert len(publishing.order()) == 8


# Flow control of one stream


def test_a_stream_without_window_does_not_hold_up_the_others() -> None:
    publishing = Publishing(*(track(name) for name in (K, V)))
    requests = {name: publishing.subscribe(name) for name in (K, V)}
    publishing.run()
    publishing.window.object_octets = 0
    for source in publishing.tracks.values():
        for layer in range(4):
            put_group(source, layer, 1, priority=32 * layer)
    publishing.window.object_octets = 1 << 40
    # The first stream that opens is that of layer 0 of K: it gets its first octet, then nothing.
    first = publishing.pair.server.core._next_uni
    publishing.window.shut.add(first)
    publishing.run()
    arrived = publishing.order()
    assert {place for place in arrived if place[0] == requests[V]} == {
        (requests[V], layer, 0) for layer in range(4)
    }
    assert len(arrived) == 8
    assert len(publishing.pair.client.of(ObjectEnded)) == 7 + 7
    publishing.window.shut.clear()
    publishing.run()
    assert len(publishing.pair.client.of(ObjectEnded)) == 8 + 8


@pytest.mark.parametrize("seed", range(10))
def test_credit_in_any_doses_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    publishing = Publishing(model(K, 6), model(V, 6), window=Window(at_once=2))
    requests = [publishing.subscribe(name) for name in (K, V)]
    for _ in range(400):
        publishing.window.object_octets = rng.choice((0, 1, 50, 1000))
        if publishing.window.open and rng.random() < 0.5:
            publishing.window.shut = {rng.choice(sorted(publishing.window.open))}
        else:
            publishing.window.shut.clear()
        seen = len(publishing.pair.server.actions)
        for _ in range(rng.randrange(4)):
            publishing.pair.step()
        for action in publishing.pair.server.actions[seen:]:
            publishing.window.note(action)
    publishing.window.shut.clear()
    publishing.window.object_octets = 1 << 40
    publishing.run()
    for request_id in requests:
        got = locations(publishing.pair.client.events, request_id)
        assert got == [(layer, block) for layer in range(6) for block in range(2)]
