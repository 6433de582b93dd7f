# SPDX-License-Identifier: Apache-2.0
"""The memory that a model runner allocates at startup and keeps."""

from dataclasses import dataclass

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.kv_cache.host_swap import HostSwap
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.worker.cuda_graphs import CudaGraphRunner
from quire_spec.documents.pod_status import MeasuredMemory


@dataclass(frozen=True, slots=True)
class RunnerMemory:
    """Memory that startup allocates in addition to weights and adapter slots."""

    kv_cache: KVCache
    graphs: CudaGraphRunner | None
    """The CUDA graphs for decoding steps. None if these steps run without graphs."""
    host_swap: HostSwap | None
    """The host memory for KV blocks. None if `swap_space` and `kv_offloading_size` are less than one block."""
    swap_costs: SwapCosts
    measured: MeasuredMemory
