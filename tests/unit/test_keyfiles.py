"""Files of keys: who may read them, what is refused, and a ring that follows its file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from kvcs.errors import FileError
from kvcs.keyfiles import (
    RingFile,
    load_key_ring,
    load_protection_ring,
    load_signing_key,
    save_key_ring,
    save_protection_ring,
    save_signing_key,
)
from kvcs.kv import ProtectionRing
from kvcs.trust import KeyRing, KeyUse, SigningKey
from kvcs.trust.rings import MAX_KEY_SET_OCTETS


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_there_and_back_for_the_owner_alone(tmp_path: Path) -> None:
    key = SigningKey.generate()
    mine, ring = tmp_path / "mine.key", tmp_path / "ring"
    before = os.umask(0)
    try:
        save_signing_key(mine, key)
        save_key_ring(ring, KeyRing([key.public]))
        save_key_ring(ring, KeyRing([key.public, SigningKey.generate().public]))
    finally:
        os.umask(before)
    assert mode(mine) == mode(ring) == 0o600
    assert load_signing_key(mine).public == key.public
    assert len(load_key_ring(ring)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.key", "ring"]


def test_a_signing_key_is_never_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "mine.key"
    save_signing_key(path, SigningKey.generate())
    before = path.read_bytes()
    with pytest.raises(FileError, match="there already"):
        save_signing_key(path, SigningKey.generate())
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"-----BEGIN CERTIFICATE-----\nMII", r"a certificate \(PEM\), which --cert, --ca"),
        (b"a note\n-----BEGIN EC PRIVATE KEY-----\nMII", r"a private key of TLS .* --key and"),
        (b"-----BEGIN OPENSSH KEY-----\n", r"a PEM file \(OPENSSH KEY\)"),
        (b"0f" * 32 + b"\n", "a scope key, which --scope-key-file takes"),
        (b"", "an empty file"),
        ((99).to_bytes(8, "little") + b'{"a":1}', "a safetensors file"),
        (b"\x81\xa1\x01\x09", "a COSE_KeySet, as `kvcs keygen` writes"),
    ],
)
def test_a_file_of_another_kind_is_called_what_it_is(
    tmp_path: Path, content: bytes, kind: str
) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    for load in (load_key_ring, load_signing_key, load_protection_ring):
        with pytest.raises(FileError, match=f"file: .*; this is {kind}"):
            load(path)


def test_keys_for_something_else_are_told_with_the_option_that_takes_them(tmp_path: Path) -> None:
    producer, issuer = SigningKey.generate(), SigningKey.generate(use=KeyUse.TOKEN, name="me")
    own, own_issuer = tmp_path / "own", tmp_path / "own_issuer"
    producers, issuers = tmp_path / "producers", tmp_path / "issuers"
    protection = tmp_path / "protection"
    save_signing_key(own, producer)
    save_signing_key(own_issuer, issuer)
    save_key_ring(producers, KeyRing([producer.public]))
    save_key_ring(issuers, KeyRing([issuer.public], use=KeyUse.TOKEN))
    ring = ProtectionRing(scope_id=b"s" * 16)
    ring.rotate()
    save_protection_ring(protection, ring)
    options = {
        own: "--sign-key-file",
        own_issuer: "--issuer-key-file",
        producers: "--keys-file",
        issuers: "--issuers",
        protection: "--protect-key-file",
    }
    for path, option in options.items():
        for use in KeyUse:
            if option != {KeyUse.MANIFEST: "--keys-file", KeyUse.TOKEN: "--issuers"}[use]:
                with pytest.raises(FileError, match=f"; this is .* which {option} takes$"):
                    load_key_ring(path, use)
        if path is not protection:
            with pytest.raises(FileError, match=f"; this is .* which {option} takes$"):
                load_protection_ring(path)
    for path in (producers, issuers, protection):
        with pytest.raises(FileError, match=f"; this is .* which {options[path]} takes$"):
            load_signing_key(path)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    key = SigningKey.generate()
    mine, ring, junk = tmp_path / "mine.key", tmp_path / "ring", tmp_path / "junk"
    save_signing_key(mine, key)
    save_key_ring(ring, KeyRing([key.public]))
    junk.write_bytes(b"junk")
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(MAX_KEY_SET_OCTETS + 1)
    for load, path in (
        (load_key_ring, mine),
        (load_key_ring, junk),
        (load_key_ring, large),
        (load_key_ring, tmp_path / "absent"),
        (load_signing_key, ring),
        (load_signing_key, junk),
        (load_signing_key, tmp_path),
    ):
        with pytest.raises(FileError, match=path.name):
            load(path)
    with pytest.raises(FileError, match="signs manifests"):
        load_key_ring(ring, KeyUse.TOKEN)
    with pytest.raises(FileError, match="trusts nobody"):
        save_key_ring(ring, KeyRing())
    with pytest.raises(FileError, match="absent"):
        save_key_ring(tmp_path / "absent" / "ring", KeyRing([key.public]))


def test_a_ring_follows_its_file(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    old, new = SigningKey.generate(), SigningKey.generate()
    save_key_ring(path, KeyRing([old.public]))
    followed = RingFile(path)
    assert not followed.changed()
    save_key_ring(path, KeyRing([new.public]))
    assert followed.changed()
    followed.reload()
    assert not followed.changed()
    assert list(followed.ring) == [new.public]


def test_a_file_that_breaks_leaves_the_ring_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    key = SigningKey.generate()
    save_key_ring(path, KeyRing([key.public]))
    followed = RingFile(path)
    path.write_bytes(b"junk")
    assert followed.changed()
    with pytest.raises(FileError):
        followed.reload()
    assert not followed.changed()  # it is not tried again before it changes
    path.unlink()
    assert not followed.changed()
    assert list(followed.ring) == [key.public]
    with pytest.raises(FileError):
        RingFile(path)


def test_protection_keys_are_for_their_owner_only(tmp_path: Path) -> None:
    ring = ProtectionRing(scope_id=b"s" * 16)
    key = ring.rotate()
    path = tmp_path / "protect.keys"
    save_protection_ring(path, ring)
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(load_protection_ring(path)) == [key]
    with pytest.raises(FileError, match="is there already"):
        save_protection_ring(path, ring)
    newer = ring.rotate()
    save_protection_ring(path, ring, replace=True)
    assert path.stat().st_mode & 0o777 == 0o600
    assert load_protection_ring(path).current == newer
    with pytest.raises(FileError, match="opens nothing"):
        save_protection_ring(path, ProtectionRing(), replace=True)
    path.write_bytes(key.base_key)
    with pytest.raises(FileError) as refused:
        load_protection_ring(path)
    assert str(path) in str(refused.value)
    with pytest.raises(FileError, match="No such file"):
        load_protection_ring(tmp_path / "absent")
