# SPDX-License-Identifier: Apache-2.0
"""A file of records. It stays valid even if the process ends at any time.

Each line contains one record, which is a JSON object. Each record is appended with a single write. If the process ends
during a write, the last line of the file is incomplete, and the next start removes it. If the disk is full, the
incomplete line is removed at once. Therefore, the file contains only complete records, and a separate journal of
finished lines is not needed.
"""

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire_spec.errors import ConfigError, Unavailable

ID_PREFIX = "batch_"
"""The id of every record starts with this prefix. If a file contains other records, it is never changed."""
_HEAD = b'{"id": "' + ID_PREFIX.encode()


class StorageFailed(Unavailable):
    """A record could not be written.

    The file is still valid. If the same command is run again, it continues after the last record.
    """


class ResultFile:
    """An open file of records. It is locked, so that other runs cannot write to it."""

    def __init__(self, path: Path) -> None:
        """Open or create the file.

        Raises:
            ConfigError: the file cannot be written, or another run is writing to it.
        """
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written ({error.strerror}); give another file") from error
        try:
            if not stat.S_ISREG(os.fstat(self._fd).st_mode):
                raise ConfigError(f"{path}: is not a file; give the path of a file")
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._fd)
            raise ConfigError(
                f"{path}: another run is writing to it; wait until that run ends, or give another file"
            ) from error
        except BaseException:
            os.close(self._fd)
            raise
        self._size = 0
        self._unsynced = True

    def recover(self) -> Iterator[dict[str, Any]]:
        """Yield the records of earlier runs. Then, if the last record of the file is incomplete, remove it.

        Raises:
            ConfigError: the file contains something other than records; it is not changed.
        """
        with os.fdopen(os.dup(self._fd), "rb") as file:
            file.seek(0)
            self._check_part(file.read(len(_HEAD)))
            file.seek(0)
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                yield self._parse(number, line)
                self._size += len(line)
        if os.fstat(self._fd).st_size > self._size:
            os.ftruncate(self._fd, self._size)

    def append(self, record: bytes) -> None:
        """Append a record. The record must end with a newline.

        Raises:
            StorageFailed: the disk is full or broken. The file contains no part of the record.
        """
        unwritten = memoryview(record)
        self._unsynced = True
        try:
            while unwritten:
                unwritten = unwritten[os.write(self._fd, unwritten) :]
        except OSError as error:
            with contextlib.suppress(OSError):  # if this fails, the next start removes the part
                os.ftruncate(self._fd, self._size)
            raise self._failure(error) from error
        self._size += len(record)

    def sync(self) -> None:
        """Wait until all records are on the disk. This call blocks.

        Raises:
            StorageFailed: the disk is full or broken.
        """
        if not self._unsynced:
            return
        self._unsynced = False
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise self._failure(error) from error

    def same_file(self, path: Path) -> bool:
        """Return True if `path` is this file."""
        try:
            return os.path.samestat(os.fstat(self._fd), os.stat(path))
        except OSError:
            return False

    def close(self) -> None:
        """Close the file and release its lock."""
        os.close(self._fd)

    def _parse(self, number: int, line: bytes) -> dict[str, Any]:
        with contextlib.suppress(ValueError, RecursionError):
            record = json.loads(line)
            if isinstance(record, dict) and str(record.get("id", "")).startswith(ID_PREFIX):
                return record
        raise ConfigError(f"{self.path}: line {number} is not a result of quire batch; give another file, or remove it")

    def _check_part(self, line: bytes) -> None:
        """Check that an incomplete line is the start of a record.

        After a power failure, the line can consist of bytes with the value 0.
        """
        text = line.rstrip(b"\0")
        if not (text.startswith(_HEAD) or _HEAD.startswith(text)):
            raise ConfigError(f"{self.path}: does not contain results of quire batch; give another file, or remove it")

    def _failure(self, error: OSError) -> StorageFailed:
        return StorageFailed(
            f"{self.path}: {error.strerror}; make space or repair the disk, then run the same command again"
        )
