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
import functools
import logging
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire_kernels.cpu_build import BuildError, build, cpu_flags, instruction_sets, main, supported_instructions
from quire_kernels.kv_cache_layout import row_size

logger = logging.getLogger(__name__)

_MAX_INT8_ROW = row_size(576, torch.int8)

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
                names = ", ".join(
                    each.name for each in instruction_sets(platform.machine()) if each.cpu_flags <= cpu_flags()
                )
                raise BuildError(f"QUIRE_NATIVE: no build {name!r} for this processor; unset it or use 0, {names}")
            missing = [sorted(each.cpu_flags - cpu_flags()) for each in instruction_sets(platform.machine())]
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
    return "amx_bf16" not in cpu_flags()


def get_library() -> ctypes.CDLL:
    """Return the library. Call this function only if `supports` accepts the tensors."""
    native_library = load_library()
    assert native_library is not None
    return native_library


def _make_openmp_global() -> None:
    """Let the library find the functions of the OpenMP library that torch has loaded. torch's wheels for x86 make them
    visible to all libraries, but those for ARM64 do not."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libgomp" in line}
    folder = str(Path(torch.__file__).parent)
    for path in sorted(path for path in mapped if path.startswith(folder)) or sorted(mapped):
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)  # is already loaded, so this changes only its visibility


def _bind(path: Path) -> ctypes.CDLL:
    try:
        _make_openmp_global()
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"{path}: {error}") from error
    for name, arguments in SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


if __name__ == "__main__":
    sys.exit(main())
