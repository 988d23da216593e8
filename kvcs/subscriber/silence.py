"""Notices that nothing has come for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from kvcs.subscriber.reception import Reception


class Silence:
    """Calls back once no octet has come for some time and no stream is open.

    Args:
        reception: what is listened to.
        seconds: how long nothing must come.
        is_wanted: asked before listening and before calling back.
        then: called back, once for each `listen` at most.
    """

    def __init__(
        self,
        reception: Reception,
        seconds: float,
        is_wanted: Callable[[], bool],
        then: Callable[[], None],
    ) -> None:
        self._reception = reception
        self._seconds = seconds
        self._is_wanted = is_wanted
        self._then = then
        self._octets = 0
        self._timer: asyncio.TimerHandle | None = None

    def listen(self) -> None:
        """Begin, if it is wanted and has not begun."""
        if self._timer is None and self._is_wanted():
            self._octets = self._reception.octets
            self._timer = asyncio.get_running_loop().call_later(self._seconds, self._passed)

    def stop(self) -> None:
        """Listen no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _passed(self) -> None:
        self._timer = None
        if self._reception.open_streams or self._reception.octets != self._octets:
            self.listen()
        elif self._is_wanted():
            self._then()
