"""The README is true: its commands and its Python are run as they stand."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvcs
from tests.certificates import write_pem
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(marker: str) -> str:
    """The code block behind an HTML comment ``marker``."""
    found = re.search(rf"<!-- {marker} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found is not None, f"README has no block marked {marker}"
    return found[1]


def command_environment(folder: Path) -> dict[str, str]:
    """An environment in which ``kvcs`` is this checkout's."""
    shim = folder / "bin" / "kvcs"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m kvcs "$@"\n')
    shim.chmod(0o755)
    path = os.pathsep.join([str(shim.parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


async def test_shell_commands_run_as_written(tmp_path: Path) -> None:
    shutil.copy(
        ROOT / "tests" / "data" / "smollm2-135m.safetensors", tmp_path / "cache.safetensors"
    )
    environment = command_environment(tmp_path)
    port = str(free_port())
    started: list[asyncio.subprocess.Process] = []
    try:
        for number in (1, 2, 3):
            marker, script = _terminal(number)
            process = await asyncio.create_subprocess_exec(
                "bash",
                "-ec",
                script.replace("4433", port),
                cwd=tmp_path,
                env=environment,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
            started.append(process)
            if marker is not None:
                await _said(process, marker)
        out, err = await started[-1].communicate()
    finally:
        for process in started:
            if process.returncode is None:
                # The command is the shell's child: both end with their process group.
                os.killpg(process.pid, signal.SIGTERM)
                await process.communicate()
    assert started[-1].returncode == 0, err.decode()
    assert b"octet by octet" in out
    received = kvcs.load_kv_file(tmp_path / "received.safetensors")
    sent = kvcs.load_kv_file(tmp_path / "cache.safetensors")
    assert received.blocks == sent.blocks
    part = kvcs.load_kv_file(tmp_path / "part.safetensors", partial=True)
    assert list(part.layers) == list(range(4, 12))
    assert np.array_equal(
        part.layers[5].k.view(np.uint16), sent.layers[5].k[: part.tokens].view(np.uint16)
    )


def _terminal(number: int) -> tuple[str | None, str]:
    """What one terminal of the README runs, and what it says when the next may begin."""
    found = re.search(
        rf"<!-- terminal {number}(?:: ([^>]*?))? -->\n```sh\n(.*?)```", README, re.DOTALL
    )
    assert found is not None, f"README has no terminal {number}"
    return found[1], found[2]


async def _said(process: asyncio.subprocess.Process, marker: str) -> None:
    """Wait until a process has said something on standard error."""
    assert process.stderr is not None
    said = []
    while line := (await process.stderr.readline()).decode():
        said.append(line)
        if marker in line:
            return
    raise AssertionError(f"{marker!r} was never said: {said}")


async def test_python_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pem = write_pem(tmp_path / "certs")
    monkeypatch.chdir(tmp_path)
    tokens = 40
    rng = np.random.default_rng(2)
    seen: dict[int, tuple[Any, Any]] = {}
    done = asyncio.Event()
    names: dict[str, Any] = {
        "scope_key": bytes(range(32)),
        "token_ids": list(range(tokens)),
        "attend": lambda index, k, v: seen.__setitem__(index, (k, v)),
        "until_done": done.wait,
    }
    exec(textwrap.dedent(block("python")), names)
    prefix: kvcs.Prefix = names["prefix"]
    whole = prefix.blocks * prefix.descriptor.block_tokens
    shape = (whole, prefix.descriptor.kv_heads, prefix.descriptor.head_dim)
    dtype = prefix.descriptor.numpy_dtype
    layers = [
        (rng.standard_normal(shape).astype(dtype), rng.standard_normal(shape).astype(dtype))
        for _ in range(prefix.descriptor.layers)
    ]
    names["prefill"] = lambda: iter(layers)
    settings = kvcs.RelaySettings(cert=pem.cert, key=pem.key, port=0, allow_anyone=True)
    async with kvcs.Relay(settings) as relay, asyncio.TaskGroup() as tasks:
        tasks.create_task(names["producer"](relay.url))
        await names["consumer"](relay.url)
        done.set()
    assert sorted(seen) == list(range(prefix.descriptor.layers))
    assert all(seen[layer][0].tobytes() == layers[layer][0].tobytes() for layer in seen), (
        "the consumer's layers are the producer's"
    )


def test_scripts_that_the_readme_names_exist() -> None:
    for path in re.findall(r"\b(?:scripts|tests|certs)/[\w./-]+\w", README):
        assert (ROOT / path).exists() or path.startswith("certs/"), path


def test_limits_that_the_readme_names_exist() -> None:
    known = {
        "PublisherSettings": kvcs.PublisherSettings,
        "SubscriberSettings": kvcs.SubscriberSettings,
        "QuicSettings": kvcs.QuicSettings,
        "SessionSettings": kvcs.SessionSettings,
        "ManifestLimits": kvcs.ManifestLimits,
        "RelayLimits": kvcs.RelayLimits,
    }
    for owner, name in re.findall(r"`(\w+(?:Settings|Limits))\.(\w+)`", README):
        assert name in known[owner].__dataclass_fields__, f"{owner}.{name}"
