"""The third-party peer: where it is installed, and how each of its programs is called.

The peer is aiomoqt, an independent implementation of the same transport draft. It needs
Python 3.12 or newer, which may be newer than the Python that runs the tests, so it lives in an
environment of its own at the project root. What it does is evidence about a peer, not about
the draft.
"""

import fcntl
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.interop.processes import Process, ProcessSpec

PROJECT_ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).resolve().parent / "peer_scripts"
ENVIRONMENT = PROJECT_ROOT / ".venv-peer"
REQUIREMENTS = ("aiomoqt==0.13.3", "aiopquic==0.6.1")
"""Pinned whole: the second is the QUIC library of the first, which does not pin it."""

DRAFT = "22"
MINIMUM_PYTHON = (3, 12)
PYTHON_VARIABLE = "PYTHON312"
PROBE_SECONDS = 90.0
"""For one candidate to say its version. A version manager's shim may answer late or never."""

INSTALL_SECONDS = 600.0


class PeerUnavailable(Exception):
    """The peer cannot be run on this machine; the text says why."""


# --- its environment ------------------------------------------------------------------------


def find_python(environ: Mapping[str, str] = os.environ) -> Path:
    """Find a Python that can run the peer.

    A path in ``PYTHON312`` is taken at its word and nothing else is tried. Otherwise every
    ``python3.N`` and ``python3`` on PATH, and every version of pyenv, is asked for its version:
    a shim on PATH may exist and fail. The oldest that is new enough wins, since binary
    packages are most likely to exist for it.

    Raises:
        PeerUnavailable: If none answers with 3.12 or newer.
    """
    named = environ.get(PYTHON_VARIABLE)
    if named:
        answer = _ask(Path(named))
        if answer is None:
            raise PeerUnavailable(f"{PYTHON_VARIABLE}={named} is not a Python 3.12 or newer")
        return answer[1]
    answers = [answer for path in _candidates(environ) if (answer := _ask(path)) is not None]
    if not answers:
        raise PeerUnavailable(
            f"no Python 3.12 or newer on PATH or under pyenv; name one by {PYTHON_VARIABLE}"
        )
    return min(answers)[1]


def _candidates(environ: Mapping[str, str]) -> Iterator[Path]:
    for folder in environ.get("PATH", "").split(os.pathsep):
        if folder:
            for pattern in ("python3.[0-9]*", "python3"):
                yield from sorted(
                    path
                    for path in Path(folder).glob(pattern)
                    if re.fullmatch(r"python3(\.\d+)?", path.name)
                )
    roots = [Path(environ["PYENV_ROOT"])] if environ.get("PYENV_ROOT") else []
    if environ.get("HOME"):
        roots.append(Path(environ["HOME"]) / ".pyenv")
    for root in roots:
        yield from sorted(root.glob("versions/*/bin/python"))


def _ask(python: Path) -> tuple[tuple[int, ...], Path] | None:
    """Return the version of ``python`` and the file that really runs, or None if it is no use."""
    question = "import sys, venv, ensurepip; print(*sys.version_info[:3]); print(sys.executable)"
    try:
        answer = subprocess.run(
            [str(python), "-c", question],
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            stdin=subprocess.DEVNULL,
            check=True,
        )
        version_text, executable = answer.stdout.splitlines()
        version = tuple(int(part) for part in version_text.split())
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return (version, Path(executable)) if version >= MINIMUM_PYTHON else None


def installed_python() -> Path:
    """Return the Python of the peer's environment, which must exist already.

    Raises:
        PeerUnavailable: If the environment is missing or holds other versions.
    """
    python = ENVIRONMENT / "bin" / "python"
    stamp = ENVIRONMENT / "requirements.stamp"
    try:
        current = stamp.read_text(encoding="utf-8") == _stamp()
    except FileNotFoundError:
        current = False
    if not current or not python.exists():
        raise PeerUnavailable(f"{ENVIRONMENT.name} is not installed")
    return python


def install() -> Path:
    """Return the Python of the peer's environment, making the environment first if needed.

    Several test runs may ask at once; one makes it and the others wait. A finished environment
    is recognised by its stamp, without starting any process.

    Raises:
        PeerUnavailable: If there is no suitable Python or the packages cannot be had.
    """
    with _exclusive():
        try:
            return installed_python()
        except PeerUnavailable:
            pass
        base = find_python()
        _run([str(base), "-m", "venv", "--clear", str(ENVIRONMENT)])
        (ENVIRONMENT / ".gitignore").write_text("*\n", encoding="utf-8")
        python = ENVIRONMENT / "bin" / "python"
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run([*pip, *REQUIREMENTS])
        (ENVIRONMENT / "requirements.stamp").write_text(_stamp(), encoding="utf-8")
        return python


def _stamp() -> str:
    return "\n".join((*REQUIREMENTS, ""))


@contextmanager
def _exclusive() -> Iterator[None]:
    # The lock is on this folder, which every run of the tests shares and nobody replaces.
    handle = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(
            command,
            check=True,
            capture_output=True,
            text=True,
            timeout=INSTALL_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.CalledProcessError as error:
        said = "\n".join(str(error.stderr).strip().splitlines()[-5:])
        raise PeerUnavailable(f"{' '.join(command)} failed: {said}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerUnavailable(f"{' '.join(command)} failed: {error}") from error


# --- its programs ---------------------------------------------------------------------------

RELAY_READY = r"Listening on all interfaces, UDP port \d+"


def relay(
    *,
    port: int,
    certificate: Path,
    key: Path,
    upstream: str | None = None,
    options: Sequence[str] = (),
    name: str = "peer relay",
) -> ProcessSpec:
    """Describe the peer's relay on ``port``; ready when it prints ``RELAY_READY``.

    It binds every interface whatever it is told, so start it only inside a network namespace.

    Args:
        upstream: URL of a relay or publisher that it asks for tracks nobody announced to it.
        options: More of its own options, for example ``("--stream-ring-cap", "8388608")``,
            which it needs to pass on an object of 1 MiB or more.
    """
    argv = [
        *("--bind", "127.0.0.1", "--port", str(port), "--cert", str(certificate)),
        *("--key", str(key), "--quic", "--draft", DRAFT),
    ]
    if upstream is not None:
        argv += ["--upstream", upstream]
    return _module(name, "aiomoqt.tools.moq_interop_relay", [*argv, *options])


def interop_client(
    url: str, *, case: str | None = None, draft: str = DRAFT, name: str = "peer client"
) -> ProcessSpec:
    """Describe one run of the peer's interop client; its output is for ``parse_tap``.

    Args:
        case: One case by name. None runs the twelve standard ones; ``fetch`` and ``join`` are
            run only when named.
    """
    argv = ["-r", url, "--draft", draft, "--tls-disable-verify"]
    if case is not None:
        argv += ["-t", case]
    return _module(name, "aiomoqt.tools.moq_interop_client", argv)


def publish(
    url: str, *, ca: Path, namespace: Sequence[bytes], source: Path, name: str = "peer publisher"
) -> ProcessSpec:
    """Describe the peer as publisher of the object tree in ``source`` (see ``objects``).

    It prints ``announced`` and then obeys commands (see ``command``); the script's own text
    lists them and the events it prints. It cannot write an object of 4 MiB or more.

    Give the command ``done`` only when the subscriber has its fill: in the peer's relay a
    PUBLISH_DONE overtakes a fill, and its subscriber then has nothing and calls the fill clean.
    """
    argv = [url, "--ca", str(ca), "--namespace", namespace_argument(namespace)]
    return _script(name, "peer_publish.py", [*argv, "--source", str(source)])


def serve(
    url: str,
    *,
    certificate: Path,
    key: Path,
    namespace: Sequence[bytes],
    source: Path,
    name: str = "peer server",
) -> ProcessSpec:
    """Describe the peer as publisher that listens at ``url`` itself, for one subscriber.

    It prints ``listening`` and obeys the same commands as ``publish``. Like its relay it binds
    every interface.
    """
    argv = [url, "--listen", "--cert", str(certificate), "--key", str(key)]
    argv += ["--namespace", namespace_argument(namespace), "--source", str(source)]
    return _script(name, "peer_publish.py", argv)


async def command(publisher: Process, line: str) -> None:
    """Have the peer's publisher carry out ``line`` and wait until it has.

    Raises:
        ProcessFailed: If it ends or does not answer.
    """
    obeyed = sum(said["event"] == "obeyed" for said in publisher.events)
    await publisher.send_line(line)
    await publisher.wait_event("obeyed", number=obeyed + 1)


def subscribe(
    url: str,
    *,
    ca: Path,
    namespace: Sequence[bytes],
    tracks: Sequence[str],
    mode: str = "join",
    options: Sequence[str] = (),
    name: str = "peer subscriber",
) -> ProcessSpec:
    """Describe the peer as subscriber of ``tracks``.

    Args:
        mode: ``live`` subscribes from the next object on; ``join`` adds a fill from {0, 0};
            ``fetch`` sends FETCH.
        options: More options of the script, such as ``--count``, ``--discover``, ``--save``.
    """
    argv = [url, "--ca", str(ca), "--namespace", namespace_argument(namespace), "--mode", mode]
    for track in tracks:
        argv += ["--track", track]
    return _script(name, "peer_subscribe.py", [*argv, *options])


def namespace_argument(namespace: Sequence[bytes]) -> str:
    """Write a Track Namespace as the scripts take it: hexadecimal fields joined by ``/``."""
    return "/".join(field.hex() for field in namespace)


def _module(name: str, module: str, argv: Sequence[str]) -> ProcessSpec:
    return ProcessSpec(name, (str(installed_python()), "-m", module, *argv), _ENVIRONMENT)


def _script(name: str, script: str, argv: Sequence[str]) -> ProcessSpec:
    return ProcessSpec(name, (str(installed_python()), str(SCRIPTS / script), *argv), _ENVIRONMENT)


# Its tools read these variables, so what a machine happens to set must not reach them; and its
# Python must not see the packages of ours.
_ENVIRONMENT: Mapping[str, str | None] = {
    **dict.fromkeys(("DRAFT", "MOQT_DRAFT", "RELAY_URL", "TESTCASE", "VERBOSE", "COMPAT")),
    **dict.fromkeys(("NAMESPACE_PREFIX", "AUTH_TOKEN", "TLS_DISABLE_VERIFY", "PYTHONPATH")),
    "PYTHONUNBUFFERED": "1",
}


# --- what its interop client says -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TapCase:
    """One test case of a TAP 14 report."""

    name: str
    passed: bool
    """It ran and succeeded; a skipped case did not."""

    message: str
    """The client's own words, or the reason of a skip."""


def parse_tap(text: str) -> dict[str, TapCase]:
    """Read a TAP 14 report, which begins at the line ``TAP version 14``; what precedes is noise.

    Raises:
        ValueError: If there is no report, or it has not as many cases as its plan says.
    """
    lines = text.splitlines()
    try:
        lines = lines[lines.index("TAP version 14") + 1 :]
    except ValueError:
        raise ValueError("no line 'TAP version 14' in the output") from None
    cases: dict[str, TapCase] = {}
    planned, latest = None, ""
    for line in lines:
        if plan := re.fullmatch(r"1\.\.(\d+)(?: #.*)?", line):
            planned = int(plan[1])
        elif case := re.fullmatch(r"(not )?ok \d+ - (\S+)(.*)", line):
            skipped = re.search(r"# SKIP\s*(.*)", case[3])
            passed = case[1] is None and skipped is None
            cases[case[2]] = TapCase(case[2], passed, skipped[1] if skipped else "")
            latest = case[2]
        elif (said := re.fullmatch(r"  message: (.*)", line)) and cases:
            cases[latest] = TapCase(latest, cases[latest].passed, json.loads(said[1]))
    if planned != len(cases):
        raise ValueError(f"the report plans {planned} cases and has {len(cases)}")
    return cases


if __name__ == "__main__":
    print(install())
    sys.exit(0)
