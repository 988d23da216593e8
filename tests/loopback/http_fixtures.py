"""A saved toy publication behind a real HTTP server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import kvcs
from kvcs.fallback import HttpServer
from kvcs.kv.tracks import PublicationNamespace
from kvcs.quic.endpoint import Server
from kvcs.trust import Authority
from tests.builders import Toy, put, toy_prefix, toy_publication
from tests.loopback.kv_fixtures import SESSION


@dataclass
class Shelf:
    """A folder of publications, and a server of it."""

    root: Path
    toy: Toy
    prefix: kvcs.Prefix
    namespace: PublicationNamespace
    server: HttpServer


async def save(root: Path, toy: Toy, **options: Any) -> PublicationNamespace:
    """Publish a toy to nobody, and save it."""
    prefix = toy_prefix(sum(toy.blocks), descriptor=toy.descriptor)
    async with kvcs.Publisher(Server(SESSION)).publish(prefix, **options) as publication:
        await put(await publication.segment(), toy)
        await publication.save(root)
        return PublicationNamespace.parse(publication.namespace)


@asynccontextmanager
async def shelf(
    root: Path, *, authority: Authority | None = None, toy: Toy | None = None, **options: Any
) -> AsyncIterator[Shelf]:
    """A toy publication on a shelf, served on a free port of this machine."""
    toy = toy_publication() if toy is None else toy
    prefix = toy_prefix(sum(toy.blocks), descriptor=toy.descriptor)
    namespace = await save(root, toy, **options)
    async with HttpServer(root, port=0, authority=authority) as server:
        yield Shelf(root, toy, prefix, namespace, server)
