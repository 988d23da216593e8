"""Mistakes of users, and peers that refuse: exit code 2, one helpful line, nothing else, soon."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import kvcs
from kvcs.kv import holder_uri
from kvcs.quic.reconnect import INITIAL_SECONDS
from tests.certificates import make_ca, make_certificate, write_pem
from tests.cli.conftest import Place, RunningRelay, make_cache
from tests.cli.servers import server_in_thread
from tests.command import ROOT, Process, Ran, Run
from tests.ports import closed_port

DATA = ROOT / "tests" / "data" / "smollm2-135m.safetensors"

PROMPTLY = 20.0
"""Seconds within which a mistake is told where nothing has to be waited for."""


def refused(ran: Ran, says: str) -> None:
    """One line of help on standard error, and nothing on standard output."""
    assert ran.code == 2, ran
    assert ran.out == ""
    line = ran.line()
    assert line.startswith("kvcs: ")
    assert says in line
    assert "Traceback" not in line and "internal error" not in line


@pytest.fixture
def there(place: Place, relay: RunningRelay) -> tuple[object, ...]:
    """Options of who uses the relay."""
    return ("--relay", relay.url, *place.member)


def rewrite(source: Path, target: Path, **changes: Any) -> Path:
    """Copy a cache file with another descriptor in its metadata and the same tensors."""
    data = source.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    descriptor = json.loads(header["__metadata__"]["kvcs.descriptor"]) | changes
    header["__metadata__"]["kvcs.descriptor"] = json.dumps(descriptor)
    text = json.dumps(header).encode()
    target.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    return target


# Files


@pytest.fixture
def bad_files(place: Place, tmp_path: Path) -> dict[str, tuple[Path, str]]:
    """Files that are no KV cache, and what is said of them."""
    data = place.cache.read_bytes()
    made = {
        "truncated": (data[:-1], f"truncated: {len(data) - 1} octets of {len(data)}"),
        "headless": (data[:50], "truncated: 50 octets"),
        "empty": (b"", "not a safetensors file"),
        "key": (b"0" * 64, "not a safetensors file; this is a scope key"),
        "foreign": (b"GGUF" + bytes(100), "not a safetensors file"),
    }
    files: dict[str, tuple[Path, str]] = {}
    for name, (octets, says) in made.items():
        path = tmp_path / f"{name}.safetensors"
        path.write_bytes(octets)
        files[name] = (path, says)
    for name, changes, says in [
        ("dtype", {"dtype": "bfloat16"}, "is F16, the descriptor says bfloat16"),
        ("layers", {"layers": 7}, "layer 6 missing, the descriptor says 7 layers"),
        ("heads", {"kv_heads": 4}, "the descriptor says [19, 4, 8]"),
        ("member", {"rope": 1}, "unknown member 'rope'"),
    ]:
        files[name] = (rewrite(place.cache, tmp_path / f"{name}.safetensors", **changes), says)
    files["short"] = (
        make_cache(tmp_path / "short.safetensors", tokens=3),
        "prefix of 3 tokens is shorter than one block of 4",
    )
    files["missing"] = (tmp_path / "none.safetensors", "No such file or directory")
    files["folder"] = (tmp_path, "not a regular file")
    return files


def test_what_cannot_be_published_is_told(
    there: tuple[object, ...], bad_files: dict[str, tuple[Path, str]], run: Run
) -> None:
    for path, says in bad_files.values():
        ran = run("publish", path, *there, "--json")
        refused(ran, says)
        assert str(path) in ran.line()


def test_what_cannot_name_a_prefix_is_told(
    there: tuple[object, ...], bad_files: dict[str, tuple[Path, str]], run: Run, tmp_path: Path
) -> None:
    for name, (path, says) in bad_files.items():
        if name != "layers":  # a file may lack layers where it names a prefix only
            refused(run("subscribe", *there, "--like", path, "--out", tmp_path / "x"), says)
    path, says = bad_files["truncated"]
    refused(run("ls", *there, "--like", path), says)
    refused(run("inspect", path), says)


def test_what_a_command_reads_is_not_replaced(
    place: Place, there: tuple[object, ...], run: Run, tmp_path: Path
) -> None:
    cache, link = tmp_path / "cache.safetensors", tmp_path / "link.safetensors"
    cache.write_bytes(place.cache.read_bytes())
    link.symlink_to(cache)
    key = place.scope_key.read_bytes()
    for like, out in ((cache, cache), (cache, link), (cache, place.scope_key)):
        ran = run("fetch", *there, "--like", like, "--out", out)
        refused(ran, f"{out}: this command reads it too; give --out another file")
    refused(run("subscribe", *there, "--like", cache, "--out", cache), "this command reads it too")
    ran = run("publish", cache, *there, "--index-out", link)
    refused(ran, f"{link}: this command reads it too; give --index-out another file")
    issuer = tmp_path / "issuer.key"
    made = ("keygen", "--issuer", "us", "--every-scope", "--out", issuer)
    assert run(*made, "--public", tmp_path / "issuers.ring").code == 0
    secret = issuer.read_bytes()
    token = ("token", "make", "--issuer-key-file", issuer, "--audience", "127.0.0.1")
    for out in (issuer, place.scope_key):
        ran = run(*token, "--scope-key-file", place.scope_key, "--out", out)
        refused(ran, f"{out}: this command reads it too")
    assert issuer.read_bytes() == secret
    assert cache.read_bytes() == place.cache.read_bytes()
    assert place.scope_key.read_bytes() == key


@pytest.mark.parametrize("command", [("ls",), ("fetch", "--out", "x")])
def test_anchors_that_are_none_are_told_before_anybody_is_asked(
    place: Place, run: Run, command: tuple[object, ...]
) -> None:
    with closed_port() as port:
        nobody = ("--relay", f"moqt://127.0.0.1:{port}", *place.member)
        ran = run(*command, *nobody, "--like", place.cache, "--anchors", "half")
    refused(ran, "--anchors: expected numbers of blocks")


def test_a_scope_key_is_shown_to_no_relay(
    place: Place, there: tuple[object, ...], run: Run
) -> None:
    ran = run("ls", *there, "--token-file", place.scope_key)
    refused(ran, f"{place.scope_key}: no token; this is a scope key")


def test_tokens_and_descriptors_that_are_none(
    place: Place, there: tuple[object, ...], run: Run, tmp_path: Path
) -> None:
    def written(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    def ls(tokens: object, descriptor: object) -> Ran:
        return run("ls", *there, "--tokens", tokens, "--descriptor", descriptor)

    refused(ls(written("a", "one two"), place.descriptor), "a: not a list of integers")
    refused(ls(written("b", "[1, 2.5]"), place.descriptor), "b: not a list of integers")
    refused(ls(written("c", "-1 " * 8), place.descriptor), "c: token ids: value at position 0")
    refused(ls(written("d", "1 2 3"), place.descriptor), "d: prefix of 3 tokens is shorter")
    refused(ls(written("e", ""), place.descriptor), "e: prefix of 0 tokens is shorter")
    refused(ls(tmp_path / "none", place.descriptor), "none: No such file")
    refused(ls(place.tokens, written("f", "{")), "f: descriptor: not JSON")
    refused(ls(place.tokens, written("g", "[]")), "g: descriptor")
    refused(ls(place.tokens, written("h", '{"model": "x"}')), "h: descriptor layers: missing")
    refused(ls(place.tokens, place.cache), "cache.safetensors: not a text file")
    # Both ways to name a prefix, or half of one, are no way.
    named = "name the prefix with --like FILE, or with --tokens FILE --descriptor FILE"
    refused(run("ls", *there, "--tokens", place.tokens), named)
    refused(run("ls", *there, "--like", place.cache, "--tokens", place.tokens), named)
    refused(run("fetch", *there, "--out", tmp_path / "x"), named)


def test_another_dtype_than_that_of_the_file_to_compare_with(
    place: Place, there: tuple[object, ...], run: Run, tmp_path: Path
) -> None:
    descriptor = json.loads(place.descriptor.read_text()) | {"dtype": "bfloat16"}
    path = tmp_path / "descriptor.json"
    path.write_text(json.dumps(descriptor))
    named = ("--tokens", place.tokens, "--descriptor", path)
    refused(
        run("subscribe", *there, *named, "--compare", place.cache),
        "another descriptor: dtype: ours bfloat16, theirs float16",
    )


def test_a_result_that_cannot_be_written_is_told_before_it_is_fetched(
    place: Place, run: Run, tmp_path: Path
) -> None:
    # Nobody listens there: an error about the target shows that nobody was asked.
    nowhere = ("--relay", "moqt://127.0.0.1:9", *place.member, "--like", place.cache)
    refused(run("subscribe", *nowhere, "--out", tmp_path), "a folder, where a file")
    refused(run("fetch", *nowhere, "--out", tmp_path / "a" / "b"), "there is no folder")
    refused(run("fetch", *nowhere, "--out", ""), "a folder, where a file")
    refused(run("fetch", *nowhere), "--out FILE, --compare FILE, or both")


def test_a_bad_scope_key_is_not_repeated(
    place: Place, relay: RunningRelay, run: Run, tmp_path: Path
) -> None:
    secret = "d1ce" * 16
    path = tmp_path / "scope.key"
    path.touch(mode=0o600)
    for content in (
        secret[:-1].encode(),
        f"{secret}0".encode(),
        f"x{secret[1:]}".encode(),
        f"{secret}\n{secret}".encode(),
        bytes.fromhex(secret),
        b"",
        secret.encode() * 100,
    ):
        path.write_bytes(content)
        for command in (
            ("publish", place.cache),
            ("subscribe", "--like", place.cache, "--out", tmp_path / "x"),
            ("ls",),
        ):
            ran = run(*command, "--relay", relay.url, "--scope-key-file", path)
            refused(ran, f"{path}: ")
            assert "64 hex characters" in ran.line()
            assert secret[:8] not in ran.err
        refused(run("inspect", place.cache, "--scope-key-file", path), f"{path}: ")
    refused(run("ls", "--relay", relay.url, "--scope-key-file", tmp_path / "no"), "No such file")
    refused(run("ls", "--relay", relay.url, "--scope-key-file", tmp_path), "Is a directory")


def test_a_scope_key_that_others_can_read_is_used_and_told(
    place: Place, relay: RunningRelay, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "scope.key"
    path.write_bytes(place.scope_key.read_bytes())
    path.chmod(0o644)
    ran = run("ls", "--relay", relay.url, "--ca", place.pem.ca, "--scope-key-file", path)
    assert ran.code == 0
    assert ran.line() == f"kvcs: {path} can be read by others; chmod 600 keeps it to you"


def test_a_bad_token_is_not_repeated(
    place: Place, there: tuple[object, ...], run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("not*base64*secret")
    ran = run("ls", *there, "--token-file", path)
    refused(ran, f"{path}: the token is not base64url text")
    assert "secret" not in ran.err
    path.write_text("A" * 70_000)
    refused(run("ls", *there, "--token-file", path), "longer than 65536 octets")
    refused(run("ls", *there, "--token-file", tmp_path / "no"), "No such file")
    path.write_text("b2s")
    path.chmod(0o604)
    ran = run("ls", *there, "--token-file", path)
    assert ran.code == 0
    assert ran.line() == f"kvcs: {path} can be read by others; chmod 600 keeps it to you"


# Words


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("http://127.0.0.1:4433", "is not a moqt:// URI"),
        ("127.0.0.1:4433", "is not a moqt:// URI"),
        ("moqt://", "moqt://"),
        ("moqt://127.0.0.1:99999", "99999"),
        ("moqt://127.0.0.1:x", "moqt://127.0.0.1:x"),
        ("moqt://127.0.0.1:1/#kvcs:x", "#kvcs:x"),
        ("", "is not a moqt:// URI"),
    ],
)
def test_a_bad_url(place: Place, run: Run, tmp_path: Path, url: str, says: str) -> None:
    refused(run("ls", "--relay", url, *place.member), says)
    refused(run("publish", place.cache, "--relay", url, *place.member), says)


def test_bad_ranges(place: Place, there: tuple[object, ...], run: Run, tmp_path: Path) -> None:
    fetch = ("fetch", *there, "--like", place.cache, "--out", tmp_path / "x")
    for option, text, says in [
        ("--layers", "4-", "--layers '4-' is not a range such as 4-11"),
        ("--layers", "a", "is not a range"),
        ("--layers", "-1", "--layers '-1' is not a range"),
        ("--layers", "3-2", "--layers '3-2' ends before it begins"),
        ("--layers", "5-6", "layers 5..6 are not within 0..5"),
        ("--layers", "9999999999", "is not a range"),
        ("--blocks", "1-2", "--blocks starts at 0"),
        ("--blocks", "0-4", "at most the prefix's 4"),
        ("--blocks", "x", "--blocks 'x' is not a range"),
        ("--publication", "moqt://x", "is not a holder URI"),
        ("--publication", "x", "is not a holder URI"),
    ]:
        refused(run(*fetch, option, text), says)


def test_times_that_are_none(place: Place, there: tuple[object, ...], run: Run) -> None:
    like = ("--like", place.cache, "--compare", place.cache)
    refused(run("subscribe", *there, *like, "--deadline", "0"), "deadline must be more than 0 s")
    refused(run("publish", place.cache, *there, "--retention", "0"), "retention must be more than")
    for arguments in [
        ("subscribe", *there, *like, "--deadline", "nan"),
        ("subscribe", *there, *like, "--deadline", "inf"),
        ("subscribe", *there, *like, "--wait", "-1"),
        ("publish", place.cache, *there, "--retain", "nan"),
        ("publish", place.cache, *there, "--retain", "-1"),
        ("publish", place.cache, *there, "--retention", "inf"),
        ("publish", place.cache, *there, "--pace", "-0.1"),
        ("publish", place.cache, *there, "--pace", "soon"),
        ("demo", "--pace", "inf"),
    ]:
        refused(run(*arguments), f"Invalid value for '{arguments[-2]}'")


def test_a_publisher_needs_one_place(place: Place, relay: RunningRelay, run: Run) -> None:
    publish = ("publish", place.cache, *place.member)
    refused(run(*publish), "--relay URL, or --serve HOST:PORT")
    refused(run(*publish, "--relay", relay.url, "--serve", "127.0.0.1:0"), "say where to publish")
    refused(run(*publish, "--serve", "127.0.0.1:0"), "`kvcs certs` makes them")
    refused(run(*publish, "--serve", "127.0.0.1:0", "--cert", place.pem.cert), "--key FILE")
    for bind in ("127.0.0.1:x", "127.0.0.1:70000", "a:b:c", "", "4433"):
        refused(run(*publish, "--serve", bind, *place.keys), f"{bind!r} is not HOST:PORT")


# Who listens


def test_a_relay_serves_anyone_only_when_told(place: Place, run: Run) -> None:
    refused(run("relay", "--bind", "127.0.0.1:0", *place.keys), "--allow-anyone")


def test_an_address_that_cannot_be_had(place: Place, relay: RunningRelay, run: Run) -> None:
    taken = relay.url.removeprefix("moqt://")
    ran = run("relay", "--bind", taken, *place.keys, "--allow-anyone")
    refused(ran, f"cannot listen on {taken}: Address already in use")
    ran = run("publish", place.cache, "--serve", taken, *place.keys, *place.member)
    refused(ran, f"cannot listen on {taken}: Address already in use")
    foreign = "192.0.2.1:0"  # for documents only: no machine has it
    refused(run("relay", "--bind", foreign, *place.keys, "--allow-anyone"), foreign)


def test_certificates_that_cannot_be_used(place: Place, run: Run, tmp_path: Path) -> None:
    other = write_pem(tmp_path / "other")
    for cert, key, says in [
        (place.scope_key, place.pem.key, "no readable certificate"),
        (tmp_path / "none", place.pem.key, "No such file"),
        (place.pem.cert, tmp_path / "none", "No such file"),
        (place.pem.cert, place.pem.cert, "key"),
        (place.pem.cert, other.key, "does not belong to"),
    ]:
        there = ("--bind", "127.0.0.1:0", "--cert", cert, "--key", key)
        refused(run("relay", *there, "--allow-anyone"), says)


# Who does not listen, or refuses


@pytest.mark.slow
def test_nobody_listens(place: Place, run: Run, tmp_path: Path) -> None:
    with closed_port() as port:
        there = ("--relay", f"moqt://127.0.0.1:{port}", *place.member)
        for arguments in [
            ("publish", place.cache, *there),
            ("subscribe", *there, "--like", place.cache, "--out", tmp_path / "x"),
            ("ls", *there),
        ]:
            began = time.monotonic()
            refused(run(*arguments), f"cannot connect to 127.0.0.1:{port}: nothing listens there")
            assert time.monotonic() - began < INITIAL_SECONDS + PROMPTLY


def test_nobody_answers_within_the_deadline(place: Place, run: Run, tmp_path: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        host = f"127.0.0.1:{silent.getsockname()[1]}"
        there = ("--relay", f"moqt://{host}", *place.member)
        like = ("--like", place.cache, "--out", tmp_path / "x", "--deadline", "0.3")
        for command in ("subscribe", "fetch"):
            began = time.monotonic()
            refused(run(command, *there, *like), f"no answer from {host} within 0.3 s")
            assert time.monotonic() - began < PROMPTLY


def test_a_certificate_that_does_not_verify(
    place: Place, relay: RunningRelay, run: Run, tmp_path: Path
) -> None:
    key = ("--scope-key-file", place.scope_key)
    refused(run("ls", "--relay", relay.url, *key), "does not verify")
    other = write_pem(tmp_path / "other")
    refused(run("ls", "--relay", relay.url, *key, "--ca", other.ca), "does not verify")
    refused(run("ls", "--relay", relay.url, *key, "--ca", tmp_path / "none"), "No such file")
    refused(run("ls", "--relay", relay.url, *key, "--ca", place.scope_key), "PEM is expected")
    insecure = run("ls", "--relay", relay.url, *key, "--insecure-accept-any-certificate")
    assert insecure.code == 0
    assert "certificate_not_verified" in insecure.line(), "it is said that nobody was verified"


def test_a_certificate_of_another_name(place: Place, run: Run, tmp_path: Path) -> None:
    ca = make_ca()
    pem = write_pem(tmp_path, ca, make_certificate(ca, ("elsewhere.example",)))
    with server_in_thread(pem) as url:
        ran = run("ls", "--relay", url, "--scope-key-file", place.scope_key, "--ca", pem.ca)
    refused(ran, "does not verify")


@pytest.fixture(scope="module")
def unwilling(place: Place) -> Iterator[str]:
    """A MOQT server that wants no announcements and names nothing."""
    with server_in_thread(place.pem, offer=False) as url:
        yield url


def test_a_peer_that_refuses(place: Place, unwilling: str, run: Run, tmp_path: Path) -> None:
    there = ("--relay", unwilling, *place.member)
    wanted = ("--like", place.cache, "--out", tmp_path / "x")
    for arguments, says in [
        (("publish", place.cache, *there), "not interested (UNINTERESTED, 0x20)"),
        (("ls", *there), "no namespaces are published here (NOT_SUPPORTED, 0x3)"),
        (("subscribe", *there, *wanted), "no namespaces are published here"),
    ]:
        began = time.monotonic()
        refused(run(*arguments), f"refused: {says}")
        assert time.monotonic() - began < PROMPTLY


# What is not there


@pytest.mark.slow
def test_a_publication_that_never_appears(
    place: Place, there: tuple[object, ...], run: Run, tmp_path: Path
) -> None:
    like = ("--like", make_cache(tmp_path / "unknown.safetensors", seed=9), "--out", tmp_path / "x")
    says = "no publication of the prefix is announced"
    for command, wait, least in [
        ("subscribe", ("--wait", "0"), 0.2),
        ("subscribe", ("--deadline", "2"), 2.0),
        ("fetch", (), 0.2),
    ]:
        began = time.monotonic()
        refused(run(command, *there, *like, *wait), says)
        assert least < time.monotonic() - began < least + PROMPTLY
    assert not (tmp_path / "x").exists()


def test_a_publication_of_another_relay(
    place: Place, there: tuple[object, ...], run: Run, tmp_path: Path
) -> None:
    opened = kvcs.load_kv_file(place.cache)
    scope = kvcs.Scope.from_hex(place.scope_key.read_text())
    prefix = kvcs.Prefix(scope, opened.descriptor, opened.token_ids)
    namespace = kvcs.PublicationNamespace.parse(prefix.namespace(os.urandom(16)))
    uri = holder_uri("moqt://127.0.0.1:9", namespace)
    like = ("--like", place.cache, "--out", tmp_path / "x")
    refused(run("fetch", *there, *like, "--publication", uri), "DOES_NOT_EXIST")


# As a shell sees it


def test_a_mistake_as_a_process(place: Place, tmp_path: Path) -> None:
    """What the tests above say of the command holds for its process too."""
    for arguments, says in [
        (("publish", tmp_path / "none", "--relay", "moqt://127.0.0.1:9", *place.member), "none"),
        (("ls",), "Missing option '--relay'"),
    ]:
        with Process(*arguments) as process:
            refused(process.end(), says)


def test_a_name_that_the_terminal_cannot_show(tmp_path: Path) -> None:
    cache = make_cache(tmp_path / "cache.safetensors", model="modèle")
    with Process("inspect", cache, environment={"PYTHONIOENCODING": "ascii"}) as process:
        ran = process.end()
    assert (ran.code, ran.err) == (0, "")
    assert "mod\\xe8le" in ran.out


def test_whoever_reads_the_output_may_stop_early(place: Place, tmp_path: Path) -> None:
    # The result of the real cache is longer than a pipe holds.
    with Process("inspect", DATA, "--json") as process:
        process.close_stdout()
        ran = process.end()
    assert (ran.code, ran.err) == (1, "")
