# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch (Hopper and later): the next kernel of a stream starts while the previous one runs.

The first kernel calls `gdc_launch_dependents`. When each program of the first kernel has either called this function or
ended, the second kernel starts. The second kernel begins with a prologue, which may read only data that was written
before the first kernel. Then it calls `gdc_wait`. `gdc_wait` returns when the first kernel has ended and its writes are
visible. In this way, the launch of the second kernel and the loads in its prologue overlap with the first kernel.

If a kernel never called `gdc_wait`, it could end before the previous kernel has ended, and a third kernel would start
too early. Therefore, at least one program must call `gdc_wait` if the first kernel has any work to do.

Set QUIRE_EARLY_LAUNCH=0 to turn off programmatic dependent launch, for example to compare results or to isolate a
fault.

The CUDA C++ programming guide describes programmatic dependent launch. vLLM's LoRA kernels use it too.
"""

import functools
import os

import torch
import triton


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Return whether programmatic dependent launch can be used.

    This requires that the device supports it, that kernels are compiled and that QUIRE_EARLY_LAUNCH is not 0.
    """
    if device.type != "cuda" or triton.knobs.runtime.interpret or os.environ.get("QUIRE_EARLY_LAUNCH") == "0":
        return False
    # AMD devices have capability numbers too, but another instruction set.
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
