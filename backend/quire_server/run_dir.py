# SPDX-License-Identifier: Apache-2.0
"""The run folder: sockets and the server's model repository, for one supervisor at a time and only while it runs."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from quire_server import launch, ledger, repository
from quire_spec import names
from quire_spec.errors import ConfigError

REPOSITORY = "repository"
_SHM_PREFIX = "shm-prefix"
_OURS = (names.TEXT_SOCKET, names.CORE_SOCKET, REPOSITORY, "backends", ledger.FOLDER, _SHM_PREFIX)


@contextlib.contextmanager
def owned(run_dir: Path) -> Iterator[Path]:
    """The run folder, resolved, empty of what an earlier owner left; emptied again at the end, or removed if new.

    Raises:
        ConfigError: it cannot be made, its path is too long for a socket, or another supervisor owns it.
    """
    run_dir = Path(os.path.realpath(run_dir))
    if len(os.fsencode(run_dir / names.TEXT_SOCKET)) > names.MAX_SOCKET_PATH:
        raise ConfigError(f"--run-dir {str(run_dir)!r}: too long for a socket in it; take a shorter path")
    new = not run_dir.exists()
    try:
        run_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(run_dir, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"--run-dir {str(run_dir)!r}: {error.strerror}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"--run-dir {str(run_dir)!r}: another supervisor uses it; give each its own, or stop the other"
            ) from error
        empty(run_dir)
        try:
            yield run_dir
        finally:
            empty(run_dir)
            if new:
                # Someone may have put a file of theirs there.
                with contextlib.suppress(OSError):
                    run_dir.rmdir()
    finally:
        os.close(lock)


def note_shm_prefix(run_dir: Path, prefix: str) -> None:
    """Remember what our servers' shared memory is called, for the next owner should we be killed: in a pod, /dev/shm
    outlives the container, and a region of 1 MiB per model would be lost with each kill."""
    (run_dir / _SHM_PREFIX).write_text(prefix)


def empty(run_dir: Path) -> None:
    """Remove what is ours, shared memory and copies of models included; only when no server of ours runs."""
    with contextlib.suppress(FileNotFoundError):
        # Never with less than a whole prefix: it names what is deleted.
        if len(prefix := (run_dir / _SHM_PREFIX).read_text()) == len(launch.new_shm_prefix()):
            launch.clear_shared_memory(prefix)
    repository.clear_copies(run_dir / names.TEXT_SOCKET)
    for name in _OURS:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
