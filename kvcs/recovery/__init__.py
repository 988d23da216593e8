"""What is missing of a retrieval and from where it can still come, under one deadline.

KVCS "Verification and Recovery": lost Objects are fetched again; recovery is bounded by the time
that recomputation would take, and it counts from the first known loss.
"""

from kvcs.recovery.headway import may_come
from kvcs.recovery.patient import FetchEnd, Patient, Receiver, RecoverySettings, Replacer
from kvcs.recovery.rounds import (
    MAX_FETCHES,
    MAX_PAUSE_DOUBLINGS,
    ROUNDS_BEFORE_RECOMPUTING,
    SESSIONS_SHARE,
    Recovery,
)

__all__ = [
    "MAX_FETCHES",
    "MAX_PAUSE_DOUBLINGS",
    "ROUNDS_BEFORE_RECOMPUTING",
    "SESSIONS_SHARE",
    "FetchEnd",
    "Patient",
    "Receiver",
    "Recovery",
    "RecoverySettings",
    "Replacer",
    "may_come",
]
