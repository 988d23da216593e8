"""Who may do what: tokens in, yes or no out, until when (KVCS "Security Considerations").

Deny is the default. What a session showed when it was opened holds for its requests, and a
request's own tokens add to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvcs.errors import TrustError
from kvcs.trust.rights import Action, Asked
from kvcs.trust.tokens import TOKEN_TYPE, Grant, TokenVerifier

GREASE_STEP, GREASE_START = 0x7F, 0x9D
"""Token Types 0x7f * N + 0x9d mean nothing and are ignored (MOQT "MOQT Auth Token Type")."""

MAX_GRANTS = 32
"""Tokens of one request that are kept: those that count longest. Each update may bring more."""

Shown = tuple[int, bytes]
"""A token as a peer shows it: Token Type and Token Value."""


@dataclass(frozen=True, slots=True)
class Permit:
    """A request that is allowed."""

    asked: Asked
    """The request."""

    grants: tuple[Grant, ...]
    """Tokens that allow it now."""

    until: float
    """Unix seconds until which they do."""


class Authority:
    """Decides what bearers of tokens may do.

    Args:
        verifier: verifies tokens.
    """

    def __init__(self, verifier: TokenVerifier) -> None:
        self.verifier = verifier

    def verify(self, shown: Iterable[Shown], now: float) -> tuple[Grant, ...]:
        """Verify the tokens of one message.

        Args:
            shown: the tokens; ones of other types count for nothing.
            now: Unix seconds.

        Raises:
            TrustError: one of them is malformed, forged, expired, or not for this relay.
        """
        return tuple(
            self.verifier.verify(bytes(value), now) for kind, value in shown if kind == TOKEN_TYPE
        )

    def admit(self, shown: Sequence[Shown], now: float) -> tuple[Grant, ...]:
        """Take the tokens with which a session is opened.

        A session that shows none is let in, and each of its requests has to show its own.

        Raises:
            TrustError: as `verify`; ``denied``: none of them allows to open a session, or all are
                of types that are not known here.
        """
        grants = self.verify(shown, now)
        opening = Asked(Action.SETUP)
        known = [kind for kind, _ in shown if not is_grease(kind)]
        issuers = self.verifier.issuers
        if known and not any(grant.allows(opening, now, issuers) for grant in grants):
            raise denied()
        return grants

    def decide(self, asked: Asked, grants: Sequence[Grant], now: float) -> Permit:
        """Whether tokens allow a request.

        Args:
            asked: the request.
            grants: what `verify` gave for tokens of the request and of its session.
            now: Unix seconds.

        Raises:
            TrustError: ``denied``: no token allows it; ``expired``: one did and has expired.
        """
        issuers = self.verifier.issuers
        # What a request was allowed by before and what its session holds are often the same.
        different = {id(grant): grant for grant in grants}.values()
        allowing = tuple(grant for grant in different if grant.allows(asked, now, issuers))
        if not allowing:
            if any(now >= grant.ends and grant.covers(asked) for grant in grants):
                raise TrustError("the token has expired", check="expired")
            raise denied()
        if len(allowing) > MAX_GRANTS:
            longest = sorted(allowing, key=lambda grant: grant.ends, reverse=True)
            allowing = tuple(longest[:MAX_GRANTS])
        until = max(grant.until(asked, now, issuers) for grant in allowing)
        return Permit(asked, allowing, until)


def is_grease(kind: int) -> bool:
    """Whether a Token Type is one of those that mean nothing."""
    return kind >= GREASE_START and (kind - GREASE_START) % GREASE_STEP == 0


def denied() -> TrustError:
    """The error for what no token allows; it says nothing of what there is."""
    return TrustError("not authorized", check="denied")
