"""Runs one plan on a virtual network and holds it to what must always be true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import kvcs
from kvcs.moqt.names import FullTrackName, Location
from kvcs.testing.network import Network, Trace, leftovers, run, write_credentials
from kvcs.testing.network.certificates import Credentials
from tests.simulation.content import Content, content
from tests.simulation.faults import strike, text_of
from tests.simulation.joining import join
from tests.simulation.plan import ConsumerPlan, Plan, ProducerPlan

PORT = 4433
LIMIT = 600.0
"""Virtual seconds of a whole run."""

EPSILON = 0.001
"""Seconds by which a deadline may be late: the loop's callbacks of one instant."""

PING = 3.0
"""PING interval, seconds: a host that moved while it was silent cannot be reached before its next
packet, and a relay waits 10 s for an answer."""

UNFOLLOWED = 9.0
"""Seconds in which a relay gives up the subscriptions of consumers that have left."""

SETTLE = 12.0
"""Seconds after the end in which every packet under way has arrived."""


@dataclass
class Outcome:
    """What came of one run."""

    plan: Plan
    ends: dict[str, str] = field(default_factory=dict)
    """How each consumer ended."""

    problems: list[str] = field(default_factory=list)
    """What must never be; empty when all is well."""

    objects: int = 0
    """Objects that consumers verified."""

    duplicates: int = 0
    refetches: int = 0
    packets: int = 0
    seconds: float = 0.0
    """Virtual seconds."""

    digest: str = ""
    """Of the trace."""


def simulate(
    plan: Plan, credentials: Credentials | None = None, trace: Trace | None = None
) -> Outcome:
    """Run a plan; what goes wrong is in `Outcome.problems`.

    Args:
        plan: the plan.
        credentials: for a plan on aioquic: a certificate for its hosts.
        trace: where the events go.
    """
    outcome = Outcome(plan)
    trace = Trace() if trace is None else trace
    try:
        run(_World(plan, outcome, credentials, trace).main(), limit=LIMIT)
    except Exception as exc:
        outcome.problems.append(f"the run failed: {text_of(exc)}")
    outcome.digest, outcome.packets = trace.digest, trace.events
    return outcome


def credentials_in(folder: str) -> Credentials:
    """Certificates for the hosts of any plan."""
    return write_credentials(folder, "relay", "relay2", "producer0", "producer1")


class _World:
    def __init__(
        self, plan: Plan, outcome: Outcome, credentials: Credentials | None, trace: Trace
    ) -> None:
        self.plan = plan
        self.outcome = outcome
        self.credentials = credentials
        self.trace = trace
        self.contents = [content(each, plan.seed) for each in plan.producers]
        self.random = Random(f"world {plan.seed}")
        self.relays: dict[str, kvcs.Relay | None] = {}
        self.early: set[str] = set()
        """Consumers that fetched what was not all produced: they get what is there."""

    async def main(self) -> None:
        plan = self.plan
        self.network = network = Network(plan.seed, quic=plan.quic, trace=self.trace)
        for name, conditions in plan.conditions.items():
            for middle in plan.middles:
                if name != middle:
                    network.connect(name, middle, conditions)
        for name, rate in plan.read_rate.items():
            network.host(name).read_rate = rate
        loop = asyncio.get_running_loop()
        self.announced: list[asyncio.Future[kvcs.PublicationNamespace | None]] = [
            loop.create_future() for _ in plan.producers
        ]
        self.consumed = asyncio.Event()
        async with self._middle() as publisher:
            await self._play(publisher)
        self.outcome.seconds = network.now
        await asyncio.sleep(SETTLE)
        self.outcome.problems += leftovers(network)

    @asynccontextmanager
    async def _middle(self) -> AsyncIterator[kvcs.Server | None]:
        """Whom everybody connects to."""
        if self.plan.topology == "direct":
            host = self.network.host(self.plan.middles[0])
            cert, key = self._files()
            with host:
                serving = kvcs.serve(host.address, PORT, cert=cert, key=key, quic=self._quic())
                server = await serving.__aenter__()
            try:
                yield server
            finally:
                await serving.__aexit__(None, None, None)
            return
        for name in self.plan.middles:
            self.relays[name] = await self._start_relay(name)
        try:
            yield None
            # Everybody has left: nothing of them may be left.
            await asyncio.sleep(40.0 + (self.plan.retention if self.plan.retention < 60 else 0.0))
            for relay in self.relays.values():
                if relay is not None:
                    self._check_relay(relay)
        finally:
            for relay in self.relays.values():
                if relay is not None:
                    await relay.close()

    async def _start_relay(self, name: str) -> kvcs.Relay:
        host = self.network.host(name)
        cert, key = self._files()
        settings = kvcs.RelaySettings(
            cert=cert,
            key=key,
            host=host.address,
            allow_anyone=True,
            limits=kvcs.RelayLimits(cache_octets=self.plan.cache_octets),
            quic=self._quic(),
        )
        with host:
            relay = kvcs.Relay(settings)
            await relay.__aenter__()
        return relay

    def _files(self) -> tuple[str, str]:
        """Certificate and key of whoever listens."""
        files = self.credentials
        return ("unused", "unused") if files is None else (str(files.cert), str(files.key))

    def _check_relay(self, relay: kvcs.Relay) -> None:
        stats = relay.stats
        if stats.sessions or stats.namespaces:
            self._problem(f"the relay has {stats.sessions} sessions, {stats.namespaces} namespaces")
        if stats.cache_octets > self.plan.cache_octets:
            self._problem(f"the relay's cache has {stats.cache_octets} octets")
        if self.plan.retention < 60 and stats.cache_octets > 4096 * max(1, stats.tracks):
            self._problem(f"the relay's cache has {stats.cache_octets} octets that have expired")

    async def _play(self, server: kvcs.Server | None) -> None:
        plan = self.plan
        producers = [
            asyncio.create_task(self._produce(number, server), name=each.name)
            for number, each in enumerate(plan.producers)
        ]
        consumers = [
            asyncio.create_task(self._consume(each), name=each.name) for each in plan.consumers
        ]
        faults = [
            asyncio.create_task(strike(self.network, each, plan.middles, self._restart_any))
            for each in plan.faults
        ]
        results = await asyncio.gather(*consumers, return_exceptions=True)
        for each, result in zip(plan.consumers, results, strict=True):
            end = result if isinstance(result, str) else text_of(result)
            self.outcome.ends[each.name] = end.partition(":")[0]
            self.network.note(each.name, end)
            if isinstance(result, BaseException) and not isinstance(
                result, kvcs.KvcsError | asyncio.CancelledError
            ):
                self._problem(f"{each.name} ended with {text_of(result)}")
            excused = each.name in self.early or not plan.must_be_complete(each)
            if not excused and result != "complete":
                self._problem(f"{each.name} should be complete, but {end}")
        self.consumed.set()
        for failed in await asyncio.gather(*faults, return_exceptions=True):
            if isinstance(failed, BaseException):
                self._problem(f"a fault ended with {text_of(failed)}")
        for each, ended in zip(
            plan.producers, await asyncio.gather(*producers, return_exceptions=True), strict=True
        ):
            if isinstance(ended, BaseException) and not isinstance(
                ended, kvcs.KvcsError | asyncio.CancelledError | _Planned
            ):
                self._problem(f"{each.name} ended with {text_of(ended)}")

    # Producers

    async def _produce(self, number: int, server: kvcs.Server | None) -> None:
        plan = self.plan.producers[number]
        try:
            with self.network.host(plan.name):
                await asyncio.sleep(plan.start)
                if server is not None:
                    await self._publish(number, server)
                    return
                async with self._sessions(range(len(self.plan.middles))) as sessions:
                    await self._publish(number, *sessions)
        finally:
            if not self.announced[number].done():
                self.announced[number].set_result(None)

    async def _publish(self, number: int, *sessions: kvcs.Connection | kvcs.Server) -> None:
        plan, data = self.plan.producers[number], self.contents[number]
        settings = kvcs.PublisherSettings(
            retention=self.plan.retention,
            random_octets=self.network.randomness(f"{plan.name} publishes").randbytes,
        )
        publisher = kvcs.Publisher(*sessions, settings=settings)
        try:
            async with publisher.publish(
                data.prefix, first_segment_blocks=plan.first_segment
            ) as publication:
                self.announced[number].set_result(
                    kvcs.PublicationNamespace.parse(publication.namespace)
                )
                await self._fill(publication, plan, data)
                await self.consumed.wait()
                await self._check_unfollowed(plan)
        finally:
            if publisher.held_octets:
                self._problem(f"{plan.name} holds {publisher.held_octets} octets")

    async def _check_unfollowed(self, plan: ProducerPlan) -> None:
        """All consumers have left: soon nobody asks anything of the producer any more."""
        if self.plan.faults or any(each.loss for each in self.plan.conditions.values()):
            return  # who closes while its last packet is lost is missed only after the idle time
        await asyncio.sleep(UNFOLLOWED)
        for session in self.network.host(plan.name).sessions:
            asked = [each for each in session.core.requests.all() if not each.ours]
            if asked:
                self._problem(f"{plan.name} is still asked: {[type(r.message) for r in asked]}")

    async def _fill(self, publication: kvcs.Publication, plan: ProducerPlan, data: Content) -> None:
        last = plan.layers if plan.end == "finish" else int(plan.end_after * plan.layers)
        start = 0
        size = data.prefix.descriptor.block_tokens
        while start < plan.blocks:
            blocks = plan.first_segment if start == 0 else plan.blocks - start
            segment = await publication.segment(None if start == 0 else blocks)
            span = slice(start * size, (start + blocks) * size)
            for layer, (k, v) in enumerate(data.layers):
                if layer == last:
                    await self._end(publication, plan)
                await asyncio.sleep(self.random.random() * plan.pause)
                await segment.put(layer, k[span], None if v is None else v[span])
            start += blocks

    async def _end(self, publication: kvcs.Publication, plan: ProducerPlan) -> None:
        self.network.note(plan.name, plan.end)
        if plan.end == "abort":
            publication.abort("planned")
            raise _Planned
        if plan.end == "raise":
            raise _Planned
        if plan.end == "vanish":
            self.network.host(plan.name).sever()
            raise _Planned
        raise asyncio.CancelledError

    # Consumers

    async def _consume(self, plan: ConsumerPlan) -> str:
        await asyncio.sleep(plan.start)
        if plan.cancel_after is None:
            return await self._retrieve(plan)
        try:
            async with asyncio.timeout(plan.cancel_after):
                return await self._retrieve(plan)
        except TimeoutError:
            return "cancelled"

    async def _retrieve(self, plan: ConsumerPlan) -> str:
        with self.network.host(plan.name):
            async with self._sessions(plan.middles) as sessions:
                if plan.retrieve == "raw":
                    return await self._join(plan, sessions[0])
                return await self._open(plan, sessions)

    async def _join(self, plan: ConsumerPlan, session: kvcs.Connection) -> str:
        """Take one data track without the Subscriber: each Object comes exactly once."""
        producer, data = self.plan.producers[plan.producer], self.contents[plan.producer]
        namespace = await asyncio.shield(self.announced[plan.producer])
        if namespace is None:
            return "never announced"
        component = data.prefix.descriptor.components[0]
        name = FullTrackName(namespace.fields, f"{component.value}.raw.s0".encode())
        try:
            joined = await join(session, name, plan.deadline)
        except TimeoutError:
            return "not in time"
        self.outcome.objects += joined.counts.total()
        every = {
            Location(layer, block)
            for layer in range(producer.layers)
            for block in range(producer.first_segment)
        }
        twice = [location for location, count in joined.counts.items() if count > 1]
        if twice or set(joined.counts) - every:
            self._problem(f"{plan.name} got Objects twice {twice} or beyond {joined.counts}")
        if joined.failure is not None:
            return joined.failure
        if joined.cut_short:
            return "cut short"
        if set(joined.counts) != every:
            self._problem(f"{plan.name} lacks {sorted(every - set(joined.counts))[:4]}")
        return "complete"

    async def _open(self, plan: ConsumerPlan, sessions: list[kvcs.Connection]) -> str:
        producer, data = self.plan.producers[plan.producer], self.contents[plan.producer]
        loop = asyncio.get_running_loop()
        named = None
        if producer.first_segment < producer.blocks:
            named = await asyncio.shield(self.announced[plan.producer])
            if named is None:
                return "never announced"
        deadline_at = loop.time() + plan.deadline
        cache: kvcs.Cache | None = None
        got: list[int] = []
        try:
            settings = kvcs.SubscriberSettings(least_recovery=plan.recovery)
            async with kvcs.Subscriber(*sessions, settings=settings).open(
                data.prefix,
                deadline=plan.deadline,
                layers=plan.layers,
                blocks=plan.blocks,
                publication=named,
                retrieve="auto" if plan.retrieve == "raw" else plan.retrieve,
            ) as cache:
                self._in_time(plan, "open", deadline_at)
                if plan.retrieve == "fetch" and not cache.manifest.complete:
                    self.early.add(plan.name)
                await self._read(plan, data, cache, got, deadline_at)
        except kvcs.KvcsError as exc:
            if cache is not None:
                self._account(plan, cache, got, exc)
            elif loop.time() > deadline_at + EPSILON:
                self._problem(f"{plan.name}: open failed {loop.time() - deadline_at:g} s late")
            raise
        finally:
            if cache is not None:
                report = cache.report
                self.outcome.objects += report.objects
                self.outcome.duplicates += report.duplicates
                self.outcome.refetches += report.refetches
        if plan.leave_after is not None and len(got) < len(cache.layers):
            return "left"
        self._account(plan, cache, got, None)
        return "complete"

    async def _read(
        self,
        plan: ConsumerPlan,
        data: Content,
        cache: kvcs.Cache,
        got: list[int],
        deadline_at: float,
    ) -> None:
        layers = aiter(cache)
        while plan.leave_after is None or len(got) < plan.leave_after:
            try:
                layer = await anext(layers)
            except StopAsyncIteration:
                self._in_time(plan, "the end", deadline_at)
                return
            finally:
                self._in_time(plan, f"layer {len(got)}", deadline_at)
            got.append(layer.index)
            self.network.note(plan.name, "layer", layer.index)
            if not data.holds(layer, cache.blocks):
                self._problem(f"{plan.name} was given a wrong layer {layer.index}")
            if plan.think:
                pause = self.random.random() * plan.think
                deadline_at = max(deadline_at, asyncio.get_running_loop().time() + pause)
                await asyncio.sleep(pause)

    def _account(
        self, plan: ConsumerPlan, cache: kvcs.Cache, got: list[int], exc: kvcs.KvcsError | None
    ) -> None:
        """Each Object is there exactly once, or it is said to be missing."""
        report = cache.report
        components = len(self.contents[plan.producer].prefix.descriptor.components)
        owed = len(cache.layers) * components * cache.blocks
        missing = sum(run.last_block - run.first_block + 1 for run in cache.missing)
        if report.objects + missing != owed:
            self._problem(
                f"{plan.name}: {report.objects} Objects verified and {missing} missing of {owed}"
            )
        if got != list(cache.layers)[: len(got)]:
            self._problem(f"{plan.name} was given layers {got} of {cache.layers}")
        if exc is None and (missing or got != list(cache.layers)):
            self._problem(f"{plan.name} was told it is complete with {missing} missing")
        if isinstance(exc, kvcs.CacheIncomplete) and exc.missing != cache.missing:
            self._problem(f"{plan.name}: the error names other blocks than the cache")
        if report.duplicates and not report.refetches and not self._came_back(plan):
            self._problem(f"{plan.name} got {report.duplicates} Objects twice")
        if report.rejected:
            self._problem(f"{plan.name} rejected Objects of an honest producer: {report.rejected}")

    def _came_back(self, plan: ConsumerPlan) -> bool:
        """Whether a retrieval may have gone on in another session."""
        return any(
            fault.kind in ("kill", "sever", "long blackout", "restart")
            for fault in self.plan.faults
        )

    def _in_time(self, plan: ConsumerPlan, what: str, deadline_at: float) -> None:
        late = asyncio.get_running_loop().time() - deadline_at
        if late > EPSILON:
            self._problem(f"{plan.name}: {what} came {late:g} s after the deadline")

    # Both

    @asynccontextmanager
    async def _sessions(self, middles: Iterable[int]) -> AsyncIterator[list[kvcs.Connection]]:
        ca = None if self.credentials is None else self.credentials.ca
        async with AsyncExitStack() as stack:
            sessions = []
            for middle in middles:
                url = f"moqt://{self.plan.middles[middle]}:{PORT}"
                opening = kvcs.connect(url, ca=ca, quic=self._quic())
                sessions.append(await stack.enter_async_context(opening))
            yield sessions

    def _quic(self) -> kvcs.QuicSettings:
        plan = self.plan
        return kvcs.QuicSettings(
            send_buffer=plan.send_buffer,
            receive_window=plan.receive_window,
            stream_receive_window=plan.stream_window,
            uni_streams=plan.uni_streams,
            ping_interval=PING,
        )

    async def _restart_any(self, seconds: float) -> None:
        await self._restart(self.random.choice(self.plan.middles), seconds)

    async def _restart(self, name: str, seconds: float) -> None:
        """A relay stops, without a word to anyone, and another one starts in its place."""
        old = self.relays.get(name)
        if old is None:
            return
        self.relays[name] = None
        await old.close(at_once=True)
        await asyncio.sleep(seconds)
        self.relays[name] = await self._start_relay(name)

    def _problem(self, text: str) -> None:
        self.outcome.problems.append(text)


class _Planned(Exception):
    """The producer fails because the plan says so."""
