# SPDX-License-Identifier: Apache-2.0
"""Functions that copy data between host and device, without waiting until the device has done its queued work."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

_PORTABLE = 1
"""The value of cudaHostRegisterPortable, which pins the memory for every CUDA context, as torch does for its own pinned
memory.
"""


def to_device_async(values: Tensor | Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """Copy a host tensor or a sequence of numbers to `device`, without waiting for the copy.

    The copy runs after the work that is already queued on the device.

    The function copies from pinned memory. A copy from pageable memory would block until all queued work is done, and
    so would `torch.tensor(..., device=)`. torch does not reuse the pinned memory before the copy has read it.
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an uninitialized, contiguous tensor in pinned host memory.

    The memory is unpinned when the tensor is freed.

    The allocation has exactly the requested size. torch's own pinned allocator rounds up to a power of two, so 40 GiB
    would take 64 GiB. Pinning and unpinning are slow, so use this function only for long-lived buffers.

    Raises:
        RuntimeError: the system does not have enough memory, or the driver cannot pin the memory.
    """
    return pin(torch.empty(shape, dtype=dtype))


def pin(tensor: Tensor) -> Tensor:
    """Pin the memory of a contiguous tensor that begins at the start of its storage, and return the tensor.

    Raises:
        RuntimeError: the driver cannot pin the memory.
    """
    if not tensor.nbytes:
        # The driver refuses to pin nothing.
        return tensor
    # A HugePageArena cannot be used, because its tensors do not begin at the start of their storage. To find out
    # whether a tensor is pinned, torch checks the start of the storage.
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = tensor.data_ptr()
    if error := int(driver.cudaHostRegister(address, tensor.nbytes, _PORTABLE)):
        raise RuntimeError(f"cannot pin {tensor.nbytes} bytes of host memory: cudaHostRegister returned {error}")
    # When the process exits, the operating system unpins and releases the memory.
    weakref.finalize(tensor, driver.cudaHostUnregister, address).atexit = False
    return tensor
