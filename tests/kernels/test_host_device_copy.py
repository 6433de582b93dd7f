# SPDX-License-Identifier: Apache-2.0
"""Pinned host memory: it has the requested size and is unpinned with its tensor."""

import gc

import pytest
import torch

from quire_kernels import pinned_empty


class _Driver:
    """Fake CUDA runtime that records pinned memory by address."""

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
    # torch checks whether memory is pinned at the start of the tensor's storage.
    assert driver.sizes == {tensor.untyped_storage().data_ptr(): 3 * 1000 * 7 * 2}
    tensor.fill_(1)
    del tensor
    gc.collect()
    assert driver.sizes == {}


def test_pinning_failure_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: _Driver(error=2))
    with pytest.raises(RuntimeError, match="cannot pin 800 bytes of host memory: cudaHostRegister returned 2"):
        pinned_empty((100,), torch.int64)
