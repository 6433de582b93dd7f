# SPDX-License-Identifier: Apache-2.0
"""Numbers on their way between host and device, without a wait for what the device is doing."""

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

_PORTABLE = 1
"""cudaHostRegisterPortable: for every context, as torch's own is."""


def to_device_async(values: Tensor | Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """A tensor of the host's, or what makes one, on `device`, where its copy comes after all that is queued.

    From pinned memory, because any other copy to a GPU first waits until all that is queued there is done: torch.tensor
    with a device does, too. The pinned memory is torch's to keep until it is read. (This has never run on a GPU.)
    """
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def pinned_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Host memory that a GPU reads and writes by itself, contiguous, not filled, for as long as this tensor is there.

    Of the size that is asked for: torch's own is rounded up to a power of two, so that 40 GiB take 64. It is slow to
    come and to go, so it is for what stays; torch's is kept for whoever asks next. (This has never run on a GPU.)

    Raises:
        RuntimeError: the system has not so much, or the driver does not pin it.
    """
    # From its storage's start, where torch looks whether a tensor is pinned: so it is none of an arena's.
    tensor = torch.empty(shape, dtype=dtype)
    driver = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = tensor.data_ptr()
    if error := int(driver.cudaHostRegister(address, tensor.nbytes, _PORTABLE)):
        raise RuntimeError(f"{tensor.nbytes} bytes cannot be pinned: cudaHostRegister says {error}")
    # At a process's end the system takes both.
    weakref.finalize(tensor, driver.cudaHostUnregister, address).atexit = False
    return tensor
