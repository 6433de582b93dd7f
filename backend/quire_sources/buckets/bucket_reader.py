# SPDX-License-Identifier: Apache-2.0
"""Reads the objects under a prefix of a bucket: S3-compatible stores, Google Cloud Storage, Azure Blob Storage."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import aiohttp
from yarl import URL

from quire_sources.buckets.azure import AzureSigner
from quire_sources.buckets.gcs import GcsSigner
from quire_sources.buckets.s3 import S3Signer
from quire_sources.buckets.url_signer import Method, UrlSigner
from quire_sources.http.borders import Borders
from quire_sources.http.client import HttpClient, range_headers, response_version
from quire_sources.reader import FileMissing, OpenFile
from quire_spec.documents.sources import AzureSource, GcsSource, S3Source

_MAX_ERROR_BYTES = 2**14
"""Only this many bytes at the start of an error response are searched for the error code."""


class BucketReader:
    """Reads the objects under one prefix of one bucket."""

    is_immutable = False
    revision = None

    def __init__(
        self,
        session: aiohttp.ClientSession,
        source: S3Source | GcsSource | AzureSource,
        credentials: Callable[[], Mapping[str, str]],
        borders: Borders | None = None,
    ) -> None:
        """`credentials` returns the values of the source's Secret; they can be empty.

        Raises:
            ConfigError: the URI has not the form of the source's kind, or the endpoint is not a URL.
        """
        self._signer = _signer(source)
        self._client = _BucketHttpClient(session, self._signer, borders)
        self._credentials = credentials

    def display_name(self, name: str) -> str:
        endpoint_note = f" at {self._signer.endpoint}" if self._signer.endpoint else ""
        return f"{self._signer.place}/{self._object_key(name)}{endpoint_note}"

    def expected_sha256(self, name: str) -> str | None:
        return None

    async def version(self, name: str) -> str | None:
        display_name = self.display_name(name)
        url, secret_headers = await self._sign("HEAD", name)
        async with self._client.request("HEAD", url, secret_headers, {}, display_name) as response:
            return response_version(await self._client.check_response(response, display_name))

    @asynccontextmanager
    async def open(
        self, name: str, start: int = 0, version: str | None = None, num_bytes: int | None = None
    ) -> AsyncIterator[OpenFile]:
        # Buckets implement If-Match with ETags, but only few of them implement If-Range.
        condition = "If-Match" if version and version.startswith('"') else "If-Range"
        headers = range_headers(start, version, num_bytes, condition)
        url, secret_headers = await self._sign("GET", name)
        async with self._client.open(url, secret_headers, headers, self.display_name(name)) as file:
            yield file

    def _object_key(self, name: str) -> str:
        return f"{self._signer.prefix}/{name}".strip("/")

    async def _sign(self, method: Method, name: str) -> tuple[URL, Mapping[str, str]]:
        """Return the URL of a request, and its secret headers."""
        request = await self._signer.sign(method, self._object_key(name), self._credentials(), self.display_name(name))
        return URL(request.url, encoded=True), request.secret_headers


def _signer(source: S3Source | GcsSource | AzureSource) -> UrlSigner:
    match source:
        case S3Source():
            return S3Signer(source)
        case GcsSource():
            return GcsSigner(source)
        case AzureSource():
            return AzureSigner(source)


class _BucketHttpClient(HttpClient):
    """Sends requests to a bucket and converts its error responses to QuireErrors."""

    def __init__(self, session: aiohttp.ClientSession, signer: UrlSigner, borders: Borders | None) -> None:
        super().__init__(session, borders)
        self._signer = signer

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
        raise self._signer.error_from_status(display_name, response.status, response.headers, body)
