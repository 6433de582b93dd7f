# SPDX-License-Identifier: Apache-2.0
"""The measured device, its clock and its limits. A CPU can take its place for rehearsals; its times mean nothing."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], object]

FREE_TIMEOUT_S = 60.0
KEPT_BYTES = 2 << 30
"""Memory of the card that libraries and kernels of a process occupy at most."""
MIN_REPLAY_S = 5e-3
NUM_WARM_UP = 4
"""Times as long before the first time that counts: the card's clock falls while the host compiles."""
NUM_REPLAYS = 7


@dataclass(frozen=True, slots=True)
class Card:
    """A CUDA device, or this CPU in its place."""

    device: torch.device
    is_tiny: bool = False
    """Measure tiny shapes in float32, which Triton's interpreter can multiply: for rehearsals."""

    @property
    def is_gpu(self) -> bool:
        """Return whether this is a CUDA device, perhaps an emulated one."""
        return self.device.type == "cuda"

    @property
    def is_full(self) -> bool:
        """Return whether the shapes and types are those of the real model."""
        return self.is_gpu and not self.is_tiny

    def about(self) -> dict[str, Any]:
        """Return the context that a measurement needs to be meaningful."""
        import platform

        found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
        try:
            import triton

            found["triton"] = triton.__version__
        except ImportError:
            found["triton"] = None
        if not self.is_gpu:
            return found | {"card": "none: a rehearsal on a CPU, whose times mean nothing"}
        properties = torch.cuda.get_device_properties(self.device)
        return found | {
            "card": properties.name,
            "cuda": torch.version.cuda,
            "multiprocessors": properties.multi_processor_count,
            "l2_mb": properties.L2_cache_size / 1e6,
            "memory_gb": properties.total_memory / 1e9,
        }

    @property
    def l2_bytes(self) -> int:
        """Of the cache that inputs must not fit into."""
        return torch.cuda.get_device_properties(self.device).L2_cache_size if self.is_full else 0

    @property
    def free_bytes(self) -> int:
        """Memory that can be had now."""
        if not self.is_gpu:
            return 1 << 30
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def wait_free(self) -> None:
        """Wait until nearly all memory is free: that of another process is free only some time after its end.

        Raises:
            TimeoutError: it is not.
        """
        deadline = time.monotonic() + FREE_TIMEOUT_S
        gc.collect()
        while self.is_gpu:
            total = torch.cuda.get_device_properties(self.device).total_memory
            free = self.free_bytes + torch.cuda.memory_reserved(self.device)
            if free >= 0.97 * total - KEPT_BYTES:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB of the card are free after {FREE_TIMEOUT_S:g} s; "
                    "another process holds the rest (nvidia-smi names it)"
                )
            time.sleep(0.5)

    def num_sets(self, set_bytes: int) -> int:
        """How many sets of inputs to go through, so that none is found in the cache when its turn comes again."""
        return min(64, max(1, -(-2 * self.l2_bytes // max(set_bytes, 1))))

    def seconds(self, calls: Sequence[Call]) -> float:
        """Of one call, the median of several replays of all of them in a graph: launches cost nothing in it.

        `calls`: the same work on different inputs, enough of them that the cache holds none when it comes again.
        """
        for call in calls:
            call()
        if not self.is_gpu:
            start = time.perf_counter()
            calls[0]()
            return time.perf_counter() - start
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # The outer one takes the stream back where a capture fails; what captures does not then.
        with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph):
            kept = [call() for call in calls]
        once = self._replay(graph, 1)
        if self.is_tiny:
            return once / len(calls)
        num = max(1, int(MIN_REPLAY_S / max(once, 1e-7)))
        self._replay(graph, NUM_WARM_UP * num)
        found = statistics.median(self._replay(graph, num) for _ in range(NUM_REPLAYS)) / num / len(calls)
        del kept, graph
        return found

    def _replay(self, graph: torch.cuda.CUDAGraph, num: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        for _ in range(num):
            graph.replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normally distributed numbers: zeros would be faster than real data."""
        return torch.randn(shape, dtype=dtype, device=self.device)
