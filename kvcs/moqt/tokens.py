"""Authorization tokens and the cache of token aliases (MOQT §8.9, §9.20.2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from kvcs.errors import RequestError, SessionError, UsageError
from kvcs.moqt.errors import KeyValueError, RequestCode, SessionCode
from kvcs.moqt.limits import Limit
from kvcs.moqt.wire import NeedMore, Octets, Reader, encode_vi64

__all__ = [
    "TOKEN",
    "TOKEN_OVERHEAD_OCTETS",
    "AuthTokenCacheOverflow",
    "DuplicateAuthTokenAlias",
    "ResolvedToken",
    "Token",
    "TokenAliasType",
    "TokenCache",
    "UnknownAuthTokenAlias",
]

TOKEN_OVERHEAD_OCTETS = 16
"""What a registered token counts in the cache beyond the octets of its value (§8.9)."""


class DuplicateAuthTokenAlias(SessionError):
    """REGISTER of an alias that is in use."""

    code = SessionCode.DUPLICATE_AUTH_TOKEN_ALIAS


class AuthTokenCacheOverflow(SessionError):
    """REGISTER beyond the cache size we advertised, in another message than SETUP."""

    code = SessionCode.AUTH_TOKEN_CACHE_OVERFLOW
    limit = Limit.TOKEN_CACHE


class UnknownAuthTokenAlias(RequestError):
    """USE_ALIAS or DELETE of an alias that is not registered: the message is refused."""

    code = RequestCode.UNKNOWN_AUTH_TOKEN_ALIAS


class TokenAliasType(IntEnum):
    """What a Token does, and which fields it has."""

    DELETE = 0
    REGISTER = 1
    USE_ALIAS = 2
    USE_VALUE = 3


_WITH_ALIAS = (TokenAliasType.DELETE, TokenAliasType.REGISTER, TokenAliasType.USE_ALIAS)
_WITH_VALUE = (TokenAliasType.REGISTER, TokenAliasType.USE_VALUE)


@dataclass(frozen=True, slots=True)
class Token:
    """A Token structure; its value never shows in ``repr``, so it stays out of logs."""

    alias_type: TokenAliasType
    """What the token does."""

    alias: int = 0
    """Token Alias; unused with USE_VALUE."""

    token_type: int = 0
    """Token Type; 0 is a format agreed out of band. Unused with DELETE and USE_ALIAS."""

    value: bytes = field(default=b"", repr=False)
    """Token Value; unused with DELETE and USE_ALIAS."""

    @classmethod
    def use_value(cls, value: bytes, token_type: int = 0) -> Token:
        """A token that is used once."""
        return cls(TokenAliasType.USE_VALUE, 0, token_type, value)

    @classmethod
    def register(cls, alias: int, value: bytes, token_type: int = 0) -> Token:
        """A token that is used, and kept under ``alias``."""
        return cls(TokenAliasType.REGISTER, alias, token_type, value)

    @classmethod
    def use_alias(cls, alias: int) -> Token:
        """The token kept under ``alias``."""
        return cls(TokenAliasType.USE_ALIAS, alias)

    @classmethod
    def delete(cls, alias: int) -> Token:
        """Retire ``alias``."""
        return cls(TokenAliasType.DELETE, alias)

    @classmethod
    def read(cls, reader: Reader) -> Token:
        """Read a token that runs to the end of ``reader``.

        Raises:
            KeyValueError: the Alias Type is unknown, a field is missing, or octets are left over.
        """
        try:
            number = reader.vi64()
            if number > TokenAliasType.USE_VALUE:
                raise KeyValueError(f"Token Alias Type {number} is not defined")
            alias_type = TokenAliasType(number)
            alias = reader.vi64() if alias_type in _WITH_ALIAS else 0
            if alias_type not in _WITH_VALUE:
                if reader.remaining:
                    raise KeyValueError(f"{reader.remaining} octets behind a Token's alias")
                return cls(alias_type, alias)
            return cls(alias_type, alias, reader.vi64(), reader.rest())
        except NeedMore as exc:
            raise KeyValueError("a Token ends inside a field") from exc

    @classmethod
    def decode(cls, octets: Octets) -> Token:
        """Read a whole token; raises as `read`."""
        return cls.read(Reader(octets))

    def write(self) -> bytes:
        """Encode the token, without an outer length."""
        parts = [encode_vi64(self.alias_type)]
        if self.alias_type in _WITH_ALIAS:
            parts.append(encode_vi64(self.alias))
        if self.alias_type in _WITH_VALUE:
            parts += (encode_vi64(self.token_type), self.value)
        return b"".join(parts)


class _TokenKind:
    """A Token behind its Length."""

    def read(self, reader: Reader) -> Token:
        return Token.read(reader.sub(reader.vi64()))

    def write(self, value: Token) -> bytes:
        if not isinstance(value, Token):
            raise UsageError(f"AUTHORIZATION_TOKEN takes a Token, not {type(value).__name__}")
        octets = value.write()
        return encode_vi64(len(octets)) + octets


TOKEN = _TokenKind()


class ResolvedToken(NamedTuple):
    """A token as it counts, aliases looked up."""

    token_type: int
    """Token Type."""

    value: bytes
    """Token Value."""

    def __repr__(self) -> str:
        return f"ResolvedToken(token_type={self.token_type}, {len(self.value)} octets)"


class TokenCache:
    """The aliases one peer has registered with us.

    Args:
        max_size: MAX_AUTH_TOKEN_CACHE_SIZE we advertised; 0 forbids aliases. It bounds what the
            peer can make us keep: each entry counts its value and `TOKEN_OVERHEAD_OCTETS`.
    """

    def __init__(self, max_size: int = 0) -> None:
        self.max_size = max_size
        self._entries: dict[int, ResolvedToken] = {}
        self._size = 0

    @property
    def size(self) -> int:
        """Octets that the live aliases count."""
        return self._size

    def __len__(self) -> int:
        return len(self._entries)

    def process(
        self, tokens: Iterable[Token], *, in_setup: bool = False
    ) -> tuple[ResolvedToken, ...]:
        """Carry out a message's tokens in order and return those it presents.

        A refused message still registers and deletes: its other tokens are carried out first.

        Args:
            tokens: the AUTHORIZATION_TOKENs of one message.
            in_setup: whether the message is SETUP, whose REGISTERs beyond the cache are one-shot.

        Raises:
            DuplicateAuthTokenAlias: an alias in use is registered again.
            AuthTokenCacheOverflow: a REGISTER does not fit.
            UnknownAuthTokenAlias: an alias is used or deleted that is not registered.
            RequestError: MALFORMED_AUTH_TOKEN, for the same token twice in one message.
        """
        presented: list[ResolvedToken] = []
        refusal: RequestError | None = None
        for token in tokens:
            if token.alias_type is TokenAliasType.DELETE:
                entry = self._entries.pop(token.alias, None)
                if entry is not None:
                    self._size -= _size(entry)
            elif token.alias_type is TokenAliasType.USE_ALIAS:
                entry = self._entries.get(token.alias)
            else:
                entry = ResolvedToken(token.token_type, token.value)
                if token.alias_type is TokenAliasType.REGISTER:
                    self._register(token.alias, entry, in_setup)
            if entry is None:
                refusal = UnknownAuthTokenAlias(f"token alias {token.alias} is not registered")
            elif token.alias_type is not TokenAliasType.DELETE:
                presented.append(entry)
        if refusal is not None:
            raise refusal
        if len(set(presented)) != len(presented):
            raise RequestError(
                "the same token twice in one message", RequestCode.MALFORMED_AUTH_TOKEN
            )
        return tuple(presented)

    def _register(self, alias: int, entry: ResolvedToken, in_setup: bool) -> None:
        if alias in self._entries:
            raise DuplicateAuthTokenAlias(f"token alias {alias} is in use")
        size = self._size + _size(entry)
        if size > self.max_size:
            if in_setup:
                return
            raise AuthTokenCacheOverflow(
                f"token cache would hold {size} octets, limit {self.max_size}"
            )
        self._entries[alias] = entry
        self._size = size


def _size(entry: ResolvedToken) -> int:
    return TOKEN_OVERHEAD_OCTETS + len(entry.value)
