"""Asynchronous contexts that say how they are used where they are used in another way."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, ParamSpec, TypeVar

from kvcs.errors import UsageError

P = ParamSpec("P")
T = TypeVar("T")


class OnlyAsyncWith:
    """Something that has to be entered by ``async with`` before it is of use.

    Python's own messages for an ``await`` or a plain ``with`` name a class that nobody has heard
    of. Type checkers do not see these methods, and find such a use by themselves.
    """

    usage = ""
    """The line that enters it."""

    def __init_subclass__(cls, *, usage: str = "") -> None:
        """A class of such contexts.

        Args:
            usage: the line that enters one.
        """
        super().__init_subclass__()
        cls.usage = usage

    if not TYPE_CHECKING:

        def __await__(self) -> NoReturn:
            self._misused("awaited")

        def __enter__(self) -> NoReturn:
            self._misused("entered by a plain `with`")

        def __exit__(self, *exc_info: object) -> None:
            """Python looks for it before it calls `__enter__`."""

        def __aiter__(self) -> NoReturn:
            self._misused("iterated over")

    def _misused(self, how: str) -> NoReturn:
        raise UsageError(f"this cannot be {how}: say `{self.usage}`")


class NotEntered(OnlyAsyncWith, AbstractAsyncContextManager[T]):
    """The context that a call of a function marked by `entered_by` gives.

    Args:
        inner: what is entered.
        usage: the line that enters it.
    """

    def __init__(self, inner: AbstractAsyncContextManager[T], usage: str) -> None:
        self._inner = inner
        self.usage = usage

    def __aenter__(self) -> Awaitable[T]:  # type: ignore[override]
        return self._inner.__aenter__()

    def __aexit__(  # type: ignore[override]
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> Awaitable[bool | None]:
        return self._inner.__aexit__(kind, exc, traceback)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(f"{name!r} is there once it is entered: say `{self.usage}`")


def entered_by(
    usage: str,
) -> Callable[
    [Callable[P, AsyncIterator[T]]], Callable[P, AbstractAsyncContextManager[T, bool | None]]
]:
    """Make an asynchronous generator a context, as `contextlib.asynccontextmanager` does.

    Args:
        usage: the line that enters it; whoever awaits it instead, or enters it by a plain ``with``,
            gets a `UsageError` with this line.
    """

    def decorate(
        function: Callable[P, AsyncIterator[T]],
    ) -> Callable[P, AbstractAsyncContextManager[T, bool | None]]:
        made = asynccontextmanager(function)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T, bool | None]:
            return NotEntered(made(*args, **kwargs), usage)

        return call

    return decorate
