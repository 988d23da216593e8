# mypy: disable-error-code="import-not-found, import-untyped"
"""The peer as publisher: serves an object tree the way KVCS lays out its tracks.

The tree is a folder for each track with a file ``GROUP.OBJECT`` for each payload. Data tracks
have one subgroup for each group, END_OF_GROUP both as header bit and as status object, Publisher
Priority floor(128 g / L), and End of Track as object 0 of group L in a subgroup of its own.
Tracks whose name begins with ``manifest`` have priority 0, the header bit alone, and no End of
Track. Nothing is published until a command says so.

Commands on standard input, one a line: ``publish G O`` publishes every track up to and including
Location {G, O}; ``publish G`` up to the end of group G; ``end`` publishes the rest and the End of
Track; ``done`` sends PUBLISH_DONE to every subscription once its fill has ended; ``withdraw``
takes the namespace back; ``close``, or the end of the input, closes the session.

It connects to a relay and announces the namespace, or with ``--listen`` it is a server of its own.

Events, one a line: ``connected`` and ``announced``, or ``listening``; ``subscribed`` {track,
request, forward, fill, largest}; ``updated`` {track, request, forward, fill}; ``fetched`` {track,
request}; ``cancelled`` {track, request}; ``refused`` {track, request}; ``published`` {largest:
{track: [group, object] or null}}; ``done`` {track, request, streams}; ``withdrawn``; ``obeyed``
{number}, after each command; ``closed``.
"""

import argparse
import asyncio
import sys
from pathlib import Path
from typing import Any

from aiomoqt.messages import RequestOk
from aiomoqt.messages.params import LocationFilter, RangeFilters
from aiomoqt.server import MOQTServer
from aiomoqt.types import (
    D16MessageType,
    GroupOrder,
    MOQTMessageType,
    ParamType,
    RequestErrorCode,
    SubscribeDoneCode,
)
from aiomoqt.utils.url import parse_relay_url
from common import (
    DRAFT,
    EXIT_OK,
    MAX_FILTER_RANGES,
    Handlers,
    connected,
    parse_namespace,
    run,
    say,
)
from published import Subscription, Track, passing

WHOLE_GROUP = 1 << 62
"""An Object ID beyond any that is used."""


class Publisher:
    """Answers the requests of the session."""

    def __init__(self, namespace: tuple[bytes, ...], source: Path) -> None:
        self.namespace = namespace
        self.tracks = {folder.name: Track(folder) for folder in sorted(source.iterdir())}
        self.by_request: dict[int, tuple[Track, Subscription]] = {}
        self._publishing = asyncio.Lock()

    def find(self, namespace: Any, name: Any) -> Track | None:
        """Return the track of this name, if it is one of ours."""
        if tuple(bytes(field) for field in namespace) != self.namespace:
            return None
        return self.tracks.get(bytes(name).decode(errors="replace"))

    async def on_subscribe(self, session: Any, message: Any) -> None:
        """Answer SUBSCRIBE."""
        track = self.find(message.track_namespace, message.track_name)
        if track is None:
            say("refused", track=bytes(message.track_name).decode(), request=message.request_id)
            session.subscribe_error(
                request_id=message.request_id,
                error_code=RequestErrorCode.DOES_NOT_EXIST,
                reason="no such track",
            )
            return
        # Not between two objects of a run of publishing: L and the filter must agree.
        async with self._publishing:
            largest = track.largest
            known = {} if largest is None else dict(zip(_LARGEST_NAMES, largest, strict=True))
            accepted = session.subscribe_ok(
                request_msg=message, content_exists=int(largest is not None), **known
            )
            subscription = Subscription(session, message, accepted.track_alias)
            subscription.range = subscription.filter.resolve(largest)
            track.subscriptions.append(subscription)
            self.by_request[message.request_id] = (track, subscription)
            session.register_request_cancel_handler(message.request_id, self.on_cancel)
            filled = subscription.start_fill(message, track)
        say(
            "subscribed",
            track=track.name,
            request=message.request_id,
            forward=subscription.forward,
            fill=filled,
            largest=largest,
        )

    async def on_update(self, session: Any, message: Any) -> None:
        """Answer REQUEST_UPDATE: Forward State, Location Filter and fill."""
        parameters = message.parameters or {}
        if message.existing_request_id not in self.by_request:  # of a FETCH or the namespace
            self._accept_update(session, message, None)
            return
        track, subscription = self.by_request[message.existing_request_id]
        async with self._publishing:
            if ParamType.LOCATION_FILTER in parameters:
                subscription.filter = parameters[ParamType.LOCATION_FILTER]
                subscription.range = subscription.filter.resolve(track.largest)
            if ParamType.FORWARD in parameters:
                subscription.forward = bool(parameters[ParamType.FORWARD])
                if not subscription.forward:
                    subscription.reset_streams()
            self._accept_update(session, message, track.largest)
            filled = subscription.start_fill(message, track)
        say(
            "updated",
            track=track.name,
            request=message.existing_request_id,
            forward=subscription.forward,
            fill=filled,
        )

    def _accept_update(self, session: Any, message: Any, largest: Any) -> None:
        known = {} if largest is None else {ParamType.LARGEST_OBJECT: largest}
        # There is no public call that answers a REQUEST_UPDATE.
        session._send_reply(
            message.request_id, RequestOk(request_id=message.request_id, parameters=known)
        )

    async def on_fetch(self, session: Any, message: Any) -> None:
        """Answer FETCH from the history."""
        track = self.find(message.namespace or (), message.track_name)
        largest = None if track is None else track.largest
        wanted = message.location_filter or LocationFilter.none()
        start, last = wanted.resolve(largest, fetch=True)
        if track is None or largest is None or last is None or start > min(largest, last):
            absent = track is None
            session.fetch_error(
                request_id=message.request_id,
                error_code=(
                    RequestErrorCode.DOES_NOT_EXIST if absent else RequestErrorCode.INVALID_RANGE
                ),
                reason="no such track" if absent else "nothing in the range",
            )
            return
        if last[1] >= WHOLE_GROUP:
            held = track.history.last_object(last[0])
            last = (last[0], 0 if held is None else held)
        session.fetch_ok(
            request_id=message.request_id,
            end_of_track=int(last[0] > track.last_group),
            largest_group_id=last[0],
            largest_object_id=last[1] + 1,  # older drafts' form; the peer converts it
        )
        say("fetched", track=track.name, request=message.request_id)
        order = message.group_order or GroupOrder.ASCENDING
        objects = track.history.fetch(
            start, last, session, descending=order == GroupOrder.DESCENDING
        )
        filters = RangeFilters.from_params(message.parameters)
        await session.serve_fetch(message.request_id, passing(objects, filters), group_order=order)

    def on_cancel(self, request_id: int) -> None:
        """Drop a subscription that its subscriber cancelled."""
        track, subscription = self.by_request.pop(request_id)
        subscription.gone = True
        subscription.reset_streams()
        for task in subscription.fills:
            task.cancel()
        track.subscriptions.remove(subscription)
        say("cancelled", track=track.name, request=request_id)

    async def command(self, session: Any, words: list[str]) -> bool:
        """Carry out one line of the input; False ends the script."""
        match words:
            case ["publish", group_id, *rest]:
                # Past any object, the end of the group is included.
                until = (int(group_id), int(rest[0]) if rest else WHOLE_GROUP)
                async with self._publishing:
                    for track in self.tracks.values():
                        await track.publish(until)
                self._say_published()
            case ["end"]:
                async with self._publishing:
                    for track in self.tracks.values():
                        await track.publish_end()
                self._say_published()
            case ["done"]:
                for track, subscription in list(self.by_request.values()):
                    await self._done(track, subscription)
            case ["withdraw"]:
                session.publish_namespace_done(namespace=self.namespace)
                say("withdrawn")
            case ["close"]:
                return False
            case _:
                raise SystemExit(f"unknown command {words}")
        return True

    async def _done(self, track: Track, subscription: Subscription) -> None:
        await asyncio.gather(*subscription.fills)
        self.by_request.pop(subscription.request_id, None)
        track.subscriptions.remove(subscription)
        subscription.session.subscribe_done(
            request_id=subscription.request_id,
            status_code=SubscribeDoneCode.TRACK_ENDED,
            stream_count=subscription.stream_count,
            reason="track ended",
        )
        say(
            "done",
            track=track.name,
            request=subscription.request_id,
            streams=subscription.stream_count,
        )

    def _say_published(self) -> None:
        say("published", largest={track.name: track.largest for track in self.tracks.values()})


_LARGEST_NAMES = ("largest_group_id", "largest_object_id")


async def obey(publisher: Publisher, session: Any) -> None:
    """Carry out the commands of the standard input until it ends."""
    lines = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(lines), sys.stdin
    )
    number = 0
    while line := await lines.readline():
        if not await publisher.command(session, line.decode().split()):
            break
        number += 1
        say("obeyed", number=number)


def handlers(publisher: Publisher) -> Handlers:
    """Return what serves each request about the tracks."""
    return {
        MOQTMessageType.SUBSCRIBE: publisher.on_subscribe,
        MOQTMessageType.FETCH: publisher.on_fetch,
        D16MessageType.REQUEST_UPDATE: publisher.on_update,
    }


async def connect(arguments: argparse.Namespace) -> int:
    """Announce the namespace at a relay and carry out the commands."""
    publisher = Publisher(parse_namespace(arguments.namespace), arguments.source)
    async with connected(arguments.url, arguments.ca, handlers(publisher)) as session:
        await session.publish_namespace(
            namespace=publisher.namespace, parameters={}, wait_response=True
        )
        say("announced")
        await obey(publisher, session)
    say("closed")
    return int(EXIT_OK)


async def serve(arguments: argparse.Namespace) -> int:
    """Listen for subscribers, tell them of the namespace, and carry out the commands."""
    publisher = Publisher(parse_namespace(arguments.namespace), arguments.source)

    async def on_subscribe_namespace(session: Any, message: Any) -> None:
        prefix = tuple(bytes(field) for field in message.namespace_prefix)
        session.subscribe_namespace_ok(message)
        if publisher.namespace[: len(prefix)] == prefix:
            session.namespace(publisher.namespace[len(prefix) :], request_id=message.request_id)

    url = parse_relay_url(arguments.url)
    server = MOQTServer(
        url.host,
        url.port,
        str(arguments.cert),
        str(arguments.key),
        use_quic=True,
        supported_drafts=DRAFT,
        max_filter_ranges=MAX_FILTER_RANGES,
    )
    for message_type, handler in handlers(publisher).items():
        server.register_handler(message_type, handler)
    server.register_handler(MOQTMessageType.SUBSCRIBE_NAMESPACE, on_subscribe_namespace)
    listener = await server.serve()
    say("listening")
    try:
        await obey(publisher, None)
    finally:
        await server.close_sessions()
        listener.close()
    say("closed")
    return int(EXIT_OK)


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="of the relay, or with --listen our own")
    parser.add_argument("--listen", action="store_true", help="serve subscribers, for one at most")
    parser.add_argument("--ca", type=Path, help="what a relay's certificate is verified against")
    parser.add_argument("--cert", type=Path, help="certificate chain to listen with")
    parser.add_argument("--key", type=Path, help="its key")
    parser.add_argument("--namespace", required=True, help="hexadecimal fields joined by /")
    parser.add_argument("--source", type=Path, required=True, help="the object tree")
    return parser.parse_args(argv)


if __name__ == "__main__":
    options = parse_arguments(sys.argv[1:])
    sys.exit(run(lambda: serve(options) if options.listen else connect(options)))
