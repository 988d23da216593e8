"""Announcing a publication on several sessions (KVCS "Publisher Behavior")."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from kvcs.errors import ConnectionClosed, RequestError
from kvcs.moqt.errors import RequestCode
from kvcs.moqt.names import TrackNamespace
from kvcs.observe import get_logger
from kvcs.quic.origin import Origin

_log = get_logger("kvcs.publisher")


async def announce(
    origins: Sequence[Origin], namespace: TrackNamespace, waits: Sequence[bool], seconds: float
) -> None:
    """PUBLISH_NAMESPACE on every session.

    Args:
        origins: what the sessions offer.
        namespace: all five fields.
        waits: for each origin, whether its peers' answer is waited for.
        seconds: longest such wait.

    Raises:
        RequestError: all of them refused or were silent, and the others are no sessions any more.
        ConnectionClosed: there is no session any more.
    """
    answers = await asyncio.gather(
        *(
            _announce(origin, namespace, wait, seconds)
            for origin, wait in zip(origins, waits, strict=True)
        )
    )
    failures = [answer for answer in answers if answer is not None]
    if len(failures) == len(answers):
        raise next((each for each in failures if isinstance(each, RequestError)), failures[0])
    for failure in failures:
        _log.warning("announcement_failed", reason=str(failure))


async def _announce(
    origin: Origin, namespace: TrackNamespace, wait: bool, seconds: float
) -> RequestError | ConnectionClosed | None:
    """Announce on one origin; what came of it if it failed."""
    if not wait:
        origin.offer_namespace(namespace)
        return None
    try:
        async with asyncio.timeout(seconds):
            await origin.add_namespace(namespace)
    except TimeoutError:
        return RequestError(
            f"no answer to the announcement within {seconds:g} s", RequestCode.TIMEOUT
        )
    except (RequestError, ConnectionClosed) as exc:
        return exc
    return None
