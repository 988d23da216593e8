"""Options from a file, from the environment and from flags, each stronger than the one before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvcs.cli.config import FILE_VARIABLE
from tests.command import Run


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FILE_VARIABLE, raising=False)
    monkeypatch.delenv("KVCS_TOKEN", raising=False)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def value(run: Run, key: str, *arguments: object, command: str = "relay") -> tuple[Any, str]:
    """Value and origin of one option of a command."""
    ran = run(*arguments, "config", "show", *command.split(), "--json")
    assert ran.code == 0, ran.err
    [row] = [row for row in ran.json() if row["key"] == key]
    return row["value"], row["origin"]


def test_file_variable_and_flag_win_in_this_order(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert value(run, "cache-mib") == (4096, "default")
    file = write(tmp_path / "kvcs.toml", "[relay]\ncache-mib = 64\n")
    assert value(run, "cache-mib", "--config", file) == (64, str(file))
    monkeypatch.setenv(FILE_VARIABLE, str(file))
    assert value(run, "cache-mib") == (64, str(file))
    monkeypatch.setenv("KVCS_RELAY_CACHE_MIB", "32")
    assert value(run, "cache-mib") == (32, "$KVCS_RELAY_CACHE_MIB")
    ran = run("config", "show", "relay", "--cache-mib", "16", "--json")
    assert [(row["value"], row["origin"]) for row in ran.json() if row["key"] == "cache-mib"] == [
        (16, "flag")
    ]


def test_kinds_of_values(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (
        '[relay]\naudience = ["a", "b c"]\nallow-anyone = true\ngoaway-timeout = 2.5\n'
        "[token.make]\nlifetime = 60\n"
    )
    file = write(tmp_path / "kvcs.toml", text)
    assert value(run, "audience", "--config", file)[0] == ["a", "b c"]
    assert value(run, "allow-anyone", "--config", file)[0] is True
    assert value(run, "goaway-timeout", "--config", file)[0] == 2.5
    lifetime = value(run, "lifetime", "--config", file, command="token make")
    assert lifetime == (60.0, str(file))
    monkeypatch.setenv("KVCS_RELAY_AUDIENCE", "x y")
    monkeypatch.setenv("KVCS_RELAY_ALLOW_ANYONE", "off")
    assert value(run, "audience") == (["x", "y"], "$KVCS_RELAY_AUDIENCE")
    assert value(run, "allow-anyone") == (False, "$KVCS_RELAY_ALLOW_ANYONE")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[relay]\ncache = 1\n", "relay.cache"),
        ("[rely]\n", "'rely'"),
        ("cache-mib = 1\n", "'cache-mib'"),
        ("relay = 1\n", "relay is a command"),
        ("[token]\nmake = 1\n", "token.make is a command"),
        ("[token.mint]\n", "token.mint"),
        ("[relay]\nallow-anyone = 1\n", "relay.allow-anyone must be true or false"),
        ("[relay]\ncache-mib = true\n", "relay.cache-mib must be a string or a number"),
        ("[relay]\ncache-mib = {a = 1}\n", "relay.cache-mib must be a string or a number"),
        ("[relay\n", "no TOML"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, run: Run, text: str, complaint: str) -> None:
    file = write(tmp_path / "kvcs.toml", text)
    ran = run("--config", file, "config", "show")
    assert ran.code == 2
    assert complaint in ran.line()
    assert str(file) in ran.line()


def test_values_pass_the_checks_of_their_flags(tmp_path: Path, run: Run) -> None:
    file = write(tmp_path / "kvcs.toml", "[relay]\ncache-mib = 2.5\n")
    for arguments in (("config", "show"), ("relay",)):
        ran = run("--config", file, *arguments)
        assert ran.code == 2
        assert "--cache-mib" in ran.line()


def test_what_a_variable_may_not_say(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCS_RELAY_CACHE", "1")
    ran = run("config", "show")
    assert (ran.code, "$KVCS_RELAY_CACHE " in ran.line()) == (2, True)
    monkeypatch.delenv("KVCS_RELAY_CACHE")
    monkeypatch.setenv("KVCS_RELAY_ALLOW_ANYONE", "maybe")
    ran = run("config", "show")
    assert (ran.code, "$KVCS_RELAY_ALLOW_ANYONE" in ran.line()) == (2, True)


def test_a_file_that_is_not_there(tmp_path: Path, run: Run) -> None:
    ran = run("--config", tmp_path / "none.toml", "config", "show")
    assert (ran.code, "none.toml" in ran.line()) == (2, True)


def test_a_command_takes_its_options_from_the_file(tmp_path: Path, run: Run) -> None:
    # Its certificate is missing: it says which file, which only the settings name.
    text = '[relay]\ncert = "no-such-cert.pem"\nkey = "no.key"\nbind = "127.0.0.1:0"\n'
    file = write(tmp_path / "kvcs.toml", text + "allow-anyone = true\n")
    ran = run("--config", file, "relay")
    assert ran.code == 2
    assert "no-such-cert.pem" in ran.err


def test_secrets_are_masked(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCS_TOKEN", "deadbeefdeadbeef")
    for arguments in (("config", "show"), ("config", "show", "--json")):
        ran = run(*arguments)
        assert ran.code == 0
        assert "deadbeef" not in ran.out
        assert "***" in ran.out


def test_unknown_commands_and_stray_options(run: Run) -> None:
    ran = run("config", "show", "rely")
    assert (ran.code, "rely" in ran.line()) == (2, True)
    ran = run("config", "show", "--cache-mib", "4")
    assert (ran.code, "behind one command" in ran.line()) == (2, True)
    assert run("config", "show", "relay", "--no-such", "4").code == 2
