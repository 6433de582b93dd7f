# SPDX-License-Identifier: Apache-2.0
"""One torch thread per test process: the tensors are tiny. With two threads on busy cores a test took 6 minutes that
takes 20 s with one thread."""

import sys

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Applies only if torch is loaded, so that tests of torch-free code do not load it."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
