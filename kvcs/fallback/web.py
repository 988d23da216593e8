"""What every client over HTTP here shares: TLS, tokens, sizes looked at before anything is read."""

from __future__ import annotations

import base64
import inspect
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import urlsplit

from kvcs.errors import UsageError
from kvcs.fallback.library import aiohttp, client_context, is_local
from kvcs.fallback.source import SourceFailed
from kvcs.quic.tokens import TokenSource, token_octets

CONCURRENCY: Final = 8
"""Requests at a time."""

TIMEOUT_SECONDS: Final = 10.0
"""Longest silence of a server."""

PIECE: Final = 256 * 1024
"""Octets that are read at a time."""


class HttpClient:
    """Asks one HTTP server.

    Redirects are refused: a token is for the server that was named. Sizes are checked before
    anything is read. It is entered before it is used, by several users at a time if need be.

    Args:
        url: ``https://host[:port][/path]``; ``http://`` for this machine alone.
        ca: PEM file of the CA to believe, instead of the system's.
        token: as for `kvcs.connect`: base64url, octets, or what gives them.
        concurrency: requests at a time.
        timeout: longest silence of the server, seconds.

    Raises:
        UsageError: the URL is none of these, or a bound is not above 0.
    """

    def __init__(
        self,
        url: str,
        *,
        ca: str | Path | None = None,
        token: TokenSource | None = None,
        concurrency: int = CONCURRENCY,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"{url!r} is no https:// URL")
        if parts.query or parts.fragment or parts.username or parts.password:
            raise UsageError(f"{url!r}: the URL may have neither user, query nor fragment")
        if parts.scheme == "http" and not is_local(parts.hostname):
            raise UsageError(f"{url!r}: say https://; without TLS only this machine is asked")
        if concurrency < 1 or not timeout > 0:
            raise UsageError("concurrency and timeout must be above 0")
        self.url = url.rstrip("/")
        self._secure = parts.scheme == "https"
        self._ca = ca
        self._token = token
        self._concurrency = concurrency
        self._timeout = timeout
        self._users = 0
        self._session: Any = None

    async def __aenter__(self) -> Self:
        """Get ready.

        Raises:
            UsageError: aiohttp is not installed.
            FileError: the CA file cannot be used.
        """
        if self._session is None:
            library = aiohttp()
            tls = client_context(self._ca) if self._secure else False
            self._session = library.ClientSession(
                connector=library.TCPConnector(limit=self._concurrency, ssl=tls),
                timeout=library.ClientTimeout(
                    total=None, sock_connect=self._timeout, sock_read=self._timeout
                ),
                cookie_jar=library.DummyCookieJar(),
                auto_decompress=False,
                trust_env=False,
            )
        self._users += 1
        return self

    async def __aexit__(self, *_: object) -> None:
        """The last user closes the connections."""
        self._users -= 1
        if self._users == 0:
            session, self._session = self._session, None
            await session.close()

    async def small(self, url: str, limit: int) -> bytes:
        """A whole answer of at most ``limit`` octets.

        Raises:
            SourceFailed: it cannot be had, or is longer.
        """
        async with await self.get(url, {}) as response:
            self.check(response, limit, 200)
            taken = bytearray()
            try:
                while piece := await response.content.read(PIECE):
                    taken += piece
                    if len(taken) > limit:
                        raise SourceFailed(f"{self.url}: an answer is longer than {limit} octets")
            except SourceFailed:
                raise
            except Exception as exc:
                raise self.failed(exc) from exc
        return bytes(taken)

    async def get(self, url: str, headers: dict[str, str]) -> Any:
        """An answer, of which nothing was read.

        Raises:
            SourceFailed: the server cannot be asked.
            UsageError: it was not entered.
        """
        if self._session is None:
            raise UsageError("enter it first: async with source")
        headers |= {"Accept-Encoding": "identity"}
        token = await self._token_octets()
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        try:
            return await self._session.get(url, headers=headers, allow_redirects=False)
        except Exception as exc:
            raise self.failed(exc) from exc

    async def _token_octets(self) -> str | None:
        given = self._token() if callable(self._token) else self._token
        if inspect.isawaitable(given):
            given = await given
        if given is None:
            return None
        [octets] = token_octets(given)
        return base64.urlsafe_b64encode(octets).rstrip(b"=").decode()

    def check(self, response: Any, limit: int, status: int) -> None:
        """Look at an answer before anything of it is read."""
        if response.status != status:
            raise SourceFailed(f"{self.url} answered {response.status}", response.status)
        length = response.content_length
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise SourceFailed(f"{self.url}: an answer is encoded")
        if status == 206 and length != limit:
            raise SourceFailed(f"{self.url}: {length} octets came for a range of {limit}")
        if length is not None and length > limit:
            raise SourceFailed(f"{self.url}: an answer of {length} octets, limit {limit}")

    def failed(self, error: Exception) -> Exception:
        """What the library raised, as ours; what is no failure of the way stays what it is."""
        library = aiohttp()
        if isinstance(error, library.ClientConnectorCertificateError):
            why = getattr(error.certificate_error, "verify_message", "") or "not trusted"
            return SourceFailed(
                f"{self.url} cannot be read: its certificate does not verify ({why});"
                " pass as ca (--ca) the authority that signed it"
            )
        if isinstance(error, library.ClientError | OSError | TimeoutError | ValueError):
            return SourceFailed(f"{self.url} cannot be read: {error or type(error).__name__}")
        return error
