"""`HttpServer`: serves saved publications, to whom a relay would serve them.

    GET /kvcs-1/{scope}/{compat}/{anchor}/                    Publication IDs, as a JSON array
    GET .../{publication}/publication.json                    what is stored of it
    GET .../{publication}/manifest                            or manifest.cose
    GET .../{publication}/{track}/{layer}                     all blocks of a layer; HTTP Range
    GET .../{publication}/{Block Key}/{layer}/{component}.{codec}     one block

Everything is lower-case hexadecimal but track names and numbers. What is served are the very octets
of the MOQT Objects' payloads.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from kvcs.contexts import OnlyAsyncWith
from kvcs.errors import ConnectionFailed, FileError, TrustError, UsageError
from kvcs.fallback.folder import (
    INDEX,
    SavedPublication,
    folder_of,
    namespace_of,
    publications,
)
from kvcs.fallback.library import aiohttp, is_local, server_context
from kvcs.fallback.reading import Readers, answer, read_changed
from kvcs.kv import MANIFEST, DataTrack
from kvcs.kv.tracks import APPLICATION, PublicationNamespace
from kvcs.observe import get_logger
from kvcs.trust import Authority
from kvcs.trust.rights import Action, Asked
from kvcs.trust.tokens import MAX_TOKEN_OCTETS, TOKEN_TYPE

_log = get_logger("kvcs.fallback")

MAX_INDICES: Final = 64
"""Descriptions of publications that are kept in memory."""

ACCEPT_TURNS: Final = 4
"""Turns of the loop after which a connection that was accepted has its handler: asyncio takes two,
and has no event for it."""

MAX_HEADER: Final = 4 * MAX_TOKEN_OCTETS
"""Longest header field of a request."""

MAX_CONNECTIONS: Final = 256
"""Connections at a time; the next ones are closed at once."""

IDLE_SECONDS: Final = 30.0
"""How long a connection may be open without a whole request on it."""


class HttpServer(OnlyAsyncWith, usage="async with kvcs.HttpServer(...) as server:"):
    """Serves a folder of saved publications; those that come later appear by themselves.

    Args:
        root: the folder.
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        cert: certificate chain, PEM; without one only this machine is served.
        key: its private key.
        authority: decides by tokens, the same as at a relay; None serves anyone.
        clock: Unix seconds.

    Raises:
        UsageError: other machines would be served without TLS, or a key lacks.
    """

    def __init__(
        self,
        root: str | Path,
        *,
        host: str = "127.0.0.1",
        port: int = 8443,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        authority: Authority | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        if (cert is None) != (key is None):
            raise UsageError("a certificate needs its key, and a key its certificate")
        if cert is None and not is_local(host):
            raise UsageError(f"{host}: without a certificate only this machine is served")
        self.root = Path(root)
        self.requests = 0
        """Requests so far."""
        self._host = host
        self._port = port
        self._cert, self._key = cert, key
        self._authority = authority
        self._clock = clock
        self._runner: Any = None
        self._listening: asyncio.Server | None = None
        self._web: Any = None
        self._readers: Readers
        self._indices: OrderedDict[Path, tuple[int, SavedPublication]] = OrderedDict()

    def _check_root(self) -> None:
        # That of `Path` may raise where the folder above cannot be searched.
        if not os.path.isdir(self.root):
            raise FileError(f"{self.root}: is no folder")

    async def __aenter__(self) -> HttpServer:
        """Listen.

        Raises:
            ConnectionFailed: the address cannot be bound.
            FileError: certificate, key or folder cannot be used.
            UsageError: aiohttp is not installed.
        """
        web = self._web = aiohttp("web")
        self._check_root()
        tls = None
        if self._cert is not None and self._key is not None:
            tls = server_context(self._cert, self._key)
        self._readers = Readers()
        server = web.Server(
            self._answer,
            access_log=None,
            max_field_size=MAX_HEADER,
            max_line_size=MAX_HEADER,
            keepalive_timeout=IDLE_SECONDS,
        )
        _bound_connections(server)
        self._runner = web.ServerRunner(server, handle_signals=False)
        await self._runner.setup()
        try:
            self._listening = await asyncio.get_running_loop().create_server(
                self._runner.server, self._host, self._port, ssl=tls
            )
        except OSError as exc:
            await self._runner.cleanup()
            self._readers.close()
            raise ConnectionFailed(
                f"cannot listen on {self._host}:{self._port}: {exc.strerror}"
            ) from exc
        self._port = self._listening.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop, and close every connection."""
        if self._listening is not None:
            # asyncio forgets a connection that it has accepted and not handed over when its server
            # is closed, and aiohttp closes those that were handed over.
            for listening in self._listening.sockets:
                # A loop without readers (Windows' proactor) accepts in a way of its own.
                with suppress(NotImplementedError):
                    asyncio.get_running_loop().remove_reader(listening.fileno())
            for _turn in range(ACCEPT_TURNS):
                await asyncio.sleep(0)
            self._listening.close()
        try:
            await self._runner.cleanup()
        finally:
            self._readers.close()

    @property
    def url(self) -> str:
        """What an `HttpSource` is given."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http{'' if self._cert is None else 's'}://{host}:{self._port}"

    # Requests

    async def _answer(self, request: Any) -> Any:
        self.requests += 1
        response = await self._respond(request)
        _log.debug("http_request", method=request.method, status=response.status)
        return response

    async def _respond(self, request: Any) -> Any:
        web = self._web
        if request.method not in ("GET", "HEAD"):
            return web.Response(status=405, headers={"Allow": "GET, HEAD"})
        try:
            grants = self._grants(request)
        except TrustError:
            return self._unauthorized('error="invalid_token"')
        if grants is None:
            return self._unauthorized("")
        parts = request.path.split("/")[1:]
        if len(parts) < 5 or parts[0] != APPLICATION.decode() or "%" in request.raw_path:
            return web.Response(status=404)
        if len(parts) == 5 and not parts[4]:
            return await self._list(parts[1:4], grants)
        namespace = namespace_of(parts[1:5])
        if namespace is None:
            return web.Response(status=404)
        return await self._serve(request, namespace, parts[5:], grants)

    def _grants(self, request: Any) -> tuple[Any, ...] | None:
        """What the tokens of a request allow; None where it shows none.

        Raises:
            TrustError: a token does not count.
        """
        if self._authority is None:
            return ()
        kind, _, text = request.headers.get("Authorization", "").partition(" ")
        if kind.lower() != "bearer":
            return None
        try:
            value = base64.b64decode(
                text.strip() + "=" * (-len(text.strip()) % 4), altchars=b"-_", validate=True
            )
        except (ValueError, binascii.Error) as exc:
            raise TrustError("token: not base64url", check="structure") from exc
        return self._authority.verify([(TOKEN_TYPE, value)], self._clock())

    def _unauthorized(self, detail: str) -> Any:
        challenge = f"Bearer {detail}".strip()
        return self._web.Response(status=401, headers={"WWW-Authenticate": challenge})

    def _may(self, asked: Asked, grants: tuple[Any, ...]) -> bool:
        if self._authority is None:
            return True
        try:
            self._authority.decide(asked, grants, self._clock())
        except TrustError:
            return False
        return True

    async def _list(self, parts: list[str], grants: tuple[Any, ...]) -> Any:
        web = self._web
        anywhere = namespace_of([*parts, "00" * 16])
        if anywhere is None:
            return web.Response(status=404)
        scope, compat, anchor, _ = anywhere
        asked = Asked(Action.SUBSCRIBE_NAMESPACE, (APPLICATION, scope, compat, anchor))
        if not self._may(asked, grants):
            return web.Response(status=403)
        found = await self._readers.run(publications, self.root, scope, compat, anchor)
        body = json.dumps([each.hex() for each in found]).encode()
        return web.Response(body=body, content_type="application/json")

    async def _serve(
        self,
        request: Any,
        namespace: PublicationNamespace,
        parts: list[str],
        grants: tuple[Any, ...],
    ) -> Any:
        """One file of a publication, or a part of one. Whether it is there shows to nobody who may
        not have it."""
        web = self._web
        folder = folder_of(self.root, namespace)
        index = await self._index(folder)
        name, where = self._find(index, parts)
        if not self._may(Asked(Action.FETCH, namespace.fields, name), grants):
            return web.Response(status=403)
        if index is None or where is None:
            return web.Response(status=404)
        path, start, octets = where
        return await answer(web, request, self._readers, folder / path, start, octets)

    async def _index(self, folder: Path) -> SavedPublication | None:
        kept = self._indices.get(folder)
        try:
            changed, index = await self._readers.run(
                read_changed, folder, None if kept is None else kept[0]
            )
        except FileError as exc:
            _log.warning("publication_not_readable", reason=str(exc))
            return None
        except OSError:
            return None
        if index is None and kept is not None:
            index = kept[1]
        if index is not None:
            self._keep(folder, changed, index)
        return index

    def _keep(self, folder: Path, changed: int, index: SavedPublication) -> None:
        self._indices[folder] = (changed, index)
        self._indices.move_to_end(folder)
        while len(self._indices) > MAX_INDICES:
            self._indices.popitem(last=False)

    @staticmethod
    def _find(
        index: SavedPublication | None, parts: list[str]
    ) -> tuple[bytes, tuple[str, int, int | None] | None]:
        """Track Name that a path asks for, and file, start and length; None where there is none.

        Only names that the index has are ever joined to a path.
        """
        manifest = MANIFEST if index is None else index.manifest
        try:
            if parts == [INDEX]:
                return manifest, None if index is None else (INDEX, 0, None)
            if len(parts) == 1:
                named = parts[0].encode()
                here = index is not None and named == index.manifest
                return named, (parts[0], 0, None) if here else None
            if len(parts) == 2:
                track = DataTrack.parse(parts[0])
                layer = _number(parts[1])
                if index is None or track not in index.tracks or layer >= index.layers:
                    return track.name, None
                return track.name, (f"{track}/{layer}", 0, None)
            if len(parts) == 3:
                found = None if index is None else index.find(bytes.fromhex(parts[0]))
                segment, block = (0, 0) if found is None else found
                track = DataTrack.parse(f"{parts[2]}.s{segment}")
                layer = _number(parts[1])
                if index is None or found is None or layer >= index.layers:
                    return track.name, None
                saved = index.tracks.get(track)
                if saved is None:
                    return track.name, None
                start, octets = saved.offset(layer, block), saved.size(layer, block)
                return track.name, (f"{track}/{layer}", start, octets)
        except ValueError:
            pass  # no name of anything
        return manifest, None


def _bound_connections(server: Any) -> None:
    """Close connections beyond `MAX_CONNECTIONS`: whoever connects has shown nothing yet."""
    made = server.connection_made

    def bounded(handler: Any, transport: Any) -> None:
        made(handler, transport)
        if len(server.connections) > MAX_CONNECTIONS:
            transport.abort()

    server.connection_made = bounded


def _number(text: str) -> int:
    """A number in its one form.

    Raises:
        ValueError: it is none.
    """
    number = int(text)
    if str(number) != text or number < 0:
        raise ValueError(text)
    return number
