# SPDX-License-Identifier: Apache-2.0
"""Identity of an adapter: a digest of its files. Equal content has an equal digest, regardless of its source.

The fetcher names cached adapters by digest. The core and the prefix cache identify adapters only by digest.
"""

import hashlib
import os
import struct
import time
from pathlib import Path

from quire_spec.constants import AdapterDigest

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""The files that every adapter has."""
CHAT_TEMPLATE_FILE = "chat_template.jinja"
"""Optional file of an adapter: its chat template. Quire reads only these three files of an adapter."""

_READ_BYTES = 2**20
_RACY_S = 2.0
"""A file that changed less than this number of seconds ago can change again without a new timestamp. Git calls such a
file racy."""


def file_sha256(path: Path) -> bytes:
    """Return the SHA-256 of a file's content, 32 bytes.

    Raises:
        OSError: the file cannot be read.
    """
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while data := file.read(_READ_BYTES):
            sha.update(data)
    return sha.digest()


def adapter_digest(folder: Path) -> AdapterDigest:
    """Return `sha256:<64 hex digits>` of the adapter in `folder`.

    The files are `ADAPTER_FILES`, in order, then the chat template if it exists. For each file, the hash covers the
    length and UTF-8 bytes of its name, and the length and SHA-256 of its content. Each length has 8 bytes,
    little-endian.

    Raises:
        OSError: a file is missing or cannot be read.
    """
    sha = hashlib.sha256()
    for name in _present_files(folder):
        path = folder / name
        sha.update(
            _encode_length(len(name.encode())) + name.encode() + _encode_length(path.stat().st_size) + file_sha256(path)
        )
    return AdapterDigest(f"sha256:{sha.hexdigest()}")


class DigestCache:
    """Cache of the digests of adapter folders. The cache reads files again only after a change; reading takes 5 ms per
    10 MB.

    The cache detects a change by the inode, size and times of a file. If a file changed less than `_RACY_S` before it
    was read, the cache always reads it again.
    """

    def __init__(self) -> None:
        self._entries: dict[Path, tuple[object, AdapterDigest]] = {}

    def get(self, folder: Path) -> AdapterDigest:
        """Return `adapter_digest(folder)`; raises the same errors as `adapter_digest`."""
        now = time.time()
        stats = [os.stat(folder / name) for name in _present_files(folder)]
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


def _present_files(folder: Path) -> tuple[str, ...]:
    return (*ADAPTER_FILES, CHAT_TEMPLATE_FILE) if (folder / CHAT_TEMPLATE_FILE).exists() else ADAPTER_FILES


def _encode_length(value: int) -> bytes:
    return struct.pack("<Q", value)
