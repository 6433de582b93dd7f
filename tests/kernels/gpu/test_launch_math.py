# SPDX-License-Identifier: Apache-2.0
"""Sizes of launches."""

import re
from pathlib import Path

import triton

import quire_kernels.gpu
from quire_kernels.gpu.launch_math import cdiv, next_power_of_2


def test_equals_tritons_functions():
    for num in range(1, 300):
        assert next_power_of_2(num) == triton.next_power_of_2(num)
        assert all(cdiv(num, size) == triton.cdiv(num, size) for size in (1, 2, 7, 16, 128))


def test_launches_do_not_call_tritons_functions():
    """Triton's functions take as long as the rest of a launch on the host."""
    folder = Path(quire_kernels.gpu.__file__).parent
    found = [
        path.name for path in folder.glob("*.py") if re.search(r"\btriton\.(cdiv|next_power_of_2)", path.read_text())
    ]
    assert not found
