# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of one device's memory: what weights, a step, adapters and a token cost, and what is left for KV.

Formulas and constants are fitted to start logs of vLLM with Llama 3.1 8B (tests/operator/plan/test_plan_tables.py has
the
five points), so they are estimates for this engine: it measures at its start, and status.plan.measured compares.
Integers in, bytes out; planner.py decides with them.
"""

import math
from dataclasses import dataclass

from quire_spec.model import memory_sizing
from quire_spec.model.model_config import ModelConfig

MIB = 2**20
GIB = 2**30

_NON_TORCH = GIB // 2
"""CUDA context and libraries of the engine's process."""
_COMMUNICATION = GIB // 2
"""NCCL's buffers, where layers are shared."""
_SERVER = GIB // 2
"""CUDA context of the server's process, outside of the engine's share."""
_SHARED_MARGIN = 3 * GIB // 10
_FRAGMENTATION_PERCENT = 2
_WEIGHTS_PERCENT = 101
"""What torch takes for tensors of 100 bytes: 15.1 GiB measured for 14.96 GiB of files."""
_ACTIVATIONS_PERCENT = 115
_SAMPLING_BYTES = 20
"""For each sequence and word: logits, what sorting and softmax copy, and the counts that penalties keep."""


@dataclass(frozen=True, slots=True)
class DeviceCosts:
    """Bytes on one device, beside the KV cache."""

    weights: int
    activations: int
    """At the peak of the largest step."""
    non_torch: int
    lora: int
    """All adapter slots."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.activations + self.non_torch + self.lora

    @property
    def rounded_total(self) -> int:
        """All of it with each part in whole MiB, as a plan has it."""
        return sum(map(round_up_mib, (self.weights, self.activations, self.non_torch, self.lora)))


def round_up_mib(size: int) -> int:
    """Rounded up to whole MiB."""
    return -(-size // MIB) * MIB


def kv_bytes_per_token(shape: ModelConfig, element_bytes: int, tp: int) -> int:
    """KV bytes of one token on each of `tp` devices; KV heads that are fewer than devices are on several."""
    heads = max(1, shape.num_kv_heads // tp)
    return memory_sizing.kv_block_bytes(shape, 1, element_bytes) // shape.num_kv_heads * heads


def weights_bytes(files_bytes: int, tp: int) -> int:
    """Bytes of the weights on each of `tp` devices, in the type that they are computed in."""
    return math.ceil(files_bytes * _WEIGHTS_PERCENT / (100 * tp))


def lora_bytes(shape: ModelConfig, num_slots: int, max_rank: int, element_bytes: int) -> int:
    """Bytes of the adapter slots on each device. Not divided by tp: one half of each pair is on all of them."""
    return num_slots * memory_sizing.lora_slot_bytes(shape, max_rank, element_bytes)


def activation_bytes(shape: ModelConfig, num_tokens: int, num_seqs: int, element_bytes: int, tp: int) -> int:
    """Bytes at the peak of a step of `num_tokens` tokens, or of sampling for `num_seqs` sequences if that is more."""
    heads = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    layer = num_tokens * element_bytes * (4 * shape.hidden_size + (3 * shape.intermediate_size + heads) // tp)
    sampling = num_seqs * shape.vocab_size * _SAMPLING_BYTES
    return max(layer, sampling) * _ACTIVATIONS_PERCENT // 100


def non_torch_bytes(tp: int) -> int:
    """Bytes that libraries take beside torch, on each of `tp` GPUs."""
    return _NON_TORCH + (_COMMUNICATION if tp > 1 else 0)


def graph_bytes(shape: ModelConfig) -> int:
    """Bytes of captured CUDA graphs: 0.5 GiB for 32 layers, 1 GiB for 64 and more. Outside of the engine's share."""
    return min(max(shape.num_layers * GIB // 64, GIB // 2), GIB)


def reserve_bytes(shape: ModelConfig, visible: int, tp: int) -> int:
    """What the engine's share should leave of each GPU: graphs, the server, fragments."""
    margin = _SHARED_MARGIN if tp > 1 else 0
    return graph_bytes(shape) + visible * _FRAGMENTATION_PERCENT // 100 + _SERVER + margin


def utilization(shape: ModelConfig, visible: int, tp: int) -> int:
    """The engine's share of each GPU in thousandths: what the reserve leaves, from 0.80 to 0.90 (0.93 from 32 GiB)."""
    share = (visible - reserve_bytes(shape, visible, tp)) * 100 // visible
    return 10 * max(80, min(share, 90 if visible < 32 * GIB else 93))
