"""What docs/ shows is true: its Python is run as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import kvcs
import kvcs.moqt
import kvcs.quic
from kvcs.testing import network
from tests.builders import same, toy_prefix, toy_publication
from tests.certificates import write_pem
from tests.loopback.http_fixtures import shelf

ROOT = Path(__file__).resolve().parents[1]
PYTHON = re.compile(r"<!-- python: ([\w ]+) -->\n```python\n(.*?)```", re.DOTALL)
RUN = {
    "testing.md": {"application"},
    "moqt.md": {"readings", "everything new"},
    "security.md": {"protected"},
    "recovery.md": {"fallback"},
}
"""The blocks of each page; every one is run by a test below."""


def blocks(page: str) -> dict[str, str]:
    """The marked Python of a page."""
    return dict(PYTHON.findall((ROOT / "docs" / page).read_text(encoding="utf-8")))


def names_of(page: str, block: str) -> dict[str, Any]:
    """What a block defines."""
    names: dict[str, Any] = {"__name__": f"docs.{page}"}
    exec(compile(blocks(page)[block], f"docs/{page}", "exec"), names)
    return names


@pytest.mark.parametrize("page", RUN)
def test_every_block_of_python_is_run(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert set(blocks(page)) == RUN[page]
    assert text.count("```python") == len(RUN[page])


def test_the_tests_of_an_application_pass_as_written() -> None:
    names = names_of("testing.md", "application")
    tests = [name for name in names if name.startswith("test_")]
    assert len(tests) == 2
    for name in tests:
        names[name]()


async def test_readings_come_over_real_sockets(tmp_path: Path) -> None:
    files = write_pem(tmp_path)
    main: Callable[..., Coroutine[Any, Any, list[float]]] = names_of("moqt.md", "readings")["main"]
    assert await main(str(files.cert), str(files.key), str(files.ca)) == [19.5, 19.7, 20.2]


def test_readings_come_over_a_virtual_network() -> None:
    main: Callable[..., Coroutine[Any, Any, list[float]]] = names_of("moqt.md", "readings")["main"]

    async def virtual() -> list[float]:
        net = network.Network(seed=4, conditions=network.Conditions(delay=0.03, loss=0.1))
        return await main("unused", "unused", "unused", net.host("local").address)

    assert network.run(virtual()) == [19.5, 19.7, 20.2]


def test_published_tracks_come_over_a_virtual_network() -> None:
    main: Callable[..., Coroutine[Any, Any, list[tuple[str, str]]]]
    main = names_of("moqt.md", "everything new")["main"]

    async def virtual() -> list[tuple[str, str]]:
        net = network.Network(seed=5, conditions=network.Conditions(delay=0.03))
        return await main("unused", "unused", "unused", net.host("local").address)

    assert network.run(virtual()) == [("ada", "ada is here"), ("bo", "bo is here")]


async def test_what_is_protected_comes_through_a_relay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, toy, prefix = write_pem(tmp_path), toy_publication(), toy_prefix()
    monkeypatch.chdir(tmp_path)
    ring = kvcs.ProtectionRing(scope_id=prefix.scope_id)
    ring.rotate()
    kvcs.save_protection_ring("protect.keys", ring)
    settings = kvcs.RelaySettings(cert=files.cert, key=files.key, port=0, allow_anyone=True)
    produce: Callable[..., Coroutine[Any, Any, str]] = names_of("security.md", "protected")[
        "produce"
    ]
    async with kvcs.Relay(settings) as relay:
        layers = list(zip(toy.k, toy.v, strict=True))
        assert await produce(relay.url, files.ca, prefix, layers) == "4 layers, rejected: {}"


async def test_what_no_session_brings_comes_over_http(tmp_path: Path) -> None:
    toy = toy_publication()
    async with shelf(tmp_path, toy=toy) as it:
        consume: Callable[..., Coroutine[Any, Any, tuple[list[kvcs.Layer], str]]]
        consume = names_of("recovery.md", "fallback")["consume"]
        layers, report = await consume(it.server.url, None, it.prefix, None)
        assert all(same(layer, toy) for layer in layers)
        assert report == "24 over HTTP, 0 recomputed"


def test_names_that_the_pages_link_exist() -> None:
    for page in (ROOT / "docs").glob("*.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize("package", [kvcs.moqt, kvcs.quic, network])
def test_a_package_lists_its_public_names(package: ModuleType) -> None:
    names = package.__all__
    assert len(names) == len(set(names))
    shown = {
        name
        for name, value in vars(package).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    modules = {name for name in names if isinstance(getattr(package, name), ModuleType)}
    assert set(names) == shown | modules


@pytest.mark.parametrize("package", [kvcs.moqt, kvcs.quic, network])
def test_every_public_name_says_what_it_is(package: ModuleType) -> None:
    bare = [
        name
        for name in package.__all__
        if callable(getattr(package, name)) and not (getattr(package, name).__doc__ or "").strip()
    ]
    assert bare == []
