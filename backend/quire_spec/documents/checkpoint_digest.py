# SPDX-License-Identifier: Apache-2.0
"""Identity of a checkpoint: a fast fingerprint for one process, and a full digest for KV blocks that leave the process.

Called by the engine and by downloads."""

import contextlib
import hashlib
import json
import logging
import math
import os
import struct
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from quire_spec.dataclass_json import to_json
from quire_spec.documents.adapter_digest import file_sha256
from quire_spec.documents.remote_weights import RemoteWeights
from quire_spec.errors import ConfigError

DIGEST_FILE = ".quire-digests.json"
"""File beside the weights that keeps the hash of each weight file, so that a checkpoint is read only once for it. The
file is `{name: [size in bytes, mtime in ns, ctime in ns, 64 hex digits]}`."""

_MAX_THREADS = 4
_RACY_S = 2.0
"""A file that was changed less than this number of seconds ago can change again without a new timestamp, so its hash is
not kept."""

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096

logger = logging.getLogger(__name__)


def compute_fingerprint(folder: Path) -> str:
    """Return one hash, `sampled-sha256:<hex>`.

    The hash covers config.json and, for each weight file, its name, its size and 64 samples of 4 KiB, or its ETag if it
    is in a bucket.
    Hashing a whole checkpoint would take as long as loading it. The samples differ if the weights were trained again,
    but they can be equal if only a few places were edited. That is sufficient for KV blocks that never leave the
    process.

    Raises:
        ConfigError: a file cannot be read.
    """
    sha = hashlib.sha256()
    try:
        _update_length_prefixed(sha, (folder / "config.json").read_bytes())
        _update_remote(sha, folder)
        for path in _weight_files(folder):
            size = path.stat().st_size
            _update_length_prefixed(sha, path.name.encode())
            _update_length_prefixed(sha, struct.pack("<Q", size))
            with path.open("rb") as file:
                for i in range(_NUM_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
                    _update_length_prefixed(sha, file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(f"model: {error}") from error
    return f"sampled-sha256:{sha.hexdigest()}"


def compute_digest(folder: Path, is_final: bool = False) -> str:
    """Return one hash, `sha256:<64 hex digits>`, of config.json and of every byte of the weight files.

    For weights in a bucket, the ETags and the URL represent the bytes.

    Two processes that get the same digest have the same weights, so they can share KV blocks. The files are read once,
    at the speed of the storage. If the folder is writable, their hashes are kept in DIGEST_FILE, and later calls use
    them while size and times of the files stay the same.

    Args:
        folder: of the checkpoint.
        is_final: the caller has written the files, and nothing writes them any more. The hashes of files that have just
            been written are kept, too.

    Raises:
        ConfigError: a file cannot be read.
    """
    start = time.monotonic()
    try:
        kept, paths = _read_kept(folder / DIGEST_FILE), _weight_files(folder)
        with ThreadPoolExecutor(_MAX_THREADS, "digest") as pool:
            entries = dict(zip((p.name for p in paths), pool.map(lambda p: _entry(p, kept), paths), strict=True))
        sha = hashlib.sha256()
        _update_length_prefixed(sha, (folder / "config.json").read_bytes())
        _update_remote(sha, folder)
        for name, (size, _, _, hex_hash) in entries.items():
            _update_length_prefixed(sha, name.encode())
            sha.update(struct.pack("<Q", size) + bytes.fromhex(hex_hash))
    except OSError as error:
        raise ConfigError(f"model: {error}") from error
    if entries != kept:
        logger.info("checkpoint digest computed folder=%s seconds=%.1f", folder, time.monotonic() - start)
        settled = math.inf if is_final else (time.time() - _RACY_S) * 1e9
        _keep(folder, {name: entry for name, entry in entries.items() if max(entry[1], entry[2]) < settled})
    return f"sha256:{sha.hexdigest()}"


_Entry = tuple[int, int, int, str]


def _weight_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def _entry(path: Path, kept: dict[str, _Entry]) -> _Entry:
    stat = path.stat()
    times = stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    entry = kept.get(path.name)
    return entry if entry is not None and entry[:3] == times else (*times, file_sha256(path).hex())


def _read_kept(path: Path) -> dict[str, _Entry]:
    """Return the hashes that an earlier call kept. A file that is missing or wrong counts as empty."""
    try:
        document = json.loads(path.read_bytes())
        return {name: (int(v[0]), int(v[1]), int(v[2]), bytes.fromhex(v[3]).hex()) for name, v in document.items()}
    except (OSError, ValueError, TypeError, AttributeError, LookupError):
        return {}


def _keep(folder: Path, entries: dict[str, _Entry]) -> None:
    """Write the hashes beside the weights. A folder that is not writable is not an error."""
    with contextlib.suppress(OSError):
        descriptor, name = tempfile.mkstemp(prefix=DIGEST_FILE, dir=folder)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(entries, file)
                # Whoever can read the weights can read this file, also another user and programs that copy the folder.
                os.fchmod(file.fileno(), 0o644)
            os.replace(name, folder / DIGEST_FILE)
        except OSError:
            os.unlink(name)


def _update_remote(sha: "hashlib._Hash", folder: Path) -> None:
    """Hash the identity of weights that stay in a bucket. The engine checks that it still holds after it read them."""
    if (weights := RemoteWeights.find(folder)) is not None:
        source = weights.source
        identity = [source.uri, source.endpoint, source.region, *map(to_json, weights.files.values()), *weights.files]
        _update_length_prefixed(sha, json.dumps(identity).encode())


def _update_length_prefixed(sha: "hashlib._Hash", data: bytes) -> None:
    sha.update(struct.pack("<Q", len(data)) + data)
