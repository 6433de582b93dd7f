# SPDX-License-Identifier: Apache-2.0
"""Cache of compiled kernels that an image can contain.

This module computes the key of the cache, and copies the cache into Triton's cache folder.

`python -m quire_engine compile` fills a folder with kernels and writes its key. At start, `install_shipped_cache`
compares this key with the key for the device. If it matches, the function copies the folder to Triton's own cache,
which must be writable. A kernel that is not in the folder is compiled when it is used for the first time.
"""

import functools
import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import uuid
from pathlib import Path

logger = logging.getLogger(__name__)

SHIPPED_CACHE_VARIABLE = "QUIRE_KERNEL_CACHE"
"""Environment variable that contains the path of the cache in the image."""
_KEY_NAME = "key.json"
_GROUP_PREFIX = "__grp__"
"""Some of the files that Triton writes for a kernel contain the absolute paths of the other files of this kernel. The
names of these files begin with this prefix."""


@functools.cache
def cache_key(capability: tuple[int, int]) -> dict[str, str]:
    """Return the values that compiled kernels depend on.

    They are the sources in this folder, the version of Triton, and the compute capability.
    """
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return {
        "sources": digest.hexdigest(),
        "triton": importlib.metadata.version("triton"),
        "capability": ".".join(map(str, capability)),
    }


def write_key(folder: Path, capability: tuple[int, int]) -> None:
    """Write the key of a folder. A folder that has a key is complete."""
    (folder / _KEY_NAME).write_text(json.dumps(cache_key(capability), indent=1) + "\n")


def install_shipped_cache(capability: tuple[int, int], cache: Path | None = None) -> int:
    """Copy kernels to Triton's cache from the folder that QUIRE_KERNEL_CACHE names.

    If the folder has another key, it is ignored, and one log line names the difference.

    Args:
        capability: compute capability of the device.
        cache: Triton's cache folder; None selects the current one.

    Returns:
        Number of entries that were copied because the cache lacked them.
    """
    value = os.environ.get(SHIPPED_CACHE_VARIABLE)
    if not value:
        return 0
    shipped, expected = Path(value), cache_key(capability)
    try:
        found = json.loads((shipped / _KEY_NAME).read_text())
        differences = [
            f"{name}={found[name]} expected={expected[name]}" for name in expected if found[name] != expected[name]
        ]
    except (OSError, ValueError, TypeError, KeyError) as error:
        differences = [f"{type(error).__name__}: {error}"]
    if differences:
        logger.warning("kernel cache ignored folder=%s %s", shipped, " ".join(differences))
        return 0
    if cache is None:
        # Imported here, because this module must not require Triton.
        from triton import knobs

        cache = Path(knobs.cache.dir)
    try:
        num_copied = sum(
            _copy_entry(entry, cache / entry.name) for entry in sorted(shipped.iterdir()) if entry.is_dir()
        )
    except OSError as error:
        logger.warning("kernel cache not installed folder=%s: %s", shipped, error)
        return 0
    logger.info("kernel cache installed folder=%s entries=%d", shipped, num_copied)
    return num_copied


def _copy_entry(source: Path, destination: Path) -> bool:
    """Copy the folder of a kernel, unless a copy already exists. In the copy, replace the paths in its files with the
    new paths. Return whether the folder was copied."""
    if destination.exists():
        return False
    temporary = destination.with_name(f".{destination.name}.{uuid.uuid4().hex}")
    shutil.copytree(source, temporary)
    for path in temporary.glob(f"{_GROUP_PREFIX}*"):
        children = json.loads(path.read_text())["child_paths"]
        path.write_text(json.dumps({"child_paths": {name: str(destination / name) for name in children}}))
    try:
        temporary.rename(destination)
    except OSError:
        # Another rank has already copied the folder.
        shutil.rmtree(temporary)
        return False
    return True
