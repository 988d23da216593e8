# mypy: disable-error-code="import-not-found, import-untyped"
"""What both scripts need: the connection to a relay, and one line of JSON for each event.

These scripts run with the Python of the peer's environment and import only the peer. They use
it the way an application would; where it has no public call for something, a line says so.
"""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiomoqt.client import MOQTClient
from aiomoqt.types import MOQTException, MOQTRequestError
from aiomoqt.utils.url import parse_relay_url

DRAFT = 22
MAX_FILTER_RANGES = 16

EXIT_OK, EXIT_REFUSED, EXIT_INCOMPLETE = 0, 2, 3


class Refused(Exception):
    """A request was refused, which has been reported."""


Handlers = dict[int, Callable[[Any, Any], Awaitable[None]]]
"""Message type to the coroutine that serves it."""


def say(event: str, **members: object) -> None:
    """Print one event as a line of JSON."""
    print(json.dumps({"event": event, **members}), flush=True)


def parse_namespace(text: str) -> tuple[bytes, ...]:
    """Read a Track Namespace given as hexadecimal fields joined by ``/``."""
    return tuple(bytes.fromhex(field) for field in text.split("/"))


@asynccontextmanager
async def connected(url: str, ca: Path, handlers: Handlers) -> AsyncIterator[Any]:
    """Connect to a relay, exchange SETUP, and close the session at the end.

    The certificate is verified against ``ca``.
    """
    relay = parse_relay_url(url)
    client = MOQTClient(
        relay.host,
        relay.port,
        path=relay.path,
        use_quic=True,
        ca_file=str(ca),
        supported_drafts=DRAFT,
    )
    # No argument of the client sets this, but its SETUP takes it from here.
    client.max_filter_ranges = MAX_FILTER_RANGES
    for message_type, handler in handlers.items():
        client.register_handler(message_type, handler)
    async with client.connect() as session:
        await session.client_session_init()
        say("connected", draft=session.negotiated_draft)
        yield session


def run(main: Callable[[], Awaitable[int]]) -> int:
    """Run ``main`` until it returns, and report a refusal or a lost session as an event.

    SIGTERM cancels it, so that the session is closed properly.
    """

    async def guarded() -> int:
        task = asyncio.current_task()
        assert task is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            return await main()
        except MOQTRequestError as error:
            say("refused", code=int(error.error_code), reason=str(error.reason))
            return EXIT_REFUSED
        except Refused:
            return EXIT_REFUSED
        except (MOQTException, OSError, TimeoutError) as error:
            say("failed", kind=type(error).__name__, reason=str(error))
            return EXIT_REFUSED
        except asyncio.CancelledError:
            return EXIT_INCOMPLETE

    return asyncio.run(guarded())


async def reply(session: Any, request_id: int, track: str) -> Any:
    """Wait for the answer to a request about ``track``.

    The public form of this wait is part of the call that sends the request, and then the
    Request ID is not known before the answer.

    Raises:
        Refused: If it is REQUEST_ERROR, or does not come.
    """
    try:
        return await session._await_response(request_id)
    except MOQTRequestError as error:
        say("refused", track=track, code=int(error.error_code), reason=str(error.reason))
        raise Refused from error


def unexpected(error: BaseException) -> None:
    """Report an error of a background task on standard error; the driver shows it."""
    print(f"background task failed: {error!r}", file=sys.stderr, flush=True)
