# SPDX-License-Identifier: Apache-2.0
"""The emulated GPU, for the tests that are about it: they are skipped where `make emulated` has not started Python."""

import sys

import pytest

if "emulator.device" not in sys.modules:
    pytest.skip("needs PyTorch for CUDA on the emulated GPU: make emulated", allow_module_level=True)

from emulator import device

__all__ = ["device"]
