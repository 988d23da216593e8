"""Files of keys: COSE_KeySets, one for each ring, and one for a producer's or issuer's own key.

A ring of public keys says whom to trust; one of protection keys is a secret of a scope's members.
Whoever can write a ring decides whom its readers trust, and whoever can read a signing key can sign
with it: both are written so that only their owner can (mode 0600).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcs.errors import FileError, TrustError
from kvcs.filekinds import file_kind, told
from kvcs.targets import check_replaced
from kvcs.trust.keys import KeyUse, PublicKey, SigningKey
from kvcs.trust.rings import (
    MAX_KEY_SET_OCTETS,
    KeyRing,
    encode_keys,
    read_key_set,
    read_signing_key,
)

if TYPE_CHECKING:
    from kvcs.kv.protection_keys import ProtectionRing

AnyPath = str | os.PathLike[str]

_KINDS: Final = {
    (False, KeyUse.MANIFEST): "a ring of producers' public keys, which --keys-file takes",
    (False, KeyUse.TOKEN): "a ring of issuers' public keys, which --issuers takes",
    (True, KeyUse.MANIFEST): "a producer's own key, which --sign-key-file takes",
    (True, KeyUse.TOKEN): "an issuer's own key, which --issuer-key-file takes",
}
"""What a COSE_KeySet is, by whether its keys are private and by what they are for."""


def load_key_ring(path: AnyPath, use: KeyUse = KeyUse.MANIFEST) -> KeyRing:
    """Read a ring of public keys.

    Args:
        path: a COSE_KeySet; `kvcs keygen` and `kvcs keys` make them.
        use: what its keys have to be for: manifests, or tokens.

    Raises:
        FileError: it cannot be read, or is no such ring.
    """
    data = _read(path)
    try:
        return KeyRing.decode(data, use)
    except TrustError as exc:
        raise _not_usable(path, data, exc) from None


def load_signing_key(path: AnyPath) -> SigningKey:
    """Read a producer's or an issuer's own key.

    Args:
        path: a COSE_KeySet of one private key; `kvcs keygen` makes it.

    Raises:
        FileError: it cannot be read, or is no such key. Nothing of it is repeated.
    """
    data = _read(path)
    try:
        return read_signing_key(data)
    except TrustError as exc:
        raise _not_usable(path, data, exc) from None


def save_key_ring(path: AnyPath, ring: KeyRing) -> None:
    """Write a ring in place of the file that is there, in one step.

    Raises:
        FileError: it cannot be written; then the file stays as it was.
    """
    if not len(ring):
        raise FileError(f"{os.fspath(path)}: a ring without keys trusts nobody; delete the file")
    _write(path, ring.encode(), replace=True)


def save_signing_key(path: AnyPath, key: SigningKey) -> None:
    """Write a signing key to a new file that only its owner can read.

    Raises:
        FileError: the file is there already, or cannot be written.
    """
    _write(path, encode_keys([key]), replace=False)


def load_protection_ring(path: AnyPath) -> ProtectionRing:
    """Read the protection keys of a scope.

    Args:
        path: a COSE_KeySet; `kvcs keygen --protection` makes it.

    Raises:
        FileError: it cannot be read, or is no such ring. Nothing of it is repeated.
    """
    # Here, since it brings numpy, and a relay, which reads rings of issuers, has no arrays.
    from kvcs.kv.protection_keys import ProtectionRing

    data = _read(path)
    try:
        return ProtectionRing.decode(data)
    except TrustError as exc:
        raise _not_usable(path, data, exc) from None


def save_protection_ring(path: AnyPath, ring: ProtectionRing, *, replace: bool = False) -> None:
    """Write the protection keys of a scope to a file that only its owner can read.

    Args:
        path: the file.
        ring: its keys.
        replace: take the place of the file that is there, in one step.

    Raises:
        FileError: the file is there already and is not replaced, or cannot be written; then it
            stays as it was.
    """
    if not len(ring):
        raise FileError(f"{os.fspath(path)}: a ring without keys opens nothing; delete the file")
    _write(path, ring.encode(), replace=replace)


class RingFile:
    """A ring that follows its file: keys come and go without a restart.

    Args:
        path: a COSE_KeySet.
        use: what its keys are for.

    Raises:
        FileError: it cannot be read now, or is no such ring.
    """

    def __init__(self, path: AnyPath, use: KeyUse = KeyUse.MANIFEST) -> None:
        self.path = path
        """The file."""
        self.ring = KeyRing(use=use)
        """The keys; the same ring for ever."""
        self._seen: tuple[int, int, int] | None = None
        self.reload()

    def changed(self) -> bool:
        """Whether the file is another one than was read last; False where there is none."""
        state = _state(self.path)
        return state is not None and state != self._seen

    def reload(self) -> None:
        """Read the file again.

        Raises:
            FileError: it cannot be read, or is no such ring; then the ring stays as it was.
        """
        self._seen = _state(self.path)  # before it is read: a later change is then seen, too
        self.ring.replace(load_key_ring(self.path, self.ring.use))


def _state(path: AnyPath) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(path: AnyPath) -> bytes:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_KEY_SET_OCTETS + 1)
    except OSError as exc:
        raise FileError(f"{os.fspath(path)}: {exc.strerror or exc}") from exc
    if len(data) > MAX_KEY_SET_OCTETS:
        raise FileError(f"{os.fspath(path)}: longer than {MAX_KEY_SET_OCTETS} octets")
    return data


def _not_usable(path: AnyPath, data: bytes, why: TrustError) -> FileError:
    """What to raise for a file of another kind than was expected; says of which one it is."""
    return FileError(f"{os.fspath(path)}: {why}{told(_key_kind(data) or file_kind(data))}")


def _key_kind(data: bytes) -> str | None:
    """What the keys of a file are for, and which option takes it; None where it has none."""
    from kvcs.kv.protection_keys import ProtectionRing  # as above

    try:
        keys = read_key_set(data)
    except TrustError:
        try:
            ProtectionRing.decode(data)
        except TrustError:
            return None
        return "a scope's protection keys, which --protect-key-file takes"
    uses = {(isinstance(key, SigningKey), _use(key)) for key in keys}
    return _KINDS.get(uses.pop()) if len(uses) == 1 else None


def _use(key: PublicKey | SigningKey) -> KeyUse:
    return key.public.use if isinstance(key, SigningKey) else key.use


def _write(path: AnyPath, data: bytes, *, replace: bool) -> None:
    target = Path(path)
    made = target.with_name(f".{target.name}.{os.getpid()}.part") if replace else target
    begun = False
    if replace:
        check_replaced(target)
    try:
        # O_EXCL also refuses to write through a symbolic link.
        descriptor = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        begun = True
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        if replace:
            made.replace(target)
    except OSError as exc:
        if begun:
            made.unlink(missing_ok=True)
        if isinstance(exc, FileExistsError):
            raise FileError(f"{target} is there already; it is not overwritten") from exc
        raise FileError(f"{target}: {exc.strerror or exc}") from exc
