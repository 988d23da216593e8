"""Help and completion: every command and every option says in words what it is for."""

from __future__ import annotations

import re
from typing import Any

import pytest

from kvcs.cli.app import COMMANDS as KNOWN
from tests.command import Run

COMMANDS = [
    "keygen",
    "keys",
    "certs",
    "inspect",
    "relay",
    "publish",
    "subscribe",
    "fetch",
    "serve-http",
    "ls",
    "plan",
    "demo",
    "bench",
    "doctor",
]
GROUPS = {"token": ["make", "show"], "config": ["show"]}
"""Commands that have commands of their own."""

FREE_LINES = {"publish", "subscribe", "fetch", "relay"}
WITH_ARGUMENTS = {"doctor", "inspect", "keys", "publish", "serve-http"}
NETWORK = {"publish", "subscribe", "fetch", "ls", "inspect"}


@pytest.fixture(autouse=True)
def narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def entries(help_text: str, heading: str) -> dict[str, str]:
    """Entries of one part of a help text: name, and what is said of it."""
    part = rf"^{heading}:\n(.*?)(?=^\S|^$|\Z)"
    found = re.search(part, help_text, re.MULTILINE | re.DOTALL)
    if found is None:
        return {}
    said: dict[str, str] = {}
    name = ""
    for line in found[1].splitlines():
        head = re.match(r"  (\S+)(?: \S+)*?(?:  +|$)", line)
        if head:
            name = head[1]
            said[name] = line[head.end() :]
        else:
            said[name] += " " + line.strip()
    return {name: text.strip() for name, text in said.items()}


def words(text: str) -> str:
    """What is said apart from defaults and bounds."""
    return re.sub(r"\[[^\]]*\]", "", text).strip()


def test_the_commands_are_those_that_are_tested(run: Run) -> None:
    listed = entries(run("--help").out, "Commands")
    assert list(listed) == list(KNOWN) == [*COMMANDS, *GROUPS]
    for text in listed.values():
        assert text.endswith(".") and not text.endswith("..."), "said in full in one line"


@pytest.mark.parametrize("command", [*COMMANDS, *GROUPS])
def test_the_list_says_of_a_command_what_it_says_of_itself(run: Run, command: str) -> None:
    paragraph = run(command, "--help").out.split("\n\n")[1]
    said = " ".join(paragraph.split())
    assert said == KNOWN[command][1] or said.startswith(KNOWN[command][1] + " ")


def test_a_command_that_is_misspelt_is_compared_with_all(run: Run) -> None:
    assert "Did you mean 'fetch'" in run("fetsh").line()


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_says_in_words_what_it_is_for(run: Run, command: str) -> None:
    ran = run(command, "--help")
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    options = entries(ran.out, "Options")
    assert {"--help", "--json", "--log-level"} <= options.keys()
    assert ("--lines" in options) == (command in FREE_LINES | {"serve-http"})
    if command in NETWORK:
        assert {"--ca", "--token-file", "--scope-key-file"} <= options.keys()
        assert "--insecure-accept-any-certificate" in options, "never cut off"
    assert ("--datagram-size" in options) == (command in FREE_LINES)
    arguments = entries(ran.out, "Arguments")
    assert bool(arguments) == (command in WITH_ARGUMENTS)
    check_words({**options, **arguments})


@pytest.mark.parametrize("group", list(GROUPS))
def test_so_do_the_commands_of_groups(run: Run, group: str) -> None:
    assert list(entries(run(group, "--help").out, "Commands")) == GROUPS[group]
    for command in GROUPS[group]:
        ran = run(group, command, "--help")
        assert (ran.code, ran.err) == (0, "")
        assert max(map(len, ran.out.splitlines())) <= 80
        options = entries(ran.out, "Options")
        assert {"--help", "--json", "--log-level"} <= options.keys()
        check_words({**options, **entries(ran.out, "Arguments")})


def check_words(said: dict[str, str]) -> None:
    """Check what is said of options and arguments."""
    for name, text in said.items():
        assert len(words(text).split()) >= 3, f"{name} says {text!r}"
        assert words(text).endswith("."), f"{name} says {text!r}"
        assert text.count("[") == text.count("]")


def test_help_tells_exit_codes(run: Run) -> None:
    text = " ".join(run("--help").out.split())
    for said in ("1 a fault of kvcs", "2 bad input", "3 the cache stayed incomplete", "130", "143"):
        assert said in text


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("kvcs pub", ["publish"]),
        ("kvcs publish --ret", ["--retain", "--retention"]),
        ("kvcs fetch --la", ["--layers"]),
        ("kvcs inspect --js", ["--json"]),
    ],
)
def test_a_shell_completes_commands_and_options(
    run: Run, monkeypatch: pytest.MonkeyPatch, typed: str, offered: list[str]
) -> None:
    monkeypatch.setenv("_KVCS_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    ran = run()
    assert (ran.code, ran.out.split(), ran.err) == (0, offered, "")


def test_a_shell_is_told_how_to_complete(run: Run, monkeypatch: Any) -> None:
    monkeypatch.setattr("shellingham.detect_shell", lambda *_: ("bash", "/bin/bash"))
    ran = run("--show-completion")
    assert ran.code == 0
    assert "complete -o default -F _kvcs_completion kvcs" in ran.out
