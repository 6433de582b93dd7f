# SPDX-License-Identifier: Apache-2.0
"""Converts a GGUF file that `quire serve` is given, and keeps the result in the cache."""

import hashlib
import subprocess
import sys
from pathlib import Path

from quire_spec.errors import ConfigError


def served_folder(model: str, cache_dir: Path) -> str:
    """Return the folder of the model in a GGUF file; any other MODEL is returned unchanged.

    The folder has the name of the file. It is written again if the size or the time of the file changes.

    Raises:
        ConfigError: the file cannot be converted. The reason is on standard error.
    """
    path = Path(model).expanduser()
    if path.suffix != ".gguf" or not path.is_file():
        return model
    stat = path.stat()
    key = hashlib.sha256(f"{path.absolute()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    folder = cache_dir / "gguf" / key / path.stem
    if not folder.is_dir():
        command = [sys.executable, "-m", "quire_engine", "convert", str(path), "--into", str(folder)]
        if subprocess.run(command).returncode:
            raise ConfigError(f"{model}: the GGUF file was not converted")
    return str(folder)
