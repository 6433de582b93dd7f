# SPDX-License-Identifier: Apache-2.0
"""The forms for CUDA devices on this CPU: the kernel language's interpreter runs them, in float32 and float16 (its
products of bfloat16 are garbage). It shows wrong arithmetic and wrong addresses; races, speed and what a GPU's compiler
does it cannot show. tests/conftest.py turns it on."""

import os
from collections.abc import Callable
from typing import Any

import pytest

from quire_kernels import Op

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled here: tests/bench/gpu.py checks them on the GPU", allow_module_level=True)


def interpreted_kernel(op: Op[..., Any]) -> Callable[..., Any]:
    """The operation's form in the kernel language."""
    return op.get("cuda", "own")
