# SPDX-License-Identifier: Apache-2.0
"""Removes earlier revisions of a model from the volume to which a new revision is downloaded.

The operator names each folder after a digest of the model's source, and passes the folders that pods use. All other
folders with such names, and what their interrupted downloads left, are removed. Files with other names are kept,
because users put them there.
"""

import contextlib
import fcntl
import logging
import re
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

logger = logging.getLogger(__name__)

_REVISION = re.compile(r"[0-9a-f]{7}")
_PARTIAL = re.compile(r"\.partial-([0-9a-f]{7})(?:\.lock|\.json|-whole\.json)?")
_REMOVED_PREFIX = ".removed-"
"""A folder gets this prefix before its files are deleted. Otherwise, if the deletion were interrupted, the rest would
look like a complete model."""


def remove_earlier_revisions(volume: Path, kept_names: Collection[str]) -> None:
    """Remove all revisions from a volume, except those with the names `kept_names`.

    A revision that another process downloads now is kept. If a folder cannot be removed, the error is only logged.
    """
    if not volume.is_dir():
        return
    for folder in [path for path in volume.iterdir() if _REVISION.fullmatch(path.name) and path.name not in kept_names]:
        with _log_errors(folder):
            folder.rename(volume / f"{_REMOVED_PREFIX}{folder.name}")
            logger.info("removing an earlier revision folder=%s", folder)
    for name in {match[1] for path in volume.iterdir() if (match := _PARTIAL.fullmatch(path.name))} - {*kept_names}:
        _remove_partial(volume, name)
    for folder in volume.glob(f"{_REMOVED_PREFIX}*"):
        with _log_errors(folder):
            shutil.rmtree(folder)


def _remove_partial(volume: Path, name: str) -> None:
    """Remove the files of an interrupted download, unless the download still runs and has the lock."""
    lock_path = volume / f".partial-{name}.lock"
    with _log_errors(volume / name), lock_path.open("a") as lock_file, contextlib.suppress(BlockingIOError):
        fcntl.flock(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for path in [path for path in volume.iterdir() if (m := _PARTIAL.fullmatch(path.name)) and m[1] == name]:
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


@contextlib.contextmanager
def _log_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("earlier revision cannot be removed path=%s error=%s", path, error)
