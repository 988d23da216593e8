"""One unidirectional stream of the peer, and the short way of its Objects (MOQT §11.3, §11.4)."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcs.moqt.data import FetchHeader, FetchParser, ObjectHeader, SubgroupHeader, SubgroupParser
from kvcs.moqt.incoming.expected import Expected, ObjectSink
from kvcs.moqt.names import Location
from kvcs.moqt.states import DataStreamState

_location = tuple.__new__
"""Makes a Location without the call of its own constructor."""


@dataclass(slots=True, eq=False)
class DataStream:
    """One unidirectional stream of the peer."""

    stream_id: int
    head: bytes = b""
    """Octets of a header that is not whole yet."""

    header: SubgroupHeader | FetchHeader | None = None
    parser: SubgroupParser | FetchParser | None = None
    expected: Expected | None = None
    early: bytearray = field(default_factory=bytearray)
    """What came before its Track Alias was bound; one buffer, however it was cut."""

    since: float = 0.0
    """When its first octets came, or when it was stopped."""

    fin: bool = False
    stopped: bool = False
    """Whether we have stopped it alone, while its request goes on: it is read over."""

    state: DataStreamState = DataStreamState.HEADER
    last: Location | None = None
    """Location of the last Object or marker."""

    subgroup_id: int | None = None
    like: ObjectHeader | None = None
    """Header of the last Object that was parsed, where nothing but its place has to be checked of
    one that is like it; None where more has."""

    def pass_on(self, sink: ObjectSink, data: bytes) -> int:
        """Give octets to a sink the short way, where they are what nearly all are.

        That is payload of the Object on its way; or its end, and the next ones of its Subgroup,
        which are like it.

        Args:
            sink: takes them; no event waits that has to come before.
            data: the next octets, not the last ones of the stream.

        Returns:
            How many octets were so; those behind them have to be parsed.
        """
        parser = self.parser
        if parser is None or self.stopped:
            return 0
        size = len(data)
        if parser.pass_over(size):
            sink.take_payload(self.stream_id, data)
            return size
        like, last, expected = self.like, self.last, self.expected
        if like is None or last is None or expected is None:
            return 0
        stop, lead, count = parser.run_like(data)
        first = last.object + 1
        if not count or not expected.rules.take_run(like, first, last.object + count):
            return 0
        end = parser.take_run(count, size)
        self.last = _location(Location, (like.group_id, last.object + count))
        first_location = _location(Location, (like.group_id, first))
        octets = data if end == size else memoryview(data)[:end]
        sink.take_run(self.stream_id, like, first_location, octets, stop, lead, count)
        return end
