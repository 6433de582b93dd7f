# SPDX-License-Identifier: Apache-2.0
"""Builds the libraries of compiled CPU kernels from csrc/, for the processor of this machine or for another one.

This module uses only the standard library, so that it runs without torch, also as a script. For an image without a
compiler, `python cpu_build.py --machine aarch64` makes all builds of an architecture in advance. With a cross compiler,
it does so on a machine of another architecture. The name of a library depends on its sources and on the compiler's
options only.
"""

import argparse
import fcntl
import functools
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

_SOURCE_DIR = Path(__file__).parent / "csrc"
_BUILD_RETENTION_S = 30 * 24 * 3600.0
"""A build that is not used is kept for this number of seconds. If an older version is installed again in this time, it
does not have to build its library again."""
_COMPILER_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp")


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """The processor instructions that one of the builds uses."""

    name: str
    machine: str
    """Architecture of the processors, as `platform.machine` returns it."""
    cpu_flags: frozenset[str]
    """Flags that /proc/cpuinfo shows for processors with these instructions."""

    @property
    def options(self) -> list[str]:
        """The options of the compiler. On x86, they have the names of the flags, but without underscores. Every ARM64
        processor has NEON."""
        if self.machine == "aarch64":
            return []
        return [f"-m{name.replace('_', '')}" for name in sorted(self.cpu_flags)]


_AVX512_FLAGS = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"})
AVX512_BF16 = InstructionSet("AVX512_BF16", "x86_64", _AVX512_FLAGS | {"avx512_bf16", "avx512vbmi", "avx512_vnni"})
"""AMD Zen 4, Intel Sapphire Rapids, and newer."""
AVX512_VNNI = InstructionSet("AVX512_VNNI", "x86_64", _AVX512_FLAGS | {"avx512_vnni"})
"""Intel Cascade Lake and Ice Lake."""
AVX512 = InstructionSet("AVX512", "x86_64", _AVX512_FLAGS)
"""Intel Skylake-SP."""
AVX2 = InstructionSet("AVX2", "x86_64", frozenset({"avx2", "fma", "f16c"}))
NEON = InstructionSet("NEON", "aarch64", frozenset({"asimd"}))
INSTRUCTION_SETS = (AVX512_BF16, AVX512_VNNI, AVX512, AVX2, NEON)
"""The instruction sets for which there are builds. Of each architecture, the fastest one comes first."""


class BuildError(Exception):
    """The compiled kernels are not available. The message contains the reason and the fix."""


def instruction_sets(machine: str) -> list[InstructionSet]:
    """Return the instruction sets of an architecture for which there are builds. The fastest one comes first."""
    return [each for each in INSTRUCTION_SETS if each.machine == machine]


def supported_instructions(name: str = "") -> InstructionSet | None:
    """Return the fastest instruction set that has a build and is supported by this processor, or the one called `name`.
    Return None if the processor supports none of them."""
    supported = (each for each in instruction_sets(platform.machine()) if each.cpu_flags <= cpu_flags())
    return next((each for each in supported if name in ("", each.name)), None)


def build(instructions: InstructionSet) -> Path:
    """Build the library for an instruction set, unless it already exists. Return its file. Works on any processor for
    which the compiler makes code; CXX can be a cross compiler.

    Raises:
        BuildError: there is no compiler, or the compiler failed.
    """
    sources = sorted(_SOURCE_DIR.glob("*.cpp"))
    flags = (*_COMPILER_FLAGS, *instructions.options)
    digest = hashlib.sha256(" ".join((*flags, instructions.machine)).encode())
    for source in sorted(_SOURCE_DIR.iterdir()):
        digest.update(source.read_bytes())
    folder = _cache_folder()
    library = folder / f"native-{digest.hexdigest()[:16]}.so"
    if library.exists():
        # The new file time tells _remove_stale_builds that this build is in use. In a container image, the file can be
        # read-only.
        with suppress(OSError):
            os.utime(library)
        return library
    with _file_lock(folder / "native.lock"):
        if not library.exists():
            _compile(sources, flags, library)
            _remove_stale_builds(library)
    return library


def _remove_stale_builds(library: Path) -> None:
    """Remove builds of other versions that were not loaded for a month. Also remove the temporary folders of builds
    that were killed."""
    oldest = time.time() - _BUILD_RETENTION_S
    for path in library.parent.glob("native-*"):
        with suppress(OSError):
            if path != library and path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _compile(sources: list[Path], flags: tuple[str, ...], library: Path) -> None:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise BuildError("no C++ compiler; install g++ or set CXX")
    logger.info("native kernels: compiling with %s into %s", compiler, library.parent)
    with tempfile.TemporaryDirectory(prefix="native-", dir=library.parent) as scratch:
        objects = [str(Path(scratch, source.stem + ".o")) for source in sources]
        out = str(Path(scratch, "native.so"))
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            commands = [
                [compiler, *flags, "-c", str(source), "-o", object_file]
                for source, object_file in zip(sources, objects, strict=True)
            ]
            list(pool.map(_run, commands))
        # The library is linked without -fopenmp, so that it uses the OpenMP library that torch has loaded. Two OpenMP
        # libraries in one process would have two thread pools, whose waiting threads would take CPU time from each
        # other.
        _run([compiler, "-shared", *objects, "-o", out])
        os.replace(out, library)


def _run(command: list[str]) -> None:
    try:
        result = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise BuildError(f"{command[0]}: cannot run the compiler: {error}; set CXX to another compiler") from error
    if result.returncode:
        raise BuildError(f"{' '.join(command)} failed: {result.stderr.strip()[-2000:]}")


@functools.cache
def cpu_flags() -> frozenset[str]:
    """Return the flags of the processor from /proc/cpuinfo. The result is empty if the file cannot be read."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()


def _cache_folder() -> Path:
    """Return the folder for builds. Only this user can write to it, because the files in it are loaded as code."""
    configured = os.environ.get("QUIRE_NATIVE_CACHE")
    home = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    for folder in (
        [Path(configured)] if configured else [Path(home, "quire"), Path(tempfile.gettempdir(), f"quire-{os.getuid()}")]
    ):
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = folder.stat()
        except OSError:
            continue
        is_private = status.st_uid in (0, os.getuid()) and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if is_private and os.access(folder, os.R_OK | os.X_OK):
            return folder
    raise BuildError("found no build folder that only this user can write to; set QUIRE_NATIVE_CACHE to such a folder")


@contextmanager
def _file_lock(path: Path) -> Iterator[None]:
    """Hold a lock, so that only one process builds while the others wait for it."""
    try:
        file = path.open("w")
    except OSError as error:
        raise BuildError(
            f"{path}: {error}; build the kernels in advance with `python -m quire_kernels.cpu_native`"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the library for every instruction set of an architecture in advance, and print the paths."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    machines = sorted({each.machine for each in INSTRUCTION_SETS})
    text = "the architecture (default: this machine's); for another one, set CXX to a cross compiler"
    parser.add_argument("--machine", choices=machines, default=platform.machine(), help=text)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        for instructions in instruction_sets(options.machine):
            print(build(instructions))
    except BuildError as error:
        print(f"quire_kernels.cpu_build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
