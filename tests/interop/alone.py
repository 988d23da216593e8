"""Scenarios of the peer with itself, in which nothing of ours takes part."""

from typing import Any

from tests.certificates import write_pem
from tests.interop import objects, peer
from tests.interop.processes import Process
from tests.interop.scenario import Stage

NAMESPACE = (b"kvcs-1", b"\x00\xff" * 8, b"compat" + bytes(26), b"anchor" + bytes(26), b"p" * 16)
"""Five fields of the lengths that KVCS has, with octets that are no text."""

TRACKS = ["k.raw.s0", "v.raw.s0"]
GROUPS, OBJECTS, SIZE = 4, 3, 5000


async def interop_client(stage: Stage, case: str | None = None) -> dict[str, Any]:
    """Run the peer's client against the peer's relay: case to whether it passed."""
    url = await stage.peer_relay()
    client = await stage.start(peer.interop_client(url, case=case))
    finished = await client.collect()
    cases = peer.parse_tap(finished.stdout)
    return {
        "exit": finished.returncode,
        "cases": {name: case.passed for name, case in cases.items()},
        "messages": {name: case.message for name, case in cases.items()},
    }


async def live(stage: Stage) -> dict[str, Any]:
    """Subscribe before anything is published."""
    url, publisher = await _publisher(stage)
    subscriber = await stage.start(_subscriber(stage, url))
    for track in TRACKS:
        await subscriber.wait_event("accepted", track=track)
        await publisher.wait_event("subscribed", track=track)
    await peer.command(publisher, "end")
    await peer.command(publisher, "done")
    return await _outcome(stage, subscriber)


async def join(stage: Stage) -> dict[str, Any]:
    """Subscribe in the middle of a group, so that fill and subscription meet inside it."""
    url, publisher = await _publisher(stage)
    await peer.command(publisher, "publish 1 1")
    subscriber = await stage.start(_subscriber(stage, url))
    for track in TRACKS:
        await subscriber.wait_event("accepted", track=track)
        await publisher.wait_event("subscribed", track=track)
        await subscriber.wait_event("fill", track=track)
    await peer.command(publisher, "end")
    await peer.command(publisher, "done")
    return await _outcome(stage, subscriber)


async def fetch(stage: Stage) -> dict[str, Any]:
    """FETCH two groups in the middle of a track that is published already."""
    url, publisher = await _publisher(stage)
    await peer.command(publisher, "end")
    options = ("--start-group", "1", "--end-group", "2", "--save", str(stage.directory / "saved"))
    subscriber = await stage.start(
        peer.subscribe(
            url,
            ca=stage.pem.ca,
            namespace=NAMESPACE,
            tracks=TRACKS,
            mode="fetch",
            options=options,
        )
    )
    return await _outcome(stage, subscriber)


async def wrong_ca(stage: Stage) -> dict[str, Any]:
    """Connect to the relay while trusting another CA."""
    url = await stage.peer_relay()
    other = write_pem(stage.directory / "other")
    spec = peer.subscribe(url, ca=other.ca, namespace=NAMESPACE, tracks=TRACKS)
    finished = await (await stage.start(spec)).collect()
    return {"exit": finished.returncode, "events": finished.events}


async def _publisher(stage: Stage) -> tuple[str, Process]:
    url = await stage.peer_relay()
    source = stage.directory / "source"
    objects.write_tree(
        source, objects.known_tree(TRACKS, groups=GROUPS, objects=OBJECTS, size=SIZE)
    )
    spec = peer.publish(url, ca=stage.pem.ca, namespace=NAMESPACE, source=source)
    publisher = await stage.start(spec)
    await publisher.wait_event("announced")
    return url, publisher


def _subscriber(stage: Stage, url: str) -> Any:
    return peer.subscribe(
        url,
        ca=stage.pem.ca,
        namespace=NAMESPACE[:4],
        tracks=TRACKS,
        options=("--discover", "--save", str(stage.directory / "saved")),
    )


async def _outcome(stage: Stage, subscriber: Process) -> dict[str, Any]:
    finished = await subscriber.collect()
    saved = objects.read_tree(stage.directory / "saved")
    return {
        "exit": finished.returncode,
        "events": finished.events,
        "saved": {track: objects.digests(payloads) for track, payloads in saved.items()},
    }
