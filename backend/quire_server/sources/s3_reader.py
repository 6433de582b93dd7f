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

from quire_server.sources.http_reader import HttpClient, response_version
from quire_server.sources.reader import OpenFile
from quire_spec.errors import InvalidArgument, NotFound, QuireError
from quire_spec.net.s3 import (
    MAX_ERROR_BYTES,
    SIGNED_URL_LIFETIME,
    check_endpoint,
    error_from_status,
    object_url,
    signing_error,
    store_options,
)

_BUCKET_NAME = re.compile(r"[\w.-]+", re.ASCII)


class S3SourceReader:
    """One prefix of one bucket."""

    is_immutable = False
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
        if parts.scheme != "s3" or not _BUCKET_NAME.fullmatch(parts.netloc) or ".." in parts.path.split("/"):
            raise InvalidArgument("s3 source: the uri is not s3://bucket/prefix; a key belongs into a Secret")
        if endpoint is not None:
            check_endpoint(endpoint)
        self._client = _S3HttpClient(session)
        self._bucket = parts.netloc
        self._prefix = parts.path.strip("/")
        self._endpoint = endpoint
        self._region = region
        self._credentials = credentials
        self._options: dict[str, Any] = {}
        self._store: S3Store | None = None
        """Of these options; it keeps the identity that a platform gave it, which is asked for over the network."""

    def display_name(self, name: str) -> str:
        endpoint_note = f" at {self._endpoint}" if self._endpoint else ""
        return f"s3://{self._bucket}/{self._object_key(name)}{endpoint_note}"

    def expected_sha256(self, name: str) -> str | None:
        return None

    async def version(self, name: str) -> str | None:
        display_name = self.display_name(name)
        async with self._client.request("HEAD", await self._signed_url("HEAD", name), {}, {}, display_name) as response:
            return response_version(await self._client.check_response(response, display_name))

    @asynccontextmanager
    async def open(self, name: str, start: int, version: str | None) -> AsyncIterator[OpenFile]:
        # Buckets know If-Match, of ETags, and few of them If-Range.
        condition = "If-Match" if version and version.startswith('"') else "If-Range"
        range_headers = {"Range": f"bytes={start}-", condition: version} if start and version else {}
        async with self._client.open(
            await self._signed_url("GET", name), {}, range_headers, self.display_name(name)
        ) as file:
            yield file

    def _object_key(self, name: str) -> str:
        return f"{self._prefix}/{name}".lstrip("/")

    async def _signed_url(self, method: Literal["GET", "HEAD"], name: str) -> URL:
        try:
            options = store_options(self._endpoint, self._region, self._credentials(), os.environ)
            if self._store is None or options != self._options:
                self._store, self._options = S3Store(self._bucket, **options), options
            signed_url = await obstore.sign_async(self._store, method, self._object_key(name), SIGNED_URL_LIFETIME)
        except QuireError:
            # Of the Secret: it has said all there is.
            raise
        except Exception as error:
            raise signing_error(self.display_name(name), error) from error
        return URL(object_url(signed_url, options), encoded=True)


class _S3HttpClient(HttpClient):
    """Knows what buckets say."""

    async def check_response(self, response: aiohttp.ClientResponse, display_name: str) -> aiohttp.ClientResponse:
        if response.status in (200, 206):
            return response
        if response.status == 404:
            raise NotFound(
                f"{display_name}: no such object; check bucket and prefix, and that it is stored as safetensors"
            )
        try:
            body = await response.content.read(MAX_ERROR_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError):
            # The status says enough.
            body = b""
        raise error_from_status(display_name, response.status, response.headers, body)
