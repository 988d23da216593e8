"""Runs many retrievals on one virtual network, and holds each to what must always be true."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random
from unittest import mock

import kvcs
from kvcs.fallback.source import StoredManifest
from kvcs.kv.tracks import PublicationNamespace
from kvcs.moqt.names import Location
from kvcs.testing.network import Network, Trace, VirtualTimeError, leftovers, run
from tests.simulation.faults import strike
from tests.simulation.retrievals.check import (
    Origins,
    expected_missing,
    lacking,
    must_be_complete,
    owed,
    places,
    wrong_blocks,
    wrong_layer,
)
from tests.simulation.retrievals.content import (
    KEYS,
    RING,
    SIGNER,
    STRANGE_KEYS,
    Context,
    with_codec,
)
from tests.simulation.retrievals.means import CallersEngine, Saved, VirtualSource, spoilt, tap
from tests.simulation.retrievals.plan import (
    PublicationPlan,
    ReaderPlan,
    RetrievalPlan,
    RetrievalsPlan,
)

PORT = 4433
LIMIT = 3600.0
"""Virtual seconds of a whole run."""

EPSILON = 0.001
"""Seconds by which a deadline may be late: the loop's callbacks of one instant."""

SETTLE = 12.0
"""Seconds after the end in which every packet under way has arrived."""

ROT = 0.3
"""Part of a relay's Objects that are spoilt when its cache rots."""


_draw: ContextVar[Callable[[int], bytes]] = ContextVar("draw")
"""Draws Publication IDs of the producer whose task runs."""


@dataclass
class Outcome:
    """What came of one run."""

    plan: RetrievalsPlan
    ends: dict[str, str] = field(default_factory=dict)
    """How each retrieval ended."""

    problems: list[str] = field(default_factory=list)
    """Rules that were broken, other than those below."""

    wrong: list[str] = field(default_factory=list)
    """Tensors that were handed out, or counted as there, and are nobody's."""

    hangs: list[str] = field(default_factory=list)
    """Waits that did not end by their deadline."""

    false: list[str] = field(default_factory=list)
    """Caches that were called complete, and are not."""

    lists: list[str] = field(default_factory=list)
    """Lists of what is missing that are not exact."""

    objects: int = 0
    digest: str = ""
    events: int = 0

    @property
    def broken(self) -> list[str]:
        """Everything that must never be."""
        return [*self.wrong, *self.hangs, *self.false, *self.lists, *self.problems]


def simulate(plan: RetrievalsPlan, trace: Trace | None = None) -> Outcome:
    """Run a plan.

    Args:
        plan: the plan.
        trace: where the events go.
    """
    outcome = Outcome(plan)
    trace = Trace() if trace is None else trace
    with_codec()
    try:
        # What is sealed gets its Publication ID from here, whatever the settings say.
        with mock.patch("kvcs.publisher.publication.secrets") as secrets:
            secrets.token_bytes = lambda octets: _draw.get()(octets)
            run(_World(plan, outcome, trace).main(), limit=LIMIT)
    except VirtualTimeError as exc:
        outcome.hangs.append(str(exc))
    except Exception as exc:
        outcome.problems.append(f"the run failed: {_text(exc)}")
    outcome.digest, outcome.events = trace.digest, trace.events
    return outcome


def _text(exc: BaseException) -> str:
    if isinstance(exc, BaseExceptionGroup):
        return "; ".join(_text(each) for each in exc.exceptions)
    return f"{type(exc).__name__}: {exc}"


class _Planned(Exception):
    """The producer fails because the plan says so."""


class _World:
    def __init__(self, plan: RetrievalsPlan, outcome: Outcome, trace: Trace) -> None:
        self.plan = plan
        self.outcome = outcome
        self.trace = trace
        self.context = Context(plan)
        self.random = Random(f"world {plan.seed}")
        self.relays: dict[str, kvcs.Relay | None] = {}
        self.shelf: dict[PublicationNamespace, Saved] = {}
        self.named: dict[bytes, int] = {}
        """Which publication has a Publication ID."""

    async def main(self) -> None:
        plan = self.plan
        self.network = network = Network(plan.seed, trace=self.trace)
        for name, conditions in plan.conditions.items():
            for middle in plan.middles:
                if name != middle:
                    network.connect(name, middle, conditions)
        loop = asyncio.get_running_loop()
        self.announced: list[asyncio.Future[PublicationNamespace | None]] = [
            loop.create_future() for _ in plan.publications
        ]
        self.consumed = asyncio.Event()
        async with self._middle():
            await self._play()
        await asyncio.sleep(SETTLE)
        self.outcome.problems += leftovers(network)

    # Relays

    @asynccontextmanager
    async def _middle(self) -> AsyncIterator[None]:
        if self.plan.topology == "none":
            yield
            return
        for name in self.plan.middles:
            self.relays[name] = await self._start_relay(name)
        try:
            yield
            await asyncio.sleep(40.0)  # everybody has left: nothing of them may be left
            for relay in self.relays.values():
                if relay is not None and (relay.stats.sessions > 1 or relay.stats.namespaces):
                    self._problem(f"a relay still has sessions or namespaces: {relay.stats}")
        finally:
            for relay in reversed(self.relays.values()):
                if relay is not None:
                    await relay.close()

    async def _start_relay(self, name: str) -> kvcs.Relay:
        host = self.network.host(name)
        below = self.plan.topology == "chain" and name == self.plan.middles[-1]
        settings = kvcs.RelaySettings(
            cert="unused",
            key="unused",
            host=host.address,
            allow_anyone=True,
            upstreams=(f"moqt://{self.plan.middles[0]}:{PORT}",) if below else (),
            limits=kvcs.RelayLimits(cache_octets=self.plan.cache_octets),
        )
        with host:
            relay = kvcs.Relay(settings)
            await relay.__aenter__()
        return relay

    async def _restart_any(self, seconds: float) -> None:
        """A relay stops, without a word to anyone, and another one starts in its place."""
        name = self.random.choice(self.plan.middles)
        old = self.relays.get(name)
        if old is None:
            return
        self.relays[name] = None
        await old.close(at_once=True)
        await asyncio.sleep(seconds)
        self.relays[name] = await self._start_relay(name)

    async def _rot(self, at: float) -> None:
        """Some of what the relays hold of data tracks is not what it was."""
        await asyncio.sleep(at)
        for relay in self.relays.values():
            if relay is None:
                continue
            for name, entry in relay._core.cache._entries.items():
                if name.name.startswith(b"manifest"):
                    continue
                for group in entry.track.groups.values():
                    for stored in group.objects.values():
                        size = stored.header.payload_length
                        if size and stored.complete and self.random.random() < ROT:
                            payload = b"".join(map(bytes, stored.views(0, size)))
                            stored.parts = (memoryview(spoilt(payload, self.random)),)

    # All together

    async def _play(self) -> None:
        plan = self.plan
        producers = [
            asyncio.create_task(self._produce(number), name=each.name)
            for number, each in enumerate(plan.publications)
        ]
        faults = [
            asyncio.create_task(strike(self.network, each, plan.middles, self._restart_any))
            for each in plan.faults
        ]
        if plan.rot is not None:
            faults.append(asyncio.create_task(self._rot(plan.rot)))
        for failed in await asyncio.gather(
            *(self._host(name) for name in plan.hosts), return_exceptions=True
        ):
            if isinstance(failed, BaseException):
                self._problem(f"a consumer's host ended with {_text(failed)}")
        self.consumed.set()
        for failed in await asyncio.gather(*faults, return_exceptions=True):
            if isinstance(failed, BaseException):
                self._problem(f"a fault ended with {_text(failed)}")
        ends = await asyncio.gather(*producers, return_exceptions=True)
        for each, ended in zip(plan.publications, ends, strict=True):
            if isinstance(ended, BaseException) and not isinstance(
                ended, kvcs.KvcsError | asyncio.CancelledError | _Planned
            ):
                self._problem(f"{each.name} ended with {_text(ended)}")

    # Producers

    async def _produce(self, number: int) -> None:
        plan = self.plan.publications[number]
        host = self.network.host(plan.name)
        try:
            with host:
                if self.plan.topology == "none":
                    async with kvcs.serve(
                        host.address, PORT, cert="unused", key="unused"
                    ) as server:
                        await asyncio.sleep(plan.start)
                        await self._publish(number, server)
                        await self.consumed.wait()
                        return
                await asyncio.sleep(plan.start)
                at = self.plan.middles if self.plan.topology == "parallel" else ("relay",)
                async with AsyncExitStack() as stack:
                    sessions = [
                        await stack.enter_async_context(kvcs.connect(f"moqt://{each}:{PORT}"))
                        for each in at
                    ]
                    await self._publish(number, *sessions)
        finally:
            if not self.announced[number].done():
                self.announced[number].set_result(None)

    async def _publish(self, number: int, *sessions: kvcs.Connection | kvcs.Server) -> None:
        plan = self.plan.publications[number]
        chance = self.network.randomness(f"{plan.name} publishes")

        def publication_id(octets: int) -> bytes:
            drawn = chance.randbytes(octets)
            self.named[drawn] = number
            return drawn

        _draw.set(publication_id)
        settings = kvcs.PublisherSettings(random_octets=publication_id)
        publisher = kvcs.Publisher(*sessions, settings=settings)
        saved = Saved()
        try:
            async with publisher.publish(
                self.context.prefix(plan.blocks),
                first_segment_blocks=plan.passes[0],
                deterministic=plan.deterministic,
                sign=SIGNER if plan.signed else None,
                protect=RING if plan.sealed else None,
                pad_blocks=plan.pad,
                encodings=plan.encodings,
            ) as publication:
                named = PublicationNamespace.parse(publication.namespace)
                self.shelf[named] = saved
                self.announced[number].set_result(named)
                await self._fill(publication, plan, saved)
                if plan.saved:
                    await publication.finish()
                    await publication._manifest.settled()
                    saved.manifest = _last_manifest(publication)
                if plan.end != "withdraw":
                    await self.consumed.wait()
        finally:
            if publisher.held_octets:
                self._problem(f"{plan.name} holds {publisher.held_octets} octets")

    async def _fill(
        self, publication: kvcs.Publication, plan: PublicationPlan, saved: Saved
    ) -> None:
        layers = self.plan.model.layers
        last = layers if plan.end in ("finish", "withdraw") else int(plan.end_after * layers)
        chance = self.network.randomness(f"{plan.name} fills")
        size, first = self.plan.model.block_tokens, 0
        for number, blocks in enumerate(plan.passes):
            segment = await publication.segment(None if number == 0 else blocks)
            damaged = [
                Location(layer, block - first)
                for layer, block in plan.damaged
                if first <= block < first + blocks
            ]
            for place, track in enumerate(segment.tracks):
                tap(track, saved, damaged if place == 0 else [], chance)
            for layer in range(layers):
                if layer == last:
                    await self._end(publication, plan)
                await asyncio.sleep(chance.random() * plan.pause)
                tokens = (first * size, (first + blocks) * size)
                k, v = self.context.tensors(self._variant(plan), layer, *tokens)
                await segment.put(layer, k, None if self.plan.model.latent else v)
            first += blocks

    def _variant(self, plan: PublicationPlan) -> int:
        return self.context.variant(self.plan.publications.index(plan))

    async def _end(self, publication: kvcs.Publication, plan: PublicationPlan) -> None:
        self.network.note(plan.name, plan.end)
        if plan.end == "abort":
            publication.abort("planned")
            raise _Planned
        if plan.end == "vanish":
            self.network.host(plan.name).sever()
        if plan.end == "cancel":
            raise asyncio.CancelledError
        raise _Planned

    # Consumers

    async def _host(self, name: str) -> None:
        """All retrievals of a host, over its own sessions."""
        with self.network.host(name):
            async with AsyncExitStack() as stack:
                sessions: dict[int, kvcs.Connection] = {}
                failure: kvcs.KvcsError | None = None
                for middle, listens in enumerate(self.plan.middles):
                    url = f"moqt://{listens}:{PORT}"
                    try:
                        sessions[middle] = await stack.enter_async_context(kvcs.connect(url))
                    except kvcs.KvcsError as exc:
                        failure = exc
                readers: dict[int, kvcs.Subscriber | kvcs.KvcsError] = {}
                for number, each in enumerate(self.plan.readers):
                    if each.host == name:
                        readers[number] = self._reader(number, each, sessions, failure)
                await asyncio.gather(
                    *(
                        self._account_for(each, readers[each.reader])
                        for each in self.plan.retrievals
                        if each.reader in readers
                    )
                )

    def _reader(
        self,
        number: int,
        plan: ReaderPlan,
        sessions: dict[int, kvcs.Connection],
        failure: kvcs.KvcsError | None,
    ) -> kvcs.Subscriber | kvcs.KvcsError:
        source = None
        if plan.source is not None:
            chance = self.network.randomness(f"source {number}")
            source = VirtualSource(plan.source, self.shelf, chance)
        at = [sessions[each] for each in plan.middles if each in sessions]
        if not plan.sessions:
            at = []
        if not at and source is None:
            assert failure is not None  # it has a session, or it says why not
            return failure
        keys = (STRANGE_KEYS if plan.strange else KEYS) if plan.verifies else None
        return kvcs.Subscriber(
            *at,
            settings=kvcs.SubscriberSettings(least_recovery=plan.recovery),
            keys=keys,
            require_signed=plan.required,
            protection=RING if plan.opens else None,
            fallback=source,
        )

    async def _account_for(
        self, plan: RetrievalPlan, reader: kvcs.Subscriber | kvcs.KvcsError
    ) -> None:
        """One retrieval, and how it ended."""
        await asyncio.sleep(plan.start)
        try:
            if isinstance(reader, kvcs.KvcsError):
                raise reader
            if plan.cancel_after is None:
                end = await self._retrieve(plan, reader)
            else:
                try:
                    async with asyncio.timeout(plan.cancel_after):
                        end = await self._retrieve(plan, reader)
                except TimeoutError:
                    end = "cancelled"
        except kvcs.CacheIncomplete:
            end = "incomplete"
        except kvcs.KvcsError as exc:
            end = f"refused: {type(exc).__name__}"
            self.network.note(plan.name, str(exc))
        except Exception as exc:
            end = "failed"
            self._problem(f"{plan.name} ended with {_text(exc)}")
        self.outcome.ends[plan.name] = end
        self.network.note(plan.name, end)

    async def _retrieve(self, plan: RetrievalPlan, reader: kvcs.Subscriber) -> str:
        loop = asyncio.get_running_loop()
        named = None
        if plan.named is not None:
            named = await asyncio.shield(self.announced[plan.named])
            if named is None:
                return "never announced"
        prefix = self.context.prefix(plan.shared, plan.own, int(plan.name[9:]))
        engine = None if plan.engine is None else CallersEngine(plan.engine, self.context)
        deadline_at = loop.time() + plan.deadline
        cache: kvcs.Cache | None = None
        early = False
        try:
            async with reader.open(
                prefix,
                deadline=plan.deadline,
                wait=plan.wait,
                layers=plan.layers,
                blocks=plan.blocks,
                publication=named,
                retrieve=plan.retrieve,
                recompute=engine,
                whole=plan.whole,
            ) as cache:
                if engine is not None:
                    engine.cache = cache
                self._in_time(plan, "open", deadline_at)
                early = plan.retrieve == "fetch" and not cache.manifest.complete
                try:
                    end = await self._read(plan, cache, deadline_at)
                except kvcs.KvcsError as exc:
                    self._check(plan, cache, exc)
                    raise
                if end == "complete":
                    end = self._completed(plan, cache)
                self._check(plan, cache, None if end.startswith("complete") else _Left())
                return end
        except kvcs.KvcsError as exc:
            self._in_time(plan, "its failure", deadline_at)
            if must_be_complete(self.plan, plan) and not early:
                self._problem(f"{plan.name} should be complete, but {_text(exc)}")
            raise
        finally:
            if engine is not None:
                self.outcome.lists += [f"{plan.name}: {each}" for each in engine.problems]

    async def _read(self, plan: RetrievalPlan, cache: kvcs.Cache, deadline_at: float) -> str:
        layers = aiter(cache)
        got: list[int] = []
        while plan.leave_after is None or len(got) < plan.leave_after:
            try:
                layer = await anext(layers)
            except StopAsyncIteration:
                break
            finally:
                self._in_time(plan, f"layer {len(got)}", deadline_at)
            got.append(layer.index)
            self.network.note(plan.name, "layer", layer.index)
            if wrong_layer(self.context, layer, cache, self._origins(cache)):
                self.outcome.wrong.append(f"{plan.name} was given a wrong layer {layer.index}")
            if plan.think:
                pause = self.random.random() * plan.think
                deadline_at = max(deadline_at, asyncio.get_running_loop().time() + pause)
                await asyncio.sleep(pause)
        else:
            return "left"
        if got != list(cache.layers):
            self.outcome.false.append(f"{plan.name} was given layers {got} of {cache.layers}")
        return "complete"

    def _completed(self, plan: RetrievalPlan, cache: kvcs.Cache) -> str:
        """By what means it became complete, the last resort of all that were used."""
        report = cache.report
        if cache.missing:
            self.outcome.false.append(
                f"{plan.name} was told it is complete, without {cache.missing}"
            )
        if plan.blocks is not None and cache.blocks != plan.blocks:
            self.outcome.false.append(f"{plan.name} has {cache.blocks} blocks of {plan.blocks}")
        if report.recomputed:
            return "complete: by recomputing"
        if report.fetched_over_http:
            return "complete: over HTTP"
        if report.from_other_publications or report.segments_from:
            return "complete: from another publication"
        if report.moves:
            return "complete: over another session"
        if report.refetches:
            return "complete: fetched again"
        return "complete: at once"

    def _origins(self, cache: kvcs.Cache) -> Origins:
        report = cache.report
        others = {
            segment: self.named[other.publication_id]
            for segment, other in report.segments_from.items()
        }
        return Origins(self.named[report.publication.publication_id], others)

    def _check(
        self, plan: RetrievalPlan, cache: kvcs.Cache, exc: kvcs.KvcsError | _Left | None
    ) -> None:
        """Each block is there with its own bits, or it is said to be missing."""
        outcome, report = self.outcome, cache.report
        origins = self._origins(cache)
        publication = origins.own
        for each in wrong_blocks(self.context, cache, origins, plan.shared):
            outcome.wrong.append(f"{plan.name}: {each}")
        said = places(cache.missing)
        if said != lacking(cache):
            outcome.lists.append(f"{plan.name} says that {said} lacks, not {lacking(cache)}")
        if isinstance(exc, kvcs.CacheIncomplete):
            if exc.missing != cache.missing:
                outcome.lists.append(f"{plan.name}: the error names other blocks than the cache")
            meant = expected_missing(self.plan, plan, cache, publication)
            if meant is not None and said != meant:
                outcome.lists.append(f"{plan.name} lacks {said} instead of {meant}: {exc}")
        if exc is None:
            every = owed(cache)
            if report.objects + report.recomputed != every:
                outcome.false.append(
                    f"{plan.name} is complete with {report.objects} and {report.recomputed}"
                    f" recomputed of {every} Objects"
                )
        outcome.objects += report.objects

    def _in_time(self, plan: RetrievalPlan, what: str, deadline_at: float) -> None:
        late = asyncio.get_running_loop().time() - deadline_at
        if late > EPSILON:
            self.outcome.hangs.append(f"{plan.name}: {what} came {late:g} s after the deadline")

    def _problem(self, text: str) -> None:
        self.outcome.problems.append(text)


class _Left:
    """A reader left before the end."""


def _last_manifest(publication: kvcs.Publication) -> StoredManifest:
    track = publication._manifest.track
    version = max(track.group_ids())
    stored = track.get(Location(version, 0))
    assert stored is not None
    payload = b"".join(map(bytes, stored.views(0, stored.header.payload_length)))
    return StoredManifest(track.name.name, version, payload, bytes(stored.header.properties))
