"""Watches of namespaces, where their request cannot even be made."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from kvcs.errors import UsageError
from kvcs.moqt.names import TrackNamespace
from kvcs.quic.namespaces import Namespaces

PREFIX = (b"kvcs-1", b"scope")


class Crowded:
    """A session on which too many requests wait for the peer, at first."""

    is_open = True

    def __init__(self) -> None:
        self.core = SimpleNamespace(requester=self)
        self.tries: list[TrackNamespace] = []

    def subscribe_namespace(self, prefix: TrackNamespace) -> int:
        self.tries.append(prefix)
        if len(self.tries) == 1:
            raise UsageError("too many requests wait")
        return len(self.tries)

    def handle(self, *_: object) -> None:
        """No answer comes."""

    def cancel(self, request_id: int) -> None:
        """It is over."""


async def test_a_watch_that_cannot_be_made_says_so_and_is_in_nobodys_way() -> None:
    session = Crowded()
    namespaces = Namespaces(cast(Any, session))
    first = namespaces.watch(PREFIX)
    assert isinstance(first.error, UsageError) and first.answered.is_set()
    second = namespaces.watch((*PREFIX, b"below"))
    assert second.error is None and session.tries == [PREFIX, second.prefix]
    namespaces.release(first)
    namespaces.release(second)
    third = namespaces.watch(PREFIX)
    assert third.error is None and len(session.tries) == 3
