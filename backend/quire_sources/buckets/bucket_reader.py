# SPDX-License-Identifier: Apache-2.0
"""Reads the objects under a prefix of an S3-compatible bucket."""

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Literal
from urllib.parse import urlsplit

import aiohttp
from yarl import URL

from quire_sources.http.borders import Borders
from quire_sources.http.client import HttpClient, range_headers, response_version
from quire_sources.reader import FileMissing, OpenFile
from quire_sources.readers.s3_signing import S3Signer, check_endpoint, error_from_status
from quire_spec.documents.sources import S3Source
from quire_spec.errors import ConfigError

_BUCKET_NAME = re.compile(r"[\w.-]+", re.ASCII)
_MAX_ERROR_BYTES = 2**14
"""Only this many bytes at the start of an error response are searched for the error code."""


class S3Reader:
    """Reads the objects under one prefix of one bucket."""

    is_immutable = False
    revision = None

    def __init__(
        self,
        session: aiohttp.ClientSession,
        source: S3Source,
        credentials: Callable[[], Mapping[str, str]],
        borders: Borders | None = None,
    ) -> None:
        """`credentials` returns a mapping that contains AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and optionally
        AWS_SESSION_TOKEN. The mapping can also be empty.

        Raises:
            ConfigError: the URI is not s3://bucket/prefix, or the endpoint is not a URL.
        """
        parts = urlsplit(source.uri)
        if parts.scheme != "s3" or not _BUCKET_NAME.fullmatch(parts.netloc) or ".." in parts.path.split("/"):
            raise ConfigError("s3 source: the uri must be s3://bucket/prefix; put credentials into a Secret")
        if source.endpoint is not None:
            check_endpoint(source.endpoint)
        self._client = _S3HttpClient(session, borders)
        self._bucket, self._prefix, self._endpoint = parts.netloc, parts.path.strip("/"), source.endpoint
        self._credentials = credentials
        self._signer = S3Signer(self._bucket, source.endpoint, source.region)

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
    async def open(
        self, name: str, start: int = 0, version: str | None = None, num_bytes: int | None = None
    ) -> AsyncIterator[OpenFile]:
        # Buckets implement If-Match with ETags, but only few of them implement If-Range.
        condition = "If-Match" if version and version.startswith('"') else "If-Range"
        headers = range_headers(start, version, num_bytes, condition)
        async with self._client.open(await self._signed_url("GET", name), {}, headers, self.display_name(name)) as file:
            yield file

    def _object_key(self, name: str) -> str:
        return f"{self._prefix}/{name}".strip("/")

    async def _signed_url(self, method: Literal["GET", "HEAD"], name: str) -> URL:
        url = await self._signer.sign(method, self._object_key(name), self._credentials(), self.display_name(name))
        return URL(url, encoded=True)


class _S3HttpClient(HttpClient):
    """Sends requests to a bucket and converts its error responses to QuireErrors."""

    async def check_response(self, response: aiohttp.ClientResponse, display_name: str) -> aiohttp.ClientResponse:
        if response.status in (200, 206):
            return response
        if response.status == 404:
            raise FileMissing(
                f"{display_name}: no such object; check the bucket and prefix, and store the files as safetensors"
            )
        try:
            body = await response.content.read(_MAX_ERROR_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError):
            # The status is sufficient.
            body = b""
        raise error_from_status(display_name, response.status, response.headers, body)
