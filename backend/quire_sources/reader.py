# SPDX-License-Identifier: Apache-2.0
"""The interface of all source readers. A reader opens a file at a byte offset, and reports the file's version and the
name that messages use for the file.

Each reader implements one protocol. An error of a reader names the file that it could not read. Retries, size limits
and files on disk are not part of this module; they belong to quire_server.downloads. The operator reads config.json and
safetensors headers with `read_range`.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from quire_spec.errors import NotFound, Unavailable

_RANGE_TIMEOUT_S = 60.0
"""Timeout of one `read_range` in seconds. The operator reads only a few ranges at the same time. Therefore a source
that is slow delays other services."""


class FileMissing(NotFound):
    """The source responds, but has no file with this name."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that is being read."""

    start: int
    """Offset of the first byte in `chunks`. It is 0 if the source cannot resume a read, or if the file has changed."""
    size: int | None
    """Size of the whole file in bytes; None if the source does not report the size."""
    version: str | None
    """The version of the file. It changes when the content changes. None if the source has no versions. In that case, a
    download cannot resume."""
    chunks: AsyncIterator[bytes]


class SourceReader(Protocol):
    """The protocol that each reader implements. A reader reads the files of a model or an adapter. All errors are
    QuireErrors. An error names a URL or a path, and never contains secrets."""

    @property
    def is_immutable(self) -> bool:
        """True if the content of the source can never change, for example because the source names a commit."""

    @property
    def revision(self) -> str | None:
        """The commit to which the revision was resolved. None before the first read, and for sources that have no
        commits."""

    def display_name(self, name: str) -> str:
        """Return a file's URL or path for messages, without user, password and query."""

    def expected_sha256(self, name: str) -> str | None:
        """Return the SHA-256 that the source declares for the file, in hexadecimal digits; None if it declares none."""

    async def version(self, name: str) -> str | None:
        """Return the current `OpenFile.version` without reading the file.

        Raises:
            FileMissing: the source has no such file. NotFound: the source does not exist.
            Unavailable: the source cannot be reached or denies access.
        """

    def open(
        self, name: str, start: int = 0, version: str | None = None, num_bytes: int | None = None
    ) -> AbstractAsyncContextManager[OpenFile]:
        """Open a file. If it still has `version` (None: any version), read it from offset `start`; otherwise read it
        from its beginning.

        `chunks` contains at least `num_bytes` bytes from offset `start`. If the file ends earlier, it contains fewer
        bytes. If `num_bytes` is None, it contains all bytes that follow `start`.

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
    # Without a copy of the slice, because several large files can be read at the same time.
    del data[skip + max_bytes :], data[:skip]
    return bytes(data)
