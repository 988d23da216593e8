"""Relays, a producer and consumers as processes that may be killed at any moment.

They are forked from a server that has imported everything, and stay for many trials: what a trial
kills is started again for the next one, on the same port.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from random import Random
from typing import Any

import kvcs
from kvcs.errors import KvcsError
from kvcs.quic.aioquic_backend import QuicSettings
from tests.builders import put, same
from tests.certificates import PemFiles
from tests.ports import HOST, free_port
from tests.unit.kv.toy import SCOPE, Toy, toy_publication

LAYERS, BLOCKS = 6, 4

QUIC = QuicSettings(idle_timeout=3.0, ping_interval=1.0)
"""A process that was killed says nothing: its peers find out by its silence."""

BACK = kvcs.Reconnect(initial=60.0, deadline=None, first_pause=0.02, max_pause=0.2)

PATIENT = kvcs.SubscriberSettings(least_recovery=60.0)
"""What a death costs is bounded by the deadline alone."""

SLACK = 60.0
"""Seconds that a busy machine may add to a wait before it counts as a hang."""

UPPERS, LOWERS, CONSUMERS = ("upper0", "upper1"), ("lower0", "lower1"), ("consumer0", "consumer1")
VICTIMS = (*UPPERS, *LOWERS, "producer", "consumer0")

Message = tuple[Any, ...]


def toy_of(seed: int) -> Toy:
    """What is published in the trial of a seed: Objects of 1 to 130 KiB."""
    heads = Random(f"size {seed}").choice([2, 16, 256])
    return toy_publication((BLOCKS,), layers=LAYERS, kv_heads=heads, seed=seed, block_tokens=16)


def prefix_of(seed: int, toy: Toy) -> kvcs.Prefix:
    """Its prefix, which no other trial has."""
    tokens = range(seed << 8, (seed << 8) + BLOCKS * toy.descriptor.block_tokens)
    return kvcs.Prefix(SCOPE, toy.descriptor, tokens)


# The processes


def run(main: Callable[..., Coroutine[Any, Any, None]], pipe: Pipe, *arguments: Any) -> None:
    """What a process does."""
    asyncio.run(main(pipe, *arguments))


async def commands(pipe: Pipe, take: Callable[[Message], None]) -> None:
    """Hand over what the test says, until it is gone."""
    while True:
        try:
            message = await asyncio.to_thread(pipe.recv)
        except (EOFError, OSError):
            return
        take(message)


async def relay(pipe: Pipe, files: PemFiles, port: int, upstreams: tuple[str, ...]) -> None:
    """One relay."""
    settings = kvcs.RelaySettings(
        cert=files.cert,
        key=files.key,
        port=port,
        allow_anyone=True,
        upstreams=upstreams,
        ca=files.ca,
        reconnect=BACK,
        quic=QUIC,
        goaway_timeout=0.1,
    )
    async with kvcs.Relay(settings) as listening:
        pipe.send(("ready",))
        await commands(pipe, lambda _: pipe.send(("stats", listening.stats.failovers)))


async def producer(pipe: Pipe, files: PemFiles, urls: tuple[str, ...]) -> None:
    """Publishes at every URL what it is told to."""
    async with AsyncExitStack() as stack:
        links = [
            await stack.enter_async_context(
                kvcs.connect(url, ca=files.ca, quic=QUIC, reconnect=BACK)
            )
            for url in urls
        ]
        publisher = kvcs.Publisher(*links)
        over: dict[int, asyncio.Event] = {}

        async def publish(seed: int, pause: float) -> None:
            toy = toy_of(seed)
            async with publisher.publish(prefix_of(seed, toy)) as publication:
                pipe.send(("announced", seed))
                segment = await publication.segment()
                for layer in range(LAYERS):
                    await asyncio.sleep(pause)
                    await put(segment, toy, [layer])
                segment.finish()
                await over[seed].wait()

        async with asyncio.TaskGroup() as group:

            def take(message: Message) -> None:
                what, seed, *more = message
                if what == "publish":
                    over[seed] = asyncio.Event()
                    group.create_task(publish(seed, *more))
                elif seed in over:
                    over.pop(seed).set()

            pipe.send(("ready",))
            await commands(pipe, take)
            for event in over.values():
                event.set()


async def consumer(pipe: Pipe, files: PemFiles, urls: tuple[str, ...]) -> None:
    """Retrieves what it is told to, twice: over either relay first."""
    async with AsyncExitStack() as stack:
        links = [
            await stack.enter_async_context(
                kvcs.connect(url, ca=files.ca, quic=QUIC, reconnect=BACK)
            )
            for url in urls
        ]

        async def retrieve(seed: int, deadline: float) -> None:
            began = time.monotonic()
            toy = toy_of(seed)
            ends = await asyncio.gather(
                *(one_end(list(order), seed, toy, deadline) for order in (links, links[::-1]))
            )
            pipe.send(("ended", seed, ends, time.monotonic() - began))

        async with asyncio.TaskGroup() as group:

            def take(message: Message) -> None:
                group.create_task(retrieve(*message))

            pipe.send(("ready",))
            await commands(pipe, take)


async def one_end(links: list[kvcs.Connection], seed: int, toy: Toy, deadline: float) -> str:
    """How one retrieval ends: "complete", the error's name, or what is wrong."""
    until = time.monotonic() + deadline
    subscriber = kvcs.Subscriber(*links, settings=PATIENT)
    while True:
        left = max(0.1, until - time.monotonic())
        layers: list[Any] = []
        try:
            async with subscriber.open(prefix_of(seed, toy), deadline=left) as cache:
                async for layer in cache:
                    if not same(layer, toy):
                        return f"wrong: layer {layer.index}"
                    layers.append(layer.index)
        except kvcs.PublicationNotFound:
            # A relay that has just started knows nothing yet: so would an application do.
            if time.monotonic() + 0.2 > until:
                return "PublicationNotFound"
            await asyncio.sleep(0.1)
            continue
        except KvcsError as exc:
            return type(exc).__name__
        return "complete" if layers == list(range(LAYERS)) else f"false end: {layers}"


# The test's side


class Cast:
    """The processes of one test.

    Args:
        files: certificates of the run.
    """

    def __init__(self, files: PemFiles) -> None:
        self._files = files
        self._context = get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._ports = {name: free_port() for name in (*UPPERS, *LOWERS)}
        self._processes: dict[str, BaseProcess] = {}
        self._pipes: dict[str, Pipe] = {}

    def __enter__(self) -> Cast:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._processes):
            self.kill(name)

    def start_all(self) -> None:
        """Start whoever is not there."""
        missing = [
            name
            for name in (*UPPERS, *LOWERS, "producer", *CONSUMERS)
            if name not in self._processes
        ]
        for name in missing:
            self._start(name)
        for name in missing:
            assert self.hears(name, SLACK) == ("ready",), name

    def _start(self, name: str) -> None:
        urls = {each: f"moqt://{HOST}:{port}" for each, port in self._ports.items()}
        upper, lower = (tuple(urls[each] for each in names) for names in (UPPERS, LOWERS))
        main: Callable[..., Coroutine[Any, Any, None]]
        arguments: tuple[Any, ...]
        if name in self._ports:
            upstreams = {"lower0": upper, "lower1": upper[::-1]}.get(name, ())
            main, arguments = relay, (self._files, self._ports[name], upstreams)
        elif name == "producer":
            main, arguments = producer, (self._files, upper)
        else:
            main, arguments = consumer, (self._files, lower)
        ours, theirs = self._context.Pipe()
        process = self._context.Process(
            target=run, args=(main, theirs, *arguments), name=name, daemon=True
        )
        process.start()
        theirs.close()
        self._processes[name], self._pipes[name] = process, ours

    def kill(self, name: str) -> None:
        """Kill a process with SIGKILL, and forget it."""
        process, pipe = self._processes.pop(name), self._pipes.pop(name)
        process.kill()
        process.join()
        pipe.close()

    def tell(self, name: str, *message: Any) -> None:
        """Say something to a process."""
        self._pipes[name].send(message)

    def hears(self, name: str, seconds: float) -> Message:
        """What a process says next.

        Raises:
            AssertionError: it says nothing for so long, or has died.
        """
        pipe = self._pipes[name]
        assert wait([pipe], seconds), f"{name} hangs"
        try:
            message: Message = pipe.recv()
        except EOFError:
            raise AssertionError(f"{name} died by itself") from None
        return message

    def all_alive(self) -> bool:
        """Whether nobody has died but by our hand."""
        return all(process.is_alive() for process in self._processes.values())


def trial(cast: Cast, seed: int) -> tuple[str, tuple[str, ...]]:
    """Publish and retrieve, and kill somebody at a moment that the seed chooses.

    Returns:
        Whom, and how the retrievals of those who live ended.

    Raises:
        AssertionError: something wrong was accepted or called complete, something hangs, or did
            not end as it has to.
    """
    chance = Random(seed)
    victim = chance.choice(VICTIMS)
    pause, moment = chance.uniform(0.0, 0.08), chance.uniform(0.0, 0.7)
    deadline = 6.0 if victim == "producer" else 45.0
    cast.start_all()
    cast.tell("producer", "publish", seed, pause)
    while cast.hears("producer", SLACK) != ("announced", seed):
        pass
    for name in CONSUMERS:
        cast.tell(name, seed, deadline)
    time.sleep(moment)
    cast.kill(victim)
    ends: list[str] = []
    for name in CONSUMERS:
        if name != victim:
            message = cast.hears(name, deadline + SLACK)
            assert message[:2] == ("ended", seed), message
            ends += message[2]
            assert message[3] < deadline + SLACK / 2, f"{name} hung for {message[3]:.1f} s"
    assert not [end for end in ends if ":" in end], (victim, ends)
    if victim != "producer":
        assert set(ends) == {"complete"}, (victim, ends)
        cast.tell("producer", "over", seed)
    assert cast.all_alive()
    return victim, tuple(ends)
