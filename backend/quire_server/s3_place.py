# SPDX-License-Identifier: Apache-2.0
"""Files under a prefix of an S3-compatible bucket: obstore signs URLs, http_place.py reads them.

Not obstore's own reader: it takes the token of a session along to wherever a bucket redirects it.
"""

import os
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal
from urllib.parse import urlsplit

import aiohttp
import obstore
from obstore.store import S3Store
from yarl import URL

from quire_server.http_place import HttpReader, version_of
from quire_server.places import Opened
from quire_spec.errors import InvalidArgument, NotFound, QuireError
from quire_spec.s3 import MAX_ERROR_BYTES, SIGNED_FOR, address, check_endpoint, refused, store_options, unsigned

_BUCKET = re.compile(r"[\w.-]+", re.ASCII)


class S3Place:
    """One prefix of one bucket."""

    fixed = False
    revision = None

    def __init__(
        self,
        session: aiohttp.ClientSession,
        uri: str,
        endpoint: str | None,
        region: str | None,
        credentials: Callable[[], Mapping[str, str]],
    ) -> None:
        """`credentials` reads AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and maybe AWS_SESSION_TOKEN; or nothing.

        Raises:
            InvalidArgument: the URI is not s3://bucket/prefix, or the endpoint not a URL.
        """
        parts = urlsplit(uri)
        if parts.scheme != "s3" or not _BUCKET.fullmatch(parts.netloc) or ".." in parts.path.split("/"):
            raise InvalidArgument("s3 source: the uri is not s3://bucket/prefix; a key belongs into a Secret")
        if endpoint is not None:
            check_endpoint(endpoint)
        self._reader = _Reader(session)
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/")
        self._endpoint = endpoint
        self._region = region
        self._credentials = credentials
        self._options: dict[str, Any] = {}
        self._store: S3Store | None = None
        """Of these options; it keeps the identity that a platform gave it, which is asked for over the network."""

    def where(self, name: str) -> str:
        at = f" at {self._endpoint}" if self._endpoint else ""
        return f"s3://{self._bucket}/{self._path(name)}{at}"

    def expected_sha256(self, name: str) -> str | None:
        return None

    async def version(self, name: str) -> str | None:
        where = self.where(name)
        async with self._reader.request("HEAD", await self._url("HEAD", name), {}, {}, where) as answer:
            return version_of(await self._reader.checked(answer, where))

    @asynccontextmanager
    async def open(self, name: str, start: int, version: str | None) -> AsyncIterator[Opened]:
        # Buckets know If-Match, of ETags, and few of them If-Range.
        condition = "If-Match" if version and version.startswith('"') else "If-Range"
        wanted = {"Range": f"bytes={start}-", condition: version} if start and version else {}
        async with self._reader.open(await self._url("GET", name), {}, wanted, self.where(name)) as opened:
            yield opened

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{name}".lstrip("/")

    async def _url(self, method: Literal["GET", "HEAD"], name: str) -> URL:
        try:
            options = store_options(self._endpoint, self._region, self._credentials(), os.environ)
            if self._store is None or options != self._options:
                self._store, self._options = S3Store(self._bucket, **options), options
            signed = await obstore.sign_async(self._store, method, self._path(name), SIGNED_FOR)
        except QuireError:
            # Of the Secret: it has said all there is.
            raise
        except Exception as error:
            raise unsigned(self.where(name), error) from error
        return URL(address(signed, options), encoded=True)


class _Reader(HttpReader):
    """Knows what buckets say."""

    async def checked(self, answer: aiohttp.ClientResponse, where: str) -> aiohttp.ClientResponse:
        if answer.status in (200, 206):
            return answer
        if answer.status == 404:
            raise NotFound(f"{where}: no such object; check bucket and prefix, and that it is stored as safetensors")
        try:
            body = await answer.content.read(MAX_ERROR_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError):
            # The status says enough.
            body = b""
        raise refused(where, answer.status, answer.headers, body)
