# SPDX-License-Identifier: Apache-2.0
"""Counter of a stub's open requests, in a memory-mapped file that remains after the stub's end.

A request is open from the server's call of `execute` until its last response. If a stub dies with open requests, the
server never ends these requests, and the supervisor must restart the server. The stub writes the counter; the
supervisor reads it.
"""

import contextlib
import mmap
import os
import struct
import threading
from pathlib import Path

FOLDER = "stubs"
"""Subfolder of the run folder with one file per stub, named by its process id."""

_COUNT_FORMAT = struct.Struct("=Q")


class OpenRequestCounter:
    """The counter file of this process."""

    def __init__(self, run_dir: Path) -> None:
        path = _path(run_dir, os.getpid())
        path.parent.mkdir(exist_ok=True)
        # Replace an old file: the process id can be reused.
        path.unlink(missing_ok=True)
        with path.open("wb+") as file:
            file.truncate(_COUNT_FORMAT.size)
            self._memory = mmap.mmap(file.fileno(), _COUNT_FORMAT.size)
        self._num_open = 0
        self._lock = threading.Lock()

    def increment(self) -> None:
        """Count a received request."""
        self._add(1)

    def decrement(self) -> None:
        """Count a request whose last response was sent."""
        self._add(-1)

    def _add(self, delta: int) -> None:
        with self._lock:
            self._num_open += delta
            _COUNT_FORMAT.pack_into(self._memory, 0, self._num_open)


def read_open_requests(run_dir: Path, pid: int) -> int:
    """Return the number of open requests of a stub, even if the stub has ended; 0 if it never received a request."""
    try:
        return int(_COUNT_FORMAT.unpack(_path(run_dir, pid).read_bytes())[0])
    except (FileNotFoundError, struct.error):
        # The file does not exist yet, or is still empty.
        return 0


def remove(run_dir: Path, pid: int) -> None:
    """Remove the file of a stub that has ended."""
    with contextlib.suppress(FileNotFoundError):
        _path(run_dir, pid).unlink()


def _path(run_dir: Path, pid: int) -> Path:
    return run_dir / FOLDER / str(pid)
