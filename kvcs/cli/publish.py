"""`kvcs publish`: a KV cache file, layer by layer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Annotated

import typer

from kvcs.cli import files
from kvcs.cli.authorities import check_untrusted, read_own_key, read_protection
from kvcs.cli.frame import command
from kvcs.cli.groups import TransferOptions
from kvcs.cli.lines import Lines
from kvcs.cli.options import (
    AudienceOption,
    ClientCaOption,
    IssuersOption,
    LinesOption,
    ProtectKeyOption,
    ScopeKeyOption,
    parse_address,
    seconds,
)
from kvcs.cli.output import Output, octets_text
from kvcs.cli.peers import Peer, connect_all, token_source
from kvcs.cli.prefixes import prefix_of
from kvcs.cli.reloading import reloading
from kvcs.errors import ConnectionClosed, UsageError
from kvcs.kv import Prefix
from kvcs.kvfile import KvFile, load_kv_file
from kvcs.publisher import Publication, Publisher, PublisherSettings
from kvcs.quic.aioquic_backend import QuicSettings
from kvcs.quic.connection import Connection
from kvcs.quic.endpoint import RELAY_PORT, Server, serve


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""

    @command(app, "publish")
    async def publish(
        output: Output,
        *,
        file: Annotated[Path, typer.Argument(metavar="FILE", help="KV cache file (safetensors).")],
        scope_key_file: ScopeKeyOption,
        relay: Annotated[
            list[str] | None,
            typer.Option(
                "--relay",
                metavar="URL",
                help="Where to publish, moqt://HOST:PORT; may be repeated.",
            ),
        ] = None,
        bind: Annotated[
            str | None,
            typer.Option(
                "--serve", metavar="HOST:PORT", help="Listen there instead, for consumers to come."
            ),
        ] = None,
        cert: Annotated[
            Path | None,
            typer.Option("--cert", metavar="FILE", help="With --serve: certificate chain, PEM."),
        ] = None,
        key: Annotated[
            Path | None,
            typer.Option("--key", metavar="FILE", help="With --serve: its private key, PEM."),
        ] = None,
        issuers: IssuersOption = None,
        audience: AudienceOption = None,
        client_ca: ClientCaOption = None,
        who: TransferOptions,
        sign_key_file: Annotated[
            Path | None,
            typer.Option(
                "--sign-key-file",
                metavar="FILE",
                help="Producer's key, which signs every version of the manifest.",
            ),
        ] = None,
        protect_key_file: ProtectKeyOption = None,
        pad_blocks: Annotated[
            int | None,
            typer.Option(
                "--pad-blocks",
                min=1,
                metavar="N",
                help="With --protect-key-file: fill up to a multiple of N blocks, so that relays do"
                " not see the length.",
            ),
        ] = None,
        retain: Annotated[
            float | None,
            typer.Option(
                "--retain",
                parser=seconds,
                metavar="SECONDS",
                help="How long to stay when all is published; until interrupted by default.",
            ),
        ] = None,
        retention: Annotated[
            float,
            typer.Option(
                "--retention",
                parser=seconds,
                metavar="SECONDS",
                help="How long relays may keep the cache.",
            ),
        ] = 3600.0,
        pace: Annotated[
            float,
            typer.Option(
                "--pace",
                parser=seconds,
                metavar="SECONDS",
                help="Time between layers, as if they were computed.",
            ),
        ] = 0.0,
        save: Annotated[
            Path | None,
            typer.Option(
                "--save",
                metavar="DIR",
                help="Also write the publication there, for `kvcs serve-http`; without --relay and"
                " --serve that is all.",
            ),
        ] = None,
        index_out: Annotated[
            Path | None,
            typer.Option(
                "--index-out",
                metavar="FILE",
                help="Also write URI and Block Keys there, for `fetch --index`; the file goes when"
                " the publication ends.",
            ),
        ] = None,
        lines: LinesOption = False,
    ) -> None:
        """Publish a KV cache file and serve it until interrupted."""
        cache = load_kv_file(file)
        prefix = prefix_of(cache, files.read_scope(scope_key_file, output))
        sign = None if sign_key_file is None else read_own_key(sign_key_file, output)
        check_untrusted(who.untrusted_relays, protect_key_file)
        protect = read_protection(protect_key_file, output)
        told = Lines(lines)
        if index_out is not None:
            if not relay and bind is None:
                raise UsageError("--index-out needs --relay or --serve: an index names holders")
            files.check_target(index_out)
            keys = (scope_key_file, sign_key_file, protect_key_file, cert, key, issuers, client_ca)
            files.check_apart(index_out, (file, *keys, *who.files), "--index-out")
        # It is served until interrupted, or as long as --retain says.
        settings = PublisherSettings(retention=retention, lifetime=inf)
        peers = who.peers(relay)
        quic = QuicSettings(datagram_size=who.datagram_size)
        if save is not None and not peers and bind is None:
            # A server that does not listen: it is published to nobody.
            async with Publisher(Server(), settings=settings).publish(
                prefix, sign=sign, protect=protect, pad_blocks=pad_blocks
            ) as publication:
                await _put_layers(output, cache, publication, pace, told)
                folder = await publication.save(save)
                told.event("saved", folder=str(folder))
                _show(output, publication, str(folder), told)
            return
        serving = Serving(
            bind, cert, key, who.token_file, issuers, tuple(audience or ()), client_ca, quic
        )
        async with _session(peers, serving) as sessions:
            where = next(each.url if isinstance(each, Server) else each.peer for each in sessions)
            publisher = Publisher(*sessions, settings=settings)
            async with publisher.publish(
                prefix, sign=sign, protect=protect, pad_blocks=pad_blocks
            ) as publication:
                uri = publication.uri(where)
                told.event("announced", uri=uri, blocks=prefix.blocks)
                if not output.as_json and not lines:
                    output.note(f"announced {uri}")
                with _noted(index_out, uri, prefix):
                    await _put_layers(output, cache, publication, pace, told)
                    if save is not None:
                        told.event("saved", folder=str(await publication.save(save)))
                    _show(output, publication, uri, told)
                    await _stay(sessions, retain)


@contextmanager
def _noted(path: Path | None, uri: str, prefix: Prefix) -> Iterator[None]:
    """Keep a publication in a file of an index as long as it is there.

    Raises:
        FileError: the file cannot be written.
    """
    if path is None:
        yield
        return
    # Here, since a producer needs nothing else of what consumers do.
    from kvcs.subscriber.indices import index_json

    document = index_json([(uri, prefix)])
    files.write_file(path, document, private=False, replace=True)
    try:
        yield
    finally:
        with suppress(OSError):
            if path.read_bytes() == document:  # else another publication has taken its place
                path.unlink()


@dataclass(frozen=True, slots=True)
class Serving:
    """How the command listens, if it does."""

    bind: str | None
    cert: Path | None
    key: Path | None
    token_file: Path | None
    issuers: Path | None
    audience: tuple[str, ...]
    client_ca: Path | None
    quic: QuicSettings


@asynccontextmanager
async def _session(
    peers: Sequence[Peer], serving: Serving
) -> AsyncIterator[Sequence[Connection | Server]]:
    if peers and serving.bind is None:
        if serving.issuers or serving.audience or serving.client_ca:
            raise UsageError("--issuers, --audience and --client-ca are for --serve HOST:PORT")
        async with connect_all(peers) as connections:
            yield connections
        return
    if peers or serving.bind is None:
        raise UsageError("say where to publish: --relay URL, or --serve HOST:PORT")
    if serving.cert is None or serving.key is None:
        raise UsageError("--serve needs --cert FILE and --key FILE; `kvcs certs` makes them")
    host, port = parse_address(serving.bind, RELAY_PORT)
    async with (
        serve(
            host,
            port,
            cert=serving.cert,
            key=serving.key,
            client_ca=serving.client_ca,
            issuers=serving.issuers,
            audience=serving.audience,
            quic=serving.quic,
            token=token_source(serving.token_file),
        ) as server,
        reloading(server),
    ):
        yield [server]


async def _put_layers(
    output: Output, cache: KvFile, publication: Publication, pace: float, told: Lines
) -> None:
    segment = await publication.segment()
    layers = cache.descriptor.layers
    with output.progress("layers published", layers) as step:
        for layer, (k, v) in cache.layers.items():
            if pace > 0:
                await asyncio.sleep(pace)
            # The file's last tokens may not fill a block; only whole blocks are published.
            v_part = None if cache.descriptor.latent else v[: segment.tokens]
            await segment.put(layer, k[: segment.tokens], v_part)
            told.event("layer_published", layer=layer)
            step.advance()


def _show(output: Output, publication: Publication, uri: str, told: Lines) -> None:
    progress, prefix = publication.progress, publication.prefix
    document = {
        "uri": uri,
        "tokens": prefix.blocks * prefix.descriptor.block_tokens,
        "tokens_left_over": prefix.tokens_left_over,
        "blocks": prefix.blocks,
        "layers": progress.layers,
        "objects": progress.objects,
        "octets": progress.octets,
        "manifest_versions": progress.manifests,
    }
    if told.wanted:
        told.event("published", **document)
        return
    output.result(
        document,
        [
            ("publication", uri),
            ("tokens", f"{document['tokens']} in {prefix.blocks} blocks"),
            ("left over", f"{prefix.tokens_left_over} tokens that fill no block"),
            ("layers", progress.layers),
            ("objects", f"{progress.objects}, {octets_text(progress.octets)}"),
            ("manifest", f"{progress.manifests} versions"),
        ],
    )


async def _stay(sessions: Sequence[Connection | Server], seconds: float | None) -> None:
    """Serve until the time is up, or every relay is gone and does not come back.

    Raises:
        ConnectionClosed: they are gone, or say that they will be where nothing is to follow.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for session in sessions:
                if isinstance(session, Server):
                    await asyncio.Event().wait()
                else:
                    await session.gone()
            for session in sessions:
                if isinstance(session, Connection):
                    session.newest.check_open()
            raise ConnectionClosed("it goes away (GOAWAY)", by_peer=True)
