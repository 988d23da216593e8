"""The named numbers of a Subscriber, with their defaults and reasons."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcs.errors import UsageError
from kvcs.kv import MAX_DATA_OCTETS, ManifestLimits

GIB = 2**30

MAX_ANCHORS = 8
"""Shorter prefixes that one look-up asks for at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriberSettings:
    """Limits and waits of one Subscriber. Times are seconds."""

    recompute_per_1k_tokens: float = 1.0
    """What recomputing 1,000 tokens takes: recovery is bounded by it (KVCS "Verification and
    Recovery")."""

    least_deadline: float = 30.0
    """Shortest default deadline from `open` to the last layer."""

    least_recovery: float = 1.0
    """Shortest time for recovery, from the first known loss."""

    listen: float = 0.25
    """How long discovery listens after REQUEST_OK before it says that nothing is there, and for
    how long the first manifest waits for those of other publications."""

    max_candidates: int = 8
    """Publications of one prefix whose manifests are read at a time."""

    probe: int = MAX_ANCHORS
    """Shorter prefixes that are asked for where the whole one is not announced; 0 asks for none.
    A peer sees from such a sequence where prompts part (KVCS "Privacy Considerations")."""

    probes_at_once: int = 4
    """Shorter prefixes that are asked for side by side; 1 asks for no more than it needs."""

    index_timeout: float = 2.0
    """How long an index is waited for."""

    append: float = 1.0
    """How long a publication that completes while it covers less than the prefix is given to add
    a segment, before it is taken as it is."""

    manifest_limits: ManifestLimits = field(default_factory=ManifestLimits)
    """Bounds of a manifest."""

    share: bool = True
    """Whether those who open the same on one Subscriber share one retrieval."""

    max_data_octets: int = MAX_DATA_OCTETS
    """Largest Data of one Object."""

    held_octets: int | None = 12 * GIB
    """Tensors of layers that were begun and not dropped, of one retrieval, before it fails with
    `CacheIncomplete`: Objects come as fast as they are verified, whether layers are used or not.
    By default the 10 GiB of 32,768 tokens of a 70B model (80 layers, 8 KV heads of 128, 16 bits)
    fit, and a longer context needs `Cache.drop`, or more here. None is no limit: then a retrieval
    takes what its prefix is long, at most."""

    stall: float = 0.3
    """Silence after the last sign of an end before what lacks is fetched again."""

    quiet: float = 2.0
    """Silence after which Objects that the manifest lists are asked for, though nothing has told
    that they are lost; and after which another session is tried, where there is one."""

    patience: float | None = None
    """How long a retrieval whose session or publisher is gone waits for either to come back; None
    waits until its deadline. Then HTTP and the caller's engine have their turn, where there are
    such, else it fails with `CacheIncomplete`."""

    retry_pause: float = 0.05
    """Pause before the second try of a fetch in recovery; doubles up to 16 times itself."""

    subscriber_priority: int = 128
    """SUBSCRIBER_PRIORITY of every request, 0 first to 255 last."""

    def __post_init__(self) -> None:
        for name in (
            "recompute_per_1k_tokens",
            "least_deadline",
            "least_recovery",
            "listen",
            "index_timeout",
            "append",
            "stall",
            "quiet",
            "retry_pause",
        ):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} must be more than 0 s, not {getattr(self, name)}")
        if self.patience is not None and not self.patience > 0:
            raise UsageError(f"patience must be more than 0 s or None, not {self.patience}")
        for name in ("max_candidates", "probes_at_once"):
            if getattr(self, name) < 1:
                raise UsageError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.held_octets is not None and self.held_octets < 1:
            raise UsageError(f"held_octets must be at least 1 or None, not {self.held_octets}")
        if not 0 <= self.probe <= MAX_ANCHORS:
            raise UsageError(f"probe must lie in 0..{MAX_ANCHORS}, not {self.probe}")
        if not 0 <= self.subscriber_priority <= 255:
            raise UsageError(
                f"subscriber_priority must lie in 0..255, not {self.subscriber_priority}"
            )

    def deadline(self, tokens: int) -> float:
        """Default deadline for a prefix: the least one, or twice the estimate of recomputing."""
        return max(self.least_deadline, 2 * self.recompute_per_1k_tokens * tokens / 1000)

    def recovery(self, tokens: int) -> float:
        """Bound of recovery for a prefix: the estimate of recomputing it."""
        return max(self.least_recovery, self.recompute_per_1k_tokens * tokens / 1000)
