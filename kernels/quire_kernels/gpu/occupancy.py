# SPDX-License-Identifier: Apache-2.0
"""Occupancy: how many programs of a compiled Triton kernel can run on a multiprocessor at the same time.

The number depends on the registers, the shared memory and the threads of the kernel.

The rules are those of the CUDA C++ programming guide. The allocation units are those of NVIDIA's occupancy calculator
for compute capability 8.0 and later.
"""

from typing import Any

import torch

_REGISTER_GRANULE = 256
"""Registers are allocated to a warp in multiples of this number."""
_RESERVED_SHARED_BYTES = 1024
"""Bytes of shared memory that the driver reserves for each program."""
_SHARED_GRANULE = 128
_MAX_PROGRAMS = 32


def programs_per_sm(kernel: Any, device: torch.device | None = None) -> int:
    """Return how many programs of a loaded kernel fit on a multiprocessor of the device."""
    properties: Any = torch.cuda.get_device_properties(device)
    num_warps = kernel.metadata.num_warps
    warp_registers = _round_up(32 * max(kernel.n_regs, 1), _REGISTER_GRANULE)
    shared = _round_up(kernel.metadata.shared, _SHARED_GRANULE) + _RESERVED_SHARED_BYTES
    return min(
        properties.regs_per_multiprocessor // (warp_registers * num_warps),
        properties.shared_memory_per_multiprocessor // shared,
        properties.max_threads_per_multi_processor // (32 * num_warps),
        _MAX_PROGRAMS,
    )


def _round_up(value: int, granule: int) -> int:
    return -(-value // granule) * granule
