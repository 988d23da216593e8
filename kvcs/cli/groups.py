"""Groups of options that several commands have, and what each group makes together.

A command takes a group as one parameter (`kvcs.cli.frame.command`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from kvcs.cli.options import (
    RECONNECT_SECONDS,
    CaOption,
    ClientCertOption,
    ClientKeyOption,
    DatagramSizeOption,
    DescriptorOption,
    InsecureOption,
    LikeOption,
    ReconnectOption,
    TokenOption,
    TokensOption,
    UntrustedRelaysOption,
)
from kvcs.cli.output import Output
from kvcs.cli.peers import Peer
from kvcs.cli.prefixes import read_prefix
from kvcs.kv import Prefix


@dataclass(frozen=True, slots=True)
class PrefixOptions:
    """Which tokens of which model are meant."""

    like: LikeOption = None
    tokens: TokensOption = None
    descriptor: DescriptorOption = None

    @property
    def given(self) -> bool:
        """Whether any of them was."""
        return not (self.like is None and self.tokens is None and self.descriptor is None)

    def files(self, scope_key_file: Path) -> tuple[Path | None, ...]:
        """What `read` reads."""
        return (scope_key_file, self.like, self.tokens, self.descriptor)

    def read(self, output: Output, scope_key_file: Path) -> Prefix:
        """The prefix that they name; see `kvcs.cli.prefixes.read_prefix`."""
        return read_prefix(output, scope_key_file, self.like, self.tokens, self.descriptor)


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """How a peer is known, and what is shown to it."""

    ca: CaOption = None
    client_cert: ClientCertOption = None
    client_key: ClientKeyOption = None
    token_file: TokenOption = None
    untrusted_relays: UntrustedRelaysOption = False
    insecure: InsecureOption = False

    @property
    def files(self) -> tuple[Path | None, ...]:
        """What is read of them."""
        return (self.ca, self.client_cert, self.client_key, self.token_file)

    def peer(self, url: str, within: float | None = None) -> Peer:
        """Whom a command asks something.

        Args:
            url: where.
            within: seconds in which the user wants all to be over.
        """
        return Peer(
            url,
            self.ca,
            self.token_file,
            self.insecure,
            within,
            untrusted=self.untrusted_relays,
            client_cert=self.client_cert,
            client_key=self.client_key,
        )


@dataclass(frozen=True, slots=True)
class TransferOptions(PeerOptions):
    """The same for what takes its time, and moves much."""

    datagram_size: DatagramSizeOption = None
    reconnect: ReconnectOption = RECONNECT_SECONDS

    def peers(self, urls: Iterable[str] | None, within: float | None = None) -> list[Peer]:
        """Whom a command connects to: each once, in the order in which they were named.

        Args:
            urls: where; None is nowhere.
            within: seconds in which the user wants all to be over.
        """
        return [
            replace(
                self.peer(url, within), datagram_size=self.datagram_size, reconnect=self.reconnect
            )
            for url in dict.fromkeys(urls or ())
        ]
