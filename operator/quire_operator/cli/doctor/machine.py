# SPDX-License-Identifier: Apache-2.0
"""Requirements of the server on a machine. It uses only the standard library, and also runs on older versions of
Python, because hack/bootstrap.py calls it before anything is installed."""

import ctypes
import os
import platform
import sys
import sysconfig
from pathlib import Path


def missing_requirements() -> list[str]:
    """Return the requirements that this machine does not meet. Each text also describes the fix."""
    problems = []
    if sys.version_info[:2] not in ((3, 11), (3, 12)):
        problems.append(
            f"Python {platform.python_version()} at {sys.executable}: the server runs models on 3.11 and 3.12; "
            "install python3.11 and use it (in a clone: make PYTHON=python3.11 ...)"
        )
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        problems.append(f"{sys.platform} {platform.machine()}: the server is built for Linux on x86_64 and aarch64")
    return problems + _libc() + _libpython()


def _libc() -> list[str]:
    name, version = platform.libc_ver()
    if name == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35):
        return []
    return [f"libc {name or 'unknown'} {version}: the server needs glibc 2.35 or later (Debian 12, Ubuntu 22.04)"]


def _libpython() -> list[str]:
    library = f"libpython{sys.version_info[0]}.{sys.version_info[1]}.so.1.0"
    for candidate in (Path(sysconfig.get_config_var("LIBDIR") or "/", library), library):
        try:
            ctypes.CDLL(str(candidate), mode=os.RTLD_LAZY)
            return []
        except OSError:
            continue
    return [
        f"{library}: not found; the server's Python processes load it. Install it (Debian, Ubuntu: apt-get install "
        f"{library.removesuffix('.so.1.0')}), or use a Python built with --enable-shared"
    ]
