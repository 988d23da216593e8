"""What docs/relays.md shows is run as it stands, but for names, ports and files."""

from __future__ import annotations

import re
import shlex
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import LAYERS, Place
from tests.command import ROOT, Process

PAGE = (ROOT / "docs" / "relays.md").read_text(encoding="utf-8")
COMMANDS = re.compile(r"<!-- commands: two sites -->\n```bash\n(.*?)```", re.DOTALL)
PYTHON = re.compile(r"<!-- python: site b -->\n```python\n(.*?)```", re.DOTALL)


def commands() -> list[list[str]]:
    """The commands of the page, without the program's name."""
    [block] = COMMANDS.findall(PAGE)
    lines = [line for line in block.splitlines() if line and not line.startswith("#")]
    split = [shlex.split(line) for line in lines]
    assert all(words[0] == "kvcs" for words in split)
    return [words[1:] for words in split]


@pytest.mark.slow
def test_a_cache_crosses_two_sites_with_the_commands_of_the_page(
    place: Place, tmp_path: Path
) -> None:
    pem, received = place.pem, tmp_path / "received.safetensors"
    here: dict[str, object] = {
        "0.0.0.0:4433": "127.0.0.1:0",
        "cache.safetensors": place.cache,
        "scope.key": place.scope_key,
        "received.safetensors": received,
        "ca.pem": pem.ca,
    }
    for name in "ab":
        here[f"{name}.pem"], here[f"{name}.key"] = pem.cert, pem.key
    kinds = []
    with ExitStack() as stack:
        for number, words in enumerate(commands()):
            kinds.append(words[0])
            arguments: list[Any] = [here.get(word, word) for word in words]
            process = stack.enter_context(Process(*arguments, "--lines"))
            if words[0] == "relay":
                name = f"moqt://relay-{'ab'[number // 2]}.example:4433"
                here[name] = process.event("listening")["url"]
            elif words[0] == "publish":
                process.event("layer_published")
            else:
                assert process.event("retrieved")["layers"] == LAYERS
                assert process.end().code == 0
    assert kinds == ["relay", "publish", "relay", "subscribe"]
    assert received.exists()


async def test_the_python_of_the_page_runs(place: Place) -> None:
    [source] = PYTHON.findall(PAGE)
    names: dict[str, Any] = {}
    exec(compile(source, "docs/relays.md", "exec"), names)
    pem = place.pem
    url = await names["site_b"](pem.cert, pem.key, pem.ca, "moqt://127.0.0.1:9")
    assert re.fullmatch(r"moqt://127\.0\.0\.1:\d+", url)
