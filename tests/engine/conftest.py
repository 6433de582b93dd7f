# SPDX-License-Identifier: Apache-2.0
"""One thread for torch: the tensors are tiny, and two threads that wait for each other on busy cores were seen to take
6 minutes for what one does in 20 seconds."""

import sys

import pytest


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """Where torch is used at all: the tests of what is torch-free stay so."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
