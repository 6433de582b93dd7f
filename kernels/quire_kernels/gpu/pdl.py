# SPDX-License-Identifier: Apache-2.0
"""A kernel that is launched while the one before it in its stream runs, and waits for that one by itself.

On Hopper and later (programmatic dependent launch). The first kernel says `gdc_launch_dependents` when the next one may
begin, which that does once all programs of the first one have said so or ended. It then finds out what it has to do,
from what was there before the first one began; `gdc_wait` waits until the first one is over and what it wrote can be
read. So the launch costs nothing, nor do such reads, each of which waits for the one before it.

A kernel may be over before the one that it did not wait for, and the next one would begin too early: some program has
to wait whenever the first kernel does anything.

QUIRE_EARLY_LAUNCH=0 turns it off, for comparing and for narrowing down a fault.

Source: the CUDA C++ programming guide, and vLLM's LoRA kernels, which do the same.
"""

import functools
import os

import torch
import triton


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Whether this device can, kernels are compiled, and nobody turned it off."""
    if device.type != "cuda" or triton.knobs.runtime.interpret or os.environ.get("QUIRE_EARLY_LAUNCH") == "0":
        return False
    # AMD's have such numbers too, and another instruction set.
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
