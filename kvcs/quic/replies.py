"""Answers to requests of ours, and coroutines that wait for them (MOQT §9.4)."""

from __future__ import annotations

import asyncio

from kvcs.errors import Redirected, RequestError
from kvcs.moqt import events, messages
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.messages import FetchOk, RequestOk, SubscribeOk

Reply = SubscribeOk | FetchOk | RequestOk


def refusal(error: messages.RequestError) -> RequestError:
    """A REQUEST_ERROR as an exception; `Redirected` where it names another place."""
    retry = messages.retry_after_ms(error)
    if error.redirect is None:
        return RequestError(error.reason, error.error_code, retry)
    redirect = error.redirect
    return Redirected(
        error.reason,
        redirect.connect_uri,
        redirect.track_namespace,
        redirect.track_name,
        retry,
    )


class Replies:
    """The waits for answers on one session."""

    def __init__(self) -> None:
        self._futures: dict[int, asyncio.Future[Reply]] = {}

    def __len__(self) -> int:
        """How many wait now."""
        return len(self._futures)

    async def wait(self, request_id: int) -> Reply:
        """Wait for the answer to a request of ours.

        Raises:
            RequestError: the peer refused it, or ended it without an answer, or it was cancelled.
            ConnectionClosed: the session ended.
        """
        future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._futures[request_id] = future
        try:
            return await future
        finally:
            self._futures.pop(request_id, None)

    def take(self, request_id: int, event: events.Event) -> None:
        """An event of a request of ours: it may be what somebody waits for."""
        future = self._futures.get(request_id)
        if future is None or future.done():
            return
        if isinstance(event, events.RequestAccepted):
            future.set_result(event.reply)
        elif isinstance(event, events.RequestRefused):
            future.set_exception(refusal(event.error))
        elif isinstance(event, events.RequestCancelled):
            future.set_exception(RequestError("the peer ended the request without an answer"))
        elif isinstance(event, events.TrackMalformed):
            future.set_exception(RequestError(event.reason, RequestCode.MALFORMED_TRACK))

    def cancel(self, request_id: int, code: int | None = None) -> None:
        """This side gives a request up: the peer's answer will not be told.

        Args:
            request_id: of the request.
            code: what the error says to who waits for the answer.
        """
        future = self._futures.get(request_id)
        if future is not None and not future.done():
            future.set_exception(RequestError("the request was cancelled before its answer", code))

    def fail(self, error: Exception) -> None:
        """The session is over: nobody gets an answer any more."""
        for future in list(self._futures.values()):
            if not future.done():
                future.set_exception(error)
