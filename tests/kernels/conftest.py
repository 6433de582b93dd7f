# SPDX-License-Identifier: Apache-2.0
"""Poisons new memory: an output that an operation does not write is NaN, so the test fails."""

from collections.abc import Callable
from typing import Any

import pytest
import torch


def _poisoned(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def poisoned(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = function(*args, **kwargs)
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    return poisoned


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> None:
    """One thread: on busy cores two threads would wait for each other in every operation, and these are small."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poison_fresh_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill every uninitialized float tensor with NaN."""
    monkeypatch.setattr(torch, "empty", _poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", _poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty))
