# SPDX-License-Identifier: Apache-2.0
"""What the fetcher keeps on disk, and nothing about where it came from.

    adapters/<digest>/            the two files of an adapter; complete, never changed
    partial/<key>/                files being fetched, to be resumed; <key>.json their versions, <key>.lock their owner
    sources/<key>.json            the digest that a source had last, and its files' versions

A key is a digest of the source's description. Several supervisors may share a cache.
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

from quire_spec.dataclass_json import from_json, to_json
from quire_spec.documents.adapter_catalog import Source
from quire_spec.documents.adapter_digest import ADAPTER_FILES, adapter_digest
from quire_spec.errors import ConfigError

RETENTION_S = 24 * 3600.0
"""How long what no catalogue names stays: rollbacks are quick, and other owners of the cache touch theirs hourly."""


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """What a source had when it was fetched last."""

    digest: str
    versions: dict[str, str | None]
    """By file; None where the place cannot tell versions."""


def fsync_path(path: Path) -> None:
    """Have a file or folder on disk before anything names it: a power cut must not leave half an adapter."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def source_key(source: Source) -> str:
    """Names a source in the cache: the same description, the same key."""
    return hashlib.sha256(json.dumps(to_json(source), sort_keys=True).encode()).hexdigest()[:32]


class AdapterCache:
    """One cache folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        for name in ("adapters", "partial", "sources"):
            (folder / name).mkdir(parents=True, exist_ok=True)

    def folder(self, digest: str) -> Path:
        """Where the adapter of that digest is, or would be."""
        return self._folder / "adapters" / digest

    def record(self, key: str) -> SourceRecord | None:
        """What the source had last, if that is still here."""
        try:
            record = from_json(SourceRecord, json.loads(self._record_path(key).read_text()))
        except (OSError, ValueError, ConfigError):
            return None
        return record if self.folder(record.digest).is_dir() else None

    @contextlib.contextmanager
    def partial(self, key: str) -> Iterator["PartialDownload"]:
        """The files being fetched of a source.

        Raises:
            BlockingIOError: another owner of this cache is fetching it.
        """
        folder = self._folder / "partial" / key
        lock_path = folder.with_suffix(".lock")
        with lock_path.open("w") as lock_file:
            fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not lock_path.exists() or not os.path.samestat(os.fstat(lock_file.fileno()), lock_path.stat()):
                raise BlockingIOError("swept while it was being locked")
            folder.mkdir(exist_ok=True)
            yield PartialDownload(folder, lock_file.fileno())

    def commit(self, key: str, partial: "PartialDownload") -> SourceRecord:
        """Make a complete partial an adapter of the cache: all of it or nothing. Reads and syncs the files: slow."""
        digest = adapter_digest(partial.folder)
        for name in ADAPTER_FILES:
            fsync_path(partial.folder / name)
        fsync_path(partial.folder)
        target = self.folder(digest)
        try:
            partial.folder.rename(target)
        except OSError:
            # The same content is there already, from another source.
            if not self.touch(digest):
                raise
            shutil.rmtree(partial.folder)
        fsync_path(target.parent)
        record = SourceRecord(digest, partial.versions())
        _write_json(self._record_path(key), to_json(record))
        partial.clear_versions()
        return record

    def touch(self, digest: str) -> bool:
        """Say that an adapter is in use, so that no sweep takes it, ours or another owner's; False: it is gone."""
        folder = self.folder(digest)
        try:
            os.utime(folder)
        except OSError:
            # What is there can be used, also on a volume that has become read-only.
            return folder.is_dir()
        return True

    def prune(self, used_digests: set[str]) -> list[str]:
        """Remove what nobody has used for a day; returns the digests removed. `used` are ours, and stay."""
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
                    removed_digests.append(path.name)
        for path in [*(self._folder / "partial").iterdir(), *(self._folder / "sources").iterdir()]:
            with contextlib.suppress(OSError):
                if path.stat().st_mtime <= cutoff:
                    self._prune_leftover(path)
        return removed_digests

    def _remove_adapter(self, folder: Path, cutoff: float) -> bool:
        """Take an adapter away in one move: when we are killed, no half of it may keep its name."""
        trash = self._folder / "partial" / f".{folder.name}"
        folder.rename(trash)
        if trash.stat().st_mtime > cutoff:
            # Another owner has just said that it uses it.
            trash.rename(folder)
            return False
        shutil.rmtree(trash)
        return True

    def _prune_leftover(self, path: Path) -> None:
        """Remove what a fetch that never came to its end has left, or a record of what is gone."""
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
    """The files of one source that are being fetched."""

    def __init__(self, folder: Path, lock_fd: int | None = None) -> None:
        """`lock` is the file descriptor whose lock keeps others away, if one does."""
        self.folder = folder
        self._lock_fd = lock_fd
        # Not with_suffix: a folder's name may have a dot in it, and two folders would share their notes.
        self._versions_file = folder.with_name(folder.name + ".json")

    def lock(self) -> contextlib.AbstractContextManager[object]:
        """Keeps others away until it is closed, however soon the one who has locked the files goes."""
        # A lock is of the open file: it lasts as long as the last descriptor.
        return contextlib.nullcontext() if self._lock_fd is None else os.fdopen(os.dup(self._lock_fd))

    def versions(self) -> dict[str, str | None]:
        """Version that each file begun was of."""
        try:
            versions: dict[str, str | None] = json.loads(self._versions_file.read_text())
        except (OSError, ValueError):
            return {}
        return versions

    def record_version(self, name: str, version: str | None) -> None:
        """Remember what version of a file its bytes are of; before they are written."""
        _write_json(self._versions_file, self.versions() | {name: version})

    def size(self, name: str) -> int:
        """Bytes that are here."""
        path = self.folder / name
        return path.stat().st_size if path.exists() else 0

    def discard(self, name: str) -> None:
        """Forget the bytes of a file."""
        (self.folder / name).unlink(missing_ok=True)

    def clear_versions(self) -> None:
        """Forget the versions, once the files are elsewhere."""
        self._versions_file.unlink(missing_ok=True)


def _write_json(path: Path, document: object) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(document))
    temporary.rename(path)
