"""One retrieval of a run, held to what must always be true."""

from __future__ import annotations

import asyncio
from typing import Final

import kvcs
from tests.simulation.faults import text_of
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
from tests.simulation.retrievals.means import CallersEngine
from tests.simulation.retrievals.plan import RetrievalPlan
from tests.simulation.retrievals.stage import Stage

EPSILON: Final = 0.001
"""Seconds by which a deadline may be late: the loop's callbacks of one instant."""


class Retrieving:
    """One retrieval.

    Args:
        stage: where its reader stands.
        plan: what it asks for.
    """

    def __init__(self, stage: Stage, plan: RetrievalPlan) -> None:
        self._stage = stage
        self.outcome = stage.outcome
        self.context = stage.context
        self.plan = plan

    async def account_for(self, reader: kvcs.Subscriber | kvcs.KvcsError) -> None:
        """One retrieval, and how it ended."""
        await asyncio.sleep(self.plan.start)
        try:
            if isinstance(reader, kvcs.KvcsError):
                raise reader
            if self.plan.cancel_after is None:
                end = await self._retrieve(reader)
            else:
                try:
                    async with asyncio.timeout(self.plan.cancel_after):
                        end = await self._retrieve(reader)
                except TimeoutError:
                    end = "cancelled"
        except kvcs.CacheIncomplete:
            end = "incomplete"
        except kvcs.KvcsError as exc:
            end = f"refused: {type(exc).__name__}"
            self._stage.network.note(self.plan.name, str(exc))
        except Exception as exc:
            end = "failed"
            self._stage.problem(f"{self.plan.name} ended with {text_of(exc)}")
        self.outcome.ends[self.plan.name] = end
        self._stage.network.note(self.plan.name, end)

    async def _retrieve(self, reader: kvcs.Subscriber) -> str:
        loop = asyncio.get_running_loop()
        named = None
        if self.plan.named is not None:
            named = await asyncio.shield(self._stage.announced[self.plan.named])
            if named is None:
                return "never announced"
        prefix = self.context.prefix(self.plan.shared, self.plan.own, int(self.plan.name[9:]))
        engine = None if self.plan.engine is None else CallersEngine(self.plan.engine, self.context)
        deadline_at = loop.time() + self.plan.deadline
        cache: kvcs.Cache | None = None
        early = False
        try:
            async with reader.open(
                prefix,
                deadline=self.plan.deadline,
                wait=self.plan.wait,
                layers=self.plan.layers,
                blocks=self.plan.blocks,
                publication=named,
                retrieve=self.plan.retrieve,
                recompute=engine,
                whole=self.plan.whole,
            ) as cache:
                if engine is not None:
                    engine.cache = cache
                self._in_time("open", deadline_at)
                early = self.plan.retrieve == "fetch" and not cache.manifest.complete
                try:
                    end = await self._read(cache, deadline_at)
                except kvcs.KvcsError as exc:
                    self._check(cache, exc)
                    raise
                if end == "complete":
                    end = self._completed(cache)
                self._check(cache, None if end.startswith("complete") else _Left())
                return end
        except kvcs.KvcsError as exc:
            self._in_time("its failure", deadline_at)
            if must_be_complete(self._stage.plan, self.plan) and not early:
                self._stage.problem(f"{self.plan.name} should be complete, but {text_of(exc)}")
            raise
        finally:
            if engine is not None:
                self.outcome.lists += [f"{self.plan.name}: {each}" for each in engine.problems]

    async def _read(self, cache: kvcs.Cache, deadline_at: float) -> str:
        layers = aiter(cache)
        got: list[int] = []
        while self.plan.leave_after is None or len(got) < self.plan.leave_after:
            try:
                layer = await anext(layers)
            except StopAsyncIteration:
                break
            finally:
                self._in_time(f"layer {len(got)}", deadline_at)
            got.append(layer.index)
            self._stage.network.note(self.plan.name, "layer", layer.index)
            if wrong_layer(self.context, layer, cache, self._origins(cache)):
                self.outcome.wrong.append(f"{self.plan.name} was given a wrong layer {layer.index}")
            if self.plan.think:
                pause = self._stage.random.random() * self.plan.think
                deadline_at = max(deadline_at, asyncio.get_running_loop().time() + pause)
                await asyncio.sleep(pause)
        else:
            return "left"
        if got != list(cache.layers):
            self.outcome.false.append(f"{self.plan.name} was given layers {got} of {cache.layers}")
        return "complete"

    def _completed(self, cache: kvcs.Cache) -> str:
        """By what means it became complete, the last resort of all that were used."""
        report = cache.report
        if cache.missing:
            self.outcome.false.append(
                f"{self.plan.name} was told it is complete, without {cache.missing}"
            )
        if self.plan.blocks is not None and cache.blocks != self.plan.blocks:
            self.outcome.false.append(
                f"{self.plan.name} has {cache.blocks} blocks of {self.plan.blocks}"
            )
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
            segment: self._stage.named[other.publication_id]
            for segment, other in report.segments_from.items()
        }
        return Origins(self._stage.named[report.publication.publication_id], others)

    def _check(self, cache: kvcs.Cache, exc: kvcs.KvcsError | _Left | None) -> None:
        """Each block is there with its own bits, or it is said to be missing."""
        outcome, report = self.outcome, cache.report
        origins = self._origins(cache)
        publication = origins.own
        for each in wrong_blocks(self.context, cache, origins, self.plan.shared):
            outcome.wrong.append(f"{self.plan.name}: {each}")
        said = places(cache.missing)
        if said != lacking(cache):
            outcome.lists.append(f"{self.plan.name} says that {said} lacks, not {lacking(cache)}")
        if isinstance(exc, kvcs.CacheIncomplete):
            if exc.missing != cache.missing:
                outcome.lists.append(
                    f"{self.plan.name}: the error names other blocks than the cache"
                )
            meant = expected_missing(self._stage.plan, self.plan, cache, publication)
            if meant is not None and said != meant:
                outcome.lists.append(f"{self.plan.name} lacks {said} instead of {meant}: {exc}")
        if exc is None:
            every = owed(cache)
            if report.objects + report.recomputed != every:
                outcome.false.append(
                    f"{self.plan.name} is complete with {report.objects} and {report.recomputed}"
                    f" recomputed of {every} Objects"
                )
        outcome.objects += report.objects

    def _in_time(self, what: str, deadline_at: float) -> None:
        late = asyncio.get_running_loop().time() - deadline_at
        if late > EPSILON:
            self.outcome.hangs.append(
                f"{self.plan.name}: {what} came {late:g} s after the deadline"
            )


class _Left:
    """A reader left before the end."""
