# SPDX-License-Identifier: Apache-2.0
"""Huge pages: tensors are disjoint and aligned, and pages use no memory before they are written."""

from pathlib import Path

import torch

from quire_kernels import HugePageArena


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_tensors_are_disjoint_and_aligned() -> None:
    arena = HugePageArena()
    sizes = [(3, 5), (1,), (1 << 20, 3), (7,), (40 << 20,)]
    tensors = [arena.empty(size, torch.bfloat16) for size in sizes]
    for i, tensor in enumerate(tensors):
        assert tensor.is_contiguous() and tensor.data_ptr() % 64 == 0
        tensor.fill_(i)
    assert all(tensor.shape == size for tensor, size in zip(tensors, sizes, strict=True))
    assert all((tensor == i).all() for i, tensor in enumerate(tensors))


def test_unwritten_pages_use_no_memory() -> None:
    before = _resident()
    huge = HugePageArena().empty((4 << 30,), torch.uint8)
    assert _resident() - before < 64 << 20
    huge[: 1 << 20] = 1
    assert _resident() - before < 64 << 20
