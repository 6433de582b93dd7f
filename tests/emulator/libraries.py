# SPDX-License-Identifier: Apache-2.0
"""Replacements of the NVIDIA libraries that PyTorch's CUDA build is linked to: three work, the others are stubs."""

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path.home() / ".cache/quire/emulator"
KEEP_SECONDS = 30 * 24 * 3600.0
_OURS = {"libcudart.so.13": "cudart.cpp", "libnccl.so.2": "nccl.cpp", "libcuda.so.1": "cuda.cpp"}
_PREFIXES = {
    "libcudart.so.13": r"cuda[A-Z]|__cuda",
    "libnccl.so.2": r"nccl",
    "libcuda.so.1": r"cu(?!File)[A-Z]",
    "libcublas.so.13": r"cublas(?!Lt)",
    "libcublasLt.so.13": r"cublasLt",
    "libcudnn.so.9": r"cudnn",
    "libcufft.so.12": r"cufft",
    "libcufile.so.0": r"cuFile",
    "libcupti.so.13": r"cupti",
    "libcurand.so.10": r"curand",
    "libcusolver.so.12": r"cusolver",
    "libcusparse.so.12": r"cusparse(?!Lt)",
    "libcusparseLt.so.0": r"cusparseLt",
    "libnvrtc.so.13": r"nvrtc",
    "libnvshmem_host.so.3": r"nvshmem",
}
"""Names of functions by library, in the order in which they are loaded."""
_DEFINED = re.compile(r"^API [\w ]+[ *]+(\w+)\(", re.MULTILINE)
_NOT_SUPPORTED = 801
"""cudaErrorNotSupported: what the runtime's functions that are not written here return."""


def build() -> list[Path]:
    """Build the libraries if necessary, which takes about 20 s, and return them.

    Raises:
        RuntimeError: torch is not installed, is not built for CUDA 13, or the compiler failed.
    """
    torch = _package("torch") / "lib"
    sources = [*sorted(HERE.glob("*.cpp")), Path(__file__), _package("torch") / "version.py"]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    folder = CACHE / digest
    if folder.exists():
        os.utime(folder)
    else:
        CACHE.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=CACHE))
        try:
            _compile_libraries(made, _required_symbols(torch))
            made.rename(folder)
        except OSError:
            # Another process built the same libraries meanwhile.
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
        remove_stale(CACHE)
    return [folder / name for name in _PREFIXES]


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


def _required_symbols(folder: Path) -> dict[str, str]:
    """Functions that PyTorch's libraries do not bring themselves, each with the version that it must have ("": any)."""
    versions: dict[str, str] = {}
    for library in folder.glob("*.so"):
        for line in _run("readelf", "-W", "--dyn-syms", str(library)).splitlines():
            words = line.split()
            if len(words) >= 8 and words[6] == "UND":
                name, _, version = words[7].partition("@")
                versions[name] = version.lstrip("@")
    if versions.get("cudaMalloc") != "libcudart.so.13":
        raise RuntimeError("torch: not built for CUDA 13; make emulated installs one that is")
    return versions


def _compile_libraries(folder: Path, required: dict[str, str]) -> None:
    headers = [_package("nvidia") / "cu13/include", _package("triton") / "backends/nvidia/include"]
    for library, prefix in _PREFIXES.items():
        names = sorted(name for name in required if re.match(prefix, name))
        sources, defined = [], set()
        if library in _OURS:
            sources.append(HERE / _OURS[library])
            defined = set(_DEFINED.findall(sources[0].read_text()))
        return_code = _NOT_SUPPORTED if library == "libcudart.so.13" else 0
        empty = folder / f"{library}.cpp"
        missing = [name for name in names if name not in defined]
        empty.write_text("".join(f'extern "C" long {name}() {{ return {return_code}; }}\n' for name in missing))
        versions = defaultdict(list)
        for name in names:
            versions[required[name]].append(name)
        versions.pop("", None)
        script = folder / f"{library}.map"
        script.write_text(
            "".join(f"{v} {{ global: {'; '.join(symbols)}; }};\n" for v, symbols in versions.items()) or "{};\n"
        )
        linked = [folder / "libcudart.so.13"] if library in _OURS and library != "libcudart.so.13" else []
        _run(
            *("g++", "-std=c++20", "-O1", "-g", "-shared", "-fPIC", f"-Wl,-soname,{library}"),
            *(f"-I{path}" for path in headers),
            *(f"-Wl,--version-script={script}", "-o", str(folder / library)),
            *map(str, [*sources, empty, *linked]),
            *("-ldl", "-lrt", "-lpthread"),
        )


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{argv[0]} failed with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout
