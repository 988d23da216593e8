"""aiomoqt beside kvcs: its own publisher, relay and subscriber, in a network of their own.

Its servers bind every interface, so they run where nothing but loopback exists. How it is installed
and kept apart is the interop tests' business, so this needs a checkout; elsewhere the cases are
skipped, with the reason. Its tools send for some seconds and tell their own rate; what they send is
neither verified nor kept.

``python -m kvcs.bench.peer JSON`` measures once, in a process of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any, Final

from kvcs.bench.children import ROOT, ChildFailed, Unavailable
from kvcs.bench.figures import Sample
from kvcs.bench.transfer import Certificates

OBJECTS_IN_GROUP: Final = 160
DRAFT: Final = "22"
INSTALL_SECONDS: Final = 900.0
"""Longest time of one measurement, the first of which makes an environment."""

SCENARIO_SECONDS: Final = 90.0
BOUND_SECONDS: Final = 20.0
LEAST_LIFE: Final = 60
"""Seconds that a publisher serves; it is ended as soon as the subscriber has measured."""

IDENTITY: Final = ("-N", "bench", "-T", "track", "--draft", DRAFT)


def runner(
    size: int, *, relay: bool, seconds: int
) -> Callable[[Certificates, int], Awaitable[Sample]]:
    """A case that lets its subscriber receive for some seconds.

    Args:
        size: octets of an Object.
        relay: whether its relay stands between.
        seconds: how long.
    """

    async def run(_: Certificates, __: int) -> Sample:
        if not (ROOT / "tests" / "interop" / "scenario.py").is_file():
            raise Unavailable("aiomoqt is measured from a checkout only, by its interop tests")
        wanted = json.dumps({"size": size, "relay": relay, "duration": seconds})
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "kvcs.bench.peer", wanted),
            cwd=ROOT,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(INSTALL_SECONDS):
                output, complaint = await process.communicate()
        except TimeoutError:
            raise ChildFailed(f"aiomoqt: not over within {INSTALL_SECONDS:g} s") from None
        finally:
            if process.returncode is None:
                # The first process of its network, too: with that one the kernel ends all others.
                os.killpg(process.pid, signal.SIGKILL)
                await process.wait()
        if process.returncode:
            last = complaint.decode(errors="replace").strip().splitlines()[-1:]
            raise ChildFailed(f"aiomoqt: {last[0] if last else process.returncode}")
        answer = json.loads(output.splitlines()[-1])
        if "unavailable" in answer:
            raise Unavailable(answer["unavailable"])
        return sample(answer["said"])

    return run


def sample(said: str) -> Sample:
    """Read what its subscriber says at its end.

    Raises:
        ChildFailed: it has received nothing.
    """
    rate = re.search(r"Throughput:\s+([\d.]+) Mbps", said)
    octets = re.search(r"Bytes:\s+([\d,]+)", said)
    objects = re.search(r"Objects:\s+([\d,]+)", said)
    if rate is None or octets is None or objects is None or not float(rate[1]):
        raise ChildFailed("aiomoqt's subscriber has received nothing")
    count = int(octets[1].replace(",", ""))
    return Sample(
        octets=count,
        seconds=count * 8 / (float(rate[1]) * 1e6),
        processes={},
        objects=int(objects[1].replace(",", "")),
    )


async def receive(stage: Any, *, size: int, relay: bool, duration: int) -> str:
    """The scenario: publisher, perhaps relay, subscriber; returns what the subscriber says."""
    peer = import_module("tests.interop.peer")
    processes = import_module("tests.interop.processes")

    def program(name: str, *arguments: str) -> Any:
        words = (str(peer.installed_python()), "-m", f"aiomoqt.tools.{name}", *arguments)
        return processes.ProcessSpec(name, words, {"PYTHONPATH": None, "PYTHONUNBUFFERED": "1"})

    media = ("-s", str(size), "-g", str(OBJECTS_IN_GROUP), "-r", "0", *IDENTITY)
    if relay:
        url = await stage.peer_relay()
        life = ("-t", str(duration + LEAST_LIFE))
        publisher = await stage.start(program("pub_bench", url, "-k", *media, *life))
        await publisher.wait_ready(r"(?i)waiting|announc|publish")
    else:
        port = stage.port()
        url = f"moqt://127.0.0.1:{port}"
        certificate = ("--cert", str(stage.pem.cert), "--key", str(stage.pem.key))
        bind = ("--bind", "127.0.0.1", "-p", str(port), "-Q")
        await stage.start(program("pub_server", *bind, *certificate, *media))
        await stage.bound(port)
    subscriber = await stage.start(
        program("sub_bench", url, "-k", "-t", str(duration), *IDENTITY), ready="Subscribed"
    )
    finished = await subscriber.collect(seconds=duration + BOUND_SECONDS)
    return str(finished.stdout)


def main(wanted: dict[str, Any]) -> dict[str, str]:
    """Measure once where nothing can be reached from outside."""
    isolation = import_module("tests.interop.isolation")
    peer = import_module("tests.interop.peer")
    scenario = import_module("tests.interop.scenario")
    this = import_module("kvcs.bench.peer")  # as the driver will find it, not as __main__
    try:
        isolation.prefix()
        peer.install()
    except (isolation.IsolationUnavailable, peer.PeerUnavailable) as exc:
        return {"unavailable": f"aiomoqt: {exc}"}
    return {"said": scenario.run_scenario(this.receive, seconds=SCENARIO_SECONDS, **wanted)}


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
