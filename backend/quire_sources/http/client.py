# SPDX-License-Identifier: Apache-2.0
"""The HTTP client that all remote readers use. It handles byte ranges, redirects and proxies, and its errors contain no
secrets.

The client follows redirects itself, because it must not send secret headers to another origin.
"""

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from quire_sources.http.borders import AddressRefused, Borders, CheckingResolver, unchecked
from quire_sources.http.errors import error_from_status
from quire_sources.reader import FileMissing, OpenFile
from quire_spec.errors import Unavailable
from quire_spec.net.redaction import describe_error

_READ_BYTES = 2**20
_MAX_REDIRECTS = 5
_REDIRECT_STATUSES = (301, 302, 303, 307, 308)
_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=15, sock_read=30)
"""Timeouts of a request. The total time of a request is not limited, because adapters are large and connections can be
slow. However, a request fails if the server stops sending data."""
_IDENTITY_ENCODINGS = ("identity", "aws-chunked", "")
"""Values of Content-Encoding that do not change the bytes. Some tools leave the value "aws-chunked" on objects that
they upload to a bucket."""
_CONTENT_RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")


def create_session(borders: Borders | None = None) -> aiohttp.ClientSession:
    """Return a session that stores no cookies, and that does not read credentials from the environment. It connects
    only to addresses inside the borders, if there are any.

    If cookies were stored, a cookie of one source could grant access to another source on the same host. The number of
    stored cookies would not be limited either. `trust_env` is not used, because it would also send the credentials in
    ~/.netrc. Instead, `_proxy_of` reads the environment variables for proxies.
    """
    connector = None
    if borders is not None:
        # A request that is not checked must leave neither an address nor an open connection to one that is.
        connector = aiohttp.TCPConnector(resolver=CheckingResolver(borders), use_dns_cache=False, force_close=True)
    return aiohttp.ClientSession(connector=connector, auto_decompress=False, cookie_jar=aiohttp.DummyCookieJar())


class HttpClient:
    """Sends requests in one session. Subclasses convert the error responses of their protocol to QuireErrors."""

    def __init__(
        self,
        session: aiohttp.ClientSession,
        borders: Borders | None = None,
        trusted: URL | None = None,
        use_proxy: bool = True,
    ) -> None:
        """`session` is the result of `create_session(borders)`. With borders, redirects to other hosts are not
        followed. `trusted` is the origin of a server that the administrator sets: its address is not checked, and its
        redirects are followed to other hosts. A proxy of the environment resolves names itself, so that the borders do
        not apply to them; `use_proxy` can be false."""
        self._session, self._borders, self._trusted = session, borders, trusted
        self._use_proxy = use_proxy

    @asynccontextmanager
    async def open(
        self, url: URL, secret_headers: Mapping[str, str], plain_headers: Mapping[str, str], display_name: str
    ) -> AsyncIterator[OpenFile]:
        """Send a GET request for a file. `plain_headers` is the result of `range_headers`. Raises NotFound or
        Unavailable. The iterator over the chunks can raise these errors, too.

        If the range in the response cannot be used, the file is requested again from its beginning.
        """
        async with self.request("GET", url, secret_headers, plain_headers, display_name) as response:
            if plain_headers and not _can_resume(response, plain_headers):
                async with self.open(url, secret_headers, {}, display_name) as file:
                    yield file
                return
            await self.check_response(response, display_name)
            if response.headers.get("Content-Encoding", "") not in _IDENTITY_ENCODINGS:
                raise Unavailable(f"{display_name}: has a Content-Encoding; store and serve the files uncompressed")
            start, size = _content_extent(response, display_name)
            # A 206 response may omit the version. It then has the version that the request named.
            version = response_version(response) or (_requested_version(plain_headers) if start else None)
            yield OpenFile(start, size, version, _iter_chunks(response, display_name))

    async def check_response(self, response: aiohttp.ClientResponse, display_name: str) -> aiohttp.ClientResponse:
        """Return the response if it is successful. Otherwise, raise NotFound or Unavailable."""
        if response.status in (200, 206):
            return response
        if response.status in (404, 410):
            raise FileMissing(
                f"{display_name}: HTTP {response.status}; check the URL, and check that the files are stored as "
                "safetensors"
            )
        raise error_from_status(display_name, response.status, response.headers)

    @asynccontextmanager
    async def request(
        self,
        method: str,
        url: URL,
        secret_headers: Mapping[str, str],
        plain_headers: Mapping[str, str],
        display_name: str,
        stop_at: Callable[[aiohttp.ClientResponse], bool] = lambda response: False,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request and follow redirects, until a response is not a redirect or `stop_at` returns True for it.

        `secret_headers` are sent only to the origin of `url`.
        """
        first_origin, target = url.origin(), url
        for _ in range(_MAX_REDIRECTS + 1):
            headers = {
                "Accept-Encoding": "identity",
                **plain_headers,
                **(secret_headers if target.origin() == first_origin else {}),
            }
            proxy = _proxy_of(target) if self._use_proxy else None
            try:
                with unchecked(proxy is not None or self._is_trusted(target)):
                    self._check_literal_address(target)
                    response = await self._session.request(
                        method, target, headers=headers, allow_redirects=False, timeout=_TIMEOUT, proxy=proxy
                    )
            except AddressRefused as error:
                raise Unavailable(f"{display_name}: {error}") from error
            except aiohttp.InvalidURL as error:
                raise Unavailable(f"{display_name}: its URL or the proxy's URL is not valid; correct it") from error
            except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
                # A ValueError means that the host is invalid, or that the URL contains a user although there is a
                # secret header. After a redirect, the message names the host to which the redirect leads, because the
                # problem may be the certificate of this host.
                verb = "no response from" if target == url else "no response after a redirect to"
                raise Unavailable(f"{display_name}: {verb} {target.origin()}: {_describe(error)}") from error
            async with response:
                is_redirect = response.status in _REDIRECT_STATUSES and "Location" in response.headers
                if not is_redirect or stop_at(response):
                    yield response
                    return
                target = self._redirect_target(target, response, display_name)
        raise Unavailable(f"{display_name}: more than {_MAX_REDIRECTS} redirects")

    def _is_trusted(self, target: URL) -> bool:
        return self._trusted is not None and target.origin() == self._trusted.origin()

    def _check_literal_address(self, target: URL) -> None:
        """Check a URL that contains an IP address, for which no resolver is called."""
        if self._borders is None or self._is_trusted(target):
            return
        try:
            refusal = self._borders.refusal(target.host or "")
        except ValueError:
            # It is a name, which the resolver checks.
            return
        if refusal is not None:
            raise AddressRefused(refusal)

    def _redirect_target(self, current: URL, response: aiohttp.ClientResponse, display_name: str) -> URL:
        try:
            target = current.join(URL(response.headers["Location"], encoded=True))
            target.origin()
        except ValueError as error:
            raise Unavailable(f"{display_name}: HTTP {response.status} has no valid Location header") from error
        if target.scheme not in ("http", "https"):
            raise Unavailable(f"{display_name}: refused a redirect to another scheme than http and https")
        if current.scheme == "https" and target.scheme == "http":
            raise Unavailable(f"{display_name}: refused a redirect from https to http")
        if self._borders is not None and self._trusted is None and target.host != current.host:
            raise Unavailable(
                f"{display_name}: the server redirects to another host, which is not followed; use the URL to which "
                "it redirects"
            )
        return target


def range_headers(
    start: int, version: str | None, num_bytes: int | None = None, condition: str = "If-Range"
) -> dict[str, str]:
    """Return the headers that request a part of a file. The part begins at offset `start` and has `num_bytes` bytes. If
    `num_bytes` is None, the part ends at the end of the file. The server sends the part only if the file still has
    `version`.

    With If-Range, the server sends the whole file if the file has changed.
    """
    if not start and num_bytes is None:
        return {}
    last = "" if num_bytes is None else str(start + num_bytes - 1)
    return {"Range": f"bytes={start}-{last}", **({condition: version} if version else {})}


def response_version(response: aiohttp.ClientResponse) -> str | None:
    """Return the ETag of a response if the ETag is strong. Otherwise, return Last-Modified. Weak ETags are ignored,
    because files with different bytes can have the same weak ETag."""
    etag = response.headers.get("ETag")
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified")


def redact_url(url: URL) -> str:
    """Return a URL that can be shown in messages. Its query and its user are removed, because they can contain a
    signature or a password."""
    return str(url.with_user(None).with_query(None).with_fragment(None))


def _proxy_of(target: URL) -> str | None:
    """Return the proxy that the environment sets for a URL. aiohttp's trust_env is not used for this, because it would
    also read ~/.netrc."""
    proxies = getproxies()
    if proxy_bypass(f"{target.host}:{target.port}", proxies):
        return None
    proxy = proxies.get(target.scheme) or proxies.get("all")
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def _describe(error: Exception) -> str:
    """Return the reason of a failed request. It does not quote the response, which can come from any service."""
    is_proxy_error = isinstance(error, aiohttp.ClientHttpProxyError)
    if isinstance(error, aiohttp.ClientResponseError | aiohttp.ClientPayloadError) and not is_proxy_error:
        return "its response is not valid HTTP"
    return describe_error(error)


def _can_resume(response: aiohttp.ClientResponse, plain_headers: Mapping[str, str]) -> bool:
    """Return whether the response to a range request can be used. If the result is False, the whole file must be
    requested."""
    if response.status != 206:
        # 412 means that the file has another version. 416 means that the file does not contain the range.
        return response.status not in (412, 416)
    content_range = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if content_range is None or not plain_headers["Range"].startswith(f"bytes={content_range[1]}-"):
        return False
    # Some servers implement Range but not If-Range. They may send a range from another version of the file.
    requested_version = _requested_version(plain_headers)
    return requested_version is None or response_version(response) in (None, requested_version)


def _requested_version(plain_headers: Mapping[str, str]) -> str | None:
    return plain_headers.get("If-Match") or plain_headers.get("If-Range")


def _content_extent(response: aiohttp.ClientResponse, display_name: str) -> tuple[int, int | None]:
    """Return the offset of the first byte of the body, and the size of the whole file."""
    if response.status == 200:
        chunked = "chunked" in response.headers.get("Transfer-Encoding", "").lower()
        if response.content_length is None and not chunked:
            raise Unavailable(
                f"{display_name}: the response has no Content-Length and is not chunked, so a lost connection could "
                "not be detected; configure the server to send Content-Length"
            )
        return 0, response.content_length
    match = _CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
    if match is None:
        raise Unavailable(f"{display_name}: HTTP 206 has no valid Content-Range header")
    return int(match[1]), None if match[2] == "*" else int(match[2])


async def _iter_chunks(response: aiohttp.ClientResponse, display_name: str) -> AsyncIterator[bytes]:
    try:
        async for data in response.content.iter_chunked(_READ_BYTES):
            yield data
    except (aiohttp.ClientError, TimeoutError, OSError, RuntimeError) as error:
        # aiohttp raises RuntimeError if the connection was closed before the read.
        raise Unavailable(f"{display_name}: the connection was cut: {_describe(error)}") from error
