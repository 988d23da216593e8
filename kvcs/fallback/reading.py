"""Files of an `HttpServer`, read in threads of their own: a slow disk stops nobody else.

A whole layer may be gigabytes, so a file goes out in pieces, each read when the one before it has
been written to the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar

from kvcs.fallback.folder import INDEX, SavedPublication, read_index
from kvcs.observe import get_logger

_log = get_logger("kvcs.fallback")

READERS: Final = 8
"""Reads at a time, and so threads; further ones wait for one of them."""

PIECE: Final = 1 << 20
"""Octets of a file that are in memory at a time, for each connection."""

OCTETS: Final = "application/octet-stream"
"""Media type of all but indices."""

P = ParamSpec("P")
T = TypeVar("T")


class Readers:
    """Threads that wait for the disk in place of the event loop; `close` gives them up."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="kvcs-http-read")

    async def run(self, read: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What a function gives that may wait for the disk.

        Cancelling leaves it to its thread, which ends it and forgets what it gives.
        """
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, lambda: read(*args, **kwargs))

    def close(self) -> None:
        """Begin no more reads; the one that a thread is at is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def read_changed(folder: Path, known: int | None) -> tuple[int, SavedPublication | None]:
    """The index of a publication's folder, unless it is known.

    Args:
        folder: the publication's.
        known: when the index was changed that is known already, ns; None where none is.

    Returns:
        When it was changed, and the index; None where it is the one that is known.

    Raises:
        FileError: it is none.
        OSError: it is not there.
    """
    changed = (folder / INDEX).stat().st_mtime_ns
    return changed, None if changed == known else read_index(folder)


def size_of(path: Path) -> int:
    """Octets of a file.

    Raises:
        OSError: it cannot be looked at.
    """
    return path.stat().st_size


def read_part(path: Path, start: int, octets: int) -> bytes:
    """A part of a file; it is opened anew, so that no reader has to be asked to close it.

    Raises:
        OSError: it cannot be read, or is shorter.
    """
    with path.open("rb") as file:
        file.seek(start)
        part = file.read(octets)
    if len(part) < octets:
        raise OSError(f"{path}: shorter than {start + octets} octets")
    return part


async def answer(
    web: Any, request: Any, readers: Readers, path: Path, start: int, octets: int | None
) -> Any:
    """Answer a request with a part of a file, or with the range of it that is asked for.

    Cancelling ends the answer where it is; the connection is then closed.

    Args:
        web: `aiohttp.web`.
        request: GET or HEAD.
        readers: read the file.
        path: the file.
        start: where the part begins.
        octets: its length; to the end of the file where None.

    Returns:
        The answer: 200, 206, 404 where the file lacks or is shorter, 416 for a wrong range.
    """
    try:
        size = await readers.run(size_of, path)
    except OSError:
        return web.Response(status=404)
    length = size - start if octets is None else octets
    if start + length > size:
        return web.Response(status=404)
    headers = {"Accept-Ranges": "bytes"}
    try:
        asked = request.http_range
        first, end, _ = asked.indices(length)
        if asked.start is not None and not first < end:
            raise ValueError
    except ValueError:
        headers["Content-Range"] = f"bytes */{length}"
        return web.Response(status=416, headers=headers)
    status = 200
    if asked.start is not None:
        status, headers["Content-Range"] = 206, f"bytes {first}-{end - 1}/{length}"
    response = web.StreamResponse(status=status, headers=headers)
    response.content_type = "application/json" if path.name == INDEX else OCTETS
    response.content_length = end - first
    await response.prepare(request)
    if request.method == "HEAD":
        return response
    at, end = start + first, start + end
    while at < end:
        try:
            piece = await readers.run(read_part, path, at, min(PIECE, end - at))
        except OSError as exc:
            # The length was promised: only the end of the connection tells that it is not kept.
            _log.warning("file_not_readable", reason=exc.strerror or str(exc))
            response.force_close()
            return response
        await response.write(piece)
        at += len(piece)
    return response
