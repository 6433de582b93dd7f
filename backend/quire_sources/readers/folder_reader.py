# SPDX-License-Identifier: Apache-2.0
"""Reads a folder below an allowed root. The root is a mounted volume, or a path of this machine.

File system calls run in daemon threads, because a network volume that hangs must not block the event loop.
"""

import os
import stat
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self, TypeVar

from quire_sources.reader import FileMissing, OpenFile
from quire_sources.readers.blocking import run_in_daemon_thread
from quire_spec.errors import ConfigError, InvalidArgument, Unavailable

_READ_BYTES = 4 * 2**20
_MAX_CALLS_PER_ROOT = 16
"""Maximum number of calls that can run at the same time for one root. It is twice the maximum number of fetches. The
limit is necessary because calls on a file system that hangs never return, and the number of
threads in a pod is limited."""
_call_semaphores: defaultdict[Path, threading.Semaphore] = defaultdict(lambda: threading.Semaphore(_MAX_CALLS_PER_ROOT))
T = TypeVar("T")


class FolderReader:
    """Reads a folder below an allowed root. If the folder contains symbolic links, their targets must also be below the
    root."""

    is_immutable = False
    revision = None

    def __init__(self, root: Path, path: str, source_name: str) -> None:
        """`path` is relative to `root`, or empty. `source_name` is the name of the source in messages.

        Raises:
            ConfigError: `path` leads out of `root`.
        """
        self._root = root
        self._source_name = source_name
        self._folder = root / path
        if Path(path).is_absolute() or ".." in Path(path).parts:
            raise ConfigError(f"{source_name}: path {path!r} must be below the root and must not contain '..'")

    @classmethod
    def unrestricted(cls, folder: Path) -> Self:
        """Return a reader of a local folder in which links can have any target. huggingface_hub's cache is such a
        folder."""
        absolute = folder.resolve()
        return cls(Path("/"), str(absolute.relative_to("/")), f"path {str(folder)!r}")

    def display_name(self, name: str) -> str:
        return str(self._folder / name)

    def expected_sha256(self, name: str) -> str | None:
        return None

    async def version(self, name: str) -> str | None:
        fd, version, _ = await self._run_blocking(self._open_file, name)
        os.close(fd)
        return version

    @asynccontextmanager
    async def open(
        self, name: str, start: int = 0, version: str | None = None, num_bytes: int | None = None
    ) -> AsyncIterator[OpenFile]:
        fd, current_version, size = await self._run_blocking(self._open_file, name)
        try:
            offset = start if version in (None, current_version) else 0
            yield OpenFile(offset, size, current_version, self._iter_chunks(fd, offset, name))
        finally:
            os.close(fd)

    async def _run_blocking(self, function: Callable[..., T], *args: object) -> T:
        """Run `function(*args)` in a thread and return its result; raises Unavailable if too many calls are already
        running."""
        semaphore = _call_semaphores[self._root]
        if not semaphore.acquire(blocking=False):
            raise Unavailable(f"{self._source_name}: {str(self._root)!r} does not respond; check its volume")

        def run() -> T:
            try:
                return function(*args)
            finally:
                semaphore.release()

        return await run_in_daemon_thread(run)

    def _open_file(self, name: str) -> tuple[int, str, int]:
        """Open a file, and return its file descriptor, its version and its size."""
        path = self._folder / name
        try:
            # realpath is called in this thread, because it can also hang if the file system hangs.
            root = os.path.realpath(self._root)
            # O_NONBLOCK is set because opening a FIFO would otherwise wait for a writer.
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise FileMissing(
                f"{self._source_name}: {str(path)!r} does not exist; Quire reads safetensors files"
            ) from error
        except ValueError as error:
            raise InvalidArgument(f"{self._source_name}: {str(path)!r} is not a path: {error}") from error
        except OSError as error:
            raise Unavailable(f"{self._source_name}: {str(path)!r}: {error.strerror}") from error
        try:
            file_stat = os.fstat(fd)
            # Get the path of the open file, because `path` could lead to another file by now.
            real_path = Path(os.readlink(f"/proc/self/fd/{fd}"))
            if not real_path.is_relative_to(root):
                raise InvalidArgument(
                    f"{self._source_name}: {str(path)!r} is a link that leads out of {root!r}; replace it with a copy"
                )
            if not stat.S_ISREG(file_stat.st_mode):
                raise InvalidArgument(f"{self._source_name}: {str(path)!r} is not a regular file")
        except BaseException:
            os.close(fd)
            raise
        version = f"{file_stat.st_dev}-{file_stat.st_ino}-{file_stat.st_size}-{file_stat.st_mtime_ns}"
        return fd, version, file_stat.st_size

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
