"""`kvcs relay`: a relay with a cache between producers and consumers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

import kvcs
from kvcs.cli.frame import command
from kvcs.cli.lines import Lines
from kvcs.cli.options import (
    AudienceOption,
    CaOption,
    ClientCaOption,
    ClientCertOption,
    ClientKeyOption,
    DatagramSizeOption,
    InsecureOption,
    IssuersOption,
    LinesOption,
    TokenOption,
    parse_address,
    seconds,
)
from kvcs.cli.output import Output
from kvcs.cli.peers import token_source
from kvcs.cli.relay_limits import LimitOption, Limits, read_limits
from kvcs.cli.reloading import reloading
from kvcs.errors import UsageError
from kvcs.moqt.settings import SessionSettings
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.endpoint import RELAY_PORT
from kvcs.relay.server import MAX_SESSIONS, Relay, RelaySettings
from kvcs.relay.settings import MIB, REQUEST_STREAMS, RelayLimits
from kvcs.relay.stats import RelayStats


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "relay")
    async def relay(
        output: Output,
        cert: Annotated[
            Path | None, typer.Option("--cert", metavar="FILE", help="Certificate chain, PEM.")
        ] = None,
        key: Annotated[
            Path | None, typer.Option("--key", metavar="FILE", help="Its private key, PEM.")
        ] = None,
        bind: Annotated[
            str,
            typer.Option(
                "--bind", metavar="HOST:PORT", help="Where to listen; port 0 takes a free one."
            ),
        ] = f"127.0.0.1:{RELAY_PORT}",
        cache_mib: Annotated[
            int,
            typer.Option("--cache-mib", min=1, metavar="MIB", help="Memory for cached Objects."),
        ] = 4096,
        cache_dir: Annotated[
            Path | None,
            typer.Option(
                "--cache-dir",
                metavar="DIR",
                help="Keep what does not fit into memory in files there; they survive a restart.",
            ),
        ] = None,
        cache_disk_mib: Annotated[
            int,
            typer.Option(
                "--cache-disk-mib", min=1, metavar="MIB", help="Space for the files of --cache-dir."
            ),
        ] = 16384,
        limit: LimitOption = None,
        allow_anyone: Annotated[
            bool,
            typer.Option("--allow-anyone", help="Serve whoever connects, without tokens."),
        ] = False,
        issuers: IssuersOption = None,
        audience: AudienceOption = None,
        client_ca: ClientCaOption = None,
        goaway_uri: Annotated[
            str,
            typer.Option(
                "--goaway-uri",
                metavar="URL",
                help="Relay to which sessions are sent when this one stops; they come back here by"
                " default.",
            ),
        ] = "",
        goaway_timeout: Annotated[
            float,
            typer.Option(
                "--goaway-timeout",
                parser=seconds,
                metavar="SECONDS",
                help="How long they have to leave when it stops.",
            ),
        ] = 5.0,
        admin: Annotated[
            str | None,
            typer.Option(
                "--admin",
                metavar="[HOST:]PORT",
                help="Serve /metrics, /healthz, /readyz and /status over HTTP there; on 127.0.0.1"
                " where no host is named. It has no TLS and no authorization.",
            ),
        ] = None,
        status: Annotated[
            str | None,
            typer.Option(
                "--status",
                metavar="URL",
                help="Run no relay: show what the one does whose --admin is at this http:// URL.",
            ),
        ] = None,
        upstream: Annotated[
            list[str] | None,
            typer.Option(
                "--upstream",
                metavar="URL",
                help="Relay or publisher that is asked for what nobody publishes here,"
                " moqt://HOST:PORT; may be repeated, the best one first.",
            ),
        ] = None,
        ca: CaOption = None,
        client_cert: ClientCertOption = None,
        client_key: ClientKeyOption = None,
        token_file: TokenOption = None,
        insecure: InsecureOption = False,
        datagram_size: DatagramSizeOption = None,
        lines: LinesOption = False,
    ) -> None:
        """Run a relay until interrupted.

        Each cache crosses it once, however many consumers there are. With --json or --lines its
        counters are printed when it ends.
        """
        if status is not None:
            # Here, since rich takes a tenth of a second to import.
            from kvcs.cli.status import show

            await show(output, status)
            return
        if cert is None or key is None:
            raise UsageError("a relay needs a certificate: --cert FILE and --key FILE")
        host, port = parse_address(bind, RELAY_PORT)
        limits = read_limits(
            limit or (),
            Limits(
                relay=RelayLimits(cache_octets=cache_mib * MIB),
                session=SessionSettings(),
                quic=QuicSettings(datagram_size=datagram_size, bidi_streams=REQUEST_STREAMS),
                max_sessions=MAX_SESSIONS,
            ),
        )
        settings = RelaySettings(
            host=host,
            port=port,
            cert=cert,
            key=key,
            limits=limits.relay,
            session=limits.session,
            quic=limits.quic,
            max_sessions=limits.max_sessions,
            cache_dir=cache_dir,
            cache_disk_octets=cache_disk_mib * MIB,
            allow_anyone=allow_anyone,
            issuers=issuers,
            audience=tuple(audience or ()),
            goaway_uri=goaway_uri,
            goaway_timeout=goaway_timeout,
            client_ca=client_ca,
            upstreams=tuple(upstream or ()),
            ca=ca,
            client_cert=client_cert,
            client_key=client_key,
            token=token_source(token_file) if upstream else None,
            verify=not insecure,
        )
        told = Lines(lines)
        server = Relay(settings)
        async with (
            _administered(admin, server) as admin_url,
            server as running,
            reloading(running),
        ):
            told.event("listening", url=running.url, admin=admin_url)
            if not lines:
                output.note(f"relay listening on {running.url}")
                if admin_url:
                    output.note(f"metrics and status on {admin_url}")
            try:
                await running.closed()
            finally:
                _show(output, running.stats, told)


@asynccontextmanager
async def _administered(address: str | None, relay: Relay) -> AsyncIterator[str | None]:
    """HTTP beside the relay, from before it listens until it has stopped; gives its URL."""
    if address is None:
        yield None
        return
    # Here, since it needs an extra that most relays do without.
    from kvcs.relay.admin import Admin

    host, port = parse_address(f"127.0.0.1:{address}" if address.isdecimal() else address, 0)
    async with Admin(relay.status, kvcs.__version__, host, port) as admin:
        yield admin.url


def _show(output: Output, stats: RelayStats, told: Lines) -> None:
    """Tell what the relay did, to programs: who stops it by hand sees its log."""
    document = asdict(stats)
    if told.wanted:
        told.event("stopped", **document)
    elif output.as_json:
        output.result(document, [])
