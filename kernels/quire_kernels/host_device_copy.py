# SPDX-License-Identifier: Apache-2.0
"""Copies between host and device that do not wait for the work queued on the device."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

_PORTABLE = 1
"""cudaHostRegisterPortable: the memory is pinned for every CUDA context, like torch's own pinned memory."""


def to_device_async(values: Tensor | Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """Queue a copy of a host tensor or of a sequence of numbers to `device`, after the work that is already queued on
    the device.

    The source is pinned memory, because a copy from pageable memory blocks until all queued work is done;
    `torch.tensor(..., device=)` blocks as well. torch keeps the pinned memory until the copy has read it.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized, contiguous tensor in pinned host memory. The memory is unpinned when the tensor is
    freed.

    The allocation has exactly the requested size; torch's pinned allocator rounds up to a power of two, so 40 GiB
    would take 64 GiB. Pinning and unpinning are slow, so use this function only for long-lived buffers.

    Raises:
        RuntimeError: the system does not have the memory, or the driver cannot pin it.
    """
    # No HugePageArena is used, because torch checks whether memory is pinned at the start of the tensor's storage.
    tensor = torch.empty(shape, dtype=dtype)
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = tensor.data_ptr()
    if error := int(driver.cudaHostRegister(address, tensor.nbytes, _PORTABLE)):
        raise RuntimeError(f"cannot pin {tensor.nbytes} bytes of host memory: cudaHostRegister returned {error}")
    # At process exit the operating system releases the memory and the pinning.
    weakref.finalize(tensor, driver.cudaHostUnregister, address).atexit = False
    return tensor
