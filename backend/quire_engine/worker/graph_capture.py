# SPDX-License-Identifier: Apache-2.0
"""Captures functions as CUDA graphs. On CUDA devices only."""

import os
from collections.abc import Callable

import torch

CapturedFunction = Callable[[], None]
"""A function that reads and writes only persistent tensors."""


def should_capture(device: torch.device) -> bool:
    """Return whether CUDA graphs are used on this device."""
    return device.type == "cuda" and os.environ.get("QUIRE_GRAPHS") != "0"


class GraphCapture:
    """Captures functions as CUDA graphs. All graphs share one memory pool. Therefore, only one graph can run at a
    time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def warm_up(self, function: CapturedFunction) -> None:
        """Run a function on the stream on which graphs are captured. This run creates the kernels, library workspaces
        and connections that the function needs."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            function()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()

    def __call__(self, function: CapturedFunction) -> CapturedFunction:
        """Capture `function` and return a function that replays its graph.

        Before the capture, `warm_up` must have run `function`.
        """
        graph = torch.cuda.CUDAGraph()
        # NCCL's threads query events at any time. In the mode "thread_local", such calls of other threads do not
        # invalidate the capture.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            function()
        return graph.replay
