# SPDX-License-Identifier: Apache-2.0
"""The adapter cache on disk.

The cache does not depend on protocols. A source is identified by its key, which is a digest of its description.
    adapters/<digest>/            the files of an adapter; complete and immutable
    partial/<key>/                partially downloaded files of a source
    partial/<key>.json            the versions of these files
    partial/<key>.lock            the lock of the download
    sources/<key>.sig             the signature of a source, if signatures are verified
    sources/<key>.json            the last digest of a source, and the versions of its files

Several supervisors can share a cache.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from quire_server.downloads.signatures import SIGNATURE_FILE
from quire_spec.constants import AdapterDigest
from quire_spec.dataclass_json import from_json, to_json
from quire_spec.documents.adapter_digest import adapter_digest
from quire_spec.documents.sources import Source
from quire_spec.errors import ConfigError

RETENTION_S = 24 * 3600.0
"""Number of seconds for which an adapter stays cached although no catalog contains it any more. This makes a rollback
fast. Supervisors that share the cache touch their adapters once an hour."""


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """The content of a source when it was last downloaded."""

    digest: AdapterDigest
    versions: dict[str, str | None]
    """Maps each file to its version. The version is None if the source does not have versions."""


def fsync_path(path: Path) -> None:
    """Sync a file or folder to disk.

    The caller does this before it renames the file or folder. Otherwise, a power failure could leave an incomplete
    adapter.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def source_key(source: Source) -> str:
    """Return the cache key of a source. Sources with equal descriptions have the same key."""
    return hashlib.sha256(json.dumps(to_json(source), sort_keys=True).encode()).hexdigest()[:32]


def folder_bytes(folder: Path) -> int:
    """Return the size of the files in a folder."""
    return sum(path.stat().st_size for path in folder.iterdir())


class AdapterCache:
    """One cache folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("adapters", "partial", "sources"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def folder(self, digest: AdapterDigest) -> Path:
        """Return the path of the folder of the adapter with this digest. The folder does not have to exist."""
        return self._folder / "adapters" / digest

    def record(self, key: str) -> SourceRecord | None:
        """Return the record of the source's last content, or None if the cache does not contain this content."""
        try:
            record = from_json(SourceRecord, json.loads(self._record_path(key).read_text()))
        except (OSError, ValueError, ConfigError):
            return None
        return record if self.folder(record.digest).is_dir() else None

    @contextlib.contextmanager
    def partial(self, key: str) -> Iterator["PartialDownload"]:
        """Lock and return the partial download of a source.

        Raises:
            BlockingIOError: another supervisor with this cache is downloading the source.
        """
        folder = self._folder / "partial" / key
        lock_path = folder.with_suffix(".lock")
        with lock_path.open("w") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not lock_path.exists() or not os.path.samestat(os.fstat(lock_file.fileno()), lock_path.stat()):
                raise BlockingIOError("pruned while it was being locked")
            folder.mkdir(exist_ok=True)
            yield PartialDownload(folder, lock_file.fileno())

    def commit(self, key: str, partial: "PartialDownload") -> SourceRecord:
        """Convert a partial download to a cached adapter. This is atomic.

        All files of the download must be complete. The function reads all files, and syncs them to disk.
        """
        digest = adapter_digest(partial.folder)
        # Sources with the same content can have different signatures.
        self.signature(key).unlink(missing_ok=True)
        if (signature := partial.folder / SIGNATURE_FILE).exists():
            signature.rename(self.signature(key))
        for path in partial.folder.iterdir():
            fsync_path(path)
        fsync_path(partial.folder)
        target = self.folder(digest)
        try:
            partial.folder.rename(target)
        except OSError:
            # The same content already exists, from another source.
            if not self.touch(digest):
                raise
            shutil.rmtree(partial.folder)
        fsync_path(target.parent)
        record = SourceRecord(digest, partial.versions())
        _write_json(self._record_path(key), to_json(record))
        partial.clear_versions()
        return record

    def signature(self, key: str) -> Path:
        """Return the path of the signature of a source. The file does not have to exist."""
        return self._folder / "sources" / f"{key}.sig"

    def touch(self, digest: AdapterDigest) -> bool:
        """Mark an adapter as used, so that no supervisor removes it. Return False if it does not exist."""
        folder = self.folder(digest)
        try:
            os.utime(folder)
        except OSError:
            # An existing adapter can be used even if the volume has become read-only.
            return folder.is_dir()
        return True

    def prune(self, used_digests: set[AdapterDigest]) -> list[AdapterDigest]:
        """Remove adapters that were not used for a day, and return their digests. `used_digests` are not removed."""
        cutoff = time.time() - RETENTION_S
        for digest in used_digests:
            with contextlib.suppress(OSError):
                self.touch(digest)
        removed_digests = []
        for path in list((self._folder / "adapters").iterdir()):
            with contextlib.suppress(OSError):
                if (
                    path.name not in used_digests
                    and path.stat().st_mtime <= cutoff
                    and self._remove_adapter(path, cutoff)
                ):
                    removed_digests.append(AdapterDigest(path.name))
        for path in [*(self._folder / "partial").iterdir(), *(self._folder / "sources").iterdir()]:
            with contextlib.suppress(OSError):
                if path.stat().st_mtime <= cutoff:
                    self._prune_leftover(path)
        return removed_digests

    def shrink(self, max_bytes: int, used_digests: set[AdapterDigest]) -> tuple[list[AdapterDigest], int]:
        """Remove the least recently used adapters until all together have at most `max_bytes` bytes. `used_digests` are
        not removed. Only one supervisor may use the cache.

        Return the digests that were removed, and the bytes of those that stay.
        """
        now, sizes = time.time(), {}
        for path in (self._folder / "adapters").iterdir():
            sizes[path] = folder_bytes(path)
        total, removed_digests = sum(sizes.values()), []
        for path in sorted(sizes, key=lambda path: path.stat().st_mtime):
            if total > max_bytes and path.name not in used_digests and self._remove_adapter(path, now):
                total -= sizes[path]
                removed_digests.append(AdapterDigest(path.name))
        return removed_digests, total

    def _remove_adapter(self, folder: Path, cutoff: float) -> bool:
        """Remove an adapter atomically. If the process is killed, it does not leave an incomplete adapter."""
        trash = self._folder / "partial" / f".{folder.name}"
        folder.rename(trash)
        if trash.stat().st_mtime > cutoff:
            # Another owner has marked the adapter as used in the meantime.
            trash.rename(folder)
            return False
        shutil.rmtree(trash)
        return True

    def _prune_leftover(self, path: Path) -> None:
        """Remove an abandoned partial download, or the record of an adapter that does not exist."""
        if path.suffix == ".lock":
            with self.partial(path.stem) as partial:
                shutil.rmtree(partial.folder)
                partial.clear_versions()
                path.unlink()
        elif path.name.startswith("."):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        elif path.parent.name == "sources" and self.record(path.stem) is None:
            path.unlink()

    def _record_path(self, key: str) -> Path:
        return self._folder / "sources" / f"{key}.json"


class PartialDownload:
    """The partially downloaded files of one source."""

    def __init__(self, folder: Path, lock_fd: int | None = None) -> None:
        """`lock_fd` is the file descriptor that has the lock. None if the caller does not need a lock."""
        self.folder = folder
        self._lock_fd = lock_fd
        # `with_suffix` cannot be used. It replaces the part of a folder name that follows a dot, so two folders could
        # share one file.
        self._versions_file = folder.with_name(folder.name + ".json")

    def lock(self) -> contextlib.AbstractContextManager[object]:
        """Return a context that holds the lock, even if the original descriptor is closed in the meantime."""
        # A lock belongs to the open file. It is released when the last descriptor of this open file is closed.
        return contextlib.nullcontext() if self._lock_fd is None else os.fdopen(os.dup(self._lock_fd))

    def versions(self) -> dict[str, str | None]:
        """Return the recorded version of each file."""
        try:
            versions: dict[str, str | None] = json.loads(self._versions_file.read_text())
        except (OSError, ValueError):
            return {}
        return versions

    def record_version(self, name: str, version: str | None) -> None:
        """Record the version of a file. Call this before any of its bytes are written."""
        _write_json(self._versions_file, self.versions() | {name: version})

    def size(self, name: str) -> int:
        """Return the number of bytes of a file that have been downloaded so far."""
        path = self.folder / name
        return path.stat().st_size if path.exists() else 0

    def discard(self, name: str) -> None:
        """Delete the bytes of a file."""
        (self.folder / name).unlink(missing_ok=True)

    def clear_versions(self) -> None:
        """Delete the recorded versions. Call this after the files were moved."""
        self._versions_file.unlink(missing_ok=True)


def _write_json(path: Path, document: object) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document))
    temporary.rename(path)
