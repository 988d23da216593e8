"""The relays of one run: how they start, fail, rot and end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import kvcs
from tests.simulation.retrievals.means import spoilt
from tests.simulation.retrievals.stage import PORT, Stage

ROT: Final = 0.3
"""Part of a relay's Objects that are spoilt when its cache rots."""


class Relays:
    """All of them; none where the plan has producers listen.

    Args:
        stage: where they stand.
    """

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._relays: dict[str, kvcs.Relay | None] = {}
        """None while one is down."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Start them, and stop those that still run: nothing of anybody may be left by then."""
        if self._stage.plan.topology == "none":
            yield
            return
        for name in self._stage.plan.middles:
            self._relays[name] = await self._start(name)
        try:
            yield
            await asyncio.sleep(40.0)  # everybody has left: nothing of them may be left
            for relay in self._relays.values():
                if relay is not None and (relay.stats.sessions > 1 or relay.stats.namespaces):
                    self._stage.problem(f"a relay still has sessions or namespaces: {relay.stats}")
        finally:
            for relay in reversed(self._relays.values()):
                if relay is not None:
                    await relay.close()

    async def _start(self, name: str) -> kvcs.Relay:
        host = self._stage.network.host(name)
        below = self._stage.plan.topology == "chain" and name == self._stage.plan.middles[-1]
        settings = kvcs.RelaySettings(
            cert="unused",
            key="unused",
            host=host.address,
            allow_anyone=True,
            upstreams=(f"moqt://{self._stage.plan.middles[0]}:{PORT}",) if below else (),
            limits=kvcs.RelayLimits(cache_octets=self._stage.plan.cache_octets),
        )
        with host:
            relay = kvcs.Relay(settings)
            await relay.__aenter__()
        return relay

    async def restart_any(self, seconds: float) -> None:
        """A relay stops, without a word to anyone, and another one starts in its place."""
        name = self._stage.random.choice(self._stage.plan.middles)
        old = self._relays.get(name)
        if old is None:
            return
        self._relays[name] = None
        await old.close(at_once=True)
        await asyncio.sleep(seconds)
        self._relays[name] = await self._start(name)

    async def rot(self, at: float) -> None:
        """Some of what the relays hold of data tracks is not what it was."""
        await asyncio.sleep(at)
        for relay in self._relays.values():
            if relay is None:
                continue
            for name, entry in relay._core.cache._entries.items():
                if name.name.startswith(b"manifest"):
                    continue
                for group in entry.track.groups.values():
                    for stored in group.objects.values():
                        size = stored.header.payload_length
                        if size and stored.complete and self._stage.random.random() < ROT:
                            payload = b"".join(map(bytes, stored.views(0, size)))
                            stored.parts = (memoryview(spoilt(payload, self._stage.random)),)
