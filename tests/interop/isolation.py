"""A network namespace of the test's own, in which nothing but loopback exists.

Every server of the peer binds all interfaces, so it must never run where other machines could
reach it. ``prefix()`` gives the command words that put a program into a new network namespace
and a new process namespace; the program then calls ``bring_up_loopback()``. The process
namespace is for the end: when its first process is killed, the kernel kills everything in it,
so that no test leaves a process behind, whatever happened.
"""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from functools import cache
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[2]
PROBE_SECONDS = 90.0
LOOK_SECONDS = 0.005

# unshare's --user maps root, which an unprivileged user needs and root does not; where user
# namespaces are switched off, root can still do without.
_FORMS = (
    ("--map-root-user", "--net", "--pid", "--kill-child"),
    ("--net", "--pid", "--kill-child"),
)

_SIOCGIFFLAGS = 0x8913
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 0x1
_IFREQ = struct.Struct("16sh22x")


class IsolationUnavailable(Exception):
    """This machine gives us no network namespace; the text says why."""


@cache
def prefix() -> tuple[str, ...]:
    """Return the command words to put before a program, after trying that they work.

    Raises:
        IsolationUnavailable: If no form works here.
    """
    unshare = shutil.which("unshare")
    if unshare is None:
        raise IsolationUnavailable("there is no unshare command (Debian: util-linux)")
    reasons = []
    for form in _FORMS:
        words = (unshare, *form, "--")
        refusal = _try([*words, sys.executable, "-m", "tests.interop.isolation"])
        if refusal is None:
            return words
        reasons.append(f"unshare {' '.join(form)}: {refusal}")
    raise IsolationUnavailable("; ".join(reasons))


def _try(command: list[str]) -> str | None:
    """Run the probe and return None, or the reason why it failed."""
    try:
        probe = subprocess.run(
            command,
            cwd=PROJECT_ROOT,
            capture_output=True,
            text=True,
            timeout=PROBE_SECONDS,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {PROBE_SECONDS:g} s"
    if probe.returncode == 0:
        return None
    said = probe.stderr.strip().splitlines()
    return said[-1] if said else f"exit {probe.returncode}"


def bring_up_loopback() -> None:
    """Make 127.0.0.1 usable in a new network namespace, where it exists but is down.

    Raises:
        RuntimeError: If this is not a new namespace: an interface besides loopback is up, so
            a server that binds all interfaces could be reached.
        OSError: If the kernel refuses.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        for _, name in socket.if_nameindex():
            if name != "lo" and _flags(handle, name) & _IFF_UP:
                raise RuntimeError(f"interface {name} is up: this is no namespace of our own")
        wanted = _flags(handle, "lo") | _IFF_UP
        fcntl.ioctl(handle, _SIOCSIFFLAGS, _IFREQ.pack(b"lo", wanted))


def wait_bound(port: int, seconds: float) -> None:
    """Block until some program has bound the UDP port ``port``.

    A server of the peer says that it listens before its own thread has bound the port, and whoever
    connects in between is told that nothing listens there. No event tells more: the kernel's
    table is read again and again.

    Raises:
        TimeoutError: If the time is over.
    """
    deadline = time.monotonic() + seconds
    while f":{port:04X} " not in Path("/proc/self/net/udp").read_text(encoding="ascii"):
        if time.monotonic() > deadline:
            raise TimeoutError(f"UDP port {port} is not bound after {seconds:g} s")
        time.sleep(LOOK_SECONDS)


def _flags(handle: socket.socket, name: str) -> int:
    answer = fcntl.ioctl(handle, _SIOCGIFFLAGS, _IFREQ.pack(name.encode(), 0))
    return int(_IFREQ.unpack(answer)[1])


def _probe() -> None:
    """Check from inside that a datagram to ourselves arrives."""
    bring_up_loopback()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        handle.bind(("127.0.0.1", 0))
        handle.settimeout(5.0)
        handle.sendto(b"here", handle.getsockname())
        if handle.recv(16) != b"here" or os.getpid() != 1:
            raise RuntimeError("the namespaces are not as asked for")


if __name__ == "__main__":
    _probe()
