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
"""What a process keeps of the card's memory at most when it has given back what it can: libraries and kernels."""
MIN_REPLAY_S = 5e-3
NUM_WARM_UP = 4
"""Times as long before the first time that counts: the card's clock falls while the host compiles."""
NUM_REPLAYS = 7


@dataclass(frozen=True, slots=True)
class Card:
    """A CUDA device, or this CPU in its place."""

    device: torch.device

    @property
    def is_gpu(self) -> bool:
        """False in a rehearsal."""
        return self.device.type == "cuda"

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
        return torch.cuda.get_device_properties(self.device).L2_cache_size if self.is_gpu else 0

    @property
    def free_bytes(self) -> int:
        """Memory that can be had now."""
        if not self.is_gpu:
            return 1 << 30
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self.device)[0]

    def wait_free(self, num_bytes: int) -> None:
        """Wait until about so many bytes are free: what a process held is free only some time after it has ended, and
        an engine plans with what is free.

        Raises:
            TimeoutError: they are not.
        """
        deadline = time.monotonic() + FREE_TIMEOUT_S
        gc.collect()
        while True:
            free, own = self.free_bytes, torch.cuda.memory_reserved(self.device) if self.is_gpu else 0
            # What this process keeps does not come back by waiting.
            if free + own >= num_bytes - KEPT_BYTES:
                return
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{free / 2**30:.1f} GiB of the card are free after {FREE_TIMEOUT_S:g} s, {num_bytes / 2**30:.1f} "
                    f"were; this process holds {own / 2**30:.1f}, the rest is another's (nvidia-smi names it)"
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

    def copy_bandwidth(self) -> float:
        """Bytes a second, read and written ones both."""
        size = 1 << (32 if self.is_gpu else 20)
        source = torch.randint(-128, 127, (size,), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / self.seconds([lambda: target.copy_(source)])

    def matrix_rate(self) -> float:
        """bfloat16 operations a second of a large product."""
        size = 8192 if self.is_gpu else 128
        a, b = self.random(size, size), self.random(size, size)
        return 2 * size**3 / self.seconds([lambda: a @ b])
