# SPDX-License-Identifier: Apache-2.0
"""The operations of a step. Each is a plain torch reference, the definition of correct, behind one dispatch seam.

They know tensors, not requests: quire_engine prepares what they need once a step and calls them from its layers.
"""

from quire_kernels.activation import ACTIVATIONS, gated, gelu_mul, gelu_tanh_mul, relu_mul, silu_mul
from quire_kernels.arena import Arena
from quire_kernels.attention import AttentionBatch, SpanGroup, paged_attention, plan_attention, reads_whole_blocks
from quire_kernels.decoder import CompiledDecoder, Heads, LayerWeights, LinearWeights, compile_decoder
from quire_kernels.dispatch import Op
from quire_kernels.kv_write import movable, write_kv
from quire_kernels.linear import embedding, linear, looked_up, pack_weight
from quire_kernels.lora import (
    AdapterBatch,
    SlotRows,
    adapted_linear,
    add_lora,
    add_lora_rows,
    plan_adapters,
    route_adapters,
)
from quire_kernels.lora_slots import LinearSlots, LoraSlots, PackedAdapter, Site
from quire_kernels.norm import add_rms_norm, norm_heads, rms_norm
from quire_kernels.prepare import SequenceState, StepInputs, prepare_inputs
from quire_kernels.rope import apply_rope, rotate_and_write
from quire_kernels.routing import Routing, route
from quire_kernels.sampling import choose, draw, keep_likely, most_likely, penalize, uniform
from quire_kernels.transfer import on_device, pinned

__all__ = [
    "ACTIVATIONS",
    "AdapterBatch",
    "Arena",
    "AttentionBatch",
    "CompiledDecoder",
    "Heads",
    "LayerWeights",
    "LinearSlots",
    "LinearWeights",
    "LoraSlots",
    "Op",
    "PackedAdapter",
    "Routing",
    "SequenceState",
    "Site",
    "SlotRows",
    "SpanGroup",
    "StepInputs",
    "adapted_linear",
    "add_lora",
    "add_lora_rows",
    "add_rms_norm",
    "apply_rope",
    "choose",
    "compile_decoder",
    "draw",
    "embedding",
    "gated",
    "gelu_mul",
    "gelu_tanh_mul",
    "keep_likely",
    "linear",
    "looked_up",
    "most_likely",
    "movable",
    "norm_heads",
    "on_device",
    "pack_weight",
    "paged_attention",
    "penalize",
    "pinned",
    "plan_adapters",
    "plan_attention",
    "prepare_inputs",
    "reads_whole_blocks",
    "relu_mul",
    "rms_norm",
    "rotate_and_write",
    "route",
    "route_adapters",
    "silu_mul",
    "uniform",
    "write_kv",
]
