"""Settings that the protocol or the library cannot carry are refused, by name."""

from __future__ import annotations

from typing import Any

import pytest

from kvcs.errors import UsageError
from kvcs.quic.aioquic_backend import QuicSettings


def test_defaults() -> None:
    settings = QuicSettings()
    assert settings.alpn == ("moqt-22",)
    assert (settings.idle_timeout, settings.ping_interval) == (30.0, 10.0)
    assert settings.datagram_size is None, "found by probing"
    assert settings.uni_streams == settings.bidi_streams == 512
    assert settings.send_buffer == 2 * 1024 * 1024
    assert settings.receive_window == 16 * 1024 * 1024
    assert settings.stream_receive_window == 4 * 1024 * 1024


@pytest.mark.parametrize(
    "changes",
    [
        {"alpn": ()},
        {"alpn": ("",)},
        {"datagram_size": 1199},
        {"datagram_size": 64_001},
        {"idle_timeout": 0.0},
        {"connect_timeout": -1.0},
        {"close_timeout": 0.0},
        {"ping_interval": 0.0},
        {"ping_interval": 30.0},
        {"max_datagram_frame_size": 0},
        {"max_datagram_frame_size": 65_536},
        {"uni_streams": 0},
        {"bidi_streams": 0},
        {"send_buffer": 0},
        {"receive_window": 0},
        {"stream_receive_window": 0},
        {"socket_buffer": 0},
        {"max_connections": 0},
        {"max_handshakes": 0},
        {"retry_handshakes": -1},
        {"stateless_resets": -1},
        {"send_buffer": 1024, "send_buffer_limit": 1023},
    ],
)
def test_impossible_values_are_refused_by_name(changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        QuicSettings(**changes)
    assert any(name in str(caught.value) for name in changes)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [1200, 1452, 8952, 64_000])
def test_datagram_sizes_up_to_the_cap_are_taken(size: int) -> None:
    assert QuicSettings(datagram_size=size).datagram_size == size
