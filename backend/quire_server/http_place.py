# SPDX-License-Identifier: Apache-2.0
"""Files under an HTTP(S) URL: ranges to resume, secret headers for the first origin only, no silent compression."""

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from quire_server.places import Opened
from quire_spec.answer import refused
from quire_spec.errors import AccessDenied, InvalidArgument, NotFound, Unavailable
from quire_spec.secret import said

_READ_BYTES = 2**20
_MAX_REDIRECTS = 5
_REDIRECTS = (301, 302, 303, 307, 308)
_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=15, sock_read=30)
"""No limit on the whole: adapters are large and lines slow. A silent peer is given up."""
_AS_IT_IS = ("identity", "aws-chunked", "")
"""Encodings that change nothing: the second is what some uploads to buckets leave behind."""
_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_SHA256 = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


class HttpPlace:
    """A folder served over HTTP(S)."""

    fixed = False
    revision = None

    def __init__(
        self, session: aiohttp.ClientSession, url: str, sha256: str | None, headers: Callable[[], Mapping[str, str]]
    ) -> None:
        """`headers` reads the secret headers; `sha256` is that of the weights.

        Raises:
            InvalidArgument: not an http(s) URL, or not a SHA-256.
        """
        self._reader = HttpReader(session)
        self._url = _checked(url)
        self._headers = headers
        self._sha256 = None
        if sha256 is not None:
            match = _SHA256.fullmatch(sha256.lower())
            if match is None:
                raise InvalidArgument(f"http source: sha256 {sha256!r} is not 64 hexadecimal digits")
            self._sha256 = match[1]

    def where(self, name: str) -> str:
        return shown(self._file(name))

    def expected_sha256(self, name: str) -> str | None:
        return self._sha256 if name.endswith(".safetensors") else None

    async def version(self, name: str) -> str | None:
        async with self._reader.request("HEAD", self._file(name), self._headers(), {}) as answer:
            if answer.status in (405, 501):
                # Some servers know only GET; then nothing can be told without reading.
                return None
            return version_of(await self._reader.checked(answer, self.where(name)))

    @asynccontextmanager
    async def open(self, name: str, start: int, version: str | None) -> AsyncIterator[Opened]:
        # If-Range makes the server send everything when the file has changed meanwhile.
        wanted = {"Range": f"bytes={start}-", "If-Range": version} if start and version else {}
        async with self._reader.open(self._file(name), self._headers(), wanted) as opened:
            yield opened

    def _file(self, name: str) -> URL:
        return self._url.joinpath(name).with_query(self._url.query)


class HttpReader:
    """Opens URLs; follows redirects itself, because secret headers must not follow to another origin."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @asynccontextmanager
    async def open(
        self, url: URL, secret: Mapping[str, str], plain: Mapping[str, str], where: str | None = None
    ) -> AsyncIterator[Opened]:
        """GET; raises NotFound and Unavailable, also from the chunks. `where` names the file, None: by its URL."""
        async with self.request("GET", url, secret, plain, where) as answer:
            if plain and not _goes_on(answer, plain):
                async with self.open(url, secret, {}, where) as opened:
                    yield opened
                return
            where = where or shown(url)
            await self.checked(answer, where)
            if (encoding := answer.headers.get("Content-Encoding", "")) not in _AS_IT_IS:
                raise Unavailable(f"{where}: comes as {encoding}; store the files as they are, and serve them so")
            start, size = _extent(answer, where)
            # A part need not say what version it is of: it was asked for by its version.
            version = version_of(answer) or (_asked_for(plain) if start else None)
            yield Opened(start, size, version, _chunks(answer, where))

    async def checked(self, answer: aiohttp.ClientResponse, where: str) -> aiohttp.ClientResponse:
        """The answer, if it is a good one; raises NotFound or Unavailable."""
        if answer.status in (200, 206):
            return answer
        if answer.status in (404, 410):
            raise NotFound(
                f"{where}: HTTP {answer.status}; check the URL, and that the adapter is stored as safetensors"
            )
        if answer.status in (401, 403):
            raise AccessDenied(f"{where}: HTTP {answer.status}; the source's secret is missing, wrong, or lacks access")
        raise refused(where, answer.status, answer.headers)

    @asynccontextmanager
    async def request(
        self, method: str, url: URL, secret: Mapping[str, str], plain: Mapping[str, str], where: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that leads nowhere else; `secret` headers go to the URL's own origin only."""
        first, target = url.origin(), url
        where = where or shown(url)
        for _ in range(_MAX_REDIRECTS + 1):
            headers = {"Accept-Encoding": "identity", **plain, **(secret if target.origin() == first else {})}
            try:
                answer = await self._session.request(
                    method,
                    target,
                    headers=headers,
                    allow_redirects=False,
                    timeout=_TIMEOUT,
                    proxy=_proxy_of(target),
                )
            except aiohttp.InvalidURL as error:
                raise Unavailable(f"{where}: it, or the proxy's, is not a URL that can be asked") from error
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                # A ValueError: a host that is none, or a secret header beside a user in the URL.
                # Of a redirect, what is wrong is wrong there, such as the certificate of a store behind a hub.
                there = "" if target == url else f"it redirects to {target.origin()}: "
                raise Unavailable(f"{where}: {there}{said(error)}") from error
            async with answer:
                if answer.status not in _REDIRECTS or "Location" not in answer.headers:
                    yield answer
                    return
                target = _next(target, answer, where)
        raise Unavailable(f"{where}: more than {_MAX_REDIRECTS} redirects")


def _proxy_of(target: URL) -> str | None:
    """The proxy that the environment names for a URL. aiohttp's trust_env would also send credentials of ~/.netrc."""
    proxies = getproxies()
    if proxy_bypass(f"{target.host}:{target.port}", proxies):
        return None
    proxy = proxies.get(target.scheme) or proxies.get("all")
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def version_of(answer: aiohttp.ClientResponse) -> str | None:
    """A strong ETag, or the time of the last change. A weak ETag may stay the same over different bytes."""
    etag = answer.headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else answer.headers.get("Last-Modified")


def shown(url: URL) -> str:
    """A URL for messages: the query may be a signature, the user a password."""
    return str(url.with_user(None).with_query(None).with_fragment(None))


def _checked(url: str) -> URL:
    try:
        parsed = URL(url)
    except ValueError as error:
        raise InvalidArgument("http source: the url cannot be read as one; use http(s)://host/folder") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        # Not quoted: what is wrong with it may be where its password is.
        raise InvalidArgument(f"http source: the url (scheme {parsed.scheme!r}) is not http(s)://host/folder")
    return parsed


def _next(current: URL, answer: aiohttp.ClientResponse, where: str) -> URL:
    try:
        target = current.join(URL(answer.headers["Location"], encoded=True))
        target.origin()
    except ValueError as error:
        raise Unavailable(f"{where}: HTTP {answer.status} without a usable Location") from error
    if target.scheme not in ("http", "https") or (current.scheme == "https" and target.scheme == "http"):
        raise Unavailable(f"{where}: refused a redirect from {current.scheme} to {target.scheme}")
    return target


def _goes_on(answer: aiohttp.ClientResponse, plain: Mapping[str, str]) -> bool:
    """Whether an answer to a request for a part can be used; if not, the file is to be read from its beginning."""
    if answer.status != 206:
        # What we hold is of another version, or not a part of this file.
        return answer.status not in (412, 416)
    part = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if part is None or plain["Range"] != f"bytes={part[1]}-":
        return False
    # Some servers know Range and no If-Range: then it may be a part of another version.
    asked = _asked_for(plain)
    return asked is None or version_of(answer) in (None, asked)


def _asked_for(plain: Mapping[str, str]) -> str | None:
    """The version that a part was asked of."""
    return plain.get("If-Match") or plain.get("If-Range")


def _extent(answer: aiohttp.ClientResponse, where: str) -> tuple[int, int | None]:
    """Offset of the first byte to come, and the size of the whole."""
    if answer.status == 200:
        chunked = "chunked" in answer.headers.get("Transfer-Encoding", "").lower()
        if answer.content_length is None and not chunked:
            raise Unavailable(
                f"{where}: the server says neither how long the file is nor where it ends, so that a cut could not be "
                "seen; have it send Content-Length"
            )
        return 0, answer.content_length
    match = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if match is None:
        raise Unavailable(f"{where}: HTTP 206 without a Content-Range that can be read")
    return int(match[1]), None if match[2] == "*" else int(match[2])


async def _chunks(answer: aiohttp.ClientResponse, where: str) -> AsyncIterator[bytes]:
    try:
        async for data in answer.content.iter_chunked(_READ_BYTES):
            yield data
    except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as error:
        # aiohttp has a RuntimeError for a connection that was gone before we asked.
        raise Unavailable(f"{where}: the connection was cut: {said(error)}") from error
