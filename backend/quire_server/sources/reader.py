# SPDX-License-Identifier: Apache-2.0
"""A place that an adapter's files are read from, and the simplest of them: a folder of this machine.

The other protocols are in http_place.py, hub_place.py and s3_place.py. A place reads and says what went wrong; limits,
retries, resuming and the cache are the fetcher's.
"""

import os
import stat
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from quire_server.blocking import run_in_daemon_thread
from quire_spec.errors import InvalidArgument, NotFound, Unavailable

_READ_BYTES = 4 * 2**20
_MAX_CALLS_PER_ROOT = 16
"""Of one root at a time, twice as many as there are fetches: of a file system that hangs none comes back, whoever may
have given up, and a pod has only so many threads."""
_call_semaphores: defaultdict[Path, threading.Semaphore] = defaultdict(lambda: threading.Semaphore(_MAX_CALLS_PER_ROOT))
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file that is being read."""

    start: int
    """Offset of the first byte to come; 0 although more was asked when the place cannot resume."""
    size: int | None
    """Bytes of the whole file, where the place says so."""
    version: str | None
    """Changes with the content; None when the place cannot tell, and then nothing is resumed."""
    chunks: AsyncIterator[bytes]


class SourceReader(Protocol):
    """Where the two files of one adapter are. Errors are QuireErrors that name URL or path, and no secret."""

    @property
    def is_immutable(self) -> bool:
        """True when what is here can never change, as at a commit."""
        ...

    @property
    def revision(self) -> str | None:
        """Commit that is read, once it is known; None where there are none."""
        ...

    def display_name(self, name: str) -> str:
        """A file's URL or path, for messages: no user, password, query."""
        ...

    def expected_sha256(self, name: str) -> str | None:
        """Digest in hex that the file must have, where the source gives one."""
        ...

    async def version(self, name: str) -> str | None:
        """What `Opened.version` would be now, without reading the file.

        Raises:
            NotFound: it is not there.
            Unavailable: the place cannot be reached, or refuses us.
        """
        ...

    def open(self, name: str, start: int, version: str | None) -> AbstractAsyncContextManager[OpenFile]:
        """Read a file from offset `start`, if it still is `version`, else from its beginning.

        Raises:
            NotFound, Unavailable: as `version`; Unavailable also from the chunks, when the connection is cut.
        """
        ...


class FolderReader:
    """A folder below an allowed root; links may lead nowhere outside it."""

    is_immutable = False
    revision = None

    def __init__(self, root: Path, path: str, source_name: str) -> None:
        """`path` is relative to `root`, or empty; `what` names the source in messages.

        Raises:
            InvalidArgument: `path` leaves `root`.
        """
        self._root = root
        self._source_name = source_name
        self._folder = root / path
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise InvalidArgument(f"{source_name}: path {path!r} must lie below the root and have no '..'")

    def display_name(self, name: str) -> str:
        return str(self._folder / name)

    def expected_sha256(self, name: str) -> str | None:
        return None

    async def version(self, name: str) -> str | None:
        fd, version, _ = await self._run_blocking(self._open_file, name)
        os.close(fd)
        return version

    @asynccontextmanager
    async def open(self, name: str, start: int, version: str | None) -> AsyncIterator[OpenFile]:
        fd, current_version, size = await self._run_blocking(self._open_file, name)
        try:
            offset = start if version == current_version else 0
            yield OpenFile(offset, size, current_version, self._iter_chunks(fd, offset, name))
        finally:
            os.close(fd)

    async def _run_blocking(self, function: Callable[..., T], *args: object) -> T:
        """The result of `work(*args)`, run in a thread; raises Unavailable when too many of them do not come back."""
        semaphore = _call_semaphores[self._root]
        if not semaphore.acquire(blocking=False):
            raise Unavailable(f"{self._source_name}: {str(self._root)!r} does not answer; see to its volume")

        def run() -> T:
            try:
                return function(*args)
            finally:
                semaphore.release()

        return await run_in_daemon_thread(run)

    def _open_file(self, name: str) -> tuple[int, str, int]:
        """File descriptor, version, size."""
        path = self._folder / name
        try:
            # Here, in a thread: of a file system that hangs, this hangs, too.
            root = os.path.realpath(self._root)
            # Non-blocking: opening a FIFO would otherwise wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise NotFound(
                f"{self._source_name}: {str(path)!r} does not exist; Quire reads safetensors adapters"
            ) from error
        except ValueError as error:
            raise InvalidArgument(f"{self._source_name}: {str(path)!r} is no path: {error}") from error
        except OSError as error:
            raise Unavailable(f"{self._source_name}: {str(path)!r}: {error.strerror}") from error
        try:
            file_stat = os.fstat(fd)
            # Asked of the open file: the path could be another one by now.
            real_path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if not real_path.is_relative_to(root):
                raise InvalidArgument(
                    f"{self._source_name}: {str(path)!r} is a link that leads out of {root!r}; copy the files there"
                )
            if not stat.S_ISREG(file_stat.st_mode):
                raise InvalidArgument(f"{self._source_name}: {str(path)!r} is not a regular file")
        except BaseException:
            os.close(fd)
            raise
        return (
            fd,
            f"{file_stat.st_dev}-{file_stat.st_ino}-{file_stat.st_size}-{file_stat.st_mtime_ns}",
            file_stat.st_size,
        )

    async def _iter_chunks(self, fd: int, start: int, name: str) -> AsyncIterator[bytes]:
        offset = start
        while data := await self._run_blocking(self._read_chunk, fd, offset, name):
            offset += len(data)
            yield data

    def _read_chunk(self, fd: int, offset: int, name: str) -> bytes:
        try:
            return os.pread(fd, _READ_BYTES, offset)
        except OSError as error:
            raise Unavailable(f"{self._source_name}: {self.display_name(name)!r}: {error.strerror}") from error
