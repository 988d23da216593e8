"""What has to be entered by ``async with`` says so, whatever else is done with it."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import pytest

import kvcs
from kvcs.contexts import entered_by
from kvcs.quic.endpoint import Server
from kvcs.quic.subscription import subscribe

URL = "moqt://relay.example:4433"
DESCRIPTOR = kvcs.Descriptor(
    model="toy",
    weights=kvcs.UNPINNED,
    layers=2,
    kv_heads=1,
    head_dim=4,
    dtype="float16",
    block_tokens=4,
)
PREFIX = kvcs.Prefix(kvcs.Scope(key=bytes(32)), DESCRIPTOR, [1, 2, 3, 4])


class NoSource:
    """A fallback that is never asked."""


CONTEXTS: dict[str, Callable[[], Any]] = {
    "kvcs.connect(...) as session": lambda: kvcs.connect(URL),
    "kvcs.serve(...) as server": lambda: kvcs.serve("127.0.0.1", 0, cert="c", key="k"),
    "kvcs.Relay(settings) as relay": lambda: kvcs.Relay(
        kvcs.RelaySettings(cert="c", key="k", allow_anyone=True)
    ),
    "kvcs.HttpServer(...) as server": lambda: kvcs.HttpServer(".", authority=None),
    "publisher.publish(...) as publication": lambda: kvcs.Publisher(Server()).publish(PREFIX),
    "subscriber.open(...) as cache": lambda: kvcs.Subscriber(fallback=NoSource()).open(PREFIX),  # type: ignore[arg-type]
    "subscribe(...) as subscription": lambda: subscribe(None, None),  # type: ignore[arg-type]
}


async def awaited(context: Any) -> None:
    await context


async def entered_plainly(context: Any) -> None:
    with context:
        pytest.fail("it was entered")


async def iterated(context: Any) -> None:
    async for _ in context:
        pytest.fail("it was iterated over")


@pytest.mark.parametrize("use", [awaited, entered_plainly, iterated])
@pytest.mark.parametrize("usage", CONTEXTS)
async def test_a_wrong_use_names_the_right_one(usage: str, use: Callable[[Any], Any]) -> None:
    with pytest.raises(kvcs.UsageError) as raised:
        await use(CONTEXTS[usage]())
    assert f"say `async with {usage}:`" in str(raised.value)


def test_what_is_not_entered_has_nothing_of_it_and_says_so() -> None:
    opened: Any = kvcs.connect(URL)
    with pytest.raises(AttributeError, match=r"'peer' .* `async with kvcs\.connect"):
        _ = opened.peer
    assert not hasattr(opened, "peer")


@pytest.mark.parametrize("session", [URL, None, object()])
def test_publishers_and_subscribers_take_sessions_alone(session: Any) -> None:
    name = type(session).__name__
    with pytest.raises(kvcs.UsageError, match=rf"kvcs\.connect\(\.\.\.\) as session.* {name}$"):
        kvcs.Publisher(session)
    with pytest.raises(kvcs.UsageError, match=rf"kvcs\.connect\(\.\.\.\) as session.* {name}$"):
        kvcs.Subscriber(session)


def test_a_session_that_is_not_entered_is_none() -> None:
    opened: Any = kvcs.connect(URL)
    for take in (kvcs.Publisher, kvcs.Subscriber):
        with pytest.raises(kvcs.UsageError, match="NotEntered"):
            take(opened)


@entered_by("async with numbered(...) as number:")
async def numbered(number: int, left: list[str]) -> AsyncIterator[int]:
    """Give a number."""
    try:
        yield number
    except KeyError:
        left.append("error")
    else:
        left.append("order")


async def test_a_context_is_entered_and_left_as_any_other() -> None:
    left: list[str] = []
    async with numbered(7, left) as number:
        assert number == 7
    async with numbered(number=8, left=left):
        raise KeyError
    async with AsyncExitStack() as stack:
        assert await stack.enter_async_context(numbered(9, left)) == 9
    assert left == ["order", "error", "order"]
    with pytest.raises(asyncio.CancelledError):
        async with numbered(10, left):
            raise asyncio.CancelledError
    assert left == ["order", "error", "order"]


def test_it_keeps_its_name_its_text_and_its_signature() -> None:
    assert numbered.__name__ == "numbered"
    assert numbered.__doc__ == "Give a number."
    assert list(inspect.signature(numbered).parameters) == ["number", "left"]
    assert "reconnect" in inspect.signature(kvcs.connect).parameters
