"""Authorization tokens: CWTs with a `moqt` claim, signed by an issuer (CAT-4-MOQT; RFC 8392).

Token Type 0x01; a tagged COSE_Sign1 in deterministic form, at most 1024 octets, with the protected
header {alg, kid, typ "CAT"} and nothing outside of it. The claims are issuer, audience, expiry,
time of issue, identifier and rights. A token that is bound or restricted by other claims is
refused: a restriction that is not understood must not be skipped.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import cbor2

from kvcs.errors import TrustError, UsageError
from kvcs.trust.cbor import load
from kvcs.trust.cose import ALG, KID, TYP, Sign1, read_sign1, sign1
from kvcs.trust.keys import MAX_NAME, MAX_TIME, KeyUse, PublicKey, SigningKey
from kvcs.trust.rights import KVCS_ROOT, SETUP_RULE, Action, Asked, Rule, read_rules
from kvcs.trust.rings import KeyRing

TOKEN_TYPE: Final = 0x01
"""MOQT Auth Token Type of these tokens (CAT-4-MOQT)."""

MAX_TOKEN_OCTETS: Final = 1_024
"""Longest token."""

MAX_LIFETIME: Final = 3_600
"""Longest time from issue to expiry by default, seconds."""

CLOCK_SKEW: Final = 30
"""Seconds by which an issuer's clock may differ from ours by default."""

MAX_VERIFIED: Final = 4_096
"""Verified tokens that are remembered, so that each request need not verify its own."""

MAX_AUDIENCES: Final = 64
"""Names that one token may be for."""

TOKEN_ID_OCTETS: Final = range(8, 17)
"""How long a token's identifier may be when it is made."""

CAT: Final = "CAT"
"""`typ` of a token (CAT-4-MOQT): no manifest has it."""

_ISS, _SUB, _AUD, _EXP, _NBF, _IAT, _CTI, _CNF = 1, 2, 3, 4, 5, 6, 7, 8
_CATV, _CATU_FIRST, _COMPOSITE_LAST, _MOQT, _REVALIDATE = 310, 308, 326, 327, 328
_RESTRICTIONS: Final = frozenset(range(_CATU_FIRST, _COMPOSITE_LAST + 1)) - {_CATV}
"""Claims of the Common Access Token that restrict it, and those that combine other claims."""

_CWT_TAG: Final = b"\xd8\x3d"
"""CBOR tag 61, which may stand around a tagged COSE object (RFC 8392, 6)."""


@dataclass(frozen=True, slots=True)
class Grant:
    """What a verified token allows its bearer."""

    issuer: str
    """Who issued it."""

    token_id: bytes
    """Its identifier (cti), for logs; empty where it has none."""

    rules: tuple[Rule, ...] = field(repr=False)
    """Its rights."""

    not_before: float
    """Unix seconds from which it counts, our clock's tolerance included."""

    ends: float
    """Unix seconds from which it counts no longer, our clock's tolerance included."""

    keys: tuple[PublicKey, ...] = field(repr=False)
    """Keys that verify it: one for each scope that its issuer may speak for."""

    def allows(self, asked: Asked, now: float, issuers: KeyRing) -> bool:
        """Whether it allows a request now, by a key that is not revoked.

        Args:
            asked: the request.
            now: Unix seconds.
            issuers: the keys that count now.
        """
        if not self.not_before <= now < self.ends:
            return False
        return self.covers(asked) and any(
            key in issuers and _counts(key, now) and _speaks_for(key, asked) for key in self.keys
        )

    def covers(self, asked: Asked) -> bool:
        """Whether its rules name a request, whatever the time."""
        return any(rule.allows(asked) for rule in self.rules)

    def until(self, asked: Asked, now: float, issuers: KeyRing) -> float:
        """Unix seconds at which it stops to allow a request: its own end or that of its key."""
        ends = [
            self.ends if key.expires is None else min(self.ends, key.expires)
            for key in self.keys
            if key in issuers and _counts(key, now) and _speaks_for(key, asked)
        ]
        return max(ends, default=now)


def issue(
    key: SigningKey,
    *,
    audience: Sequence[str],
    rules: Sequence[Rule],
    issued_at: int,
    lifetime: int,
    token_id: bytes,
    with_setup: bool = True,
    map_form: bool = False,
) -> bytes:
    """Make a token.

    Args:
        key: an issuer's key; its name becomes the token's issuer.
        audience: names of the relays that it is for; anybody else refuses it.
        rules: what it allows.
        issued_at: Unix seconds.
        lifetime: seconds.
        token_id: 8 to 16 octets, random.
        with_setup: also allow a session to be opened with it.
        map_form: write the rights as a map, as some drafts of the format have them.

    Raises:
        UsageError: the key is no issuer's, an argument is out of bounds, or the token would be too
            long.
    """
    if key.public.use is not KeyUse.TOKEN:
        raise UsageError("tokens are signed by issuer keys; this one signs manifests")
    if not 1 <= len(audience) <= MAX_AUDIENCES or not all(0 < len(n) <= MAX_NAME for n in audience):
        raise UsageError("a token names the relays that it is for")
    if len(token_id) not in TOKEN_ID_OCTETS:
        raise UsageError("a token's identifier has 8 to 16 octets")
    if lifetime < 1 or not 0 <= issued_at <= MAX_TIME - lifetime:
        raise UsageError(f"a lifetime of {lifetime} s from {issued_at} on cannot be")
    scopes = [rule.to_claim() for rule in ([SETUP_RULE] if with_setup else [])]
    scopes += [rule.to_claim() for rule in rules]
    claims = {
        _ISS: key.public.name,
        _AUD: list(audience),
        _EXP: issued_at + lifetime,
        _IAT: issued_at,
        _CTI: token_id,
        _MOQT: {0: scopes} if map_form else scopes,
    }
    token = sign1(cbor2.dumps(claims, canonical=True), key, {TYP: CAT})
    if len(token) > MAX_TOKEN_OCTETS:
        raise UsageError(
            f"the token would have {len(token)} octets, limit {MAX_TOKEN_OCTETS}: give it fewer"
            " scopes"
        )
    return token


@dataclass(frozen=True, slots=True)
class Claims:
    """What a token says; who shows it wrong has to verify it first."""

    issuer: str
    audience: tuple[str, ...]
    issued_at: int
    not_before: int
    expires: int
    token_id: bytes
    rules: tuple[Rule, ...]
    kid: bytes


def read_claims(value: bytes) -> Claims:
    """Read a token without verifying it: to show it, and to know when to replace one's own.

    Raises:
        TrustError: it is no token of the profile; see `TokenVerifier.verify`.
    """
    return _read(value)[1]


class TokenVerifier:
    """Verifies tokens for one relay.

    Args:
        issuers: keys of the issuers, each with its scope; the ring may change while it is used.
        audience: names of this relay.
        skew: seconds by which an issuer's clock may differ.
        max_lifetime: longest time from issue to expiry, seconds.

    Raises:
        UsageError: the ring is none of issuer keys, or this relay has no name.
    """

    def __init__(
        self,
        issuers: KeyRing,
        audience: Collection[str],
        *,
        skew: float = CLOCK_SKEW,
        max_lifetime: float = MAX_LIFETIME,
    ) -> None:
        if issuers.use is not KeyUse.TOKEN:
            raise UsageError("tokens are verified with issuer keys")
        if not audience or not all(audience):
            raise UsageError("a relay needs a name that tokens can be for")
        if not skew >= 0 or not max_lifetime > 0:
            raise UsageError("the skew is not negative, the lifetime of a token above 0 s")
        self.issuers = issuers
        self.audience = frozenset(audience)
        self._skew = skew
        self._max_lifetime = max_lifetime
        self._verified: OrderedDict[bytes, Grant] = OrderedDict()
        self._serial = issuers.serial

    def verify(self, value: bytes, now: float) -> Grant:
        """Verify a token.

        Args:
            value: the Token Value.
            now: Unix seconds.

        Raises:
            TrustError: ``size``, ``structure``, ``header`` or ``algorithm``: it is no token of the
                profile; ``kid``: its key is unknown; ``signature``; ``issuer``; ``audience``;
                ``claims``; ``lifetime``: longer than allowed; ``restriction``: it has one that is
                not understood here; ``not_yet``; ``expired``: it or its key.
        """
        if len(value) > MAX_TOKEN_OCTETS:
            raise TrustError(f"token: {len(value)} octets, limit {MAX_TOKEN_OCTETS}", check="size")
        if self._serial != self.issuers.serial:
            self._verified.clear()
            self._serial = self.issuers.serial
        digest = hashlib.sha256(value).digest()
        grant = self._verified.get(digest)
        if grant is None:
            grant = self._verify(value)
            while len(self._verified) >= MAX_VERIFIED:
                self._verified.popitem(last=False)
            self._verified[digest] = grant
        else:
            self._verified.move_to_end(digest)
        self._check_times(grant, now)
        return grant

    def _verify(self, value: bytes) -> Grant:
        message, claims = _read(value)
        candidates = self.issuers.having(claims.kid)
        if not candidates:
            raise TrustError(f"token: no key {claims.kid.hex()} is known", check="kid")
        tried: dict[bytes, TrustError | None] = {}
        for key in candidates:
            if key.octets not in tried:
                tried[key.octets] = _failure(message, key)
        keys = tuple(key for key in candidates if tried[key.octets] is None)
        if not keys:
            raise next(error for error in tried.values() if error is not None)
        keys = tuple(key for key in keys if key.name == claims.issuer)
        if not keys:
            raise TrustError("token: its issuer is not the one of its key", check="issuer")
        if not self.audience.intersection(claims.audience):
            raise TrustError("token: it is for another relay", check="audience")
        if claims.expires - claims.issued_at > self._max_lifetime:
            raise TrustError(
                f"token: valid for {claims.expires - claims.issued_at} s, limit"
                f" {self._max_lifetime:g}",
                check="lifetime",
            )
        return Grant(
            claims.issuer,
            claims.token_id,
            claims.rules,
            max(claims.not_before, claims.issued_at) - self._skew,
            claims.expires + self._skew,
            keys,
        )

    @staticmethod
    def _check_times(grant: Grant, now: float) -> None:
        if now >= grant.ends:
            raise TrustError("token: it has expired", check="expired")
        if now < grant.not_before:
            raise TrustError("token: it does not count yet", check="not_yet")
        late: TrustError | None = None
        for key in grant.keys:
            try:
                key.check_time(now)
            except TrustError as exc:
                late = exc
            else:
                return
        if late is not None:
            raise late


def _read(value: bytes) -> tuple[Sign1, Claims]:
    if len(value) > MAX_TOKEN_OCTETS:
        raise TrustError(f"token: {len(value)} octets, limit {MAX_TOKEN_OCTETS}", check="size")
    inner = value.removeprefix(_CWT_TAG)
    if inner[:1] != b"\xd2":
        raise TrustError("token: not a tagged COSE_Sign1", check="structure")
    message = read_sign1(inner, "token", max_octets=MAX_TOKEN_OCTETS, deterministic=True)
    if message.unprotected or set(message.protected) != {ALG, KID, TYP}:
        raise TrustError("token: its header is not alg, kid and typ, all protected", check="header")
    if message.protected[TYP] != CAT:
        raise TrustError("token: its typ is not CAT", check="header")
    claims = load(message.payload, "token", max_octets=MAX_TOKEN_OCTETS, deterministic=True)
    if not isinstance(claims, dict):
        raise TrustError("token: its claims are no map", check="claims")
    return message, _claims(claims, message.kid)


def _claims(claims: dict[Any, Any], kid: bytes) -> Claims:
    audience = claims.get(_AUD)
    names = [audience] if isinstance(audience, str) else audience
    issuer, token_id = claims.get(_ISS), claims.get(_CTI, b"")
    times: list[Any] = [claims.get(_IAT), claims.get(_EXP), claims.get(_NBF, claims.get(_IAT))]
    if (
        not isinstance(issuer, str)
        or not isinstance(names, list)
        or not 1 <= len(names) <= MAX_AUDIENCES
        or not all(isinstance(name, str) for name in names)
        or not isinstance(token_id, bytes)
    ):
        raise TrustError("token: iss, aud or cti is missing or of another kind", check="claims")
    if not all(type(time) is int and 0 <= time <= MAX_TIME for time in times):
        raise TrustError("token: iat or exp is missing, or a time is none", check="claims")
    bound = _RESTRICTIONS.intersection(claims) or _CNF in claims
    if bound or claims.get(_REVALIDATE, 0) != 0 or claims.get(_CATV, 1) != 1:
        raise TrustError("token: restricted in a way not understood here", check="restriction")
    issued_at, expires, not_before = times
    return Claims(
        issuer,
        tuple(names),
        issued_at,
        not_before,
        expires,
        token_id,
        read_rules(claims.get(_MOQT, [])),
        kid,
    )


def _failure(message: Sign1, key: PublicKey) -> TrustError | None:
    try:
        message.verify(key)
    except TrustError as exc:
        return exc
    return None


def _counts(key: PublicKey, now: float) -> bool:
    try:
        key.check_time(now)
    except TrustError:
        return False
    return True


def _speaks_for(key: PublicKey, asked: Asked) -> bool:
    """Whether a key's scope covers what is asked; opening a session is of no scope."""
    if key.scope_id is None or asked.action in (Action.SETUP, Action.CLIENT_SETUP):
        return True
    return asked.namespace[:2] == (KVCS_ROOT, key.scope_id)
