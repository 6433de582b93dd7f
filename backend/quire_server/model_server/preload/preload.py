# SPDX-License-Identifier: Apache-2.0
"""Builds the LD_PRELOAD library from preload.c. The library prevents crashes of the server, and prevents the loss of
text in its streams.

In an image without a compiler, the library must already exist: `python -m quire_server.preload` builds it ahead of
time.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_suffix(".c")
_HEADERS = tuple(_SOURCE.with_name(name) for name in ("request_guard.h", "grpc_guard.h"))
_CACHE_VARIABLE = "QUIRE_NATIVE_CACHE"
"""Environment variable that contains the path of the folder for prebuilt libraries. quire_kernels.cpu_native uses the
same folder."""


def find_or_build_library(folder: Path) -> Path | None:
    """Return the path of the library for the server's LD_PRELOAD. If no prebuilt library exists, build one in `folder`.

    If the library cannot be built, log a warning and return None. Without the library, the server can lose parts of
    streams under load, and some requests can crash it (SECURITY.md).
    """
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in (_SOURCE, *_HEADERS))).hexdigest()
    name = f"preload-{digest[:16]}.so"
    folders = [Path(cache)] if (cache := os.environ.get(_CACHE_VARIABLE)) else []
    for path in (parent / name for parent in [*folders, folder]):
        if path.exists():
            return path
    try:
        return _compile(folder / name)
    except OSError as error:
        reason = str(error)
    except subprocess.CalledProcessError as error:
        reason = error.stderr.strip()[-500:]
    logger.warning(
        "preload library not built (%s): without it, HTTP streams can lose text if the server is short of CPU time, "
        "and requests can crash the server; install gcc or set CC, or build the library in advance with "
        "`python -m quire_server.preload`",
        reason,
    )
    return None


def _compile(target: Path) -> Path:
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("C compiler not found")
    temporary = target.with_suffix(f".{os.getpid()}")
    command = [compiler, "-O2", "-fPIC", "-shared", "-o", str(temporary), str(_SOURCE), "-ldl", "-pthread"]
    subprocess.run(command, capture_output=True, text=True, check=True)
    temporary.replace(target)
    return target


def main() -> int:
    """Build the library into QUIRE_NATIVE_CACHE."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    cache = os.environ.get(_CACHE_VARIABLE)
    if not cache:
        logger.error("%s is not set; set it to the folder to build into", _CACHE_VARIABLE)
        return 2
    Path(cache).mkdir(parents=True, exist_ok=True)
    library_path = find_or_build_library(Path(cache))
    if library_path is not None:
        logger.info("%s", library_path)
    return 0 if library_path else 1


if __name__ == "__main__":
    sys.exit(main())
