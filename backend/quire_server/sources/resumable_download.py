# SPDX-License-Identifier: Apache-2.0
"""Brings one file from a place to the disk: bounded, resumed where a cut left it, verified.

Bytes of two versions never mix: the version is noted before its first byte. What becomes of the files is the caller's.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping

from quire_server.sources.adapter_cache import PartialDownload
from quire_sources.blocking import run_in_daemon_thread
from quire_sources.reader import OpenFile, SourceReader
from quire_spec.backoff import backoff
from quire_spec.documents.adapter_digest import file_sha256
from quire_spec.errors import InvalidArgument, Unavailable

logger = logging.getLogger(__name__)

_MAX_ATTEMPTS = 3
"""Tries in a row that bring next to nothing, before the caller is told."""
_MIN_PROGRESS_BYTES = 2**16
"""Less than that is next to nothing, of a try and in SILENCE_S: a place that gives a byte at a time would never end."""
_FIRST_RETRY_S = 0.25
MAX_RETRY_AFTER_S = 10.0
"""What a place may have us wait for the next try (Retry-After); other adapters may wait behind us."""
NO_ANSWER_TIMEOUT_S = 60.0
"""How long a place may say nothing: a hung file system or peer must not hold an adapter for ever."""


MAX_SOURCE_CHANGES = 3
"""Times that files may change while they are read, before whoever writes there is told."""


class DigestMismatch(InvalidArgument):
    """What came is not what the source says it should be."""


class ResumableDownload:
    """How files are brought: with what limit each."""

    def __init__(
        self,
        size_limit: Callable[[str], tuple[int | None, str]],
        on_size: Callable[[str, int], None] = lambda name, size: None,
        max_retry_after_s: float = MAX_RETRY_AFTER_S,
    ) -> None:
        """`limit(name)` is the largest size of a file, None: any, and what its refusal ends with; `sized` is told the
        size of each file whose place says it; `patience_s` is the longest wait that a place may ask for."""
        self._size_limit, self._on_size, self._max_retry_after_s = size_limit, on_size, max_retry_after_s

    async def download(self, reader: SourceReader, partial: PartialDownload, name: str) -> None:
        """Read one file to its end, going on where a cut left it."""
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
                logger.info("fetch goes on after an error file=%s bytes=%d error=%s", name, partial.size(name), error)
                await asyncio.sleep(pause_s)

    def _retry_delay_s(self, stalled_attempts: int, error: Unavailable) -> float:
        """How long to wait for the next try; raises the error where the place wants longer: the caller tries later."""
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
                raise Unavailable(f"{reader.display_name(name)}: asked for byte {start}, got byte {open_file.start}")
            if open_file.start == 0:
                # Before the new version is noted: old bytes must never pass for bytes of it.
                partial.discard(name)
            partial.record_version(name, open_file.version)
            size = await self._write(reader, partial, name, open_file)
        if open_file.size is not None and size != open_file.size:
            raise Unavailable(f"{reader.display_name(name)}: {size} bytes of {open_file.size} came")

    async def _write(self, reader: SourceReader, partial: PartialDownload, name: str, open_file: OpenFile) -> int:
        """Append what comes to the partial file; returns its size then."""
        size = window_bytes = open_file.start
        window_start = time.monotonic()
        with (partial.folder / name).open("r+b" if open_file.start else "wb") as file:
            file.seek(open_file.start)
            while data := await _next_chunk(open_file, reader.display_name(name)):
                size += len(data)
                try:
                    # The place may have said less, or nothing, about the size.
                    self._check_size(reader, name, size)
                except InvalidArgument:
                    partial.discard(name)
                    raise
                await run_in_daemon_thread(file.write, data)
                if (now := time.monotonic()) - window_start >= NO_ANSWER_TIMEOUT_S:
                    if size - window_bytes < _MIN_PROGRESS_BYTES:
                        raise Unavailable(
                            f"{reader.display_name(name)}: {size - window_bytes} bytes came in "
                            f"{NO_ANSWER_TIMEOUT_S:g} s"
                        )
                    window_start, window_bytes = now, size
        return size

    def _check_size(self, reader: SourceReader, name: str, size: int) -> None:
        limit, hint = self._size_limit(name)
        if limit is not None and size > limit:
            raise InvalidArgument(f"{reader.display_name(name)}: {size} bytes or more, the limit is {limit}{hint}")

    async def version(self, reader: SourceReader, name: str) -> str | None:
        """What version a file is of now; asked as often as a file is read: an error would lose what was read."""
        for attempt in range(1, _MAX_ATTEMPTS):
            try:
                return await query_version(reader, name)
            except Unavailable as error:
                pause_s = self._retry_delay_s(attempt, error)
                logger.info("place is asked again after an error file=%s error=%s", name, error)
                await asyncio.sleep(pause_s)
        return await query_version(reader, name)

    async def changed_files(self, reader: SourceReader, recorded_versions: Mapping[str, str | None]) -> list[str]:
        """Files that are others by now than the versions that were noted of them, as far as their place can tell: files
        of two versions may fit each other by form."""
        current_versions = {
            name: await self.version(reader, name) for name, version in recorded_versions.items() if version is not None
        }
        return [name for name, version in current_versions.items() if version not in (None, recorded_versions[name])]

    async def verify(self, reader: SourceReader, partial: PartialDownload, name: str) -> None:
        """Compare a whole file's SHA-256 with what the place expects; raises DigestMismatch, and drops the file."""
        expected = reader.expected_sha256(name)
        if expected is None:
            return
        actual = (await run_in_daemon_thread(file_sha256, partial.folder / name)).hex()
        if actual != expected:
            partial.discard(name)
            raise DigestMismatch(
                f"{reader.display_name(name)}: its sha256 is {actual}, not {expected}; correct the source or what is "
                "there"
            )


async def query_version(reader: SourceReader, name: str) -> str | None:
    """`place.version`, in bounded time."""
    with no_answer_timeout(reader.display_name(name)):
        async with asyncio.timeout(NO_ANSWER_TIMEOUT_S):
            return await reader.version(name)


@contextlib.contextmanager
def no_answer_timeout(display_name: str) -> Iterator[None]:
    """Say which place it was that did not answer in time."""
    try:
        yield
    except TimeoutError as error:
        raise Unavailable(f"{display_name}: no answer for {NO_ANSWER_TIMEOUT_S:g} s") from error


async def _next_chunk(open_file: OpenFile, display_name: str) -> bytes:
    """The next bytes of a file; none at its end."""
    with no_answer_timeout(display_name):
        async with asyncio.timeout(NO_ANSWER_TIMEOUT_S):
            return await anext(open_file.chunks, b"")
