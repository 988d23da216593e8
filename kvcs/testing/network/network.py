"""The network: hosts, the links between them, and what decides and records everything."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any, Literal

from kvcs.errors import UsageError
from kvcs.quic.aioquic_backend.udp import make_socket
from kvcs.quic.backend import AIOQUIC, current_backend
from kvcs.quic.chance import make_chance
from kvcs.quic.connection import Connection
from kvcs.testing.network.conditions import Conditions, Link
from kvcs.testing.network.hosts import Address, Host, Port
from kvcs.testing.network.loop import VirtualLoop
from kvcs.testing.network.model import ModelBackend
from kvcs.testing.network.recording import Recording
from kvcs.testing.network.sockets import VirtualSocket
from kvcs.testing.network.trace import Trace

Quic = Literal["model", "aioquic"]
"""What carries sessions: our model of QUIC, quick; or the real library, packet for packet."""

HOSTS_PER_NET = 200
"""Addresses of one /24 that hosts get."""


@dataclass(frozen=True, slots=True)
class Path:
    """Both directions between two hosts."""

    there: Link
    """From the first to the second."""

    back: Link
    """From the second to the first."""

    def change(self, **changes: Any) -> None:
        """Change conditions of both directions."""
        self.there.change(**changes)
        self.back.change(**changes)

    def blackout(self, seconds: float) -> None:
        """Lose everything in both directions for a while."""
        self.there.blackout(seconds)
        self.back.blackout(seconds)


class Network:
    """Hosts on virtual time. Make it inside `run`; what it does depends on the seed alone.

    ::

        async def main() -> None:
            network = Network(seed=1, conditions=Conditions(delay=0.02, loss=0.01))
            with network.host("relay"):
                ...                            # listens on the host "relay"
            with network.host("consumer"):
                async with kvcs.connect("moqt://relay:4433") as session:
                    ...

        run(main())

    What is opened outside of any host belongs to the host "local".

    Args:
        seed: of every random decision.
        conditions: of every link that is not set by `connect`.
        quic: "model" carries sessions over a model of QUIC (streams, credit, acknowledgements,
            loss recovery; no TLS), a hundred times as fast; "aioquic" runs the real library, which
            needs real certificates: see `write_credentials`.
        trace: what happened goes there.

    Raises:
        UsageError: the running loop is not a `VirtualLoop`.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        conditions: Conditions | None = None,
        quic: Quic = "model",
        trace: Trace | None = None,
    ) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, VirtualLoop):
            raise UsageError("a Network needs virtual time: run it with kvcs.testing.network.run")
        loop.resolve_with(self.lookup)
        self.seed = seed
        self.random = Random(seed)
        """For decisions of a test."""
        self.trace = Trace() if trace is None else trace
        self.quic = quic
        self._loop = loop
        self._conditions = Conditions() if conditions is None else conditions
        self._hosts: dict[str, Host] = {}
        self._by_address: dict[str, Host] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._ports: dict[Address, Port] = {}
        self._rebound = 0
        self._chances = 0
        self.sessions: list[Connection] = []
        """Every session that was ever opened, at both ends, in order."""
        self.enter(self.host("local"))

    # What a test builds with

    def host(self, name: str) -> Host:
        """The host of a name, made when it is first asked for."""
        if name not in self._hosts:
            number = len(self._hosts)
            address = f"10.{number // HOSTS_PER_NET}.0.{1 + number % HOSTS_PER_NET}"
            self._hosts[name] = self._by_address[address] = Host(self, name, address)
        return self._hosts[name]

    def path(self, one: Host | str, other: Host | str) -> Path:
        """The path between two hosts, to look at or to change."""
        a, b = _name(one), _name(other)
        return Path(self.link(a, b), self.link(b, a))

    def connect(
        self,
        one: Host | str,
        other: Host | str,
        conditions: Conditions,
        back: Conditions | None = None,
    ) -> Path:
        """Set what a path is like: ``back`` from ``other`` to ``one``, the same where None."""
        path = self.path(one, other)
        path.there.conditions = conditions
        path.back.conditions = conditions if back is None else back
        return path

    def link(self, source: Host | str, target: Host | str) -> Link:
        """One direction between two hosts."""
        name = f"{_name(source)}>{_name(target)}"
        key = (_name(source), _name(target))
        if key not in self._links:
            self._links[key] = Link(name, self._conditions, self.randomness(name), self.trace)
        return self._links[key]

    def randomness(self, name: str) -> Random:
        """A source of random numbers of its own for one part of a test."""
        return Random(f"{self.seed}/{name}")

    def note(self, *facts: object) -> None:
        """Note something that happened in the trace."""
        self.trace.note(self._loop.time(), *facts)

    @property
    def now(self) -> float:
        """Virtual seconds since the run began."""
        return self._loop.elapsed

    @property
    def open_ports(self) -> list[str]:
        """Ports that are open: none once everything was closed."""
        hosts = self._hosts.values()
        return [f"{host.name}:{number}" for host in hosts for number in host.ports]

    def lookup(self, name: str) -> str | None:
        """The address of a host, by its name or its address."""
        host = self._hosts.get(name) or self._by_address.get(name)
        return None if host is None else host.address

    # What hosts and ports call

    def enter(self, host: Host) -> Callable[[], None]:
        """Let the running code work on a host; the result undoes it."""
        backend = ModelBackend(self, host) if self.quic == "model" else AIOQUIC
        backend_token = current_backend.set(Recording(backend, self.sessions, host.sessions))
        socket_token = make_socket.set(partial(VirtualSocket, host))
        chance_token = make_chance.set(self._new_chance)

        def leave() -> None:
            current_backend.reset(backend_token)
            make_socket.reset(socket_token)
            make_chance.reset(chance_token)

        return leave

    def _new_chance(self) -> Random:
        self._chances += 1
        return self.randomness(f"chance {self._chances}")

    def bind(self, port: Port) -> None:
        """A port was opened."""
        self._ports[port.public] = port

    def unbind(self, port: Port) -> None:
        """A port was closed."""
        if self._ports.get(port.public) is port:
            del self._ports[port.public]

    def rebind(self, port: Port) -> None:
        """Give a port another public address."""
        self.unbind(port)
        self._rebound += 1
        port.public = (f"10.255.{self._rebound // 250}.{1 + self._rebound % 250}", port.number)
        self.bind(port)
        self.note("moved", port.host.name, port.number)

    def carry(self, port: Port, packet: Any, size: int, to: Address) -> None:
        """Send a packet from a port."""
        target = self._ports.get(to)
        host = self._by_address.get(to[0]) if target is None else target.host
        if host is None:
            self.note("no such address", port.host.name, size)
            return
        source = port.public
        link = self.link(port.host, host)
        link.carry(size, lambda: self._arrive(packet, size, source, to, port))

    def _arrive(self, packet: Any, size: int, source: Address, to: Address, sender: Port) -> None:
        port = self._ports.get(to)
        if port is not None:
            fate = port.receive(packet, size, source)
            if fate != "received":
                self.note(fate, port.host.name, size)
        elif to[0] in self._by_address:
            # An ICMP message; it takes as long as a packet, and is never lost.
            link = self.link(self._by_address[to[0]], sender.host)
            self._loop.call_later(link.conditions.delay, sender.refuse)


def _name(host: Host | str) -> str:
    return host if isinstance(host, str) else host.name
