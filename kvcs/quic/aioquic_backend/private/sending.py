"""Reaches on the sending side: octets of a stream stay where they lie until they are sent."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator

Octets = bytes | bytearray | memoryview

SMALL_OCTETS = 1024
"""Pieces up to this size are joined with small ones before them: headers come in two or three."""


class SendBuffer:
    """Octets of a stream that wait to be sent or acknowledged, as views of where they lie.

    It takes the place of the library's bytearray, which copies octets in, moves all that waits
    again and again while it grows, and copies twice on the way out. The library appends, copies a
    slice out, and deletes from the front; nothing else is here.
    """

    __slots__ = ("_base", "_parts", "_starts", "_stop")

    def __init__(self) -> None:
        self._base = 0
        """Octets that were deleted, so positions in the stream are `_base` more than the index."""
        self._stop = 0
        self._parts: list[bytes | memoryview] = []
        self._starts: list[int] = []
        """Where each part begins, counted from the first octet ever appended."""

    def __len__(self) -> int:
        return self._stop - self._base

    def __iadd__(self, octets: Octets) -> SendBuffer:
        """Append a copy of the octets."""
        self.extend((bytes(octets),))
        return self

    def extend(self, parts: Iterable[Octets]) -> int:
        """Append octets without copying them: they must not change any more.

        Returns:
            How many those are.
        """
        held, starts = self._parts, self._starts
        before = stop = self._stop
        last: bytes | memoryview = held[-1] if held else b""
        # What small pieces are joined to, while there is such a piece at the end.
        small = last if held and isinstance(last, bytes) and len(last) <= SMALL_OCTETS else None
        try:
            for part in parts:
                view: bytes | memoryview
                if type(part) is bytes:
                    view = part
                else:
                    view = part if type(part) is memoryview else memoryview(part)
                    if view.itemsize != 1 or view.ndim != 1:
                        view = view.cast("B")  # len() would count rows, not octets
                size = len(view)
                if size > SMALL_OCTETS:
                    held.append(view)
                    starts.append(stop)
                    small = None
                elif size:
                    if small is None:
                        small = bytes(view)
                        held.append(small)
                        starts.append(stop)
                    else:
                        held[-1] = small = small + view
                        if len(small) > SMALL_OCTETS:
                            small = None
                stop += size
        finally:
            self._stop = stop
        return stop - before

    def __getitem__(self, where: slice) -> bytes:
        """A copy of octets ``where.start`` to ``where.stop``, both within the buffer."""
        return b"".join(self.cut(self._base + where.start, self._base + where.stop))

    def cut(self, start: int, stop: int) -> list[memoryview]:
        """Octets from one offset of the stream to another, both within the buffer, uncopied."""
        index = bisect_right(self._starts, start) - 1
        pieces = []
        while start < stop:
            at = start - self._starts[index]
            piece = memoryview(self._parts[index])[at : at + stop - start]
            pieces.append(piece)
            start += len(piece)
            index += 1
        return pieces

    def cuts(self, start: int, size: int, count: int) -> Iterator[list[memoryview]]:
        """As `cut`, for several runs of octets that follow each other.

        Args:
            start: offset of the first.
            size: octets of each.
            count: how many there are; all of them are within the buffer.
        """
        index = bisect_right(self._starts, start) - 1
        part, at = memoryview(self._parts[index]), start - self._starts[index]
        left = len(part) - at
        for _ in range(count):
            pieces, lack = [], size
            while lack > left:
                pieces.append(part[at:])
                lack -= left
                index += 1
                part, at = memoryview(self._parts[index]), 0
                left = len(part)
            pieces.append(part[at : at + lack])
            at += lack
            left -= lack
            yield pieces

    def slices(self, start: int, size: int, count: int) -> list[bytes | memoryview]:
        """As `cuts` for runs that are small: each in one piece, a copy where it lay in several."""
        slices: list[bytes | memoryview] = []
        index, stop = bisect_right(self._starts, start) - 1, start + count * size
        while start < stop:
            part, begin = memoryview(self._parts[index]), self._starts[index]
            end = min(begin + len(part), stop)
            whole = range(start - begin, end - begin - size + 1, size)
            slices += [part[at : at + size] for at in whole]
            start += len(whole) * size
            if start < end:
                slices.append(b"".join(self.cut(start, start + size)))
                start += size
            while index + 1 < len(self._starts) and self._starts[index + 1] <= start:
                index += 1
        return slices

    def __delitem__(self, where: slice) -> None:
        """Drop the octets before ``where.stop``."""
        self._base += where.stop
        gone = bisect_right(self._starts, self._base) - 1
        if self._base == self._stop:
            gone = len(self._parts)
        if gone > 0:
            del self._parts[:gone], self._starts[:gone]
