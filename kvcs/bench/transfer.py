"""One transfer: which processes it takes, in what order they start, and what they say of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from kvcs.bench.children import Child, ChildFailed, child
from kvcs.bench.figures import Process, Sample
from kvcs.bench.workload import MIB, Workload

START_SECONDS: Final = 90.0
"""Longest time for the processes of a transfer to start and to check what they got."""

SLOWEST_RATE: Final = MIB
"""Octets per second below which a transfer counts as hung; its link may ask for more time."""

Stack = Literal["kvcs", "raw", "stock", "tcp", "http", "redis"]

ROLES: Final[dict[Stack, tuple[str, str]]] = {
    "kvcs": ("producer", "consumer"),
    "raw": ("raw-sender", "raw-receiver"),
    "stock": ("stock-sender", "stock-receiver"),
    "tcp": ("tcp-sender", "tcp-receiver"),
    "http": ("http-sender", "http-receiver"),
    "redis": ("redis-sender", "redis-receiver"),
}

Lend = Literal["", "distinct", "same"]
"""Whether arrays are lent: not at all, one for each layer, or the same ones for every layer."""


Secure = Literal["", "signed", "sealed", "both"]
"""What the producer does so that relays need not be trusted: signs manifests, seals Objects."""


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files of a server for 127.0.0.1."""

    folder: Path

    def to_json(self) -> dict[str, str]:
        """For a process of the bench."""
        return {name: str(self.folder / f"{name}.pem") for name in ("ca", "cert", "key")}


@dataclass(frozen=True, slots=True)
class Link:
    """What a process between sender and receiver does to datagrams."""

    rtt_ms: float
    """Half of it is added in each direction."""

    loss: float
    """Part of the datagrams that it drops, in each direction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """One way to bring a workload from one process to others."""

    workload: Workload
    stack: Stack = "kvcs"
    relay: bool = False
    """Through our relay; kvcs alone."""

    consumers: int = 1
    """Receiving processes, each of which takes everything; kvcs alone."""

    datagram: int | None = None
    """Largest UDP payload in octets; None leaves the default of the stack."""

    link: Link | None = None
    """Between sender and receiver; None where they speak with each other at once."""

    lend: Lend = ""
    """Whether the producer lends its arrays in the place of having them copied."""

    into: bool = False
    """Whether the receiver puts octets into memory that it has used before; a raw sender then reads
    from as much memory, too. kvcs and raw alone."""

    keep: bool = True
    """Whether the consumer keeps every layer; else it lets each go when the next one comes."""

    secure: Secure = ""
    """What is signed and sealed, and verified and opened; kvcs alone."""

    late: bool = False
    """Whether the consumer opens only when every layer was put, and time counts from there."""

    compute_ms: float = 0.0
    """What computing each layer takes in the producer."""

    loop: Literal["asyncio", "uvloop"] = "asyncio"
    """Event loop of every process."""

    @property
    def seconds(self) -> float:
        """Longest time that it may take."""
        moved = self.workload.octets * self.consumers / SLOWEST_RATE
        if self.link is not None:
            # A lossy path is slow by its nature: several round trips for each of its datagrams.
            moved += 4 * (1 + self.link.rtt_ms) * (1 + 100 * self.link.loss)
        return START_SECONDS + moved + self.workload.layers * self.compute_ms / 1000

    async def run(self, certificates: Certificates, seed: int = 0) -> Sample:
        """Start the processes in order, let them go, and gather what they measured.

        Args:
            certificates: of every server in it.
            seed: decides which datagrams a `Link` drops.

        Raises:
            ChildFailed: a process failed, what arrived is not what was sent, or it took longer
                than `seconds`.
        """
        try:
            async with asyncio.timeout(self.seconds), AsyncExitStack() as stack:
                stage = await _Stage.set(self, stack)
                return sample(self, await stage.perform(certificates, seed))
        except TimeoutError:
            raise ChildFailed(f"a transfer was not over within {self.seconds:.0f} s") from None


class _Stage:
    """The processes of one transfer."""

    def __init__(self, transfer: Transfer, children: dict[str, Child]) -> None:
        self._transfer = transfer
        self._children = children
        self._receivers = [children[f"receiver {n}"] for n in range(transfer.consumers)]

    @classmethod
    async def set(cls, transfer: Transfer, stack: AsyncExitStack) -> _Stage:
        """Start every process; they import what they need side by side."""
        sender, receiver = ROLES[transfer.stack]
        roles = {"sender": sender}
        if transfer.relay:
            roles["relay"] = "relay"
        if transfer.link is not None:
            roles["link"] = "link"
        roles |= {f"receiver {number}": receiver for number in range(transfer.consumers)}
        children = {
            name: await stack.enter_async_context(child(role, transfer.loop))
            for name, role in roles.items()
        }
        return cls(transfer, children)

    async def perform(
        self, certificates: Certificates, seed: int
    ) -> tuple[dict[str, Any], dict[str, Any] | None, list[dict[str, Any]]]:
        """Let the processes do their parts; returns what sender, relay and receivers say."""
        transfer, children, receivers = self._transfer, self._children, self._receivers
        sender = children["sender"]
        options: dict[str, Any] = {
            "workload": transfer.workload.to_json(),
            "seconds": transfer.seconds,
            "datagram": transfer.datagram,
            "lend": transfer.lend,
            "into": transfer.into,
            "keep": transfer.keep,
            "late": transfer.late,
            "secure": transfer.secure,
            "compute_ms": transfer.compute_ms,
            "folder": str(certificates.folder),
            **certificates.to_json(),
        }
        if transfer.relay:
            options["relay"] = await children["relay"].ready(options)
            children["relay"].tell("go")
        options["url"] = await sender.ready(options)
        if transfer.link is not None:
            between = {"rtt_ms": transfer.link.rtt_ms, "loss": transfer.link.loss, "seed": seed}
            options["url"] = await children["link"].ready({**options, **between})
        if transfer.late:
            sender.tell("go")
            await sender.event("put")
        await asyncio.gather(*(receiver.ready(options) for receiver in receivers))
        for receiver in receivers:
            receiver.tell("go")
        if not transfer.late:
            sender.tell("go")
        received = await self._watched(*(each.event("received") for each in receivers))
        sender.tell("stop")
        sent = await sender.event("sent")
        relayed = None
        if transfer.relay:
            children["relay"].tell("stop")
            relayed = await children["relay"].event("sent")
        for receiver in receivers:
            receiver.tell("check")
        checked = await asyncio.gather(*(each.event("checked") for each in receivers))
        if transfer.link is not None:
            children["link"].tell("stop")
        both = zip(received, checked, strict=True)
        return sent, relayed, [{**first, **second} for first, second in both]

    async def _watched(self, *events: Awaitable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Wait for events of receivers while looking whether every process is still there.

        Raises:
            ChildFailed: one is not.
        """
        receiving = asyncio.gather(*events)
        ends = {name: asyncio.ensure_future(c.ended()) for name, c in self._children.items()}
        try:
            watched: list[asyncio.Future[Any]] = [receiving, *ends.values()]
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
            if not receiving.done():
                gone = next(each for each in ends.values() if each.done())
                raise ChildFailed(gone.result())
            return await receiving
        finally:
            receiving.cancel()
            for future in ends.values():
                future.cancel()


def sample(
    transfer: Transfer,
    said: tuple[dict[str, Any], dict[str, Any] | None, list[dict[str, Any]]],
) -> Sample:
    """Join what the processes of one transfer said.

    Raises:
        ChildFailed: a receiver confirmed something else than what was to be sent.
    """
    sent, relayed, receivers = said
    workload = transfer.workload
    digests_match = None
    for received in receivers:
        if received["octets"] != workload.octets:
            raise ChildFailed(f"{received['octets']} of {workload.octets} octets were confirmed")
        if received.get("objects", workload.objects) != workload.objects:
            raise ChildFailed(f"{received['objects']} of {workload.objects} objects were verified")
        if received.get("digest") is not None:
            digests_match = received["digest"] == sent["digest"]
            if not digests_match:
                raise ChildFailed("the tensors that arrived are not those that were sent")
    processes = {"sender": _process([sent])}
    if relayed is not None:
        processes["relay"] = _process([relayed])
    processes["receiver"] = _process(receivers)
    begun = min(each["started_at"] for each in receivers) if transfer.late else sent["started_at"]
    values: dict[str, float] = {}
    behind_ms: list[float] = []
    if "verified_at" in receivers[0]:
        verified_at = receivers[0]["verified_at"]
        pairs = zip(sent["computed_at"], verified_at, strict=True)
        behind_ms = [1000 * (verified - computed) for computed, verified in pairs]
        values = _layer_values(begun, verified_at, behind_ms)
        if transfer.compute_ms:
            computing = workload.layers * transfer.compute_ms / 1000
            values["all_layers_over_computing"] = (values["all_layers_ms"] / 1000) / computing
    return Sample(
        octets=workload.octets * len(receivers),
        seconds=max(each["at"] for each in receivers) - begun,
        processes=processes,
        objects=receivers[0].get("objects", 0),
        digests_match=digests_match,
        values=values,
        behind_ms=behind_ms,
    )


def _process(readings: list[dict[str, Any]]) -> Process:
    return Process(
        sum(each["cpu_seconds"] for each in readings),
        max(each["peak_octets"] for each in readings),
        max(each["before_octets"] for each in readings),
    )


def _layer_values(
    begun: float, verified_at: list[float], behind_ms: list[float]
) -> dict[str, float]:
    """Times of layers in milliseconds: from the beginning, and behind the moment of each layer."""
    first, last = verified_at[0] - begun, verified_at[-1] - begun
    return {
        "first_layer_ms": 1000 * first,
        "all_layers_ms": 1000 * last,
        "first_over_all_layers": first / last,
        "first_layer_behind_ms": behind_ms[0],
        "median_layer_behind_ms": sorted(behind_ms)[len(behind_ms) // 2],
        "last_layer_behind_ms": behind_ms[-1],
    }
