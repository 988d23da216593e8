"""A virtual network on virtual time: whole sessions, relays and faults in one process.

`run` runs a coroutine on a clock that never waits; `Network` connects the hosts on it. The code
under test is the real one: `kvcs.connect`, `kvcs.serve`, `Publisher`, `Subscriber`, `Relay`. The
same seed gives the same run. See docs/testing.md.
"""

from kvcs.testing.network.certificates import Credentials, write_credentials
from kvcs.testing.network.conditions import Conditions, Link
from kvcs.testing.network.hosts import Host
from kvcs.testing.network.leftovers import leftovers
from kvcs.testing.network.loop import VirtualLoop, VirtualTimeError, run
from kvcs.testing.network.network import Network, Path
from kvcs.testing.network.trace import Trace

__all__ = [
    "Conditions",
    "Credentials",
    "Host",
    "Link",
    "Network",
    "Path",
    "Trace",
    "VirtualLoop",
    "VirtualTimeError",
    "leftovers",
    "run",
    "write_credentials",
]
