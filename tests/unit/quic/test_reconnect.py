"""The numbers of coming back, and a link on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import pytest

from kvcs.errors import CertificateError, ConnectionClosed, ConnectionFailed, UsageError
from kvcs.moqt.events import GoawayReceived, SessionClosed
from kvcs.moqt.uri import MoqtUri, parse_uri
from kvcs.quic.connection import Connection
from kvcs.quic.link import Link
from kvcs.quic.origin import Origin
from kvcs.quic.reconnect import DEFAULT_RECONNECT, Reconnect, retry_seconds
from kvcs.quic.tenure import Tenure
from kvcs.testing.network import run

HOME, THERE = "moqt://home:1", "moqt://there:2"


# The numbers


def test_pauses_double_up_to_the_longest_and_chance_takes_off_a_part() -> None:
    policy = Reconnect(first_pause=0.1, max_pause=1.0, jitter=0.5)
    chance = random.Random(1)
    for tries, longest in enumerate((0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0)):
        drawn = [policy.pause(tries, chance) for _ in range(200)]
        assert all(0 <= pause <= longest for pause in drawn)
        assert tries == 0 or min(drawn) >= longest / 2
        assert len(set(drawn)) == len(drawn)
        assert max(drawn) - min(drawn) > longest / 4
    assert policy.pause(10_000, chance) <= 1.0


def test_without_jitter_pauses_are_exact() -> None:
    policy = Reconnect(first_pause=0.1, max_pause=1.0, jitter=0.0)
    pauses = [policy.pause(tries, random.Random(1)) for tries in range(6)]
    assert pauses == [0.0, 0.1, 0.2, 0.4, 0.8, 1.0]


def test_a_retry_interval_is_never_shortened() -> None:
    chance = random.Random(1)
    drawn = [retry_seconds(100, chance) for _ in range(200)]
    assert all(0.1 <= pause <= 0.15 for pause in drawn)
    assert len(set(drawn)) == len(drawn)
    assert retry_seconds(0, chance) == 0.0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("initial", -1.0),
        ("deadline", 0.0),
        ("first_pause", 0.0),
        ("max_pause", -1.0),
        ("jitter", 1.5),
        ("settled", -1.0),
        ("max_hops", -1),
        ("max_elsewhere", -1),
        ("leave", -1.0),
        ("linger", float("nan")),
    ],
)
def test_numbers_that_cannot_be_used(name: str, value: float) -> None:
    with pytest.raises(UsageError, match=name):
        Reconnect(**{name: value})  # type: ignore[arg-type]


# The link


class Session(Tenure):
    """What a link needs of a session."""

    def __init__(self, uri: MoqtUri, link: Link) -> None:
        super().__init__(link)
        self.peer = str(uri)
        self.drained = 0
        self.core = self
        self.requests = self

    def all(self) -> list[Any]:
        """Its requests: none."""
        return []

    def goaway(self, uri: str = "", timeout_ms: int = 0) -> None:
        """The peer sends it away."""
        self.goaway_received = GoawayReceived(None, uri, timeout_ms)
        callbacks, self._on_goaway = self._on_goaway, []
        for callback in callbacks:
            callback()

    def end(self, reason: str = "lost", *, by_peer: bool = True) -> None:
        """It is over."""
        if self._closed_event is None:
            self._closed_event = SessionClosed(None, reason, by_peer)
            self._released.set()
            callbacks, self._on_closed = self._on_closed, []
            for callback in callbacks:
                callback()

    async def drain(self) -> None:
        """Everything was acknowledged."""
        self.drained += 1

    async def close_alone(self, code: int = 0, reason: str = "") -> None:
        """Close it."""
        self.end(reason or "closed", by_peer=False)


class Relays:
    """Opens sessions, or does not."""

    def __init__(self) -> None:
        self.opened: list[Session] = []
        self.tries: list[tuple[float, str]] = []
        self.down: set[str] = set()
        self.error: Exception = ConnectionFailed("nobody listens")

    async def open(self, uri: MoqtUri, *, link: Link, origin: Origin | None) -> Connection:
        """The link's opener."""
        self.tries.append((asyncio.get_running_loop().time(), str(uri)))
        if str(uri) in self.down:
            raise self.error
        session = Session(uri, link)
        self.opened.append(session)
        return cast(Connection, session)

    @property
    def newest(self) -> Session:
        """The last one."""
        return self.opened[-1]


EXACT = Reconnect(first_pause=1.0, max_pause=4.0, jitter=0.0, deadline=20.0, initial=3.0)


def linked(
    scenario: Callable[[Relays, Link], Any], policy: Reconnect = EXACT, *, start: bool = True
) -> Relays:
    """Run a scenario with a link on virtual time."""
    relays = Relays()

    async def main() -> None:
        link = Link(relays.open, parse_uri(HOME), policy, random.Random(1))
        if start:
            await link.start(policy.initial)
        try:
            await scenario(relays, link)
        finally:
            if start:
                await link.close()
                assert all(not session.is_open for session in relays.opened)

    run(main())
    return relays


def test_a_lost_session_is_opened_again_with_growing_pauses() -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        began = asyncio.get_running_loop().time()
        relays.down.add(HOME)
        relays.newest.end()
        await asyncio.sleep(10.5)
        waited = [round(when - began, 6) for when, _ in relays.tries[1:]]
        assert waited == [0.0, 1.0, 3.0, 7.0]
        assert link.is_open and not link.current.is_usable
        relays.down.clear()
        assert await link.session() is link.current
        assert link.sessions == 2

    linked(scenario)


def test_it_is_given_up_at_the_deadline_and_says_why() -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        began = asyncio.get_running_loop().time()
        relays.down.add(HOME)
        told = 0

        def note() -> None:
            nonlocal told
            told += 1

        link.on_change(note)
        relays.newest.end("the relay crashed")
        with pytest.raises(ConnectionClosed) as caught:
            await link.session()
        assert asyncio.get_running_loop().time() - began == pytest.approx(20.0)
        text = str(caught.value)
        assert "the relay crashed" in text and "within 20 s: nobody listens" in text
        assert not link.is_open and link.current.lasts is False
        assert link.current.close_error() is caught.value
        assert told == 2  # lost, and given up
        with pytest.raises(ConnectionClosed):
            await link.elsewhere(THERE)

    linked(scenario)


def test_who_waits_for_a_session_is_told_when_the_link_is_closed() -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        relays.down.add(HOME)
        relays.newest.end()
        waiting = [
            asyncio.create_task(link.session()),
            asyncio.create_task(link.origin.add_namespace((b"news",))),
            asyncio.create_task(link.current.gone()),
        ]
        await asyncio.sleep(0.5)
        assert not any(task.done() for task in waiting)
        await link.close(0x1, "it is enough")
        async with asyncio.timeout(1.0):
            session, namespace, gone = await asyncio.gather(*waiting, return_exceptions=True)
        assert isinstance(session, ConnectionClosed) and isinstance(namespace, ConnectionClosed)
        assert (session.code, session.reason, session.by_peer) == (0x1, "it is enough", False)
        assert gone is None

    linked(scenario)


@pytest.mark.parametrize(("code", "tries"), [(0x2, 1), (0x16, 1), (0x18, 3), (None, 3)])
def test_a_token_that_is_refused_at_first_is_shown_once(code: int | None, tries: int) -> None:
    """But one that has expired: a function may give another the next time."""

    async def scenario(relays: Relays, link: Link) -> None:
        relays.down.add(HOME)
        relays.error = ConnectionClosed("token: it is for another relay", code=code, by_peer=True)
        with pytest.raises(ConnectionClosed) as caught:
            await link.start(3.0)
        assert caught.value is relays.error
        assert len(relays.tries) == tries

    linked(scenario, start=False)


def test_without_a_deadline_it_is_tried_for_ever() -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        relays.down.add(HOME)
        relays.newest.end()
        await asyncio.sleep(3_000.0)
        assert link.is_open
        relays.down.clear()
        await link.session()

    linked(scenario, Reconnect(deadline=None))


def test_a_session_that_keeps_dying_is_not_opened_in_a_tight_loop() -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        for _ in range(5):
            (await link.session()).close_error()
            relays.newest.end()
        await link.session()
        times = [when for when, _ in relays.tries]
        assert [round(b - a, 6) for a, b in pairwise(times)] == [0, 1, 2, 4, 4]
        await asyncio.sleep(EXACT.settled)
        before = asyncio.get_running_loop().time()
        relays.newest.end()  # it had lasted: no pause
        await link.session()
        assert asyncio.get_running_loop().time() == before

    linked(scenario)


def test_goaway_opens_the_next_session_first_and_lets_go_of_the_old_one_last() -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        old = relays.newest
        holder = object()
        old.hold(holder)
        old.goaway(THERE, 60_000)
        new = await link.session()
        assert new.peer == THERE and old.is_open
        await asyncio.sleep(5.0)
        assert old.is_open  # it is held
        old.release(holder)
        await asyncio.sleep(0.1)
        assert not old.is_open and old.drained == 1
        assert link.current is new

    linked(scenario)


@pytest.mark.parametrize(("timeout_ms", "seconds"), [(2_000, 2.0), (0, 30.0), (600_000, 30.0)])
def test_a_held_session_is_left_when_its_time_is_over(timeout_ms: int, seconds: float) -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        old, began = relays.newest, asyncio.get_running_loop().time()
        old.hold(object())
        old.goaway("", timeout_ms)
        closed = asyncio.Event()
        old.on_closed(closed.set)
        await closed.wait()
        assert asyncio.get_running_loop().time() - began == pytest.approx(seconds)

    linked(scenario)


def test_where_nobody_listens_an_old_session_that_nobody_needs_is_left_at_once() -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        relays.down.add(HOME)
        old = relays.newest
        old.goaway("", 60_000)
        await asyncio.sleep(0.5)
        assert not old.is_open  # a stopping relay waits for it
        relays.down.clear()
        await link.session()

    linked(scenario)


def test_one_that_is_needed_is_kept_until_the_next_is_there() -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        relays.down.add(HOME)
        old, holder = relays.newest, object()
        old.hold(holder)
        old.goaway("", 60_000)
        await asyncio.sleep(8.0)
        assert old.is_open and link.is_open
        relays.down.clear()
        await link.session()
        assert old.is_open
        old.release(holder)

    linked(scenario)


def test_one_that_is_needed_no_longer_is_left_while_the_next_is_tried_for() -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        relays.down.add(HOME)
        old, holder = relays.newest, object()
        old.hold(holder)
        old.goaway("", 60_000)
        await asyncio.sleep(3.5)  # the next try would be at 7 s
        old.release(holder)
        await asyncio.sleep(0.1)
        assert not old.is_open
        relays.down.clear()
        await link.session()

    linked(scenario)


def test_a_new_uri_that_does_not_answer_takes_turns_with_home() -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        relays.down.update((HOME, THERE))
        relays.newest.goaway(THERE)
        await asyncio.sleep(14.0)
        assert [uri for _, uri in relays.tries[1:]] == [THERE, THERE, HOME, THERE, HOME]
        relays.down.remove(HOME)
        assert (await link.session()).peer == HOME

    linked(scenario)


def test_goaway_after_goaway_is_followed_so_many_times() -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        for _ in range(6):
            relays.newest.goaway(HOME if relays.newest.peer == THERE else THERE)
            await link.session()
        peers = [session.peer for session in relays.opened]
        assert peers[:5] == [HOME, THERE, HOME, THERE, HOME]
        assert set(peers[5:]) == {HOME}

    linked(scenario)


def test_the_first_session_is_tried_for_as_long_as_is_said() -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        relays.down.add(HOME)
        began = asyncio.get_running_loop().time()
        with pytest.raises(ConnectionFailed):
            await link.start(3.5)
        waited = [round(when - began, 6) for when, _ in relays.tries]
        assert waited == [0.0, 1.0, 3.0, 3.5]
        with pytest.raises(ConnectionFailed):
            await link.start(0.0)
        assert len(relays.tries) == 5
        relays.error = CertificateError("another name")
        with pytest.raises(CertificateError):
            await link.start(3.5)
        assert len(relays.tries) == 6

    linked(scenario, start=False)


def test_sessions_elsewhere_are_used_again_and_bounded() -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        assert await link.elsewhere("") is link.current
        assert await link.elsewhere(HOME) is link.current
        there = await link.elsewhere(THERE)
        assert await link.elsewhere(THERE) is there
        assert there.link is link and link.current is not there
        relays.opened[1].end()
        again = await link.elsewhere(THERE)
        assert again is not there
        await link.elsewhere("moqt://third:3")
        with pytest.raises(UsageError, match="2 other sessions"):
            await link.elsewhere("moqt://fourth:4")
        for uri in ("https://there", "moqt://", "moqt://user@there"):
            with pytest.raises(UsageError):
                await link.elsewhere(uri)

    linked(scenario, Reconnect(max_elsewhere=2))


def test_sessions_elsewhere_that_are_sent_away_count_and_are_closed_with_the_link() -> None:
    async def scenario(relays: Relays, link: Link) -> None:
        await link.elsewhere(THERE)
        sent_away = relays.newest
        sent_away.goaway()
        again = await link.elsewhere(THERE)
        assert again is not link.current and again.is_usable and sent_away.is_open
        assert link.is_beside(again) and not link.is_beside(link.current)
        with pytest.raises(UsageError, match="2 other sessions"):
            await link.elsewhere("moqt://third:3")

    linked(scenario, Reconnect(max_elsewhere=2))  # which looks that every session is closed


def test_the_default_survives_a_restart_and_not_an_absence() -> None:
    assert DEFAULT_RECONNECT.deadline == 60.0
    assert DEFAULT_RECONNECT.max_hops == 4
