# SPDX-License-Identifier: Apache-2.0
"""Replacements of the NVIDIA libraries that PyTorch's CUDA build is linked to: three work, the others are stubs."""

import hashlib
import importlib.util
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import nvidia_stubs
from nvidia_stubs import compile_library, functions_of, required_functions

HERE = Path(__file__).resolve().parent
CACHE = Path.home() / ".cache/quire/emulator"
KEEP_SECONDS = 30 * 24 * 3600.0
_OURS = {"libcudart.so.13": "cudart.cpp", "libnccl.so.2": "nccl.cpp", "libcuda.so.1": "cuda.cpp"}
_LIBRARIES = (
    *("libcudart.so.13", "libnccl.so.2", "libcuda.so.1", "libcublas.so.13", "libcublasLt.so.13", "libcudnn.so.9"),
    *("libcufft.so.12", "libcufile.so.0", "libcupti.so.13", "libcurand.so.10", "libcusolver.so.12"),
    *("libcusparse.so.12", "libcusparseLt.so.0", "libnvrtc.so.13", "libnvshmem_host.so.3"),
)
"""In the order in which they are loaded."""
_DEFINED = re.compile(r"^API [\w ]+[ *]+(\w+)\(", re.MULTILINE)
_NOT_SUPPORTED = 801
"""cudaErrorNotSupported: what the runtime's functions that are not written here return."""


def build() -> list[Path]:
    """Build the libraries if necessary, which takes about 20 s, and return them.

    Raises:
        RuntimeError: torch is not installed, is not built for CUDA 13, or the compiler failed.
    """
    torch = _package("torch") / "lib"
    sources = [
        *sorted(HERE.glob("*.cpp")),
        Path(__file__),
        Path(nvidia_stubs.__file__),
        _package("torch") / "version.py",
    ]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    folder = CACHE / digest
    if folder.exists():
        os.utime(folder)
    else:
        CACHE.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=CACHE))
        try:
            _compile_libraries(made, _required_functions(torch))
            made.rename(folder)
        except OSError:
            # Another process built the same libraries meanwhile.
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
        remove_stale(CACHE)
    return [folder / name for name in _LIBRARIES]


def remove_stale(cache: Path) -> None:
    """Remove builds that have not been used for long, and leftovers of killed builds."""
    oldest = time.time() - KEEP_SECONDS
    for folder in cache.iterdir():
        if folder.stat().st_mtime < oldest:
            shutil.rmtree(folder, ignore_errors=True)


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise RuntimeError(f"{name}: not installed; make emulated installs it")
    return Path(spec.submodule_search_locations[0])


def _required_functions(folder: Path) -> dict[str, str]:
    """Return the functions that PyTorch's libraries import, each with the version that it must have ("": any)."""
    versions = required_functions(folder)
    if versions.get("cudaMalloc") != "libcudart.so.13":
        raise RuntimeError("torch: not built for CUDA 13; make emulated installs one that is")
    return versions


def _compile_libraries(folder: Path, required: dict[str, str]) -> None:
    headers = [_package("nvidia") / "cu13/include", _package("triton") / "backends/nvidia/include"]
    for library in _LIBRARIES:
        functions = functions_of(library, required)
        sources, defined = [], set()
        if library in _OURS:
            sources.append(HERE / _OURS[library])
            defined = set(_DEFINED.findall(sources[0].read_text()))
        linked = [folder / "libcudart.so.13"] if library in _OURS and library != "libcudart.so.13" else []
        compile_library(
            folder / library,
            functions,
            [name for name in functions if name not in defined],
            _NOT_SUPPORTED if library == "libcudart.so.13" else 0,
            sources=sources,
            options=["-O1", "-g", *(f"-I{path}" for path in headers), *map(str, linked), "-ldl", "-lrt", "-lpthread"],
        )
