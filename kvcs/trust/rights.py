"""The `moqt` claim: which actions on which names a token allows (CAT-4-MOQT).

Namespaces are matched field by field from the first on, octet by octet. A name with more fields
than a rule has matchers matches: that is how a rule covers a prefix. One with fewer does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from kvcs.errors import TrustError

KVCS_ROOT: Final = b"kvcs-1"
"""Field 0 of every KVCS Track Namespace."""

MAX_RULES: Final = 256
"""Rules in one token."""

Name = tuple[bytes, ...]
"""Fields of a Track Namespace."""


class Action(IntEnum):
    """What a token can allow, with the claim's numbers."""

    CLIENT_SETUP = 0
    SETUP = 1
    PUBLISH_NAMESPACE = 2
    SUBSCRIBE_NAMESPACE = 3
    SUBSCRIBE = 4
    REQUEST_UPDATE = 5
    PUBLISH = 6
    FETCH = 7
    TRACK_STATUS = 8
    SUBSCRIBE_TRACKS = 9


PRODUCER: Final = frozenset({Action.PUBLISH_NAMESPACE, Action.REQUEST_UPDATE, Action.PUBLISH})
"""What a producer needs."""

CONSUMER: Final = frozenset(
    {
        Action.SUBSCRIBE_NAMESPACE,
        Action.SUBSCRIBE,
        Action.REQUEST_UPDATE,
        Action.FETCH,
        Action.TRACK_STATUS,
        Action.SUBSCRIBE_TRACKS,
    }
)
"""What a consumer needs."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What somebody wants to do, and with which name."""

    action: Action
    """What."""

    namespace: Name = ()
    """Track Namespace, or the prefix of a request for namespaces; empty with SETUP."""

    track: bytes | None = None
    """Track Name; None where a request has none."""


@dataclass(frozen=True, slots=True)
class Match:
    """Matches one field."""

    kind: int
    """0: equal; 1: begins with; 2: ends with."""

    octets: bytes
    """Compared octet by octet."""

    def fits(self, field: bytes) -> bool:
        """Whether a field matches."""
        if self.kind == 0:
            return field == self.octets
        return field.startswith(self.octets) if self.kind == 1 else field.endswith(self.octets)


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry of the claim."""

    actions: frozenset[int]
    """Numbers of the actions that it allows; ones that we do not know allow nothing."""

    namespace: tuple[Match, ...] = ()
    """Matchers of the first fields; none match every namespace."""

    exact: bool = False
    """Whether further fields are forbidden."""

    track: Match | None = None
    """Matcher of the Track Name; None matches every one, and requests without one."""

    def allows(self, asked: Asked) -> bool:
        """Whether it allows a request."""
        fields = asked.namespace
        if asked.action not in self.actions or len(fields) < len(self.namespace):
            return False
        if self.exact and len(fields) != len(self.namespace):
            return False
        if not all(m.fits(field) for m, field in zip(self.namespace, fields, strict=False)):
            return False
        return self.track is None or (asked.track is not None and self.track.fits(asked.track))

    def to_claim(self) -> list[Any]:
        """The rule as it stands in a token."""
        claim: list[Any] = [sorted(self.actions)]
        if self.namespace or self.exact or self.track is not None:
            claim.append([_matcher(m) for m in self.namespace] + [None] * self.exact)
        if self.track is not None:
            claim.append(_matcher(self.track))
        return claim


def scope_rule(scope_id: bytes, actions: frozenset[Action]) -> Rule:
    """A rule for everything in one scope: namespaces below ``("kvcs-1", Scope ID)``."""
    return Rule(frozenset(map(int, actions)), (Match(0, KVCS_ROOT), Match(0, scope_id)))


SETUP_RULE: Final = Rule(frozenset({int(Action.CLIENT_SETUP), int(Action.SETUP)}))
"""Opening a session, under both numberings that are in use."""


def read_rules(claim: object) -> tuple[Rule, ...]:
    """Read the claim, in its array or its map form.

    Raises:
        TrustError: ``claims``: it is malformed or has too many rules.
    """
    if isinstance(claim, dict):
        claim = claim.get(0)
    if not isinstance(claim, list):
        raise _wrong("the moqt claim is no list of rules")
    if len(claim) > MAX_RULES:
        raise _wrong(f"{len(claim)} rules, limit {MAX_RULES}")
    return tuple(_rule(entry) for entry in claim)


def _rule(entry: object) -> Rule:
    if not isinstance(entry, list) or not 1 <= len(entry) <= 3:
        raise _wrong("a rule has one to three parts")
    actions = entry[0]
    if not isinstance(actions, list) or not actions or any(type(a) is not int for a in actions):
        raise _wrong("a rule's actions are numbers")
    namespace: tuple[Match, ...] = ()
    exact = False
    if len(entry) > 1:
        fields: Sequence[object] = entry[1] if isinstance(entry[1], list) else ()
        if not fields:
            raise _wrong("a rule's namespace has at least one matcher")
        exact = fields[-1] is None
        namespace = tuple(_match(field) for field in (fields[:-1] if exact else fields))
    track = _match(entry[2]) if len(entry) > 2 else None
    return Rule(frozenset(actions), namespace, exact, track)


def _match(value: object) -> Match:
    if isinstance(value, bytes):
        return Match(0, value)
    if (
        isinstance(value, list)
        and len(value) == 2
        and type(value[0]) is int
        and value[0] in (1, 2)
        and isinstance(value[1], bytes)
    ):
        return Match(value[0], value[1])
    raise _wrong("a matcher is neither octets nor a prefix or suffix")


def _matcher(match: Match) -> object:
    return match.octets if match.kind == 0 else [match.kind, match.octets]


def _wrong(text: str) -> TrustError:
    return TrustError(f"token: {text}", check="claims")
