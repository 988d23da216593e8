"""The Tracks that are in use in a relay, by name and by the namespaces above them."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from kvcs.moqt.names import FullTrackName, TrackNamespace, is_prefix
from kvcs.relay.tracks import RelayTrack


class Directory:
    """Tracks in use."""

    def __init__(self) -> None:
        self._tracks: dict[FullTrackName, RelayTrack] = {}
        self._names: list[FullTrackName] = []
        """Keys of `_tracks` in order: those below a namespace stand together."""

    def __len__(self) -> int:
        """Number of Tracks."""
        return len(self._tracks)

    def __contains__(self, name: FullTrackName) -> bool:
        """Whether a Track is in use."""
        return name in self._tracks

    def __iter__(self) -> Iterator[RelayTrack]:
        """The Tracks, the one that has been in use longest first."""
        return iter(list(self._tracks.values()))

    def get(self, name: FullTrackName) -> RelayTrack | None:
        """A Track by its name."""
        return self._tracks.get(name)

    def add(self, track: RelayTrack) -> None:
        """A Track is in use from now on."""
        self._tracks[track.name] = track
        insort(self._names, track.name)

    def remove(self, track: RelayTrack) -> bool:
        """A Track is not used any more; False where another one of its name is."""
        if self._tracks.get(track.name) is not track:
            return False
        del self._tracks[track.name]
        del self._names[bisect_left(self._names, track.name)]
        return True

    def below(self, namespace: TrackNamespace) -> list[RelayTrack]:
        """Tracks below a namespace."""
        found: list[RelayTrack] = []
        index = bisect_left(self._names, FullTrackName(namespace, b""))
        while index < len(self._names) and is_prefix(namespace, self._names[index].namespace):
            found.append(self._tracks[self._names[index]])
            index += 1
        return found
