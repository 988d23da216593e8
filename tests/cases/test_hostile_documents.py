"""Nothing that comes from a peer is ever code: no unsafe deserialisation, and typed errors only.

Memory is measured: whatever the input, parsing it takes no more than 32 times its size and 1 MiB.
"""

from __future__ import annotations

import ast
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import kvcs
from kvcs.errors import KvcsError
from kvcs.kv import Descriptor, PayloadHeader, parse_holder_uri, parse_manifest
from kvcs.moqt.names import parse_name_text
from kvcs.moqt.uri import parse_uri
from kvcs.trust import (
    PRODUCER,
    KeyRing,
    KeyUse,
    SigningKey,
    encode_keys,
    issue,
    read_claims,
    read_sign1,
    scope_rule,
    sign1,
)
from tests.unit.kv.toy import toy_descriptor, toy_publication

PACKAGE = Path(kvcs.__file__).parent
INPUTS = 10_000

# Nothing of these

MODULES = {
    "cloudpickle",
    "code",
    "codeop",
    "dill",
    "hickle",
    "joblib",
    "jsonpickle",
    "marshal",
    "pickle",
    "runpy",
    "shelve",
    "xmlrpc",
    "yaml",
}
"""Modules that run, or rebuild objects from, what they read."""

NAMES = {"__import__", "compile", "eval", "exec"}
ATTRIBUTES = {("torch", "load"), ("np", "load"), ("numpy", "load"), ("os", "system")}
PICKLING = {"allow_pickle", "weights_only"}


def trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield path, ast.parse(path.read_text(), str(path))


def unsafe(tree: ast.Module) -> list[str]:
    """What a module uses that must not be there, with lines."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            names = []
        found += [f"{node.lineno}: import {n}" for n in names if n.split(".")[0] in MODULES]
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in NAMES:
                found.append(f"{node.lineno}: {function.id}()")
            if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
                if (function.value.id, function.attr) in ATTRIBUTES:
                    found.append(f"{node.lineno}: {function.value.id}.{function.attr}()")
            found += [f"{node.lineno}: {k.arg}=" for k in node.keywords if k.arg in PICKLING]
            found += [
                f"{node.lineno}: shell="
                for keyword in node.keywords
                if keyword.arg == "shell" and getattr(keyword.value, "value", None)
            ]
    return found


def test_nothing_in_the_package_runs_what_it_reads() -> None:
    modules = list(trees())
    assert len(modules) > 100
    for path, tree in modules:
        assert unsafe(tree) == [], path


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import torch\ntorch.load(f)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "from yaml import load",
    ],
)
def test_the_check_finds_what_it_looks_for(source: str) -> None:
    assert unsafe(ast.parse(source))


# Documents that were changed

KEY = SigningKey.generate(use=KeyUse.MANIFEST, name="producer")
ISSUER = SigningKey.generate(use=KeyUse.TOKEN, name="issuer")
TOKEN = issue(
    ISSUER,
    audience=["relay"],
    rules=[scope_rule(bytes(16), PRODUCER)],
    issued_at=0,
    lifetime=60,
    token_id=bytes(8),
)
HEADER = PayloadHeader(
    component=1,
    layer=3,
    block=2,
    token_start=8,
    token_count=4,
    codec=0,
    data_length=128,
    data_digest=bytes(32),
)
NAME = "kvcs-1-.00.ff--k.2eraw.2es0"
URI = "moqt://relay.example:4433/path?query#kvcs:" + "A" * 22

Parse = Callable[[bytes], object]

DOCUMENTS: dict[str, tuple[bytes, Parse]] = {
    "manifest": (toy_publication((1, 1), layers=2).writer().to_json_bytes(), parse_manifest),
    "descriptor": (toy_descriptor().canonical(), Descriptor.parse),
    "payload header": (HEADER.pack(), PayloadHeader.unpack),
    "signed message": (
        sign1(b"payload", KEY),
        lambda octets: read_sign1(octets, "message", max_octets=4096),
    ),
    "key ring": (encode_keys([KEY.public]), KeyRing.decode),
    "token": (TOKEN, read_claims),
    "name": (NAME.encode(), lambda octets: parse_name_text(octets.decode("latin-1"))),
    "uri": (URI.encode(), lambda octets: parse_uri(octets.decode("latin-1"))),
    "holder": (URI.encode(), lambda octets: parse_holder_uri(octets.decode("latin-1"))),
}


def mutated(octets: bytes, choose: random.Random) -> bytes:
    result = bytearray(octets)
    for _ in range(choose.randrange(1, 6)):
        at = choose.randrange(len(result) + 1)
        change = choose.randrange(6)
        if change == 0 and at < len(result):
            result[at] = choose.randrange(256)
        elif change == 1:
            del result[at : at + choose.randrange(1, 20)]
        elif change == 2:
            result[at:at] = choose.randbytes(choose.randrange(1, 9))
        elif change == 3:
            result[at:at] = result[at : at + choose.randrange(1, 60)] * choose.randrange(1, 9)
        elif change == 4 and at < len(result):
            result[at] ^= 1 << choose.randrange(8)
        else:
            result[at:at] = choose.choice(
                (b"[" * 500, b"{" * 300, b"9" * 400, b"\x9f" * 300, b"\xbf" * 200, b"\xff" * 9)
            )
    return bytes(result)


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_changed_documents_raise_typed_errors_in_bounded_memory(kind: str) -> None:
    good, parse = DOCUMENTS[kind]
    choose = random.Random(kind)
    refused = 0
    parse_or_not(parse, good)
    for number in range(INPUTS // len(DOCUMENTS) + 1):
        octets = mutated(good, choose)
        if number % 20:
            refused += parse_or_not(parse, octets)
            continue
        tracemalloc.start()
        try:
            refused += parse_or_not(parse, octets)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak <= 32 * len(octets) + 2**20, octets[:80]
    assert refused > INPUTS // len(DOCUMENTS) // 4  # the changes do hit


def parse_or_not(parse: Parse, octets: bytes) -> bool:
    """Parse; whether it was refused. Anything but an error of ours fails the test."""
    try:
        parse(octets)
    except KvcsError:
        return True
    return False


@pytest.mark.parametrize("kind", ["manifest", "descriptor", "signed message", "key ring", "token"])
@pytest.mark.parametrize("filler", [b"[", b'{"a":', b"1", b"\x9f", b"\x81", b" ", b'"'])
def test_sizes_are_limited_first(kind: str, filler: bytes) -> None:
    """Octets by the million: refused, and not by running out of stack or memory."""
    _, parse = DOCUMENTS[kind]
    octets = filler * (2_000_000 // len(filler))
    tracemalloc.start()
    try:
        assert parse_or_not(parse, octets)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak <= 32 * len(octets) + 2**20
