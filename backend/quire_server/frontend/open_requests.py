# SPDX-License-Identifier: Apache-2.0
"""Counter of the requests that are open in a stub. It is a memory-mapped file, so that it can still be read after the
stub has ended.

A request is open from the time at which the server passes it to `execute` until its last response is sent. If a stub
dies while requests are open, the server never ends these requests. The supervisor must then restart the server. The
stub writes the counter; the supervisor reads it.
"""

import contextlib
import mmap
import os
import struct
import threading
from pathlib import Path

FOLDER = "stubs"
"""Subfolder of the run folder. It contains one file for each stub, and the stub's process id is the name of the
file."""

_COUNT_FORMAT = struct.Struct("=Q")


class OpenRequestCounter:
    """The counter file of this process."""

    def __init__(self, run_dir: Path) -> None:
        path = _path(run_dir, os.getpid())
        path.parent.mkdir(exist_ok=True)
        # Replace the file of an earlier process, because a process id can be reused.
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
        """Count a request as closed, because its last response was sent."""
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
