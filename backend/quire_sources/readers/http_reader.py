# SPDX-License-Identifier: Apache-2.0
"""Reads a folder that is served over HTTP(S)."""

import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from yarl import URL

from quire_sources.http.client import HttpClient, range_headers, redact_url, response_version
from quire_sources.reader import OpenFile
from quire_spec.documents.sources import HttpSource
from quire_spec.errors import ConfigError

_SHA256 = re.compile(r"(?:sha256:)?([0-9a-f]{64})")


class HttpReader:
    """Reads the files below a URL."""

    is_immutable = False
    revision = None

    def __init__(self, client: HttpClient, source: HttpSource, headers: Callable[[], Mapping[str, str]]) -> None:
        """`headers` is a function that returns the secret headers.

        Raises:
            ConfigError: the source has an invalid URL or SHA-256.
        """
        self._client = client
        self._url = _parse_url(source.url)
        self._headers = headers
        self._weights_sha256 = None if source.sha256 is None else _parse_sha256(source.sha256)

    def display_name(self, name: str) -> str:
        return redact_url(self._file_url(name))

    def expected_sha256(self, name: str) -> str | None:
        return self._weights_sha256 if name.endswith(".safetensors") else None

    async def version(self, name: str) -> str | None:
        display_name = self.display_name(name)
        async with self._client.request("HEAD", self._file_url(name), self._headers(), {}, display_name) as response:
            if response.status in (405, 501):
                # Some servers implement only GET. The version is then unknown until the file is read.
                return None
            return response_version(await self._client.check_response(response, display_name))

    @asynccontextmanager
    async def open(
        self, name: str, start: int = 0, version: str | None = None, num_bytes: int | None = None
    ) -> AsyncIterator[OpenFile]:
        async with self._client.open(
            self._file_url(name), self._headers(), range_headers(start, version, num_bytes), self.display_name(name)
        ) as file:
            yield file

    def _file_url(self, name: str) -> URL:
        return self._url.joinpath(name).with_query(self._url.query)


def _parse_url(url: str) -> URL:
    # Error messages do not quote the URL, because the invalid part of it can be a password.
    try:
        parsed = URL(url)
    except ValueError as error:
        raise ConfigError("http source: the url is not valid; use http(s)://host/folder") from error
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(
            f"http source: the url must be http(s)://host/folder, got a url with scheme {parsed.scheme!r}"
        )
    return parsed


def _parse_sha256(sha256: str) -> str:
    match = _SHA256.fullmatch(sha256.lower())
    if match is None:
        raise ConfigError(f"http source: sha256 must be 64 hexadecimal digits, got {sha256!r}")
    return match[1]
