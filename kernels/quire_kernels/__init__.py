# SPDX-License-Identifier: Apache-2.0
"""The tensor operations of which a step consists.

One dispatcher selects an implementation for each operation. Each operation has a reference in plain torch, which
defines its result.

This package handles tensors, not requests. In each step, quire_engine prepares the arguments once and then calls the
operations from its layers.
"""

from quire_kernels.activation import ACTIVATIONS, gelu_mul, gelu_tanh_mul, get_gated_op, relu_mul, silu_mul, softcap
from quire_kernels.attention import (
    AttentionGroup,
    AttentionMetadata,
    BidirectionalTokens,
    attend_in_both_directions,
    build_attention_metadata,
    paged_attention,
    reads_whole_blocks,
    within_chunks,
)
from quire_kernels.dispatch import Op
from quire_kernels.encoder_attention import build_encoder_metadata, encoder_attention
from quire_kernels.experts import (
    ExpertActivation,
    ExpertAdapters,
    ExpertWeights,
    SwiGLU,
    fused_experts,
    has_experts_kernel,
    pack_experts,
    quantize_experts,
)
from quire_kernels.fused_decoder import AttentionShape, FusedDecoder, LayerWeights, LinearWeights, build_fused_decoder
from quire_kernels.gated_delta import gated_delta_rule, gated_rms_norm, short_convolution
from quire_kernels.host_device_copy import pin, pinned_empty, to_device_async
from quire_kernels.huge_pages import HugePageArena
from quire_kernels.kv_cache_layout import row_size
from quire_kernels.kv_cache_write import as_indexable, write_kv
from quire_kernels.linear import (
    LinearWeight,
    embedding,
    linear,
    pack_weight,
    pad_outputs,
    quantize_weight,
    supports_embedding,
    weight_bytes,
)
from quire_kernels.lora import (
    AdapterSegment,
    LoRABatch,
    adapted_linear,
    add_adapters,
    add_lora,
    add_lora_embedding,
    build_lora_batch,
    build_routed_lora_batch,
)
from quire_kernels.lora_routing import TokenRouting, route_tokens
from quire_kernels.lora_slots import LoRAPair, LoRASlots, LoRATarget, ModuleSlots, PackedAdapter, RowTransform
from quire_kernels.mamba2 import Mamba2Params, gated_group_norm, mamba2_recurrence
from quire_kernels.norm import add_rms_norm, qk_norm, rms_norm
from quire_kernels.prefill_attention import prepare_chunk_attention, select_prefill_attention
from quire_kernels.quantization import GROUP_SIZE, e2m1_codebook, quantize_fp8, quantize_int4, quantize_int8
from quire_kernels.quantized_linear import (
    MIN_CAPABILITY_FOR_FP8,
    PANEL_COLUMNS,
    QuantizedWeight,
    converts_fp8,
    has_kernel_for_shape,
    has_quantized_kernel,
    pack_weight_codebook,
    pack_weight_fp4,
    pack_weight_fp8,
    pack_weight_int4,
    pack_weight_int8,
    quantized_linear,
    supports_int4,
)
from quire_kernels.rope import apply_rope, rope_and_cache
from quire_kernels.routing import Routing, choose_experts
from quire_kernels.sampling import (
    apply_penalties,
    apply_token_bitmask,
    argmax_first,
    filter_top_k_top_p_min_p,
    inverse_transform,
    logsumexp,
    sample,
    uniform,
)
from quire_kernels.state_batch import StateBatch, build_state_batch
from quire_kernels.step_inputs import SequenceState, StepInputs, prepare_inputs
