# SPDX-License-Identifier: Apache-2.0
"""A folder that holds KV blocks in files: an emptyDir, or a claim that several pods share.

Torch-free. A block is the file ROOT/REPRESENTATION/KEY[:2]/KEY, all in hexadecimal. Its header names everything that
the reader expects, and a checksum covers the bytes of the block. A file is written under another name and then renamed,
so two pods can write the same block. Names are opened relative to open folders and never through a symbolic link.
"""

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
import struct
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from pathlib import Path

import xxhash

from quire_engine.kv_cache.block_hash import LAYOUT_VERSION
from quire_engine.kv_transfer.daemon_threads import DaemonThreads
from quire_engine.kv_transfer.key_index import KeyIndex
from quire_engine.kv_transfer.read_time import ReadTime
from quire_engine.kv_transfer.store import KVStore, RowBuffers

_MAGIC, _VERSION = b"QKV1", 1
_HEADER = struct.Struct("<4sHH16s32sQ16s")
"""Magic, bytes of the header, version of the format, representation, key, bytes of the block, xxh3_128 of the block."""
_TEMPORARY = ".tmp-"
_LOCK = ".lock"
_NUM_READERS = 2
_MAX_GROUPS = 256
_MIN_GROUP_BLOCKS = 64
"""The quota is divided among groups of folders, so that one sweep reads a small part of many files. Each group has room
for at least this number of blocks."""
_SWEEP_SHARE = 8
"""A group is swept when the processes may have written this fraction of its part of the quota since the last sweep."""
_RESCAN_S = 60.0
_SCAN_NAMES, _SCAN_PAUSE_S = 2000, 0.01
"""A scan pauses after this number of names, so that steps and writes do not wait for it."""
_RACY_S = 2.0
"""A folder that was changed less than this number of seconds ago can change again without a new time."""
_RETRY_S = 30.0
"""After an error of the file system, nothing is written for this number of seconds."""
_STALE_S = 600.0
"""A temporary file that is older was left by a process that died."""

logger = logging.getLogger(__name__)


class FolderStore(KVStore):
    """See the module. Any number of processes can use the same folder at the same time."""

    def __init__(
        self,
        root: Path,
        rows: RowBuffers,
        parallel: str,
        max_bytes: int | None = None,
        num_writers: int = 1,
        other_row_bytes: int = 0,
    ) -> None:
        """Use the folder `root`, which is created if necessary.

        Args:
            root: the folder.
            rows: host memory of this process.
            parallel: the numbers of ranks that have parts of a row, and the node whose parts these rows are. Others do
                not share files.
            max_bytes: maximum size of all files together, also of other models; None: half of the space that is free.
                Between two sweeps, the files can exceed it by an eighth.
            num_writers: number of processes that share this quota and write at the same time. A process that writes two
                kinds of rows counts twice.
            other_row_bytes: bytes of a row of the other kind, if there is one.

        Raises:
            OSError: the folder cannot be created or opened.
        """
        self._rows = rows
        self._row_bytes = row_bytes(rows)
        representation = hashlib.sha256(f"{LAYOUT_VERSION} {_VERSION} {parallel} {rows.layout}".encode()).digest()
        self._representation = representation[:16]
        self._path = root
        self._root = _open_root(root)
        # At the end of the process, a thread may still use the folder.
        weakref.finalize(self, os.close, self._root).atexit = False
        space = os.fstatvfs(self._root)
        self.max_bytes = space.f_bavail * space.f_frsize // 2 if max_bytes is None else max_bytes
        file_bytes = _HEADER.size + max(self._row_bytes, other_row_bytes)
        self._num_groups = max(1, min(_MAX_GROUPS, self.max_bytes // (_MIN_GROUP_BLOCKS * file_bytes)))
        self._max_unswept_bytes = self.max_bytes // self._num_groups // _SWEEP_SHARE // num_writers
        # An earlier process may have ended before it swept what it had written.
        self._unswept_bytes = dict.fromkeys(range(self._num_groups), self._max_unswept_bytes)
        self._index = KeyIndex()
        self._folder_times: dict[int, int] = {}
        self._scanned_at = 0.0
        self._read_time = ReadTime()
        self._no_writes_before = 0.0
        self._lock = threading.Lock()
        self.misses = Counter[str]()
        """Number of misses and failed writes, by reason."""
        self._readers = DaemonThreads(_NUM_READERS, "kv-read")
        self._writer = DaemonThreads(1, "kv-write")
        self._scan_later()

    @property
    def errors(self) -> dict[str, int]:
        """See KVStore. A block that another process has removed is not an error."""
        return {reason: number for reason, number in self.misses.copy().items() if reason != "absent"}

    @property
    def seconds_per_block(self) -> float:
        """See KVStore."""
        return self._read_time.seconds_per_block

    def contains(self, keys: Sequence[bytes]) -> int:
        """See KVStore. Files of other pods are seen after some seconds."""
        if time.monotonic() > self._scanned_at + _RESCAN_S:
            self._scan_later()
        return next((number for number, key in enumerate(keys) if key not in self._index), len(keys))

    def absent(self, keys: Sequence[bytes]) -> list[int]:
        """Return the numbers of the keys that have no file. Unlike `contains`, it waits for the disk."""
        return [number for number, key in enumerate(keys) if not self._has_file(key)]

    def forget(self, key: bytes) -> None:
        """Do not return a block from `contains` until it is written again or its folder has changed."""
        self._index.discard(key)

    def read(
        self,
        keys: Sequence[bytes],
        rows: Sequence[int],
        on_done: Callable[[int], None],
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:
        """See KVStore. A read continues even if it is no longer wanted, for later sequences."""
        self._readers.submit(partial(self._run, self._read_blocks, keys, rows, on_done))

    def write(self, keys: Sequence[bytes], rows: Sequence[int], on_done: Callable[[int], None]) -> None:
        """See KVStore."""
        self._writer.submit(partial(self._run, self._write_blocks, keys, rows, on_done))

    def _run(
        self,
        transfer: Callable[[Sequence[bytes], Sequence[int]], Iterator[None]],
        keys: Sequence[bytes],
        rows: Sequence[int],
        on_done: Callable[[int], None],
    ) -> None:
        """Call `on_done` with the number of blocks that `transfer` has moved, also after an error."""
        num_done = 0
        try:
            self._rows.synchronize()
            for _ in transfer(keys, rows):
                num_done += 1
        except Exception:
            self._count("internal")
            logger.exception("kv folder: a transfer failed")
        finally:
            on_done(num_done)

    def _read_blocks(self, keys: Sequence[bytes], rows: Sequence[int]) -> Iterator[None]:
        for key, row in zip(keys, rows, strict=True):
            start = time.perf_counter()
            if reason := self._read_block(key, row):
                self._index.discard(key)
                self._count(reason)
                return
            self._read_time.add(time.perf_counter() - start)
            yield

    def _has_file(self, key: bytes) -> bool:
        try:
            with self._open_folder(*self._folder_names(key)) as folder:
                os.stat(key.hex(), dir_fd=folder, follow_symlinks=False)
        except OSError:
            return False
        return True

    def _read_block(self, key: bytes, row: int) -> str:
        """Read one file into a row. Return the reason if this is a miss. A file that is wrong is deleted."""
        name = key.hex()
        try:
            with self._open_folder(*self._folder_names(key)) as folder:
                reason = self._read_file(folder, name, key, row)
                if reason:
                    os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return "absent"
        except OSError as error:
            return _reason(error)
        return reason

    def _read_file(self, folder: int, name: str, key: bytes, row: int) -> str:
        """Return why the file is wrong; "" if it has been read. Update its time, by which files are swept."""
        try:
            # O_NONBLOCK: a FIFO must not block.
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        except OSError as error:
            if error.errno == errno.ELOOP:
                return "symlink"
            raise
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                return "owner" if stat.S_ISREG(status.st_mode) else "type"
            if status.st_size != _HEADER.size + self._row_bytes:
                return "length"
            header, buffers = bytearray(_HEADER.size), self._rows.buffers(row)
            if os.readv(file, [header, *buffers]) != status.st_size:
                return "length"
            if header != (expected := self._header(key, buffers)):
                return _why_wrong(header, expected)
            with contextlib.suppress(OSError):
                os.utime(file)
        finally:
            os.close(file)
        return ""

    def _write_blocks(self, keys: Sequence[bytes], rows: Sequence[int]) -> Iterator[None]:
        for key, row in zip(keys, rows, strict=True):
            if time.monotonic() < self._no_writes_before:
                return
            try:
                with self._open_folder(*self._folder_names(key), create=True) as folder:
                    self._write_file(folder, key, row)
                self._index.add(key)
                yield
                self._sweep_after(key)
            except OSError as error:
                self._count(_reason(error))
                self._no_writes_before = time.monotonic() + _RETRY_S
                self._open_root_again()
                logger.warning("kv folder: cannot write or remove, next attempt in %.0f s error=%s", _RETRY_S, error)
                return

    def _open_root_again(self) -> None:
        """Use the folder that has the path now, because the one that was opened may have been removed."""
        with contextlib.suppress(OSError):
            root = _open_root(self._path)
            try:
                # Threads that read continue with the same descriptor.
                os.dup2(root, self._root, inheritable=False)
            finally:
                os.close(root)

    def _write_file(self, folder: int, key: bytes, row: int) -> None:
        name, buffers = f"{_TEMPORARY}{os.getpid()}-{threading.get_ident()}", self._rows.buffers(row)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=folder)
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
        try:
            try:
                # Without fsync: a file that is torn by a crash of the node fails its checksum.
                if os.writev(file, [self._header(key, buffers), *buffers]) != _HEADER.size + self._row_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            finally:
                os.close(file)
            os.rename(name, key.hex(), src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=folder)
            raise

    def _header(self, key: bytes, buffers: Sequence[memoryview]) -> bytes:
        checksum = xxhash.xxh3_128()
        for buffer in buffers:
            checksum.update(buffer)
        fields = _MAGIC, _HEADER.size, _VERSION, self._representation, key, self._row_bytes, checksum.digest()
        return _HEADER.pack(*fields)

    def _folder_names(self, key: bytes) -> tuple[str, str]:
        return self._representation.hex(), key[:1].hex()

    @contextlib.contextmanager
    def _open_folder(self, *names: str, create: bool = False) -> Iterator[int]:
        """Open the folder with the path `names`."""
        parent = os.dup(self._root)
        try:
            for name in names:
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=parent)
                child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
                os.close(parent)
                parent = child
            yield parent
        finally:
            os.close(parent)

    def _scan_later(self) -> None:
        self._scanned_at = time.monotonic()
        self._writer.submit(self._scan)

    def _scan(self, first: int = 0) -> None:
        """Find the blocks in the folders from number `first` on, also those that other processes have written or
        removed. The part of the scan that is left runs after the writes that have been started."""
        num_names = 0
        for number in range(first, 256):
            num_names += self._scan_folder(number)
            if num_names >= _SCAN_NAMES:
                time.sleep(_SCAN_PAUSE_S)
                self._scanned_at = time.monotonic()
                self._writer.submit(partial(self._scan, number + 1))
                return

    def _scan_folder(self, number: int) -> int:
        """Find the blocks in one folder, and remove stale temporary files. Return the number of names, 0 if the folder
        has not changed."""
        names: list[str] = []
        with contextlib.suppress(OSError), self._open_folder(*self._folder_names(bytes([number]))) as folder:
            changed_at, now = os.fstat(folder).st_mtime_ns, time.time()
            if self._folder_times.get(number) == changed_at:
                return 0
            names = os.listdir(folder)
            temporary = [name for name in names if name.startswith(_TEMPORARY)]
            for name in temporary:
                with contextlib.suppress(FileNotFoundError):
                    if abs(now - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime) > _STALE_S:
                        os.unlink(name, dir_fd=folder)
            if temporary or abs(now - changed_at / 1e9) < _RACY_S:
                self._folder_times.pop(number, None)
            else:
                self._folder_times[number] = changed_at
        self._index.replace(number, names)
        return len(names)

    def _sweep_after(self, key: bytes) -> None:
        """Sweep the group of a key if enough was written to it since its last sweep."""
        group = key[0] * self._num_groups // 256
        self._unswept_bytes[group] += _HEADER.size + self._row_bytes
        if self._unswept_bytes[group] > self._max_unswept_bytes and self._sweep(group):
            self._unswept_bytes[group] = 0

    def _sweep(self, group: int) -> bool:
        """Remove the files of a group that were used least recently, if the group exceeds its part of the quota.

        The lock ends with its process. If another process sweeps, return False: nothing was done.
        """
        lock = os.open(_LOCK, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600, dir_fd=self._root)
        try:
            self._try_lock(lock)
            files, now = [], time.time()
            for names, entry in self._group_entries(group):
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                is_temporary = entry.name.startswith(_TEMPORARY)
                if not is_temporary or abs(now - status.st_mtime) > _STALE_S:
                    files.append((is_temporary, status.st_mtime, status.st_size, names, entry.name))
            excess = sum(file[2] for file in files) - self.max_bytes // self._num_groups
            # Temporary files first, then by the time of the last use.
            for is_temporary, _, size, names, name in sorted(files, key=lambda file: (not file[0], file[1])):
                if excess <= 0 and not is_temporary:
                    break
                excess -= size
                with contextlib.suppress(FileNotFoundError), self._open_folder(*names) as folder:
                    os.unlink(name, dir_fd=folder)
                with contextlib.suppress(ValueError):
                    self._index.discard(bytes.fromhex(name))
        except BlockingIOError:
            return False
        finally:
            os.close(lock)
        return True

    @staticmethod
    def _try_lock(file: int) -> None:
        """Raise BlockingIOError if another process has the lock.

        Some network file systems have no locks. Two sweeps at the same time then remove the same files.
        """
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
                raise

    def _group_entries(self, group: int) -> Iterator[tuple[tuple[str, str], "os.DirEntry[str]"]]:
        """Yield the files in the folders of a group, of all representations, each with the path of its folder. Symbolic
        links are not followed."""
        numbers = [number for number in range(256) if number * self._num_groups // 256 == group]
        folders = [name for name in os.listdir(self._root) if len(name) == 2 * len(self._representation)]
        for names in product(folders, [f"{number:02x}" for number in numbers]):
            with contextlib.suppress(OSError), self._open_folder(*names) as folder, os.scandir(folder) as entries:
                yield from ((names, entry) for entry in list(entries) if not entry.is_dir(follow_symlinks=False))

    def _count(self, reason: str) -> None:
        with self._lock:
            self.misses[reason] += 1
            is_first = self.misses[reason] == 1
        if is_first:
            logger.warning("kv folder: first miss or failed write of its kind reason=%s", reason)


def row_bytes(rows: RowBuffers) -> int:
    """Return the bytes of a row."""
    return sum(len(buffer) for buffer in rows.buffers(0))


def _open_root(path: Path) -> int:
    path.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY)


def _why_wrong(header: bytearray, expected: bytes) -> str:
    """Return why a header of the right length is wrong: it is from another version, of another block, or corrupt."""
    found, right = _HEADER.unpack(header), _HEADER.unpack(expected)
    if found[0] != right[0]:
        return "corrupt"
    if found[1:3] != right[1:3]:
        return "version"
    return "key" if found[3:5] != right[3:5] else "corrupt"


def _reason(error: OSError) -> str:
    """Return a short name of an error of the file system."""
    names = {errno.ENOSPC: "full", errno.EDQUOT: "full", errno.EROFS: "read_only", errno.EACCES: "access"}
    names |= {errno.EPERM: "access", errno.ENOENT: "absent", errno.ESTALE: "absent", errno.ELOOP: "symlink"}
    names |= {errno.ENOTDIR: "symlink"}
    return names.get(error.errno or 0, "io")
