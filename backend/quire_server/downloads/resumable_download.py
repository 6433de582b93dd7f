# SPDX-License-Identifier: Apache-2.0
"""Downloads one file from a source to disk. The download has a size limit, resumes after a lost connection, and is
verified.

The bytes of two versions of a file are never mixed, because the version is recorded before the first byte is written.
The adapter fetcher and the model download call this module, and own the files that it downloads.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from quire_server.downloads.adapter_cache import PartialDownload
from quire_sources.reader import OpenFile, SourceReader
from quire_sources.readers.blocking import run_in_daemon_thread
from quire_spec.backoff import backoff
from quire_spec.documents.adapter_digest import file_sha256
from quire_spec.errors import InvalidArgument, Unavailable

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
"""Maximum number of successive attempts that make no progress. After that, the download fails."""
_MIN_PROGRESS_BYTES = 2**16
"""An attempt makes progress only if at least this many bytes arrive. During an attempt, at least this many bytes must
also arrive in each period of NO_ANSWER_TIMEOUT_S seconds. Therefore a download from a very slow source fails."""
_FIRST_RETRY_S = 0.25
MAX_RETRY_AFTER_S = 10.0
"""A download waits for at most this many seconds if the source sends Retry-After. The limit is low, because other
adapters can be waiting in the queue."""
NO_ANSWER_TIMEOUT_S = 60.0
"""A read fails if no data arrives for this many seconds. Otherwise, a server or file system that hangs would block the
download forever."""
MAX_SOURCE_CHANGES = 3
"""The download fails if the files at the source change this many times while it is running."""


class DigestMismatch(InvalidArgument):
    """The SHA-256 of the content differs from the SHA-256 that the source declares."""


class ResumableDownload:
    """Downloads files; each file has a size limit."""

    def __init__(
        self,
        size_limit: Callable[[str], tuple[int | None, str]],
        on_size: Callable[[str, int], None] = lambda name, size: None,
        max_retry_after_s: float = MAX_RETRY_AFTER_S,
        check_start: Callable[[Path, int], int | None] = lambda path, size: None,
    ) -> None:
        """`size_limit(name)` returns the maximum size of a file (None: no limit) and a hint. The hint becomes part of
        the error message if the file is larger.

        `on_size` is called with the name and the size of each file whose size the source reports. `max_retry_after_s`
        limits how long a download waits if the source sends Retry-After.

        `check_start` is called with the path and the final size of a file when its first bytes have arrived. It returns
        the number of bytes with which it must be called again, or None. If it raises InvalidArgument, the download
        ends.
        """
        self._check_start = check_start
        self._size_limit, self._on_size, self._max_retry_after_s = size_limit, on_size, max_retry_after_s

    async def download(self, reader: SourceReader, partial: PartialDownload, name: str) -> None:
        """Download one file. If a part of it was downloaded before, continue after that part."""
        stalled_attempts = 0
        while True:
            bytes_before = partial.size(name)
            try:
                await self._read_file(reader, partial, name)
                return
            except Unavailable as error:
                stalled_attempts = (
                    0 if partial.size(name) - bytes_before >= _MIN_PROGRESS_BYTES else stalled_attempts + 1
                )
                if stalled_attempts >= _MAX_ATTEMPTS:
                    raise
                pause_s = self._retry_delay_s(stalled_attempts, error)
                logger.info(
                    "download resumes after an error file=%s bytes=%d error=%s", name, partial.size(name), error
                )
                await asyncio.sleep(pause_s)

    def _retry_delay_s(self, stalled_attempts: int, error: Unavailable) -> float:
        """Return how many seconds to wait before the next attempt. Raise `error` if the source asks for a longer delay
        than the maximum."""
        retry_after_s = error.retry_after_s or 0.0
        if retry_after_s > self._max_retry_after_s:
            raise error
        return max(backoff(stalled_attempts, _FIRST_RETRY_S, self._max_retry_after_s), retry_after_s)

    async def _read_file(self, reader: SourceReader, partial: PartialDownload, name: str) -> None:
        recorded_version = partial.versions().get(name)
        start = partial.size(name) if recorded_version else 0
        async with contextlib.AsyncExitStack() as stack:
            with no_answer_timeout(reader.display_name(name)):
                async with asyncio.timeout(NO_ANSWER_TIMEOUT_S):
                    open_file = await stack.enter_async_context(reader.open(name, start, recorded_version))
            self._check_size(reader, name, open_file.size or 0)
            if open_file.size is not None:
                self._on_size(name, open_file.size)
            if open_file.start not in (0, start):
                raise Unavailable(
                    f"{reader.display_name(name)}: requested data from byte {start}, got data from byte "
                    f"{open_file.start}"
                )
            if open_file.start == 0:
                # The old bytes are discarded before the new version is recorded, so that they are never taken for bytes
                # of the new version.
                partial.discard(name)
            partial.record_version(name, open_file.version)
            size = await self._write(reader, partial, name, open_file)
        if open_file.size is not None and size != open_file.size:
            raise Unavailable(f"{reader.display_name(name)}: only {size} of {open_file.size} bytes arrived")

    async def _write(self, reader: SourceReader, partial: PartialDownload, name: str, open_file: OpenFile) -> int:
        """Append the chunks to the partial file and return the new size of the file."""
        size = window_bytes = open_file.start
        window_start = time.monotonic()
        path = partial.folder / name
        bytes_to_check: int | None = 1
        with path.open("r+b" if open_file.start else "wb") as file:
            file.seek(open_file.start)
            while data := await _next_chunk(open_file, reader.display_name(name)):
                size += len(data)
                try:
                    # The size is checked again, because the source may have reported a smaller size or no size.
                    self._check_size(reader, name, size)
                except InvalidArgument:
                    partial.discard(name)
                    raise
                await run_in_daemon_thread(file.write, data)
                if open_file.size is not None and bytes_to_check is not None and size >= bytes_to_check:
                    await run_in_daemon_thread(file.flush)
                    bytes_to_check = await run_in_daemon_thread(self._check_start, path, open_file.size)
                if (now := time.monotonic()) - window_start >= NO_ANSWER_TIMEOUT_S:
                    if size - window_bytes < _MIN_PROGRESS_BYTES:
                        raise Unavailable(
                            f"{reader.display_name(name)}: only {size - window_bytes} bytes arrived in "
                            f"{NO_ANSWER_TIMEOUT_S:g} s"
                        )
                    window_start, window_bytes = now, size
        return size

    def _check_size(self, reader: SourceReader, name: str, size: int) -> None:
        limit, hint = self._size_limit(name)
        if limit is not None and size > limit:
            raise InvalidArgument(
                f"{reader.display_name(name)}: has at least {size} bytes, but the limit is {limit}{hint}"
            )

    async def version(self, reader: SourceReader, name: str) -> str | None:
        """Return the current version of a file at the source. If the query fails, it is repeated, because an error here
        would discard the bytes that are already downloaded."""
        for attempt in range(1, _MAX_ATTEMPTS):
            try:
                return await query_version(reader, name)
            except Unavailable as error:
                pause_s = self._retry_delay_s(attempt, error)
                logger.info("version query is repeated after an error file=%s error=%s", name, error)
                await asyncio.sleep(pause_s)
        return await query_version(reader, name)

    async def changed_files(self, reader: SourceReader, recorded_versions: Mapping[str, str | None]) -> list[str]:
        """Return the files whose current version at the source differs from the recorded version. Files without a
        recorded version are left out.

        This check is necessary because the engine can load files of different versions without an error, if their
        tensors have the same shapes.
        """
        current_versions = {
            name: await self.version(reader, name) for name, version in recorded_versions.items() if version is not None
        }
        return [name for name, version in current_versions.items() if version not in (None, recorded_versions[name])]

    async def verify(self, reader: SourceReader, partial: PartialDownload, name: str) -> None:
        """Compare the SHA-256 of a file with the SHA-256 that the source declares. If they differ, discard the file and
        raise DigestMismatch."""
        expected = reader.expected_sha256(name)
        if expected is None:
            return
        actual = (await run_in_daemon_thread(file_sha256, partial.folder / name)).hex()
        if actual != expected:
            partial.discard(name)
            raise DigestMismatch(
                f"{reader.display_name(name)}: sha256 is {actual}, not {expected}; correct the source or the file"
            )


async def query_version(reader: SourceReader, name: str) -> str | None:
    """Return `reader.version(name)`; raise Unavailable if the source does not respond within 60 s."""
    with no_answer_timeout(reader.display_name(name)):
        async with asyncio.timeout(NO_ANSWER_TIMEOUT_S):
            return await reader.version(name)


@contextlib.contextmanager
def no_answer_timeout(display_name: str) -> Iterator[None]:
    """Convert a TimeoutError into an Unavailable error that names the source."""
    try:
        yield
    except TimeoutError as error:
        raise Unavailable(f"{display_name}: no response for {NO_ANSWER_TIMEOUT_S:g} s") from error


async def _next_chunk(open_file: OpenFile, display_name: str) -> bytes:
    """Return the next bytes of a file; return b"" at the end of the file."""
    with no_answer_timeout(display_name):
        async with asyncio.timeout(NO_ANSWER_TIMEOUT_S):
            return await anext(open_file.chunks, b"")
