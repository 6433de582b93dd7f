# SPDX-License-Identifier: Apache-2.0
"""The interface of all source readers: display names, versions, and files by byte range.

A reader translates one protocol, and its errors name the failed file. Retries, size limits and state on disk belong to
quire_server.downloads. The operator reads config.json and safetensors headers with `read_range`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from quire_spec.errors import NotFound, Unavailable

_RANGE_TIMEOUT_S = 60.0
"""Timeout of one `read_range` in seconds. The operator reads only a few ranges at the same time, so a slow source
delays other services."""


class FileMissing(NotFound):
    """The source responds, but has no file with this name."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that is being read."""

    start: int
    """Offset of the first byte in `chunks`; 0 if the source cannot resume or the file has changed."""
    size: int | None
    """Size of the whole file in bytes; None if the source does not report the size."""
    version: str | None
    """Version, which changes when the content changes. None if the source has no versions; such downloads cannot
    resume."""
    chunks: AsyncIterator[bytes]


class SourceReader(Protocol):
    """Protocol of a reader for the files of one model or adapter. All errors are QuireErrors that name a URL or path,
    without secrets."""

    @property
    def is_immutable(self) -> bool:
        """True if the content can never change, for example because the source names a commit."""

    @property
    def revision(self) -> str | None:
        """The resolved commit; None before the first read, and for sources without commits."""

    def display_name(self, name: str) -> str:
        """Return a file's URL or path for messages, without user, password and query."""

    def expected_sha256(self, name: str) -> str | None:
        """Return the SHA-256 in hex that the source declares for the file; None if it declares none."""

    async def version(self, name: str) -> str | None:
        """Return the current `OpenFile.version` without reading the file.

        Raises:
            FileMissing: the source has no such file. NotFound: the source does not exist.
            Unavailable: the source cannot be reached or denies access.
        """

    def open(
        self, name: str, start: int = 0, version: str | None = None, num_bytes: int | None = None
    ) -> AbstractAsyncContextManager[OpenFile]:
        """Read a file from offset `start` if it still has `version` (None: any version); otherwise read it from its
        beginning.

        `chunks` contains at least `num_bytes` bytes from `start`, or fewer if the file ends before; None: all bytes
        from `start`.

        Raises:
            FileMissing, NotFound, Unavailable: see `version`. `chunks` raises Unavailable if the connection is lost.
        """


async def read_range(reader: SourceReader, name: str, start: int, max_bytes: int) -> bytes | None:
    """Return up to `max_bytes` bytes of a file from offset `start`; None if the source has no such file.

    Raises:
        NotFound, Unavailable: the errors of `SourceReader.open`; Unavailable also if the read takes longer than 60 s.
    """
    data, skip = bytearray(), 0
    try:
        async with asyncio.timeout(_RANGE_TIMEOUT_S), reader.open(name, start, num_bytes=max_bytes) as file:
            skip = start - file.start
            while len(data) < skip + max_bytes and (chunk := await anext(file.chunks, b"")):
                data += chunk
    except FileMissing:
        return None
    except TimeoutError as error:
        raise Unavailable(
            f"{reader.display_name(name)}: only {len(data)} bytes arrived in {_RANGE_TIMEOUT_S:g} s"
        ) from error
    return bytes(data[skip : skip + max_bytes])
