"""`kvcs publish --save`, `kvcs serve-http` and `--fallback`: a cache without any relay."""

from __future__ import annotations

import re
import shlex
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

import kvcs
from tests.cli.conftest import Place
from tests.command import Process, Run
from tests.ports import free_port

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "recovery.md"


def same_octets(one: Path, other: Path) -> bool:
    """Whether the received file has the whole blocks of the published one."""
    got, meant = kvcs.load_kv_file(one), kvcs.load_kv_file(other)
    tokens = len(got.token_ids)
    return all(
        got.layers[index].k.tobytes() == layer.k[:tokens].tobytes()
        and got.layers[index].v.tobytes() == layer.v[:tokens].tobytes()
        for index, layer in meant.layers.items()
    )


def test_a_saved_cache_is_served_and_fetched(place: Place, run: Run, tmp_path: Path) -> None:
    shelf, out = tmp_path / "shelf", tmp_path / "out.safetensors"
    saved = run(
        *("publish", place.cache, "--scope-key-file", place.scope_key, "--save", shelf, "--json")
    )
    assert saved.code == 0, saved.err
    assert saved.json()["layers"] == 6
    with Process(
        *("serve-http", shelf, "--bind", "127.0.0.1:0", *place.keys, "--allow-anyone", "--lines")
    ) as server:
        url = server.event("listening")["url"]
        assert url.startswith("https://")
        fetch = ("fetch", "--fallback", url, *place.member, "--like", place.cache)
        fetched = run(*fetch, "--out", out, "--json")
        assert fetched.code == 0, fetched.err
        assert fetched.json()["fetched_over_http"] == 2 * 6 * 4
        assert same_octets(out, place.cache)
        some = run(*fetch, "--layers", "2-3", "--compare", place.cache, "--json")
        assert (some.code, some.json()["equal"]) == (0, True)
        # A relay that nobody answers for is no hindrance.
        beside = run(
            *(*fetch, "--relay", "moqt://127.0.0.1:9", "--deadline", "20"),
            *("--compare", place.cache, "--json"),
        )
        assert (beside.code, beside.json()["equal"]) == (0, True), beside.err


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("serve-http", "."), "--issuers FILE"),
        (("serve-http", ".", "--allow-anyone", "--issuers", "x"), "--issuers FILE"),
        (("serve-http", "nowhere", "--allow-anyone", "--bind", "127.0.0.1:0"), "no folder"),
        (("serve-http", ".", "--allow-anyone", "--bind", "0.0.0.0:0"), "certificate"),
        (("fetch", "--out", "x"), "--fallback URL"),
        (("fetch", "--fallback", "http://cache.example", "--out", "x"), "https://"),
    ],
)
def test_mistakes_are_one_line(place: Place, run: Run, words: tuple[str, ...], why: str) -> None:
    member = () if words[0] == "serve-http" else (*place.member, "--like", place.cache)
    ran = run(*words, *member)
    assert ran.code == 2
    assert why in ran.line()


def test_the_commands_of_the_guide_run_as_written(
    place: Place, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(place.cache, "cache.safetensors")
    here = f"127.0.0.1:{free_port()}"
    [block] = re.findall(r"^```sh\n(.*?)^```", GUIDE.read_text(), re.MULTILINE | re.DOTALL)
    with ExitStack() as stack:
        for line in block.replace("127.0.0.1:8443", here).splitlines():
            program, *words = shlex.split(line)
            assert program == "kvcs"
            if words[-1] == "&":
                stack.enter_context(Process(*words[:-1])).says("serving")
                continue
            ran = run(*words)
            assert ran.code == 0, (words, ran.err)
    assert same_octets(tmp_path / "received.safetensors", place.cache)
