# SPDX-License-Identifier: Apache-2.0
"""The run folder of a supervisor, which contains its sockets and the server's model repository. A lock ensures that
only one supervisor uses the folder."""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from quire_server.frontend import open_requests
from quire_server.model_server import launch, readiness_file
from quire_spec import constants
from quire_spec.errors import ConfigError
from quire_spec.model import capabilities

REPOSITORY = "repository"
OTHER_REPOSITORY = "other-models"
"""Folder that contains links to the models of --model-repository."""
_SHM_PREFIX = "shm-prefix"
_SOCKETS = (
    *(constants.TEXT_SOCKET, constants.CORE_SOCKET, constants.SUPERVISOR_SOCKET),
    *map(constants.process_socket, constants.core_names(capabilities.MAX_DATA_PARALLEL_SIZE)),
    *map(constants.openai_probe_socket, range(constants.MAX_OPENAI_FRONTS)),
    *map(constants.process_socket, (constants.KV_PEER, constants.NODE)),
)
_OWNED_NAMES = (
    *(*_SOCKETS, REPOSITORY, OTHER_REPOSITORY, "backends", open_requests.FOLDER, _SHM_PREFIX),
    *(readiness_file.NAME, constants.CLOSING_FILE, constants.CACHE_SALT_SECRET_FILE),
)


@contextlib.contextmanager
def locked_run_dir(run_dir: Path) -> Iterator[Path]:
    """Lock the run folder, remove the files that an earlier owner left there, and yield the resolved path of the
    folder.

    When the context ends, the supervisor's files are removed. If this function has created the folder, it also removes
    the folder.

    Raises:
        ConfigError: the folder cannot be created, its path is too long for a socket, or another supervisor uses it.
    """
    run_dir = Path(os.path.realpath(run_dir))
    if len(os.fsencode(run_dir / constants.SUPERVISOR_SOCKET)) > constants.MAX_SOCKET_PATH:
        raise ConfigError(f"--run-dir {str(run_dir)!r}: the path is too long for a Unix socket; use a shorter path")
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
                f"--run-dir {str(run_dir)!r}: in use by another supervisor; use another folder, or stop the other one"
            ) from error
        clean(run_dir)
        try:
            yield run_dir
        finally:
            clean(run_dir)
            if is_new:
                # The folder may contain files of other programs. In that case, it is not removed.
                with contextlib.suppress(OSError):
                    run_dir.rmdir()
    finally:
        os.close(lock_fd)


def write_shm_prefix(run_dir: Path, prefix: str) -> None:
    """Write the prefix of the server's shared memory regions to a file. If this supervisor is killed, the next owner of
    the run folder uses the prefix to remove the regions.

    In a pod, the content of /dev/shm is kept when a container ends. Without the file, 1 MiB per model would be lost
    whenever a supervisor is killed.
    """
    (run_dir / _SHM_PREFIX).write_text(prefix)


def write_cache_salt_secret(run_dir: Path) -> None:
    """Write a random secret for the cache salts. All OpenAI fronts of the pod use it."""
    path = run_dir / constants.CACHE_SALT_SECRET_FILE
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))


def clean(run_dir: Path) -> None:
    """Remove the supervisor's files and the server's shared memory. The server must not be running."""
    with contextlib.suppress(FileNotFoundError):
        # If the file was truncated, the shorter prefix would also match memory regions of other servers.
        if len(prefix := (run_dir / _SHM_PREFIX).read_text()) == len(launch.new_shm_prefix()):
            launch.clear_shared_memory(prefix)
    for name in _OWNED_NAMES:
        path = run_dir / name
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
