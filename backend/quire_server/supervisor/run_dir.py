# SPDX-License-Identifier: Apache-2.0
"""The run folder: sockets and the server's model repository, for one supervisor at a time and only while it runs."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from quire_server.frontend import open_requests
from quire_server.model_server import launch, repository
from quire_spec import constants
from quire_spec.errors import ConfigError

REPOSITORY = "repository"
_SHM_PREFIX = "shm-prefix"
_OWNED_NAMES = (constants.TEXT_SOCKET, constants.CORE_SOCKET, REPOSITORY, "backends", open_requests.FOLDER, _SHM_PREFIX)


@contextlib.contextmanager
def locked_run_dir(run_dir: Path) -> Iterator[Path]:
    """The run folder, resolved, empty of what an earlier owner left; emptied again at the end, or removed if new.

    Raises:
        ConfigError: it cannot be made, its path is too long for a socket, or another supervisor owns it.
    """
    run_dir = Path(os.path.realpath(run_dir))
    if len(os.fsencode(run_dir / constants.TEXT_SOCKET)) > constants.MAX_SOCKET_PATH:
        raise ConfigError(f"--run-dir {str(run_dir)!r}: too long for a socket in it; take a shorter path")
    is_new = not run_dir.exists()
    try:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock_fd = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"--run-dir {str(run_dir)!r}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"--run-dir {str(run_dir)!r}: another supervisor uses it; give each its own, or stop the other"
            ) from error
        clean(run_dir)
        try:
            yield run_dir
        finally:
            clean(run_dir)
            if is_new:
                # Someone may have put a file of theirs there.
                with contextlib.suppress(OSError):
                    run_dir.rmdir()
    finally:
        os.close(lock_fd)


def write_shm_prefix(run_dir: Path, prefix: str) -> None:
    """Remember what our servers' shared memory is called, for the next owner should we be killed: in a pod, /dev/shm
    outlives the container, and a region of 1 MiB per model would be lost with each kill."""
    (run_dir / _SHM_PREFIX).write_text(prefix)


def clean(run_dir: Path) -> None:
    """Remove what is ours, shared memory and copies of models included; only when no server of ours runs."""
    with contextlib.suppress(FileNotFoundError):
        # Never with less than a whole prefix: it names what is deleted.
        if len(prefix := (run_dir / _SHM_PREFIX).read_text()) == len(launch.new_shm_prefix()):
            launch.clear_shared_memory(prefix)
    repository.remove_stale_copies(run_dir / constants.TEXT_SOCKET)
    for name in _OWNED_NAMES:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
