"""What is said when a connection ends or never comes to be."""

from __future__ import annotations

import pytest
from aioquic.quic.events import ConnectionTerminated

from kvcs.errors import CertificateError, ConnectionFailed
from kvcs.quic.aioquic_backend.ending import (
    Ending,
    ending_of,
    explain,
    no_answer,
    nobody_listens,
    one_line,
)

TARGET = "relay.example:4433"
CRYPTO = 0x100


def transport_error(code: int, reason: str, by_peer: bool = False) -> Ending:
    """An ending as a transport error gives it."""
    event = ConnectionTerminated(error_code=code, frame_type=6, reason_phrase=reason)
    return ending_of(event, by_peer=by_peer, idle_timeout=30.0)


def test_an_application_close_keeps_its_code() -> None:
    event = ConnectionTerminated(error_code=0x10, frame_type=None, reason_phrase="bye")
    assert ending_of(event, by_peer=True, idle_timeout=1.0) == Ending(0x10, "bye", True)


def test_a_transport_error_has_no_application_code() -> None:
    ending = transport_error(0x3, "over the limit", by_peer=True)
    assert (ending.code, ending.by_peer, ending.transport_error) == (None, True, 3)
    assert ending.reason == "QUIC error FLOW_CONTROL_ERROR: over the limit"
    assert transport_error(0x77, "").reason == "QUIC error 0x77"
    assert transport_error(0x1234, "").reason == "QUIC error 0x1234"
    assert transport_error(CRYPTO + 40, "").reason == "QUIC error TLS alert handshake_failure"


def test_silence_is_named() -> None:
    event = ConnectionTerminated(error_code=1, frame_type=0, reason_phrase="Idle timeout")
    ending = ending_of(event, by_peer=False, idle_timeout=30.0)
    assert ending.idle
    assert ending.reason == "idle timeout: nothing was received for 30 s"
    forged = ending_of(event, by_peer=True, idle_timeout=30.0)
    assert not forged.idle, "a peer's word is no silence"


@pytest.mark.parametrize(
    ("alert", "reason", "advice"),
    [
        (45, "Certificate is no longer valid", "renew it"),
        (42, "certificate has expired", "renew it"),
        (42, "hostname 'a' doesn't match 'b'", "by a name that it carries"),
        (42, "self-signed certificate", "pass as ca"),
        (42, "unable to get local issuer certificate", "pass as ca"),
    ],
)
def test_certificate_errors_say_what_to_do(alert: int, reason: str, advice: str) -> None:
    error = explain(transport_error(CRYPTO + alert, reason), TARGET, ("moqt-22",))
    assert isinstance(error, CertificateError)
    assert TARGET in str(error) and reason in str(error) and advice in str(error)


def test_a_peer_that_rejects_our_certificate_says_so() -> None:
    error = explain(transport_error(CRYPTO + 42, "no", by_peer=True), TARGET, ("moqt-22",))
    assert isinstance(error, CertificateError)
    assert "the peer refuses this side's certificate" in str(error)


@pytest.mark.parametrize(
    ("ending", "text"),
    [
        (transport_error(CRYPTO + 120, "", by_peer=True), "does not speak moqt-22"),
        (transport_error(0x2, "too many", by_peer=True), "takes no more connections"),
        (Ending(None, "silent", False, idle=True), "no answer from"),
        (transport_error(0xC, "", by_peer=True), "the peer ended the handshake"),
        (transport_error(0xA, "odd", by_peer=False), "this side gave up the handshake"),
    ],
)
def test_other_failures_say_with_whom_and_why(ending: Ending, text: str) -> None:
    error = explain(ending, TARGET, ("moqt-22",))
    assert type(error) is ConnectionFailed
    assert text in str(error) and TARGET in str(error)


def test_words_for_silence_and_refusal() -> None:
    assert "within 10 s" in str(no_answer(TARGET, 10.0))
    assert "nothing listens" in str(nobody_listens(TARGET))


def test_a_peers_words_become_one_printable_line() -> None:
    assert one_line("a\nb\x1b[0m\u2028c ") == "a b [0m c"
