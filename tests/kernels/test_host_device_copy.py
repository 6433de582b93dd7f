# SPDX-License-Identifier: Apache-2.0
"""Host memory that a GPU reads: as much of it as is asked for, and given back with its tensor."""

import gc

import pytest
import torch

from quire_kernels import pinned_empty


class _Driver:
    """Of CUDA, which there is none of without a GPU: pinned memory, by address."""

    def __init__(self, error: int = 0) -> None:
        self.error = error
        self.sizes: dict[int, int] = {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.sizes[address] = size
        return self.error

    def cudaHostUnregister(self, address: int) -> int:
        del self.sizes[address]
        return 0


def test_pins_the_exact_size_and_unpins_when_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    tensor = pinned_empty((3, 1000, 7), torch.bfloat16)
    assert tensor.shape == (3, 1000, 7) and tensor.dtype == torch.bfloat16 and tensor.is_contiguous()
    # There torch asks whether a tensor is pinned: from its storage's start on.
    assert driver.sizes == {tensor.untyped_storage().data_ptr(): 3 * 1000 * 7 * 2}
    tensor.fill_(1)
    del tensor
    gc.collect()
    assert driver.sizes == {}


def test_pinning_failure_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: _Driver(error=2))
    with pytest.raises(RuntimeError, match="cannot pin 800 bytes of host memory: cudaHostRegister returned 2"):
        pinned_empty((100,), torch.int64)
