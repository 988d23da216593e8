"""Authorization tokens and the alias cache (MOQT §8.9, §9.20.2)."""

from __future__ import annotations

import pytest

from kvcs.errors import RequestError
from kvcs.moqt.errors import KeyValueError, RequestCode, SessionCode
from kvcs.moqt.parameters import Parameters
from kvcs.moqt.tokens import (
    TOKEN_OVERHEAD_OCTETS,
    AuthTokenCacheOverflow,
    DuplicateAuthTokenAlias,
    ResolvedToken,
    Token,
    TokenCache,
    UnknownAuthTokenAlias,
)

SECRET = b"very secret octets"


@pytest.mark.parametrize(
    "hex_", ["", "04", "ff" * 9, "00", "0005aa", "02", "020501", "01", "0105", "03", "0380"]
)
def test_tokens_that_cannot_be_decoded(hex_: str) -> None:
    with pytest.raises(KeyValueError):
        Token.decode(bytes.fromhex(hex_))


def test_values_stay_out_of_what_may_be_logged() -> None:
    for shown in (
        repr(Token.use_value(SECRET)),
        repr(ResolvedToken(0, SECRET)),
        repr(Parameters.of(authorization_token=Token.register(1, SECRET))),
    ):
        assert "secret" not in shown


def test_tokens_are_carried_out_in_order() -> None:
    cache = TokenCache(100)
    assert cache.process([Token.register(5, b"old", 1)]) == (ResolvedToken(1, b"old"),)
    assert cache.process([Token.use_alias(5)]) == (ResolvedToken(1, b"old"),)
    tokens = [Token.delete(5), Token.register(5, b"new"), Token.use_value(b"x", 9)]
    assert cache.process(tokens) == (ResolvedToken(0, b"new"), ResolvedToken(9, b"x"))
    assert cache.size == TOKEN_OVERHEAD_OCTETS + 3
    assert len(cache) == 1
    assert cache.process([Token.delete(5)]) == ()
    assert (cache.size, len(cache)) == (0, 0)


def test_an_alias_in_use_is_not_registered_again() -> None:
    cache = TokenCache(100)
    cache.process([Token.register(5, b"x")])
    with pytest.raises(DuplicateAuthTokenAlias) as caught:
        cache.process([Token.register(5, b"x")])
    assert caught.value.code == SessionCode.DUPLICATE_AUTH_TOKEN_ALIAS


def test_the_cache_is_bounded_by_what_was_advertised() -> None:
    cache = TokenCache(50)
    cache.process([Token.register(1, bytes(50 - TOKEN_OVERHEAD_OCTETS))])
    with pytest.raises(AuthTokenCacheOverflow) as caught:
        cache.process([Token.register(2, b"")])
    assert caught.value.code == SessionCode.AUTH_TOKEN_CACHE_OVERFLOW
    assert cache.size == 50
    with pytest.raises(AuthTokenCacheOverflow):
        TokenCache().process([Token.register(0, b"")])


def test_a_setup_that_registers_too_much_uses_the_value_once() -> None:
    cache = TokenCache(0)
    assert cache.process([Token.register(1, SECRET)], in_setup=True) == (ResolvedToken(0, SECRET),)
    assert len(cache) == 0
    with pytest.raises(UnknownAuthTokenAlias):
        cache.process([Token.use_alias(1)])


@pytest.mark.parametrize("token", [Token.use_alias(9), Token.delete(9)])
def test_an_unknown_alias_refuses_the_message_after_the_rest_took_effect(token: Token) -> None:
    cache = TokenCache(100)
    with pytest.raises(UnknownAuthTokenAlias) as caught:
        cache.process([Token.register(1, b"a"), token, Token.register(2, b"b")])
    assert caught.value.code == RequestCode.UNKNOWN_AUTH_TOKEN_ALIAS
    assert cache.process([Token.use_alias(1), Token.use_alias(2)]) == (
        ResolvedToken(0, b"a"),
        ResolvedToken(0, b"b"),
    )


def test_one_message_does_not_present_a_token_twice() -> None:
    cache = TokenCache(100)
    with pytest.raises(RequestError) as caught:
        cache.process([Token.register(1, b"a"), Token.use_value(b"a")])
    assert caught.value.code == RequestCode.MALFORMED_AUTH_TOKEN
    assert len(cache) == 1
