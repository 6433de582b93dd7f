# SPDX-License-Identifier: Apache-2.0
"""Files under an HTTP(S) URL: ranges to resume, secret headers for the first origin only, no silent compression."""

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from quire_server.sources.reader import OpenFile
from quire_spec.errors import AccessDenied, InvalidArgument, NotFound, Unavailable
from quire_spec.net.http_errors import error_from_status
from quire_spec.net.redaction import describe_error

_READ_BYTES = 2**20
_MAX_REDIRECTS = 5
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)
_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=15, sock_read=30)
"""No limit on the whole: adapters are large and lines slow. A silent peer is given up."""
_IDENTITY_ENCODINGS = ("identity", "aws-chunked", "")
"""Encodings that change nothing: the second is what some uploads to buckets leave behind."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
_SHA256 = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


class HttpSourceReader:
    """A folder served over HTTP(S)."""

    is_immutable = False
    revision = None

    def __init__(
        self, session: aiohttp.ClientSession, url: str, sha256: str | None, headers: Callable[[], Mapping[str, str]]
    ) -> None:
        """`headers` reads the secret headers; `sha256` is that of the weights.

        Raises:
            InvalidArgument: not an http(s) URL, or not a SHA-256.
        """
        self._client = HttpClient(session)
        self._url = _parse_url(url)
        self._headers = headers
        self._sha256 = None
        if sha256 is not None:
            match = _SHA256.fullmatch(sha256.lower())
            if match is None:
                raise InvalidArgument(f"http source: sha256 {sha256!r} is not 64 hexadecimal digits")
            self._sha256 = match[1]

    def display_name(self, name: str) -> str:
        return redact_url(self._file_url(name))

    def expected_sha256(self, name: str) -> str | None:
        return self._sha256 if name.endswith(".safetensors") else None

    async def version(self, name: str) -> str | None:
        async with self._client.request("HEAD", self._file_url(name), self._headers(), {}) as response:
            if response.status in (405, 501):
                # Some servers know only GET; then nothing can be told without reading.
                return None
            return response_version(await self._client.check_response(response, self.display_name(name)))

    @asynccontextmanager
    async def open(self, name: str, start: int, version: str | None) -> AsyncIterator[OpenFile]:
        # If-Range makes the server send everything when the file has changed meanwhile.
        range_headers = {"Range": f"bytes={start}-", "If-Range": version} if start and version else {}
        async with self._client.open(self._file_url(name), self._headers(), range_headers) as file:
            yield file

    def _file_url(self, name: str) -> URL:
        return self._url.joinpath(name).with_query(self._url.query)


class HttpClient:
    """Opens URLs; follows redirects itself, because secret headers must not follow to another origin."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    @asynccontextmanager
    async def open(
        self,
        url: URL,
        secret_headers: Mapping[str, str],
        plain_headers: Mapping[str, str],
        display_name: str | None = None,
    ) -> AsyncIterator[OpenFile]:
        """GET; raises NotFound and Unavailable, also from the chunks. `where` names the file, None: by its URL."""
        async with self.request("GET", url, secret_headers, plain_headers, display_name) as response:
            if plain_headers and not _can_resume(response, plain_headers):
                async with self.open(url, secret_headers, {}, display_name) as file:
                    yield file
                return
            display_name = display_name or redact_url(url)
            await self.check_response(response, display_name)
            if (encoding := response.headers.get("Content-Encoding", "")) not in _IDENTITY_ENCODINGS:
                raise Unavailable(
                    f"{display_name}: comes as {encoding}; store the files as they are, and serve them so"
                )
            start, size = _content_extent(response, display_name)
            # A part need not say what version it is of: it was asked for by its version.
            version = response_version(response) or (_requested_version(plain_headers) if start else None)
            yield OpenFile(start, size, version, _iter_chunks(response, display_name))

    async def check_response(self, response: aiohttp.ClientResponse, display_name: str) -> aiohttp.ClientResponse:
        """The answer, if it is a good one; raises NotFound or Unavailable."""
        if response.status in (200, 206):
            return response
        if response.status in (404, 410):
            raise NotFound(
                f"{display_name}: HTTP {response.status}; check the URL, and that the adapter is stored as safetensors"
            )
        if response.status in (401, 403):
            raise AccessDenied(
                f"{display_name}: HTTP {response.status}; the source's secret is missing, wrong, or lacks access"
            )
        raise error_from_status(display_name, response.status, response.headers)

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: URL,
        secret_headers: Mapping[str, str],
        plain_headers: Mapping[str, str],
        display_name: str | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """An answer that leads nowhere else; `secret` headers go to the URL's own origin only."""
        first_origin, target = url.origin(), url
        display_name = display_name or redact_url(url)
        for _ in range(_MAX_REDIRECTS + 1):
            headers = {
                "Accept-Encoding": "identity",
                **plain_headers,
                **(secret_headers if target.origin() == first_origin else {}),
            }
            try:
                response = await self._session.request(
                    method,
                    target,
                    headers=headers,
                    allow_redirects=False,
                    timeout=_TIMEOUT,
                    proxy=_proxy_of(target),
                )
            except aiohttp.InvalidURL as error:
                raise Unavailable(f"{display_name}: it, or the proxy's, is not a URL that can be asked") from error
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                # A ValueError: a host that is none, or a secret header beside a user in the URL.
                # Of a redirect, what is wrong is wrong there, such as the certificate of a store behind a hub.
                redirect_note = "" if target == url else f"it redirects to {target.origin()}: "
                raise Unavailable(f"{display_name}: {redirect_note}{describe_error(error)}") from error
            async with response:
                if response.status not in _REDIRECT_STATUSES or "Location" not in response.headers:
                    yield response
                    return
                target = _redirect_target(target, response, display_name)
        raise Unavailable(f"{display_name}: more than {_MAX_REDIRECTS} redirects")


def _proxy_of(target: URL) -> str | None:
    """The proxy that the environment names for a URL. aiohttp's trust_env would also send credentials of ~/.netrc."""
    proxies = getproxies()
    if proxy_bypass(f"{target.host}:{target.port}", proxies):
        return None
    proxy = proxies.get(target.scheme) or proxies.get("all")
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def response_version(response: aiohttp.ClientResponse) -> str | None:
    """A strong ETag, or the time of the last change. A weak ETag may stay the same over different bytes."""
    etag = response.headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")


def redact_url(url: URL) -> str:
    """A URL for messages: the query may be a signature, the user a password."""
    return str(url.with_user(None).with_query(None).with_fragment(None))


def _parse_url(url: str) -> URL:
    try:
        parsed = URL(url)
    except ValueError as error:
        raise InvalidArgument("http source: the url cannot be read as one; use http(s)://host/folder") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        # Not quoted: what is wrong with it may be where its password is.
        raise InvalidArgument(f"http source: the url (scheme {parsed.scheme!r}) is not http(s)://host/folder")
    return parsed


def _redirect_target(current: URL, response: aiohttp.ClientResponse, display_name: str) -> URL:
    try:
        target = current.join(URL(response.headers["Location"], encoded=True))
        target.origin()
    except ValueError as error:
        raise Unavailable(f"{display_name}: HTTP {response.status} without a usable Location") from error
    if target.scheme not in ("http", "https") or (current.scheme == "https" and target.scheme == "http"):
        raise Unavailable(f"{display_name}: refused a redirect from {current.scheme} to {target.scheme}")
    return target


def _can_resume(response: aiohttp.ClientResponse, plain_headers: Mapping[str, str]) -> bool:
    """Whether an answer to a request for a part can be used; if not, the file is to be read from its beginning."""
    if response.status != 206:
        # What we hold is of another version, or not a part of this file.
        return response.status not in (412, 416)
    content_range = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if content_range is None or plain_headers["Range"] != f"bytes={content_range[1]}-":
        return False
    # Some servers know Range and no If-Range: then it may be a part of another version.
    requested_version = _requested_version(plain_headers)
    return requested_version is None or response_version(response) in (None, requested_version)


def _requested_version(plain_headers: Mapping[str, str]) -> str | None:
    """The version that a part was asked of."""
    return plain_headers.get("If-Match") or plain_headers.get("If-Range")


def _content_extent(response: aiohttp.ClientResponse, display_name: str) -> tuple[int, int | None]:
    """Offset of the first byte to come, and the size of the whole."""
    if response.status == 200:
        chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()
        if response.content_length is None and not chunked:
            raise Unavailable(
                f"{display_name}: the server says neither how long the file is nor where it ends, so that a cut could "
                "not be "
                "seen; have it send Content-Length"
            )
        return 0, response.content_length
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None:
        raise Unavailable(f"{display_name}: HTTP 206 without a Content-Range that can be read")
    return int(match[1]), None if match[2] == "*" else int(match[2])


async def _iter_chunks(response: aiohttp.ClientResponse, display_name: str) -> AsyncIterator[bytes]:
    try:
        async for data in response.content.iter_chunked(_READ_BYTES):
            yield data
    except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as error:
        # aiohttp has a RuntimeError for a connection that was gone before we asked.
        raise Unavailable(f"{display_name}: the connection was cut: {describe_error(error)}") from error
