# SPDX-License-Identifier: Apache-2.0
"""The identity of an adapter: a digest of its two files. The same content has the same digest, wherever it came from.

The fetcher names what it has brought by it, the core and the prefix cache know adapters by nothing else.
"""

import hashlib
import struct
from pathlib import Path

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
ADAPTER_FILES = (CONFIG_FILE, WEIGHTS_FILE)
"""All that is read of an adapter's folder."""

_READ_BYTES = 2**20


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
        sha.update(_length(len(name.encode())) + name.encode() + _length(path.stat().st_size) + file_sha256(path))
    return f"sha256:{sha.hexdigest()}"


def _length(value: int) -> bytes:
    return struct.pack("<Q", value)
