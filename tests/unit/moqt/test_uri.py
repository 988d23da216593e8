"""`moqt://` URIs (MOQT §6.1)."""

from __future__ import annotations

import pytest

from kvcs.errors import UsageError
from kvcs.moqt.uri import parse_uri


@pytest.mark.parametrize(
    ("text", "host", "port", "path", "authority"),
    [
        ("moqt://relay.example", "relay.example", 443, "", "relay.example"),
        ("moqt://relay.example:4433", "relay.example", 4433, "", "relay.example:4433"),
        ("moqt://Relay.Example/", "relay.example", 443, "/", "Relay.Example"),
        ("moqt://h/a/b?x=1&y=/?", "h", 443, "/a/b?x=1&y=/?", "h"),
        ("moqt://h?x=1", "h", 443, "?x=1", "h"),
        ("moqt://[::1]:4433/p", "::1", 4433, "/p", "[::1]:4433"),
        ("moqt://127.0.0.1:1", "127.0.0.1", 1, "", "127.0.0.1:1"),
        ("moqt://h/.well-known/x%20y", "h", 443, "/.well-known/x%20y", "h"),
        ("MOQT://h", "h", 443, "", "h"),
        ("moqt://[2001:db8::1]", "2001:db8::1", 443, "", "[2001:db8::1]"),
        ("moqt://[2001:DB8::1]:1/x", "2001:db8::1", 1, "/x", "[2001:DB8::1]:1"),
        ("moqt://[::ffff:192.0.2.1]:9", "::ffff:192.0.2.1", 9, "", "[::ffff:192.0.2.1]:9"),
        ("moqt://[fe80::1%25eth0]:1", "fe80::1%eth0", 1, "", "[fe80::1%25eth0]:1"),
        ("moqt://h:", "h", 443, "", "h:"),
        ("moqt://h:65535", "h", 65535, "", "h:65535"),
        ("moqt://h?", "h", 443, "?", "h"),
        ("moqt://h/?", "h", 443, "/?", "h"),
        ("moqt://h#a?b", "h", 443, "", "h"),
    ],
)
def test_parts(text: str, host: str, port: int, path: str, authority: str) -> None:
    uri = parse_uri(text)
    assert (uri.host, uri.port, uri.path, uri.authority) == (host, port, path, authority)
    assert uri.fragment == ("a?b" if "#" in text else "")
    if not text.startswith("MOQT"):
        assert str(uri) == text
        assert parse_uri(str(uri)) == uri


def test_the_fragment_stays_here() -> None:
    uri = parse_uri("moqt://h:1/p?q#kvcs:a-b")
    assert (uri.path, uri.fragment) == ("/p?q", "kvcs:a-b")
    assert str(uri) == "moqt://h:1/p?q#kvcs:a-b"
    assert str(parse_uri("moqt://h/p")) == "moqt://h/p"


@pytest.mark.parametrize(
    "text",
    [
        "https://h",
        "h:4433",
        "moqt:/h",
        "moqt:///path",
        "moqt://127.0.0.1%00.example:1",
        "moqt://h%1b%5b2J:1",
        "moqt://h%0aname:1",
        "moqt://h%20x",
        "moqt://h%e2%80%ae:1",
        "moqt://:443",
        "moqt://h:port",
        "moqt://h:99999",
        "moqt://[::1",
        "moqt://user@h",
        "moqt://user:pass@h",
        "moqt://h/a b",
        "moqt://h/\u00e9",
        "moqt://h o/",
        "moqt://h/%zz",
        "moqt://h/a?b c",
        "moqt://h:0",
        "moqt://h:65536",
        "moqt://h:+1",
        "moqt://h:1_0",
        "moqt://h:\u0663",
        "moqt://[::1]x",
        "moqt://[::1",
        "moqt://[::g]",
        "moqt://::1:443",
        "moqt://h\n",
        "moqt://\th",
        " moqt://h",
        "moqt://h/a\r\nb",
        "moqt://h\x00",
        "moqt://\u00fc.example",
        "",
    ],
)
def test_what_is_no_moqt_uri(text: str) -> None:
    with pytest.raises(UsageError):
        parse_uri(text)
