"""When a publisher makes the next manifest version."""

from __future__ import annotations

from dataclasses import dataclass

from kvcs.errors import UsageError

SIGNED_SECONDS = 0.25
"""Time after which a signed version is due if a layer completed."""

SIGNED_OCTETS = 64 * 2**20
"""Octets of all signed versions of a publication beyond which only the regular ones are due."""


@dataclass(frozen=True, slots=True)
class ManifestCadence:
    """After which completed layers a new version is due (KVCS "Manifest Track").

    Every version repeats all former digests, so versions cost layers squared. A consumer in signed
    mode may use a layer only after a list names it, so few versions make it wait. The default is
    dense at the first layers and then the draft's "at least every eight completed layers". A
    version when a segment is added or becomes complete is always due and not asked here.

    Raises:
        UsageError: a setting is out of bounds.
    """

    first_layers: tuple[int, ...] = (1, 2, 4, 8)
    """Counts of completed layers after which a version is due besides the regular ones."""

    every_layers: int = 8
    """A version is due whenever so many layers completed; no limit below holds it back."""

    max_total_octets: int | None = None
    """Once all versions of a publication together would pass this, only regular ones are due."""

    every_seconds: float | None = None
    """A version is also due so long after the last one, if a layer completed since."""

    def __post_init__(self) -> None:
        if self.every_layers < 1:
            raise UsageError(f"every_layers must be at least 1, got {self.every_layers}")
        if any(count < 1 for count in self.first_layers):
            raise UsageError(f"first_layers must be at least 1 each, got {self.first_layers}")
        if self.every_seconds is not None and not self.every_seconds > 0:
            raise UsageError(f"every_seconds must be above 0, got {self.every_seconds}")
        if self.max_total_octets is not None and self.max_total_octets < 0:
            raise UsageError(f"max_total_octets must not be negative, got {self.max_total_octets}")

    @classmethod
    def for_signing(cls) -> ManifestCadence:
        """The default for signed manifests: what completed a moment ago is soon listed, as long as
        all versions together stay small beside the tensors."""
        return cls(every_seconds=SIGNED_SECONDS, max_total_octets=SIGNED_OCTETS)

    def due(
        self,
        *,
        layers_completed: int,
        layers_listed: int,
        next_octets: int = 0,
        total_octets: int = 0,
        seconds_since_last: float = 0.0,
    ) -> bool:
        """Whether to publish a version now.

        Args:
            layers_completed: layers whose every Object of the segment is published.
            layers_listed: how many of them the last version listed.
            next_octets: size of the version that would be published.
            total_octets: size of all versions of this publication so far.
            seconds_since_last: time since the last version.
        """
        if layers_completed <= layers_listed:
            return False
        if layers_completed // self.every_layers > layers_listed // self.every_layers:
            return True
        if self.max_total_octets is not None and total_octets + next_octets > self.max_total_octets:
            return False
        if any(layers_listed < count <= layers_completed for count in self.first_layers):
            return True
        return self.every_seconds is not None and seconds_since_last >= self.every_seconds
