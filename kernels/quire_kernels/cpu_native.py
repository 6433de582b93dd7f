# SPDX-License-Identifier: Apache-2.0
"""Compiled bfloat16 kernels for x86 and ARM64 CPUs. They are built once on each machine, and called with ctypes.

Five libraries are built from the same sources, four of them for x86 processors: with AVX-512 BF16, VBMI and VNNI, with
AVX-512 and VNNI, with AVX-512, and with AVX2, FMA and F16C. The NEON build is for ARM64. The fastest build that the
processor supports is loaded. QUIRE_NATIVE selects another one by its name, for example QUIRE_NATIVE=AVX2.

The kernels are optional. `load_library` returns None if the processor supports no build, if there is no C++ compiler,
or if QUIRE_NATIVE=0 is set. In this case, torch computes instead. The sources below csrc/ include only standard
headers. On two cores, it takes about five seconds to compile the AVX-512 BF16 build, and about thirty to compile the
AVX2 build. No ARM64 machine has been measured. The library is stored in the folder QUIRE_NATIVE_CACHE, which by default
is in the user's cache folder.
A new build removes the libraries of other versions if they were not loaded for a month. For an image without a
compiler, the command `python -m quire_kernels.cpu_native` makes all builds of its architecture in advance.
"""

import ctypes
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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire_kernels.kv_cache_layout import row_size

logger = logging.getLogger(__name__)

_SOURCE_DIR = Path(__file__).parent / "csrc"
_BUILD_RETENTION_S = 30 * 24 * 3600.0
"""A build that is not used is kept for this number of seconds. If an older version is installed again in this time, it
does not have to build its library again."""
_COMPILER_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-fopenmp")
_MAX_INT8_ROW = row_size(576, torch.int8)


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
_INSTRUCTION_SETS = tuple(
    each for each in (AVX512_BF16, AVX512_VNNI, AVX512, AVX2, NEON) if each.machine == platform.machine()
)
"""The instruction sets of this architecture for which there are builds. The fastest one comes first."""


_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
SIGNATURES: Mapping[str, tuple[type[Any], ...]] = {
    "quire_pack": (_P, _P, _N, _N),
    "quire_unpack_rows": (_P, _P, _P, _N, _N),
    "quire_linear": (_P, _N, _P, _P, _P, _N, _N, _N, _N),
    "quire_pack_int8": (_P, _P, _P, _N, _N),
    "quire_linear_int8": (_P, _N, _P, _P, _P, _N, _N, _N, _N, _P, _P),
    "quire_experts": (_P, _N, _P, _P, _P, _P, _P, _N, _N, _N, _N, _P),
    "quire_pack_codes": (_P, _P, _P, _P, _N, _N),
    "quire_linear_codes": (_P, _N, _P, _P, _P, _N, _N, _N, _N, _P, _P),
    "quire_pack_adapter": (_P, _P, _P, _P, _N, _N, _N),
    "quire_lora_embedding": (_P, _P, _P, _P, _N, _P, _N, _N),
    "quire_adapted_linear": (_P, _N, _P, _P, _P, _N, _N, _N, _N, _P, _P),
    "quire_rms_norm": (_P, _N, _P, _P, _N, _N, _F),
    "quire_norm_heads": (_P, _N, _P, _P, _N, _N, _N, _N, _F),
    "quire_silu_mul": (_P, _P, _N, _N),
    "quire_gelu_tanh_mul": (_P, _P, _N, _N),
    "quire_softcap": (_P, _N, _N, _N, _F),
    "quire_rotate_write": (_P, _N, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N, _N),
    "quire_argmax": (_P, _N, _P, _N, _N),
    "quire_logsumexp": (_P, _N, _P, _N, _N),
    "quire_sample": (_P, _N, _N, _P, _P, _P, _N, _N),
    "quire_apply_bitmask": (_P, _N, _P, _N, _P, _N, _N),
    "quire_attention": (_P, _N, _P, _P, _P, _N, _P, _P, _P, _N, _N, _N, _N, _N, _F, _N, _F, _P, _N),
    "quire_short_convolution": (_P, _N, _P, _P, _P, _P, _P, _P, _P, _N, _N, _N, _N),
    "quire_gated_delta_update": (_P, _N, _P, _P, _N, _P, _P, _P, _N, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N),
    "quire_gated_delta_scan": (_P, _N, _P, _P, _N, _P, _P, _P, _P, _N, _N, _N, _N, _N, _N),
    "quire_kimi_delta_update": (_P, _N, _P, _P, _N, _P, _N, _P, _P, _P, _P, _P, _N, _N, _N, _N),
    "quire_gated_rms_norm": (_P, _P, _N, _P, _P, _N, _N, _N, _F, _N),
    "quire_mamba2_update": (_P, _N, _P, _N, _P, _P, _P, _F, _F, _P, _N, _P, _P, _P, _P, _P, _N, _N, _N, _N, _N),
    "quire_mamba2_scan": (_P, _N, _P, _N, _P, _P, _P, _F, _F, _P, _P, _N, _N, _N, _N, _N, _N),
    "quire_gated_group_norm": (_P, _P, _N, _P, _P, _N, _N, _N, _F, _N),
    "quire_decode": (_P, _P, _P, _P, _P),
}
"""The types of the arguments of each function of the library."""


class BuildError(Exception):
    """The compiled kernels are not available. The message contains the reason and the fix."""


@functools.cache
def load_library() -> ctypes.CDLL | None:
    """Return the library, and build it first if necessary. Return None if it is not available. The reason for this is
    logged once."""
    if os.environ.get("QUIRE_NATIVE") == "0":
        return None
    try:
        name = os.environ.get("QUIRE_NATIVE", "")
        if (instructions := supported_instructions(name)) is None:
            if name:
                names = ", ".join(each.name for each in _INSTRUCTION_SETS if each.cpu_flags <= _cpu_flags())
                raise BuildError(f"QUIRE_NATIVE: no build {name!r} for this processor; unset it or use 0, {names}")
            missing = [sorted(each.cpu_flags - _cpu_flags()) for each in _INSTRUCTION_SETS]
            raise BuildError(
                f"this processor lacks {', '.join(missing[-1])}" if missing else f"no kernels for {platform.machine()}"
            )
        native_library = _bind(build(instructions))
    except BuildError as error:
        logger.info("native kernels off: %s", error)
        return None
    logger.info("native kernels on build=%s", instructions.name)
    return native_library


def supports(*tensors: Tensor) -> bool:
    """Return whether compiled kernels are available and accept these tensors.

    The tensors must be bfloat16, on the CPU, with a last stride of 1.
    """
    if any(t.dtype != torch.bfloat16 or t.device.type != "cpu" or t.stride(-1) != 1 for t in tensors):
        return False
    return load_library() is not None


def supports_cache(cache: Tensor) -> bool:
    """Return whether compiled kernels are available and accept this KV cache.

    It must be bfloat16, or int8 with a head_dim of at most 576.
    """
    is_int8 = cache.dtype == torch.int8 and cache.device.type == "cpu" and cache.shape[-1] <= _MAX_INT8_ROW
    return load_library() is not None if is_int8 else supports(cache)


def has_fast_gemm() -> bool:
    """Return whether the compiled GEMM is the fastest one on this processor. On a processor with AMX it is not, because
    oneDNN is several times faster there."""
    return "amx_bf16" not in _cpu_flags()


def get_library() -> ctypes.CDLL:
    """Return the library. Call this function only if `supports` accepts the tensors."""
    native_library = load_library()
    assert native_library is not None
    return native_library


def supported_instructions(name: str = "") -> InstructionSet | None:
    """Return the fastest instruction set that has a build and is supported by this processor, or the one called `name`.
    Return None if the processor supports none of them."""
    supported = (each for each in _INSTRUCTION_SETS if each.cpu_flags <= _cpu_flags())
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


def _bind(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path}: {error}") from error
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


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


@functools.cache
def _cpu_flags() -> frozenset[str]:
    """Return the flags of the processor from /proc/cpuinfo. The result is empty if the file cannot be read."""
    try:
        return frozenset(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return frozenset()


def main() -> int:
    """Build the library for every instruction set in advance, and print the paths."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        for instructions in _INSTRUCTION_SETS:
            print(build(instructions))
    except BuildError as error:
        print(f"quire_kernels.cpu_native: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
