"""Two scopes on one relay: an outsider cannot tell what exists in the other one from what does not.

Neither by the answer, which is the same to the octet, nor by its time: the relay runs the same
functions in the same order, sets the same timers and asks nobody, whatever the name. A member of
the scope is told apart by each of these, so they show what there is to see.
"""

from __future__ import annotations

import asyncio
import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvcs
from kvcs.errors import RequestError
from kvcs.keyfiles import save_key_ring
from kvcs.moqt.actions import Action as Sent
from kvcs.moqt.actions import Send
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.filters import LocationFilter
from kvcs.moqt.names import FullTrackName, TrackNamespace
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.settings import SessionSettings
from kvcs.moqt.tokens import Token
from kvcs.moqt.track.store import Track
from kvcs.quic.endpoint import open_connection
from kvcs.testing.actors import EVERYTHING, PUBLICATION, ConsumerPeer, PublisherPeer, full_name
from kvcs.testing.hub import Hub
from kvcs.testing.network import Network, Trace, run
from kvcs.testing.tracks import put_group
from kvcs.trust import TOKEN_TYPE, KeyRing, KeyUse
from tests.unit.relay.guarded import (
    BASE,
    ISSUER,
    OTHER,
    OTHER_ID,
    Guarded,
    other_token,
    shows,
    token,
)

PACKAGE = os.path.join(os.path.dirname(kvcs.__file__), "")
UPSTREAM: TrackNamespace = (*PUBLICATION[:4], b"U" * 16)
"""A publication that the relay's upstream has, and the relay has not heard of."""


OUTSIDERS: dict[str, Callable[[], SessionSettings]] = {
    "no token": lambda: shows(),
    "of another scope": lambda: shows(other_token()),
    "with a token that has expired": lambda: shows(token(lifetime=60)),
}


class World:
    """A relay with an upstream, a publication that is cached, read and announced, and a stranger.

    Args:
        settings: what the stranger shows.
    """

    def __init__(self, settings: SessionSettings) -> None:
        self.hub = Guarded(relay_id=b"relay")
        self.above = Hub(relay_id=b"above")
        self.hub.link(self.above)
        self.origins = [
            PublisherPeer(self.hub, PUBLICATION, shows(token(lifetime=3600))),
            PublisherPeer(self.above, UPSTREAM),
        ]
        for origin, namespace in zip(self.origins, (PUBLICATION, UPSTREAM), strict=True):
            for name in (b"k.raw.s0", b"v.raw.s0", b"manifest"):
                put_group(origin.track(full_name(name, namespace)), 0, 2)
        self.member = ConsumerPeer(self.hub, shows(token(lifetime=3600)))
        self.member.subscribe(full_name(b"k.raw.s0"), fill=EVERYTHING)
        self.member.end.core.requester.subscribe_namespace(PUBLICATION[:4])
        self.stranger = ConsumerPeer(self.hub, settings)
        self.hub.advance(120.0)  # past the end of a token that counts for a minute


def requester(world: World) -> Any:
    return world.stranger.end.core.requester


ASK: dict[str, Callable[[World, FullTrackName], int]] = {
    "SUBSCRIBE": lambda world, name: requester(world).subscribe(
        name,
        Parameters.of(
            location_filter=LocationFilter.next_object(),
            fill_parameters=Parameters.of(location_filter=EVERYTHING),
            rendezvous_timeout=5000,
        ),
    ),
    "FETCH": lambda world, name: requester(world).fetch(
        name, Parameters.of(location_filter=EVERYTHING)
    ),
    "TRACK_STATUS": lambda world, name: requester(world).track_status(name),
    "PUBLISH": lambda world, name: requester(world).publish(
        Track(name, authoritative=True), Parameters()
    ),
    "PUBLISH_NAMESPACE": lambda world, name: requester(world).publish_namespace(name.namespace),
    **{
        f"{kind} {fields}": (
            lambda world, name, ask=ask, fields=fields: ask(world, name.namespace[:fields])
        )
        for fields in (2, 3, 4, 5)
        for kind, ask in {
            "SUBSCRIBE_NAMESPACE": lambda world, prefix: requester(world).subscribe_namespace(
                prefix
            ),
            "SUBSCRIBE_TRACKS": lambda world, prefix: requester(world).subscribe_tracks(
                prefix, Parameters()
            ),
        }.items()
        if kind == "SUBSCRIBE_NAMESPACE" or fields in (2, 5)
    },
}

THERE = {
    "cached": full_name(b"k.raw.s0"),
    "not cached": full_name(b"v.raw.s0"),
    "a manifest": full_name(b"manifest"),
    "upstream": full_name(b"k.raw.s0", UPSTREAM),
}


def nowhere(name: FullTrackName) -> dict[str, FullTrackName]:
    """Names of the same length that are not there: each field of it differs once."""
    fields = list(name.namespace)
    found = {"another track": FullTrackName(name.namespace, name.name[:-1] + b"9")}
    for at, what in enumerate(("scope", "descriptor", "anchor", "publication"), start=1):
        other = (*fields[:at], b"#" * len(fields[at]), *fields[at + 1 :])
        found[f"another {what}"] = FullTrackName(other, name.name)
    return found


@dataclass(frozen=True)
class Seen:
    """What came of one request."""

    octets: tuple[object, ...]
    """Everything that the relay has sent to who asked, action by action."""

    calls: tuple[str, ...]
    """Functions that ran, in order."""

    upstream: int
    """Requests that the relay has made of others."""

    timer: float | None
    """When the relay wants to be called next."""

    later: tuple[object, ...]
    """What it has sent to who asked a minute later."""


def octets_of(actions: list[Sent]) -> tuple[object, ...]:
    return tuple(
        (each.stream_id, b"".join(each.data), each.fin) if isinstance(each, Send) else each
        for each in actions
    )


@contextmanager
def calls() -> Iterator[list[str]]:
    """The functions of kvcs that run meanwhile, in order."""
    found: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(PACKAGE):
            found.append(f"{code.co_filename.removeprefix(PACKAGE)}:{code.co_qualname}")

    gc.disable()  # what it would end is none of this
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)
        gc.enable()


def asking(settings: SessionSettings, kind: str, name: FullTrackName) -> Seen:
    """Ask for a name in a world made for it."""
    world = World(settings)
    relay = world.stranger.spoke.relay
    asked = [len(origin.subscribes) + len(origin.fetches) for origin in world.origins]
    relay.actions.clear()
    with calls() as ran:
        ASK[kind](world, name)
        world.hub.run()
    at_once = octets_of(relay.actions)
    timer = world.hub.core.next_timer()
    world.hub.advance(60.0)
    now = [len(origin.subscribes) + len(origin.fetches) for origin in world.origins]
    return Seen(
        at_once,
        tuple(ran),
        sum(now) - sum(asked),
        timer,
        octets_of(relay.actions)[len(at_once) :],
    )


@pytest.mark.parametrize("kind", list(ASK))
@pytest.mark.parametrize("who", list(OUTSIDERS))
def test_an_outsiders_answer_and_its_cost_say_nothing(who: str, kind: str) -> None:
    settings = OUTSIDERS[who]()
    absent = nowhere(THERE["cached"])
    if who == "with a token that has expired":
        del absent["another scope"]  # its token was never for that: it is told so, always
    names = THERE | absent
    assert len({tuple(map(len, (*name.namespace, name.name))) for name in names.values()}) == 1
    asking(settings, kind, names["cached"])  # what is worked out once is worked out now
    seen = {what: asking(settings, kind, name) for what, name in names.items()}
    first = seen["cached"]
    assert {what for what, each in seen.items() if each != first} == set()
    assert (first.upstream, first.later) == (0, ())
    [(_, octets, fin)] = first.octets  # type: ignore[misc]
    assert fin and octets, "a refusal, and at once"


@pytest.mark.parametrize("kind", ["SUBSCRIBE", "FETCH", "TRACK_STATUS", "SUBSCRIBE_NAMESPACE 5"])
def test_a_member_is_told_what_there_is(kind: str) -> None:
    settings = shows(token(lifetime=3600))
    name = THERE["cached"]
    there = asking(settings, kind, name)
    absent = asking(settings, kind, nowhere(name)["another publication"])
    assert there.octets != absent.octets
    assert there.calls != absent.calls


@pytest.mark.parametrize("fields", [2, 3, 4, 5])
def test_a_prefix_that_moves_to_another_scope_says_nothing(fields: int) -> None:
    found = []
    name = THERE["cached"]
    for target in (name, name, *nowhere(name).values()):
        world = World(shows(other_token()))
        request_id = requester(world).subscribe_namespace((b"kvcs-1", OTHER_ID))
        world.hub.run()
        relay = world.stranger.spoke.relay
        relay.actions.clear()
        with calls() as ran:
            moved = Parameters.of(
                track_namespace_prefix=target.namespace[:fields],
                authorization_token=Token.use_value(other_token().value, TOKEN_TYPE),
            )
            requester(world).update(request_id, moved)
            world.hub.run()
        found.append((octets_of(relay.actions), tuple(ran), world.hub.core.next_timer()))
        assert world.hub.core.stats.unauthorized == 1
    assert all(each == found[1] for each in found[1:])


# On a network: the same instant, and the same packets on the way to it.


def refused_at(folder: Path, kind: str, publication: bytes | None, shown: bool) -> list[str]:
    """What a whole run looks like from outside: each packet with its size and its time."""
    trace = Trace(keep=True)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        network = Network(seed=3, trace=trace)
        host = network.host("relay")
        settings = kvcs.RelaySettings(
            cert="unused", key="unused", host=host.address, issuers=folder, audience=("relay",)
        )
        with host:
            relay = kvcs.Relay(settings)
            await relay.__aenter__()
        with network.host("producer"):
            producer = await open_connection(
                "moqt://relay:4433", token=token(at=int(time.time()) - BASE, lifetime=3600).value
            )
            requests = producer.core.requester
            await producer.reply(requests.publish_namespace(PUBLICATION))
        with network.host("stranger"):
            mine = other_token(at=int(time.time()) - BASE, lifetime=3600).value if shown else None
            stranger = await open_connection("moqt://relay:4433", token=mine)
            began = len(trace.lines)
            fields = (*PUBLICATION[:4], publication or PUBLICATION[4])
            name = full_name(b"k.raw.s0", fields)
            asked = stranger.core.requester
            request = {
                "SUBSCRIBE": lambda: asked.subscribe(name, Parameters()),
                "FETCH": lambda: asked.fetch(name, Parameters()),
                "TRACK_STATUS": lambda: asked.track_status(name),
                "SUBSCRIBE_NAMESPACE": lambda: asked.subscribe_namespace(fields),
            }[kind]()
            with pytest.raises(RequestError) as refused:
                await stranger.reply(request)
            assert refused.value.code == RequestCode.UNAUTHORIZED
            trace.note(loop.time(), "answered")
            seen.extend(trace.lines[began:])
            await stranger.close()
        await producer.close()
        await relay.close()

    seen: list[str] = []
    run(main())
    return seen


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("kind", ["SUBSCRIBE", "FETCH", "TRACK_STATUS", "SUBSCRIBE_NAMESPACE"])
def test_the_refusal_takes_the_same_packets_at_the_same_times(
    tmp_path: Path, kind: str, shown: bool
) -> None:
    ring = tmp_path / "issuers"
    save_key_ring(ring, KeyRing([ISSUER.public, OTHER.public], use=KeyUse.TOKEN))
    there = refused_at(ring, kind, None, shown)
    absent = refused_at(ring, kind, b"N" * 16, shown)
    assert len(there) > 2 and there == absent
