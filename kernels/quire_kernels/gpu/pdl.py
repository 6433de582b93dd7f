# SPDX-License-Identifier: Apache-2.0
"""Programmatic dependent launch (Hopper and later): the next kernel of a stream starts while the previous one runs.

The first kernel calls `gdc_launch_dependents`; the second kernel starts when all programs of the first one have called
this function or ended. The second kernel runs a prologue that reads only data older than the first kernel, and then
calls `gdc_wait`. `gdc_wait` returns when the first kernel has ended and its writes are visible. So the launch and the
dependent loads of the prologue overlap with the first kernel.

Without a call of `gdc_wait`, a kernel could end before the previous kernel, and a third kernel would start too early.
So at least one program must call `gdc_wait` whenever the first kernel has any work.

QUIRE_EARLY_LAUNCH=0 disables programmatic dependent launch, to compare results or to isolate a fault.

Source: the CUDA C++ programming guide, and vLLM's LoRA kernels, which also use programmatic dependent launch.
"""

import functools
import os

import torch
import triton


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Return whether PDL can be used: the device supports it, kernels are compiled, and QUIRE_EARLY_LAUNCH is not 0."""
    if device.type != "cuda" or triton.knobs.runtime.interpret or os.environ.get("QUIRE_EARLY_LAUNCH") == "0":
        return False
    # AMD devices have capability numbers too, but another instruction set.
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
