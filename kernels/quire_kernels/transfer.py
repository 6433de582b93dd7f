# SPDX-License-Identifier: Apache-2.0
"""Numbers on their way from the host to the device, without a wait for what the device is doing."""

from collections.abc import Sequence

import torch
from torch import Tensor


def on_device(numbers: Tensor | Sequence[int] | Sequence[float], device: torch.device) -> Tensor:
    """A tensor of the host's, or what makes one, on `device`, where its copy comes after all that is queued.

    From pinned memory, because any other copy to a GPU first waits until all that is queued there is done: torch.tensor
    with a device does, too. The pinned memory is torch's to keep until it is read. (This has never run on a GPU.)
    """
    tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
