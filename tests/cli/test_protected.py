"""Protected caches by command, and what of them is in a relay's memory and in what is said: nothing
(case 61)."""

from __future__ import annotations

import base64
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcs
from kvcs.kv.opening import Opener
from kvcs.kv.protection import Sealer
from kvcs.moqt.names import FullTrackName, Location
from tests.cli.conftest import BLOCK_TOKENS, Place
from tests.command import Process, Run

PROBE = 32
"""Octets of each thing that is looked for."""


@pytest.fixture(scope="module")
def keys(place: Place) -> Path:
    """Protection keys of the scope."""
    path = place.folder / "protect.keys"
    ring = kvcs.ProtectionRing(scope_id=_prefix(place).scope_id)
    ring.rotate()
    kvcs.save_protection_ring(path, ring)
    return path


def _prefix(place: Place) -> kvcs.Prefix:
    opened = kvcs.load_kv_file(place.cache)
    scope = kvcs.Scope.from_hex(place.scope_key.read_text())
    return kvcs.Prefix(scope, opened.descriptor, opened.token_ids)


def forms(secret: bytes) -> dict[str, bytes]:
    """Ways in which a secret could be written down."""
    whole = base64.b64encode(secret)
    return {
        "raw": secret[:PROBE],
        "hex": secret.hex().encode(),
        "HEX": secret.hex().upper().encode(),
        "base64": whole.rstrip(b"="),
        "repr": repr(secret)[2:-1].encode(),
    }


def tensor_needles(place: Place) -> dict[str, bytes]:
    """The start of some blocks' tensors."""
    found: dict[str, bytes] = {}
    for index, layer in kvcs.load_kv_file(place.cache).layers.items():
        for name, tensor in (("k", layer.k), ("v", layer.v)):
            for block in range(len(tensor) // BLOCK_TOKENS):
                octets = np.ascontiguousarray(tensor[block * BLOCK_TOKENS :]).tobytes()
                found[f"{name} of layer {index} block {block}"] = octets[:PROBE]
    return found


def secret_needles(place: Place, keys: Path) -> dict[str, bytes]:
    """What nobody but the members may have, in every mode."""
    [key] = kvcs.load_protection_ring(keys)
    scope_key = bytes.fromhex(place.scope_key.read_text())
    ids = kvcs.load_kv_file(place.cache).token_ids[:8]
    found = {f"scope key, {form}": octets for form, octets in forms(scope_key).items()}
    found |= {f"protection key, {form}": octets for form, octets in forms(key.base_key).items()}
    found["tokens, text"] = ", ".join(map(str, ids)).encode()
    found["tokens, JSON"] = ",".join(map(str, ids)).encode()
    for kind in ("<i8", "<u4", ">u4"):
        found[f"tokens, {kind}"] = np.asarray(ids).astype(kind).tobytes()
    return found


def in_memory(pid: int, needles: dict[str, bytes]) -> set[str]:
    """Names of those needles that a process holds in memory that it can write to."""
    found: set[str] = set()
    with open(f"/proc/{pid}/maps", encoding="ascii") as maps, open(f"/proc/{pid}/mem", "rb") as mem:
        for line in maps:
            span, rights, *_ = line.split()
            if not rights.startswith("rw") or "[v" in line:
                continue
            start, end = (int(each, 16) for each in span.split("-"))
            mem.seek(start)
            try:
                octets = mem.read(end - start)
            except OSError:
                continue  # a guard page, or gone meanwhile
            found |= {name for name, needle in needles.items() if needle in octets}
    return found


@contextmanager
def published(place: Place, *protect: object) -> Iterator[tuple[Process, Process, str, list[Any]]]:
    """A relay and a publisher that says all it can; what a consumer's command needs."""
    quiet = ("--log-level", "debug")
    with Process(
        "relay", "--bind", "127.0.0.1:0", *place.keys, "--allow-anyone", "--lines", *quiet
    ) as relay:
        url = relay.event("listening")["url"]
        there = ("--relay", url, *place.member)
        with Process(
            "publish", place.cache, *there, *protect, "--retain", "600", "--lines", *quiet
        ) as publisher:
            publisher.event("published")
            yield relay, publisher, url, [*there, "--like", place.cache, *quiet]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("protected", [True, False])
def test_a_relay_holds_nothing_of_a_protected_cache(
    place: Place, keys: Path, run: Run, tmp_path: Path, protected: bool
) -> None:
    protect = ("--protect-key-file", keys, "--untrusted-relays") if protected else ()
    tensors, secrets = tensor_needles(place), secret_needles(place, keys)
    with published(place, *protect) as (relay, publisher, _, there):
        out = tmp_path / "got.safetensors"
        got = run("subscribe", *there, *protect, "--out", out, "--compare", place.cache, "--json")
        assert got.code == 0, got.err
        document = got.json()
        assert (document["protected"], document["equal"]) == (protected, True)
        try:
            held = in_memory(relay.pid, tensors | secrets)
        except PermissionError:
            pytest.skip("this machine lets nobody look into the memory of a process")
        # Unprotected, the relay's cache has the tensors: the look finds what is there.
        assert held <= (set() if protected else tensors.keys())
        assert bool(held) is not protected
        shown = [got.out, got.err]
        if protected:
            bare = run("fetch", *there, "--out", tmp_path / "x")
            assert bare.code == 2
            assert f"Key ID {2**32 + 1}" in bare.err
            shown += [bare.out, bare.err]
        for process in (publisher, relay):
            ended, _ = process.stop()
            shown += [ended.out, ended.err]
        text = "\n".join(shown).encode()
        written = {name for name, needle in (tensors | secrets).items() if needle in text}
        assert written == set()


def test_the_other_commands_read_protected_publications(
    place: Place, keys: Path, run: Run, tmp_path: Path
) -> None:
    protect = ("--protect-key-file", keys)
    with published(place, *protect) as (_, _, url, there):
        relay = ("--relay", url, *place.member)
        [listed] = run("ls", *relay, *protect, "--untrusted-relays", "--json").json()
        asked = ("inspect", listed["uri"], "--ca", place.pem.ca)
        facts = run(*asked, *protect, "--untrusted-relays", "--json").json()
        assert (facts["protected"], facts["complete"]) == (True, True)
        assert "protected  " in run(*asked, *protect).out.replace(":", " ")
        closed = run(*asked)
        assert closed.code == 2 and f"Key ID {2**32 + 1}" in closed.err
        got = run("fetch", *there, *protect, "--layers", "1-2", "--out", tmp_path / "some")
        assert got.code == 0, got.err
        assert "opened with the scope's keys" in got.out
        # A newer key alone does not open what an older one has sealed.
        newer = tmp_path / "newer.keys"
        ring = kvcs.load_protection_ring(keys)
        [old] = ring
        ring.rotate()
        ring.remove(old.key_id)
        kvcs.save_protection_ring(newer, ring)
        refused = run("fetch", *there, "--protect-key-file", newer, "--out", tmp_path / "none")
        assert refused.code == 2 and f"Key ID {old.key_id}" in refused.err


@pytest.mark.parametrize("name", ["publish", "subscribe", "fetch", "inspect"])
def test_relays_that_are_not_trusted_need_keys(place: Place, run: Run, name: str) -> None:
    words: dict[str, tuple[object, ...]] = {
        "publish": ("publish", place.cache, "--relay", "moqt://127.0.0.1:1", *place.member),
        "inspect": ("inspect", _uri(place), "--ca", place.pem.ca),
    }
    retrieving = (name, "--relay", "moqt://127.0.0.1:1", *place.member, "--like", place.cache)
    chosen = words.get(name, (*retrieving, "--compare", place.cache))
    ran = run(*chosen, "--untrusted-relays")
    assert ran.code == 2
    assert "--untrusted-relays needs --protect-key-file FILE" in ran.err


def _uri(place: Place) -> str:
    namespace = _prefix(place).namespace(bytes(16))
    return kvcs.kv.holder_uri("moqt://127.0.0.1:1", kvcs.PublicationNamespace.parse(namespace))


def test_nothing_in_memory_shows_itself(place: Place, keys: Path) -> None:
    """What a debugger, a log or a traceback would print of it."""
    ring = kvcs.load_protection_ring(keys)
    prefix = _prefix(place)
    name = FullTrackName(prefix.namespace(bytes(16)), b"k.raw.s0")
    sealer = Sealer(ring.current, name)
    tensor = next(iter(tensor_needles(place).values()))
    sealed = sealer.seal(Location(0, 0), 0, [tensor])
    opener = Opener(ring, name)
    texts = [repr(each) for each in (ring, ring.current, prefix, prefix.scope, sealer, opener)]
    for damage in (bytes(sealed)[:-1], b"", bytes(len(sealed))):
        with pytest.raises(kvcs.ObjectError) as refused:
            opener.open(Location(0, 0), 0, b"\x02\xf1\x00\x00\x00\x01", damage)
        texts.append(f"{refused.value!r} {refused.value}")
    said = "\n".join(texts).encode()
    needles = secret_needles(place, keys) | {"a tensor": tensor, "its hex": tensor.hex().encode()}
    assert {name for name, needle in needles.items() if needle in said} == set()
