# SPDX-License-Identifier: Apache-2.0
"""Ledger: how many requests a stub has open with the server, in a file that outlives the stub.

From the server's hand-over to the last response, whatever the text process knows of it: a stub that dies in between
leaves a client that this server never ends, so the supervisor has to know. The stub writes, the supervisor reads.
"""

import contextlib
import mmap
import os
import struct
import threading
from pathlib import Path

FOLDER = "stubs"
"""In the run folder: one file for each stub, named by its process id."""

_COUNT_FORMAT = struct.Struct("=Q")


class OpenRequestCounter:
    """This process's file."""

    def __init__(self, run_dir: Path) -> None:
        path = _path(run_dir, os.getpid())
        path.parent.mkdir(exist_ok=True)
        # A new file under the name of an old one: its process id may have been another stub's.
        path.unlink(missing_ok=True)
        with path.open("wb+") as file:
            file.truncate(_COUNT_FORMAT.size)
            self._memory = mmap.mmap(file.fileno(), _COUNT_FORMAT.size)
        self._num_open = 0
        self._lock = threading.Lock()

    def increment(self) -> None:
        """A request came."""
        self._add(1)

    def decrement(self) -> None:
        """A request's last response went out."""
        self._add(-1)

    def _add(self, delta: int) -> None:
        with self._lock:
            self._num_open += delta
            _COUNT_FORMAT.pack_into(self._memory, 0, self._num_open)


def read_open_requests(run_dir: Path, pid: int) -> int:
    """Requests that a stub, dead or alive, has open: none when it died before it could take any."""
    try:
        return int(_COUNT_FORMAT.unpack(_path(run_dir, pid).read_bytes())[0])
    except (FileNotFoundError, struct.error):
        # No file yet, or one that had not got its size yet.
        return 0


def remove(run_dir: Path, pid: int) -> None:
    """Remove the file of a stub that is gone."""
    with contextlib.suppress(FileNotFoundError):
        _path(run_dir, pid).unlink()


def _path(run_dir: Path, pid: int) -> Path:
    return run_dir / FOLDER / str(pid)
