"""What the package as a whole promises: its public names, no unsafe reader, light imports."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import kvcs

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 500
UNSAFE_MODULES = {
    "cPickle",
    "cloudpickle",
    "dill",
    "imp",
    "joblib",
    "jsonpickle",
    "marshal",
    "pickle",
    "shelve",
}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load"}
HEAVY_MODULES = ("torch", "transformers", "typer", "matplotlib")
"""What no public name brings; structlog brings rich, which no room but the command uses."""

PART_OF_NAMES = ("kvcs.errors", "numpy", "aioquic", "cryptography", "structlog", "asyncio", "ssl")
"""What some public names bring, and `import kvcs` does not."""


def test_all_names_what_the_package_shows() -> None:
    assert dir(kvcs) == sorted(kvcs.__all__)
    assert len(kvcs.__all__) == len(set(kvcs.__all__))
    for name in kvcs.__all__:
        assert getattr(kvcs, name) is not None
    with pytest.raises(AttributeError, match="Conect"):
        _ = kvcs.Conect  # type: ignore[attr-defined]


def test_names_come_from_where_type_checkers_are_told() -> None:
    tree = ast.parse((ROOT / "kvcs" / "__init__.py").read_text(encoding="utf-8"))
    [block] = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    told = {
        alias.asname or alias.name: (node.module, alias.name)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    found = {
        name: (home, kvcs._OTHERWISE.get(name, name))
        for home, names in kvcs._HOMES.items()
        for name in names
    }
    assert found == told
    assert sorted([*found, "__version__"]) == sorted(kvcs.__all__)


def test_every_public_name_says_what_it_is() -> None:
    bare = [
        name
        for name in kvcs.__all__
        if callable(getattr(kvcs, name)) and not (getattr(kvcs, name).__doc__ or "").strip()
    ]
    assert bare == []


def test_version_is_that_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert kvcs.__version__ == project["project"]["version"]


def test_the_package_is_typed() -> None:
    assert (ROOT / "kvcs" / "py.typed").is_file()


def _sources() -> list[Path]:
    found = list((ROOT / "kvcs").rglob("*.py"))
    for folder in ("scripts", "certs", "examples", "bench"):
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and (
                path.suffix == ".py" or ("python" in _first_line(path) and not path.suffix)
            ):
                found.append(path)
    return sorted(found)


def _first_line(path: Path) -> str:
    with path.open("rb") as file:
        return file.readline(200).decode("ascii", "replace")


def unsafe(source: str) -> Iterator[str]:
    """Say where a module reads or runs what can carry code."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            # `from torch import load` would hide the call below.
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            names = []
        for name in names:
            if name.split(".")[0] in UNSAFE_MODULES or name in UNSAFE_CALLS:
                yield f"line {node.lineno}: imports {name}"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in UNSAFE_CALLS:
                yield f"line {node.lineno}: calls {called}"
            for keyword in node.keywords:
                is_off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg == "allow_pickle" and not is_off:
                    yield f"line {node.lineno}: allows pickles"


def test_nothing_reads_what_can_carry_code() -> None:
    sources = _sources()
    assert sources
    found = [
        f"{path.relative_to(ROOT)} {text}"
        for path in sources
        for text in unsafe(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "def f():\n    import dill.source",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "import yaml\nyaml.load(x)",
        "eval('1')",
        "np.load(p, allow_pickle=True)",
        "np.load(p, allow_pickle=flag)",
    ],
)
def test_an_unsafe_reader_is_found(source: str) -> None:
    assert list(unsafe(source))


def test_a_safe_reader_is_not_blamed() -> None:
    source = "import json\njson.loads(x)\nnp.load(p, allow_pickle=False)\nmodel.eval()"
    assert list(unsafe(source)) == []


def test_no_module_is_too_long_to_read() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for path in _sources()
    }
    assert {path: lines for path, lines in lengths.items() if lines > MAX_LINES} == {}


def _brought(program: str, *names: str) -> str:
    """Which of some modules are there when a program has ended in a process of its own."""
    result = subprocess.run(
        [
            sys.executable,
            "-c",
            f"import sys\n{program}\n"
            f"print(*[name for name in {names!r} if name in sys.modules], file=sys.stderr)",
        ],
        cwd=ROOT,
        # Uncompiled, every process would compile hundreds of modules again.
        env={name: it for name, it in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stderr.strip()


def test_import_brings_nothing_but_names() -> None:
    assert _brought("import kvcs", *HEAVY_MODULES, *PART_OF_NAMES) == ""
    assert _brought("import kvcs\nkvcs.UsageError", *PART_OF_NAMES) == "kvcs.errors"


def test_rooms_are_there_without_being_imported() -> None:
    """As docs/operations.md has it for `kvcs.observe.metrics`."""
    program = "import kvcs\nkvcs.observe.metrics.requests_unauthorized\n" + "\n".join(
        f"assert kvcs.{room}.__name__ == 'kvcs.{room}'" for room in sorted(kvcs._ROOMS)
    )
    assert _brought(program, "kvcs.observe") == "kvcs.observe"


def test_one_thread_at_a_time_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two that import parts of one package at once may find modules that are half made."""
    for name in ("UsageError", "Scheme"):
        monkeypatch.delitem(vars(kvcs), name, raising=False)
    entered, together = threading.Event(), []
    other = threading.Thread(target=lambda: kvcs.Scheme)

    def importing(home: str) -> Any:
        if home == "kvcs.errors":
            other.start()
            together.append(entered.wait(0.5))
        else:
            entered.set()
        return import_module(home)

    monkeypatch.setattr(kvcs, "import_module", importing)
    assert kvcs.UsageError
    other.join()
    assert together == [False] and entered.is_set() and kvcs.Scheme


def test_a_function_that_may_be_called_in_a_thread_imports_nothing_there() -> None:
    program = "import kvcs\nkvcs.load_protection_ring"
    brought = "kvcs.keyfiles", "kvcs.kv.protection_keys"
    assert _brought(program, *brought) == " ".join(brought)
    assert _brought("import kvcs\nkvcs.load_key_ring", *brought) == "kvcs.keyfiles"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_process_that_was_forked_in_the_middle_of_an_import_imports() -> None:
    program = """
import kvcs, os, signal, threading, warnings
held, over = threading.Event(), threading.Event()
def hold():
    with kvcs._one_by_one:
        held.set()
        over.wait()
thread = threading.Thread(target=hold)
thread.start()
held.wait()
warnings.simplefilter("ignore")
child = os.fork()
if not child:
    signal.alarm(30)
    os._exit(kvcs.UsageError is None)
status = os.waitpid(child, 0)[1]
over.set()
thread.join()
assert status == 0, status
"""
    assert _brought(program, "kvcs.errors") == ""


def test_no_public_name_brings_a_heavy_library() -> None:
    assert _brought("from kvcs import *", *HEAVY_MODULES, "kvcs.errors") == "kvcs.errors"


@pytest.mark.parametrize("arguments", [["--version"], ["--help"]])
def test_a_look_at_the_command_brings_no_room(arguments: list[str]) -> None:
    rooms = ("kvcs.moqt", "kvcs.quic", "kvcs.kv", "kvcs.trust", "kvcs.observe", "rich")
    program = f"from kvcs.cli import main\nassert main({arguments!r}) == 0"
    shown = (*HEAVY_MODULES, *PART_OF_NAMES, *rooms)
    # asyncio runs commands, and ssl comes with it.
    assert _brought(program, *shown) == "typer kvcs.errors asyncio ssl"


def test_a_relay_is_started_without_what_it_never_does() -> None:
    program = "from kvcs.cli import main\nassert main(['relay', '--help']) == 0"
    shown = ("kvcs.kv", "kvcs.publisher", "kvcs.subscriber", "kvcs.fallback", "kvcs.cli.demo")
    assert _brought(program, *shown, "numpy", "kvcs.relay.server") == "kvcs.relay.server"
