"""The arrows between rooms: which room may import which, held by walking each file's imports."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvcs"

CLOCKS = {"time", "datetime", "sched"}
RANDOMNESS = {"random", "secrets", "uuid"}
INPUT_OUTPUT = {"asyncio", "http", "select", "selectors", "socket", "socketserver", "ssl"} | {
    "subprocess",
    "threading",
    "urllib.request",
}
COSE = {"cbor2", "cryptography", "pycose"}
ARRAYS = {"ml_dtypes", "numpy"}
EVERYTHING = {"*"}


@dataclass(frozen=True, slots=True)
class Room:
    """One row of the table of rooms. A name covers itself and what is below it."""

    kvcs: set[str]
    """Names below `kvcs` that it may import, apart from itself."""

    libraries: set[str]
    """Third-party packages that it may import."""

    never: set[str]
    """Modules of the standard library that it may not import."""


ABOVE_THE_SHELL = {
    "contexts",
    "errors",
    "fallback",
    "kv",
    "kvfile",
    "moqt",
    "observe",
    "publisher",
    "quic",
    "recovery",
    "subscriber",
    "trust",
}
SHARED = {"errors", "moqt.session"} | {
    f"moqt.{path.stem}" for path in (PACKAGE / "moqt").glob("*.py") if path.stem != "__init__"
}
"""What both sides of a session use, and the session, whose parts these are."""

PURE = INPUT_OUTPUT | CLOCKS | RANDOMNESS

# The longest name that covers a module decides, so `relay.server` has a row of its own.
ROOMS = {
    "errors": Room(set(), set(), PURE),
    "contexts": Room({"errors"}, set(), PURE),
    "moqt": Room({"errors", "moqt.session", "moqt.track"}, set(), PURE),
    "moqt.session": Room({"errors", "moqt"}, set(), PURE),
    "moqt.track": Room(SHARED, set(), PURE),
    "moqt.sending": Room({"moqt.track"} | SHARED, set(), PURE),
    "moqt.incoming": Room({"moqt.track"} | SHARED, set(), PURE),
    "moqt.asking": Room({"moqt.sending", "moqt.track"} | SHARED, set(), PURE),
    "trust": Room({"errors"}, COSE, INPUT_OUTPUT | CLOCKS),
    "kv": Room(
        {"errors", "moqt.names", "moqt.wire", "trust"},
        ARRAYS | COSE | {"rfc8785"},
        INPUT_OUTPUT | CLOCKS,
    ),
    "planner": Room({"errors", "kv"}, set(), INPUT_OUTPUT | CLOCKS),
    "targets": Room({"errors"}, set(), INPUT_OUTPUT | CLOCKS),
    "filekinds": Room(set(), set(), PURE),
    "keyfiles": Room(
        {"errors", "filekinds", "kv", "targets", "trust"}, set(), INPUT_OUTPUT | CLOCKS
    ),
    "kvfile": Room(
        {"errors", "filekinds", "kv", "targets"},
        ARRAYS | {"safetensors"},
        INPUT_OUTPUT | CLOCKS,
    ),
    "observe": Room({"errors"}, {"prometheus_client", "structlog"}, set()),
    "access": Room({"errors", "moqt", "trust"}, set(), PURE),
    "access.guard": Room(
        {"access", "errors", "keyfiles", "moqt", "observe", "trust"}, {"structlog"}, set()
    ),
    "relay": Room({"access", "errors", "moqt", "trust"}, set(), PURE),
    "relay.server": Room(
        {"access", "contexts", "errors", "keyfiles", "moqt", "observe"}
        | {"quic", "relay", "trust"},
        {"structlog"},
        set(),
    ),
    "relay.uplinks": Room({"errors", "moqt", "observe", "quic", "relay"}, {"structlog"}, set()),
    "relay.disk": Room({"errors", "moqt", "observe", "relay"}, set(), set()),
    "relay.admin": Room({"errors", "observe", "relay"}, {"prometheus_client", "structlog"}, set()),
    "quic": Room(
        {"access", "contexts", "errors", "moqt", "observe", "quic.aioquic_backend", "trust"},
        {"structlog"},
        set(),
    ),
    "quic.aioquic_backend": Room(
        {"errors", "filekinds", "moqt", "observe", "quic"},
        {"aioquic", "cryptography", "structlog"},
        set(),
    ),
    "publisher": Room(ABOVE_THE_SHELL, ARRAYS | {"structlog"}, set()),
    "subscriber": Room(ABOVE_THE_SHELL, ARRAYS | {"structlog"}, set()),
    "recovery": Room(ABOVE_THE_SHELL, ARRAYS | {"structlog"}, set()),
    # aiohttp is imported by name, when an HTTP source or server begins to work.
    "fallback": Room(
        {"contexts", "errors", "kv", "moqt", "observe", "quic.tokens", "trust"},
        {"structlog"},
        set(),
    ),
    "integrations": Room(
        EVERYTHING, {"lmcache", "numpy", "structlog", "torch", "transformers", "vllm"}, set()
    ),
    "bench": Room(EVERYTHING, ARRAYS | {"aiohttp", "aioquic", "matplotlib", "redis"}, set()),
    "cli": Room(
        EVERYTHING, {"cryptography", "numpy", "rich", "structlog", "typer", "uvloop"}, set()
    ),
    "testing": Room(EVERYTHING, EVERYTHING, set()),
    "__init__": Room(EVERYTHING, set(), set()),
    "__main__": Room({"cli"}, set(), set()),
}
"""Every room of the design; a new one adds its row."""


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name."""

    module: str
    """Absolute name of the module, or of the name in it where that is a module too."""

    names: tuple[str, ...]
    """Names that are taken from the module."""

    line: int
    """Line of the statement."""


def _is_module(dotted: str) -> bool:
    path = ROOT.joinpath(*dotted.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def _absolute(node: ast.ImportFrom, package: str) -> str:
    if node.level == 0:
        return node.module or ""
    base = package.split(".")
    base = base[: len(base) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def imports(source: str, package: str) -> Iterator[Import]:
    """Find every import of a module, also those inside functions and under TYPE_CHECKING.

    Args:
        source: text of the module.
        package: name of the package that the module is in, for relative imports.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, (), node.lineno)
        elif isinstance(node, ast.ImportFrom):
            module = _absolute(node, package)
            for alias in node.names:
                dotted = f"{module}.{alias.name}"
                if module.split(".")[0] == "kvcs" and _is_module(dotted):
                    yield Import(dotted, (), node.lineno)
                else:
                    yield Import(module, (alias.name,), node.lineno)


def private_attributes(source: str, package: str) -> Iterator[Import]:
    """Find ``module._name`` where ``module`` is an imported module of kvcs."""
    tree = ast.parse(source)
    bound: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                dotted = f"{_absolute(node, package)}.{alias.name}"
                if dotted.startswith("kvcs.") and _is_module(dotted):
                    bound[alias.asname or alias.name] = dotted
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.asname and alias.name.startswith("kvcs."):
                    bound[alias.asname] = alias.name
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in bound
        ):
            yield Import(bound[node.value.id], (node.attr,), node.lineno)


def room_of(module: str) -> str:
    """Name of the row that covers a module of kvcs, given without the leading ``kvcs``."""
    covering = [name for name in ROOMS if module == name or module.startswith(f"{name}.")]
    if not covering:
        raise AssertionError(f"kvcs.{module} has no row in ROOMS; add one")
    return max(covering, key=len)


def _covers(allowed: set[str], name: str) -> bool:
    return allowed == EVERYTHING or any(
        name == entry or name.startswith(f"{entry}.") for entry in allowed
    )


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


def violations(module: str, package: str, source: str) -> list[str]:
    """Say which arrows one module breaks.

    Args:
        module: name of the module without the leading ``kvcs.``; ``__init__`` for the package.
        package: absolute name of the package that the module is in.
        source: text of the module.
    """
    name = room_of(module)
    room = ROOMS[name]
    found: list[str] = []
    for item in imports(source, package):
        top, _, below = item.module.partition(".")
        where = f"kvcs.{module}:{item.line}"
        if top == "kvcs":
            target = below or "__init__"
            if room_of(target) != name and not _covers(room.kvcs, target):
                found.append(f"{where}: {name} may not import kvcs.{target}")
        elif top in sys.stdlib_module_names:
            for dotted in (item.module, *(f"{item.module}.{taken}" for taken in item.names)):
                if _covers(room.never, dotted):
                    found.append(f"{where}: {name} may not import {dotted}")
        elif not _covers(room.libraries, top):
            found.append(f"{where}: {name} may not import the library {top}")
    for item in [*imports(source, package), *private_attributes(source, package)]:
        top, _, below = item.module.partition(".")
        # `quic` and its backend are two rows of the table and one room to the reader.
        if top != "kvcs" or below.split(".")[0] == module.split(".")[0]:
            continue
        for part in [*below.split("."), *item.names]:
            if _is_private(part):
                found.append(f"kvcs.{module}:{item.line}: {part} is private to kvcs.{below}")
    return found


def _modules() -> Iterator[tuple[str, str, Path]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        package = ".".join(parts[:-1])
        dotted = parts[1:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts[1:]
        yield ".".join(dotted), package, path


MODULES = list(_modules())


@pytest.mark.parametrize(
    ("module", "package", "path"), MODULES, ids=[module for module, _, _ in MODULES]
)
def test_module_keeps_to_its_room(module: str, package: str, path: Path) -> None:
    assert violations(module, package, path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    ("module", "source", "complaint"),
    [
        ("moqt.wire", "import asyncio", "moqt may not import asyncio"),
        ("moqt.wire", "from time import monotonic", "moqt may not import time"),
        ("moqt.wire", "from urllib import request", "moqt may not import urllib.request"),
        ("moqt.wire", "import numpy as np", "moqt may not import the library numpy"),
        ("moqt.wire", "from kvcs.kv import manifest", "moqt may not import kvcs.kv"),
        ("moqt.wire", "from ..kv.payload import x", "moqt may not import kvcs.kv.payload"),
        ("moqt.wire", "def f():\n    import aioquic", "moqt may not import the library aioquic"),
        (
            "moqt.track.store",
            "from kvcs.moqt.sending import delivery",
            "moqt.track may not import kvcs.moqt.sending",
        ),
        ("moqt.wire", "from kvcs.moqt.asking import load", "moqt may not import kvcs.moqt.asking"),
        (
            "kv.ledger",
            "from kvcs.moqt.session import Session",
            "kv may not import kvcs.moqt.session",
        ),
        ("kv.ledger", "import asyncio.events", "kv may not import asyncio"),
        ("trust.tokens", "import numpy", "trust may not import the library numpy"),
        ("relay.core", "import asyncio", "relay may not import asyncio"),
        ("relay.core", "from kvcs.relay.server import a", "relay may not import kvcs.relay.server"),
        ("relay.core", "from kvcs.kv.payload import x", "relay may not import kvcs.kv.payload"),
        ("relay.server", "from kvcs.kv import payload", "relay.server may not import kvcs.kv"),
        ("quic.connection", "import aioquic.quic", "quic may not import the library aioquic"),
        ("quic.endpoint", "import kvcs", "quic may not import kvcs.__init__"),
        ("publisher", "from kvcs.relay import core", "publisher may not import kvcs.relay"),
        ("errors", "from kvcs.moqt import names", "errors may not import kvcs.moqt.names"),
        ("cli.main", "from kvcs.kv.payload import _read", "_read is private to kvcs.kv.payload"),
        ("cli.main", "import kvcs.kv.layout as a\na._x", "_x is private to kvcs.kv.layout"),
        ("cli.main", "from kvcs.kv import layout\nlayout._x", "_x is private to kvcs.kv.layout"),
        ("cli.main", "import torch", "cli may not import the library torch"),
    ],
)
def test_a_broken_arrow_is_found(module: str, source: str, complaint: str) -> None:
    package = "kvcs." + module.rpartition(".")[0] if "." in module else "kvcs"
    found = violations(module, package, source)
    assert any(complaint in text for text in found), found


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("moqt.data", "from kvcs.errors import SessionError\nfrom kvcs.moqt.wire import _x"),
        ("moqt.uri", "from urllib.parse import urlsplit"),
        ("kv.ledger", "import numpy\nfrom kvcs.moqt.names import Location"),
        ("quic.endpoint", "import asyncio\nfrom kvcs.quic.aioquic_backend import adapter"),
        ("relay.server", "import asyncio\nfrom kvcs.relay.core import Relay"),
        ("cli.main", "from kvcs import __version__\nimport typer"),
    ],
)
def test_a_kept_arrow_is_not_blamed(module: str, source: str) -> None:
    assert violations(module, f"kvcs.{module.rpartition('.')[0]}", source) == []


def test_a_module_without_a_row_is_found() -> None:
    with pytest.raises(AssertionError, match="no row"):
        room_of("attic.things")
