# SPDX-License-Identifier: Apache-2.0
"""Digest that identifies an adapter by the content of its files.

Adapters with the same content have the same digest, even if they come from different sources.

The fetcher stores each cached adapter under its digest. The core and the prefix cache identify adapters only by digest.
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
"""Optional file of an adapter. It contains the adapter's chat template."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json", "special_tokens_map.json")
"""Optional files of an adapter. They are compared with the base model's tokenizer, which the adapter's requests use."""
OPTIONAL_FILES = (CHAT_TEMPLATE_FILE, *TOKENIZER_FILES)
"""Quire reads these files and the files of `ADAPTER_FILES`, and no other files of an adapter."""
MAX_TOKENIZER_BYTES = 64 << 20
"""Maximum size of each of `TOKENIZER_FILES`. For comparison, Gemma's tokenizer.json has 33 MB."""

_READ_BYTES = 2**20
_RACY_S = 2.0
"""If a file was changed less than this number of seconds ago, its timestamp may stay the same after a further change.
Git calls such a file racy."""


def file_sha256(path: Path) -> bytes:
    """Return the SHA-256 hash of a file's content as 32 bytes.

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

    The digest covers the files of `ADAPTER_FILES` in that order, and then those of `OPTIONAL_FILES` that exist. For
    each file, four values are hashed: the length of its name, the name in UTF-8, the length of its content, and the
    SHA-256 hash of its content. Each length is a little-endian number of 8 bytes.

    Raises:
        OSError: a file is missing or cannot be read.
    """
    sha = hashlib.sha256()
    for name in present_files(folder):
        path = folder / name
        sha.update(
            _encode_length(len(name.encode())) + name.encode() + _encode_length(path.stat().st_size) + file_sha256(path)
        )
    return AdapterDigest(f"sha256:{sha.hexdigest()}")


class DigestCache:
    """Cache for the digests of adapter folders.

    The files of a folder are read again only after a change, because reading takes 5 ms for every 10 MB.

    The cache compares the inode, the size and the times of each file to detect a change. The digest is not cached if a
    file was changed less than `_RACY_S` seconds before it was read.
    """

    def __init__(self) -> None:
        self._entries: dict[Path, tuple[object, AdapterDigest]] = {}

    def get(self, folder: Path) -> AdapterDigest:
        """Return `adapter_digest(folder)` from the cache, or compute it. Raises the same errors as `adapter_digest`."""
        now = time.time()
        stats = [os.stat(folder / name) for name in present_files(folder)]
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


def present_files(folder: Path) -> tuple[str, ...]:
    """Return the names of the files of an adapter, which its digest covers."""
    return (*ADAPTER_FILES, *(name for name in OPTIONAL_FILES if (folder / name).exists()))


def _encode_length(value: int) -> bytes:
    return struct.pack("<Q", value)
