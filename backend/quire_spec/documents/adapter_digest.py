# SPDX-License-Identifier: Apache-2.0
"""The identity of an adapter: a digest of its two files. The same content has the same digest, wherever it came from.

The fetcher names what it has brought by it, the core and the prefix cache know adapters by nothing else.
"""

import hashlib
import os
import struct
import time
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""All that is read of an adapter's folder."""

_READ_BYTES = 2**20
_RACY_S = 2.0
"""A file that changed so shortly before it was read can change again and keep its times: they are as coarse as that."""


def file_sha256(path: Path) -> bytes:
    """SHA-256 of a file's content, 32 bytes.

    Raises:
        OSError: the file cannot be read.
    """
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            sha.update(data)
    return sha.digest()


def adapter_digest(folder: Path) -> str:
    """`sha256:<64 hex digits>` of the adapter in `folder`.

    Over, for each of `ADAPTER_FILES` in order: the name (UTF-8, its length before it), the content's length, and the
    content's SHA-256. Lengths are 8 bytes, little-endian: no two adapters share an encoding.

    Raises:
        OSError: a file is missing or cannot be read.
    """
    sha = hashlib.sha256()
    for name in ADAPTER_FILES:
        path = folder / name
        sha.update(
            _encode_length(len(name.encode())) + name.encode() + _encode_length(path.stat().st_size) + file_sha256(path)
        )
    return f"sha256:{sha.hexdigest()}"


class DigestCache:
    """Digests of adapters' folders, whose files are read again only when they changed: 5 ms for each 10 MB are saved.

    A file that changed has another inode, size or time. Git's index knows files in the same way, and reads those that
    are as young as itself again, too.
    """

    def __init__(self) -> None:
        self._entries: dict[Path, tuple[object, str]] = {}

    def get(self, folder: Path) -> str:
        """The folder's `adapter_digest`. Raises as that."""
        now = time.time()
        stats = [os.stat(folder / name) for name in ADAPTER_FILES]
        file_stats = tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for s in stats)
        cached = self._entries.get(folder)
        if cached is not None and cached[0] == file_stats:
            return cached[1]
        digest = adapter_digest(folder)
        if max(max(s.st_mtime, s.st_ctime) for s in stats) < now - _RACY_S:
            self._entries[folder] = (file_stats, digest)
        else:
            self._entries.pop(folder, None)
        return digest


def _encode_length(value: int) -> bytes:
    return struct.pack("<Q", value)
