# SPDX-License-Identifier: Apache-2.0
"""CUDA graph captures replaced by functions on the CPU, so that decode steps use the inputs of graphs."""

from collections.abc import Callable
from typing import Any

import pytest

from quire_engine.worker import cuda_graphs
from quire_kernels import paged_attention


class RerunCapture:
    """Runs each step once, as a capture does, and again at each replay."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.replayed: list[int] = []
        """Number of the captured step, for each replay."""

    def __call__(self, step: Callable[[], Any]) -> Callable[[], Any]:
        number = self.num_captured
        self.num_captured += 1
        step()

        def replay() -> Any:
            self.replayed.append(number)
            return step()

        return replay


def replace_captures(monkeypatch: pytest.MonkeyPatch, enabled: bool = True) -> list[RerunCapture]:
    """Make all later model runners replay their decode steps; return the list of their captures.

    The CPU's attention needs groups of spans from the host, which a step of a graph does not have.
    """
    captures: list[RerunCapture] = []
    monkeypatch.setattr(cuda_graphs, "should_capture", lambda device: enabled)
    monkeypatch.setattr(cuda_graphs, "GraphCapture", lambda device: captures.append(RerunCapture()) or captures[-1])
    monkeypatch.setitem(paged_attention.dispatch_table, "cpu", paged_attention.reference)
    return captures
