# SPDX-License-Identifier: Apache-2.0
"""Marks for tests that need a certain machine: a processor's instructions, a GPU's kernel language, an emulated GPU."""

import os
import sys
from collections.abc import Callable
from typing import Any

import pytest

from quire_kernels import Op, cpu_build

requires_native_kernels = pytest.mark.skipif(
    cpu_build.supported_instructions() is None,
    reason="compiled CPU kernels need AVX2, FMA and F16C, or ARM64",
)
"""Depends on the processor and not on the build, so that a failed build fails the test."""

requires_interpreter = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="Triton compiles kernels on this machine: tests/bench/gpu.py checks them on the GPU",
)
"""Runs CUDA kernels on the CPU in Triton's interpreter, which tests/conftest.py turns on. It supports float32 and
float16; its bfloat16 products are wrong. It shows wrong arithmetic and wrong addresses, but no races and no effects of
a GPU compiler."""

emulated_device: Any = sys.modules.get("emulator.device")
"""The emulated GPU's Python module; None outside `make emulated`."""

requires_emulated_gpu = pytest.mark.skipif(
    emulated_device is None, reason="needs PyTorch for CUDA on the emulated GPU: make emulated"
)


def interpreted_kernel(op: Op[..., Any]) -> Callable[..., Any]:
    """Return the operation's Triton implementation."""
    return op.get("cuda", "own")
