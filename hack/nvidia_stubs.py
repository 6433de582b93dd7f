# SPDX-License-Identifier: Apache-2.0
"""PyTorch's CUDA build without NVIDIA's libraries, for machines and images without a GPU.

If a package index has no CPU build of torch, pip installs the CUDA build and 3 GB of NVIDIA's libraries. torch cannot
be imported without these libraries, although it never calls them on a CPU. This module writes wheels that pip accepts
instead of them. One of these wheels contains a stub for each library: a small library that has the same name, and that
defines just the functions that torch imports. The others are empty. The version of each wheel is that of the real
distribution with a local label such as `+stub.0a1b2c3d`, a digest of this module.

bootstrap.py installs the wheels into environments, nodocker_cluster into images, and tests/emulator builds its
replacements of the CUDA runtime from the same tables.
"""

import contextlib
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from email import message_from_bytes
from pathlib import Path

CACHE = Path.home() / ".cache/quire/torch"
KEEP_SECONDS = 30 * 24 * 3600.0
"""Wheels that have not been used for this time are removed."""
CONSTRAINTS = "constraints.txt"
"""A file beside the wheels. It pins torch and the stubs, which pip would otherwise ignore for newer versions."""
WITHOUT_TRITON = "without-triton"
"""A folder beside the wheels, with an empty wheel for triton. Its constraints are for environments without GPU kernels.
The real one takes 1 GB."""
_PREFIXES = {
    "libcudart": r"cuda[A-Z]|__cuda",
    "libnccl": r"nccl",
    "libcuda": r"cu(?!File)[A-Z]",
    "libcublas": r"cublas(?!Lt)",
    "libcublasLt": r"cublasLt",
    "libcudnn": r"cudnn",
    "libcufft": r"cufft",
    "libcufile": r"cuFile",
    "libcupti": r"cupti",
    "libcurand": r"curand",
    "libcusolver": r"cusolver",
    "libcusparse": r"cusparse(?!Lt)",
    "libcusparseLt": r"cusparseLt",
    "libnvrtc": r"nvrtc",
    "libnvshmem_host": r"nvshmem",
}
"""Beginnings of the names of each library's functions."""
_NO_DEVICE = 100
"""cudaErrorNoDevice and CUDA_ERROR_NO_DEVICE. The functions of a stub return it."""
_TEXT_FUNCTION = re.compile(r"(?!cuGet)\w+Get(Error|Status)(String|Name)|ncclGetLastError")
"""Functions that return a text. torch calls them after an error; a number would be an invalid pointer."""
_DIGEST = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:8]
_MACHINE = platform.machine()
_LIBRARY_FOLDER = "nvidia/cu13/lib"
"""A folder in which torch's libraries look for NVIDIA's (their run path contains it)."""


def required_functions(folder: Path) -> dict[str, str]:
    """Return the functions that the libraries in `folder` import from other libraries, each with the version that it
    must have (empty: any)."""
    versions: dict[str, str] = {}
    for library in folder.glob("*.so"):
        for line in _run("readelf", "-W", "--dyn-syms", str(library)).splitlines():
            words = line.split()
            if len(words) >= 8 and words[6] == "UND":
                name, _, version = words[7].partition("@")
                versions[name] = version.lstrip("@")
    return versions


def functions_of(library: str, required: Mapping[str, str]) -> dict[str, str]:
    """Return the functions that belong to a library, such as libcudart.so.13, each with its version."""
    prefix = _PREFIXES.get(library.partition(".so")[0])
    return {} if prefix is None else {name: required[name] for name in sorted(required) if re.match(prefix, name)}


def compile_library(
    path: Path,
    functions: Mapping[str, str],
    stubs: Iterable[str],
    return_code: int,
    *,
    sources: Sequence[Path] = (),
    options: Sequence[str] = (),
    compiler: str = "g++",
) -> None:
    """Write a shared library.

    Args:
        path: The file. Its name becomes the library's name.
        functions: All functions of the library, each with its version.
        stubs: The functions that only return `return_code`, or a text. The others are in `sources` (C++).
        options: Further arguments of the compiler.
        compiler: The program, which can be a cross compiler.

    Raises:
        RuntimeError: the compiler failed.
    """
    versions = defaultdict(list)
    for name, version in functions.items():
        versions[version].append(name)
    versions.pop("", None)
    with tempfile.TemporaryDirectory() as work:
        code, script = Path(work, "stubs.cpp"), Path(work, "versions.map")
        code.write_text("".join(_stub(name, return_code) for name in stubs))
        script.write_text("".join(f"{v} {{ global: {'; '.join(n)}; }};\n" for v, n in versions.items()) or "{};\n")
        command = [compiler, "-std=c++20", "-shared", "-fPIC", f"-Wl,-soname,{path.name}"]
        _run(*command, f"-Wl,--version-script={script}", "-o", str(path), *map(str, sources), str(code), *options)


def _stub(name: str, return_code: int) -> str:
    if _TEXT_FUNCTION.fullmatch(name):
        return f'extern "C" const char *{name}() {{ return "this is a stub of a library of NVIDIA"; }}\n'
    return f'extern "C" long {name}() {{ return {return_code}; }}\n'


def missing_programs(machine: str = _MACHINE) -> list[str]:
    """Return the programs that `build_wheels` needs for an architecture and that are not installed."""
    return [program for program in (_compiler(machine), "readelf") if shutil.which(program) is None]


def _compiler(machine: str) -> str:
    return "g++" if machine == _MACHINE else f"{machine}-linux-gnu-g++"


def build_wheels(pip: Sequence[str], torch: str, machine: str = _MACHINE) -> Path:
    """Return a folder that contains torch's wheel, the wheels of the stubs, and constraints.txt.

    It is kept in the user's cache, by the version of torch.

    Args:
        pip: The command that runs pip.
        torch: The requirement of torch.
        machine: The architecture, as `platform.machine` returns it.

    Raises:
        RuntimeError: pip cannot download torch, or the compiler failed.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
        made = Path(temporary, "wheels")
        options = [] if machine == _MACHINE else [f"--platform=manylinux_2_28_{machine}"]
        _run(*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", f"--dest={made}", *options, torch)
        (wheel,) = made.iterdir()
        folder = CACHE / f"{wheel.stem}-{_DIGEST}"
        if not folder.exists():
            _write_stub_wheels(wheel, made, machine)
            with contextlib.suppress(OSError):  # another process has built the same wheels meanwhile
                made.rename(folder)
    os.utime(folder)
    oldest = time.time() - KEEP_SECONDS
    for other in CACHE.iterdir():
        if other.stat().st_mtime < oldest:
            shutil.rmtree(other, ignore_errors=True)
    return folder


def _write_stub_wheels(wheel: Path, folder: Path, machine: str = _MACHINE) -> None:
    """Write a wheel for each distribution of NVIDIA that torch requires, and the constraints that select them."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory(dir=folder) as work:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        message = message_from_bytes(archive.read(metadata))
        archive.extractall(work, [n for n in archive.namelist() if re.fullmatch(r"torch/lib/[^/]+\.so[.\d]*", n)])
        libraries = _compile_stubs(Path(work, "torch/lib"), Path(work), _compiler(machine))
        constraints = {"torch": message["Version"]}
        (folder / WITHOUT_TRITON).mkdir()
        for requirement in message.get_all("Requires-Dist", []):
            parsed = re.match(r"((?:cuda|nvidia)[\w.-]*|triton)(?:\[([\w,-]*)\])?([^;]*)", requirement)
            if parsed is None or "extra ==" in requirement:
                continue
            name, extras, version = parsed[1], (parsed[2] or "").split(","), _lowest_version(parsed[3])
            # All libraries are in the first wheel, because torch does not look for each in a folder of its own.
            content = libraries if len(constraints) == 1 else []
            target = folder / WITHOUT_TRITON if name == "triton" else folder
            _write_wheel(target, name, version, extras, content, machine)
            constraints[name] = version
    lines = [f"{name}=={version}\n" for name, version in constraints.items()]
    (folder / WITHOUT_TRITON / CONSTRAINTS).write_text("".join(lines))
    (folder / CONSTRAINTS).write_text("".join(line for line in lines if not line.startswith("triton=")))


def _lowest_version(versions: str) -> str:
    """Return the lowest version that a requirement allows, with the local label of the stubs."""
    lowest = re.search(r"(?:==|>=|~=)\s*([\w.]+)", versions)
    if lowest is None:
        raise RuntimeError(f"torch requires {versions!r} of a library of NVIDIA; give its stub a version here")
    return f"{lowest.group(1)}+stub.{_DIGEST}"


def _compile_stubs(torch_lib: Path, work: Path, compiler: str) -> list[Path]:
    """Return a stub of each library of NVIDIA that torch's libraries are linked to."""
    required, needed = required_functions(torch_lib), set[str]()
    for library in torch_lib.glob("*.so"):
        needed |= set(re.findall(r"NEEDED.*\[(.*)\]", _run("readelf", "-d", str(library))))
    present = {library.name for library in torch_lib.iterdir()}
    stubs = []
    for library in sorted(name for name in needed - present if re.match(r"lib(cu|nv|nccl)", name)):
        functions = functions_of(library, required)
        stubs.append(work / library)
        compile_library(stubs[-1], functions, functions, _NO_DEVICE, compiler=compiler)
    return stubs


def _write_wheel(
    folder: Path, name: str, version: str, extras: Sequence[str], libraries: Sequence[Path], machine: str
) -> None:
    """Write a wheel. Its record has no digests, which pip does not require."""
    stem = f"{re.sub(r'[-_.]+', '_', name)}-{version}"
    tag = f"linux_{machine}"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + "".join(f"Provides-Extra: {extra}\n" for extra in extras if extra),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: quire\nRoot-Is-Purelib: false\nTag: py3-none-{tag}\n",
    }
    paths = [f"{_LIBRARY_FOLDER}/{library.name}" for library in libraries]
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-{tag}.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        for library, path in zip(libraries, paths, strict=True):
            archive.write(library, path)
        for file, text in files.items():
            archive.writestr(f"{info}/{file}", text)
        archive.writestr(
            f"{info}/RECORD", "".join(f"{path},,\n" for path in [*paths, *(f"{info}/{f}" for f in (*files, "RECORD"))])
        )


def _run(*argv: str) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{os.path.basename(argv[0])} failed with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


if __name__ == "__main__":
    print(build_wheels([sys.executable, "-m", "pip", "--disable-pip-version-check"], sys.argv[1]))
