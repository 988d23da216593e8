"""Stateless resets: their tokens, their form, and how many there are."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from kvcs.quic.aioquic_backend import resets
from kvcs.quic.aioquic_backend.resets import StatelessResets, reset_secret
from tests.unit.quic.pair import SERVER, Pair

ADDRESS = ("192.0.2.1", 4433)
CONNECTION_ID = b"12345678"
NEVER = 1e9


def packet(size: int, first: int = 0x40) -> bytes:
    """A packet of a connection that nobody knows."""
    return (bytes((first,)) + CONNECTION_ID).ljust(size, b"x")


def test_tokens_follow_from_the_key_and_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    secret = reset_secret(key, ADDRESS)
    assert len(secret) == 32 and secret == reset_secret(key, (*ADDRESS, 0, 0))
    token = StatelessResets(secret, 1).token(CONNECTION_ID)
    assert len(token) == 16
    assert token == StatelessResets(reset_secret(key, ADDRESS), 9).token(CONNECTION_ID)
    others = [
        StatelessResets(secret, 1).token(b"12345679"),
        StatelessResets(reset_secret(key, ("192.0.2.2", 4433)), 1).token(CONNECTION_ID),
        StatelessResets(reset_secret(key, ("192.0.2.1", 4434)), 1).token(CONNECTION_ID),
        *(
            StatelessResets(reset_secret(other, ADDRESS), 1).token(CONNECTION_ID)
            for other in (
                ec.generate_private_key(ec.SECP256R1()),
                ed25519.Ed25519PrivateKey.generate(),
            )
        ),
    ]
    monkeypatch.setattr(resets.socket, "gethostname", lambda: "another.example")
    others.append(StatelessResets(reset_secret(key, ADDRESS), 1).token(CONNECTION_ID))
    assert token not in others and len(set(others)) == len(others)


@pytest.mark.parametrize(
    ("size", "expected"), [(22, 21), (23, 22), (43, 42), (44, 43), (45, 43), (16_000, 43)]
)
def test_a_reset_is_shorter_than_what_it_answers(size: int, expected: int) -> None:
    made = StatelessResets(bytes(32), 10)
    answers = {made.answer(packet(size, first), CONNECTION_ID, NEVER) for first in (0x40, 0x7F)}
    assert len(answers) == 2, "nothing in them is the same but the token"
    for answer in answers:
        assert answer is not None and len(answer) == expected
        assert answer[0] & 0xC0 == 0x40, "it looks like a packet of a connection"
        assert answer[-16:] == made.token(CONNECTION_ID)


@pytest.mark.parametrize(
    "data",
    [b"", b"\x40", packet(20), packet(21), packet(60, 0xC0), packet(60, 0x80), packet(60, 0x00)],
)
def test_what_is_no_packet_of_a_connection_gets_none(data: bytes) -> None:
    made = StatelessResets(bytes(32), 10)
    assert made.answer(data, data[1:9], NEVER) is None
    assert (made.sent, made.left_out) == (0, 0)


def test_two_that_know_nothing_of_each_other_fall_silent() -> None:
    sides = [StatelessResets(bytes((index,)) * 32, 1000) for index in range(2)]
    data: bytes | None = packet(1200)
    turns = 0
    while data is not None:
        data = sides[turns % 2].answer(data, data[1:9], NEVER)
        turns += 1
    assert turns == 1 + resets.LONGEST_RESET - resets.SHORTEST_RESET + 1
    assert sides[0].left_out == sides[1].left_out == 0, "the limit has no part in that"


def test_there_are_no_more_in_a_second_than_the_limit() -> None:
    made = StatelessResets(bytes(32), 3)

    def answered(count: int, now: float) -> int:
        return sum(made.answer(packet(40), CONNECTION_ID, now) is not None for _ in range(count))

    assert answered(10, 100.0) == 3
    assert (made.sent, made.left_out) == (3, 7)
    assert answered(10, 100.34) == 1
    assert answered(10, 200.0) == 3, "what was not used is not saved up"
    assert (made.sent, made.left_out) == (7, 23)
    nothing = StatelessResets(bytes(32), 0)
    assert nothing.answer(packet(40), CONNECTION_ID, NEVER) is None
    assert (nothing.sent, nothing.left_out) == (0, 1)


def test_every_connection_id_of_a_server_has_the_token_that_follows_from_it() -> None:
    """Those of the library's own making are random, and nobody could make them again."""
    made = StatelessResets(bytes(32), 10)
    pair = Pair(reset_token=made.token)
    client = pair.client.quic
    pair.clock.run_until(lambda: len(client._peer_cid_available) == 7)
    known = [client._peer_cid, *client._peer_cid_available]
    assert [each.stateless_reset_token for each in known] == [
        made.token(each.cid) for each in known
    ]
    client.change_connection_id()  # the server gives another in its place
    pair.client.transport.send(2, b"x", False)
    pair.client.transport.flush()
    pair.clock.run_until(lambda: len(client._peer_cid_available) == 7)
    newest = client._peer_cid_available[-1]
    assert newest.cid not in [each.cid for each in known]
    assert newest.stateless_reset_token == made.token(newest.cid)

    before = pair.client.ending
    answer = made.answer(packet(60), client._peer_cid.cid, NEVER)
    assert answer is not None
    now = pair.clock.time()
    pair.client.transport.datagrams_received([answer], SERVER, now)
    pair.client.transport.batch_ended(now)
    assert before is None and pair.client.ending is not None
