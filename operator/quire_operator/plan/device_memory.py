# SPDX-License-Identifier: Apache-2.0
"""Computes how much memory one device needs: for the weights, the peak of a step, the adapter slots, the KV cache of
one token, and the reserve.

The formulas and constants are fitted to five startup logs of vLLM, which served Llama 3.1 8B.
tests/operator/plan/test_plan_tables.py lists the values of these logs. For Quire's own engine, the results are
estimates. The engine measures its memory at startup; status.plan.measured contains the result. Called by candidates.py
and host_memory.py.
"""

import math
from dataclasses import astuple, dataclass

from quire_operator.api.engine_spec import LoraSpec
from quire_spec.model import memory_sizing
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.parallel.tensor_parallel import TensorParallelShard

MIB = 2**20
GIB = 2**30

_NON_TORCH = GIB // 2
"""Memory of the CUDA context and the libraries of the engine process."""
_COMMUNICATION = GIB // 2
"""Memory of the NCCL buffers, which exist only with tensor parallelism."""
_SERVER = GIB // 2
"""Memory of the CUDA context of the server process; gpuMemoryUtilization does not include it."""
_SHARED_MARGIN = 3 * GIB // 10
_FRAGMENTATION_PERCENT = 2
_WEIGHTS_PERCENT = 101
"""torch allocates this number of bytes for 100 bytes of tensors. In a measurement, it allocated 15.1 GiB for 14.96 GiB
of files."""
_ACTIVATIONS_PERCENT = 115
_SAMPLING_BYTES = 20
"""Sampling needs this number of bytes for each sequence and each entry of the vocabulary. These bytes are used for the
logits, for copies that sorting and softmax make, and for the token counts that penalties need."""


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Memory in bytes on one device, without the KV cache."""

    weights: int
    activations: int
    """Peak memory of the activations during the largest step."""
    non_torch: int
    lora: int
    """Memory of all adapter slots."""
    draft: int = 0
    """Weights of the draft model or of its heads."""
    states: int = 0
    """States of sequences, and their snapshots."""

    @property
    def total(self) -> int:
        """Sum of all costs."""
        return sum(astuple(self))

    @property
    def rounded_total(self) -> int:
        """Sum of all costs. Each cost is rounded up to whole MiB before it is added, because a plan contains only whole
        MiB."""
        return sum(map(round_up_mib, astuple(self)))


def round_up_mib(size: int) -> int:
    """Round a size up to whole MiB."""
    return -(-size // MIB) * MIB


def kv_bytes_per_token(
    shape: ModelConfig, element_bytes: int, tp: int, scale_bytes: int = 0, num_layers: int | None = None
) -> int:
    """Return the number of bytes that one token needs in the KV cache of each of `tp` devices.

    If the model has fewer than `tp` KV heads, the heads are replicated. By default, all layers are counted;
    `num_layers` sets another number of layers.
    """
    local_shape = TensorParallelShard(shape, 0, tp).local_config
    return memory_sizing.kv_block_bytes(local_shape, 1, element_bytes, scale_bytes, num_layers)


def weights_bytes(files_bytes: int, tp: int) -> int:
    """Return the number of bytes of the weights on each of `tp` devices. `files_bytes` is the size of all weights in
    the dtype of the engine."""
    return math.ceil(files_bytes * _WEIGHTS_PERCENT / (100 * tp))


def lora_bytes(
    shape: ModelConfig,
    num_slots: int,
    rank: int,
    lora: LoraSpec,
    element_bytes: int,
    first_stage: ModelConfig | None = None,
) -> int:
    """Return the number of bytes on each device of `num_slots` adapters whose LoRA ranks add up to `rank`. With tensor
    parallelism, one matrix of each LoRA pair is replicated. A pipeline stage has as many pages as `first_stage`."""
    experts = bool(lora.experts)
    num_pages = memory_sizing.lora_pages(first_stage or shape, num_slots, rank, experts, bool(lora.modulesToSave))
    return memory_sizing.lora_bytes(shape, num_pages, element_bytes, experts)


def activation_bytes(
    shape: ModelConfig, num_tokens: int, num_seqs: int, element_bytes: int, tp: int, lora: LoraSpec
) -> int:
    """Return the peak number of bytes of the activations.

    It is the larger of two values: the forward pass of a step with `num_tokens` tokens, and sampling for `num_seqs`
    sequences.
    """
    layers = [shape.for_layer(layer) for layer in range(shape.num_layers)]
    heads = max((each.num_heads + 2 * each.num_kv_heads) * each.head_dim for each in layers)
    inner = max(each.intermediate_size for each in layers)
    layer = num_tokens * element_bytes * (4 * shape.hidden_size + (3 * inner + heads) // tp)
    # The inputs of all layers, and the three tensors from which they are computed.
    layer += num_tokens * element_bytes * 4 * shape.num_layers * shape.per_layer_size
    if shape.images is not None:
        # The embeddings of the images of a step, which are kept for later steps.
        layer += num_tokens * element_bytes * (1 + shape.images.num_deepstack) * shape.hidden_size
    if shape.moe is not None:
        # Each token is copied once for each of its experts, and once more for their adapters.
        per_expert = (3 if lora.experts else 2) * shape.hidden_size + (3 * shape.moe.intermediate_size + heads) // tp
        layer = max(layer, num_tokens * element_bytes * (4 * shape.hidden_size + shape.moe.top_k * per_expert))
    sampling = num_seqs * shape.vocab_size * _SAMPLING_BYTES if shape.has_outer_parts else 0
    return max(layer, sampling) * _ACTIVATIONS_PERCENT // 100


def non_torch_bytes(tp: int) -> int:
    """Return the number of bytes that libraries other than torch allocate on each of `tp` GPUs."""
    return _NON_TORCH + (_COMMUNICATION if tp > 1 else 0)


def graph_bytes(shape: ModelConfig) -> int:
    """Return the number of bytes that captured CUDA graphs need. gpuMemoryUtilization does not include them.

    The result is 0.5 GiB for 32 layers, and 1 GiB for 64 layers or more.
    """
    return min(max(shape.num_layers * GIB // 64, GIB // 2), GIB)


def utilization(shape: ModelConfig, visible: int, tp: int) -> int:
    """Return gpuMemoryUtilization in thousandths. It is from 800 to 900, or from 800 to 930 if a GPU has at least 32
    GiB.

    The rest of the memory is for CUDA graphs, the server and fragmentation.
    """
    reserve = graph_bytes(shape) + _SERVER + visible * _FRAGMENTATION_PERCENT // 100 + (_SHARED_MARGIN if tp > 1 else 0)
    share = (visible - reserve) * 100 // visible
    return 10 * max(80, min(share, 90 if visible < 32 * GIB else 93))
