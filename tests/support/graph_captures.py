# SPDX-License-Identifier: Apache-2.0
"""CUDA graph captures replaced by functions on the CPU, so that small steps use the inputs of graphs."""

from collections.abc import Callable

import pytest

from quire_engine.worker import graph_capture
from quire_kernels import paged_attention


class RerunCapture:
    """Runs a step again at each replay."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.replayed: list[int] = []
        """Number of the captured step, for each replay."""

    def warm_up(self, step: Callable[[], None]) -> None:
        step()

    def __call__(self, step: Callable[[], None]) -> Callable[[], None]:
        number = self.num_captured
        self.num_captured += 1

        def replay() -> None:
            self.replayed.append(number)
            step()

        return replay


def replace_captures(monkeypatch: pytest.MonkeyPatch, enabled: bool = True) -> list[RerunCapture]:
    """Make all later model runners replay their small steps; return the list of their captures.

    The CPU's attention needs groups of spans from the host, which a step of a graph does not have.
    """
    captures: list[RerunCapture] = []
    monkeypatch.setattr(graph_capture, "should_capture", lambda device: enabled)
    monkeypatch.setattr(graph_capture, "GraphCapture", lambda device: captures.append(RerunCapture()) or captures[-1])
    monkeypatch.setitem(paged_attention.dispatch_table, "cpu", paged_attention.reference)
    return captures
