# SPDX-License-Identifier: Apache-2.0
"""Prepares the attention of long prompts at startup.

The plans of cuDNN and their memory then exist before the first request arrives. The startup of a model runner calls it.
For a model with a soft cap on attention logits, with heads of different sizes, or with latent attention, the project's
own kernel is always used instead of cuDNN.
"""

import torch

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.base import CausalLM
from quire_kernels import prepare_chunk_attention, select_prefill_attention
from quire_spec.engine.config import EngineConfig
from quire_spec.model.model_config import ModelConfig


def select_for_prompts(
    config: EngineConfig, model: CausalLM, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Select the implementation for prompts without a context.

    A trial run covers every length that a prompt can have in one step.
    """
    shape = model.shape
    if _may_use_cudnn(shape) and shape.encoder is None:
        heads = shape.num_heads, shape.num_kv_heads, shape.head_dim
        select_prefill_attention(heads, dtype, device, min(config.max_num_batched_tokens, max_model_len))


def prepare_for_chunks(
    config: EngineConfig, model: CausalLM, max_model_len: int, dtype: torch.dtype, kv_cache: KVCache
) -> None:
    """Build the plans for chunks that follow a context.

    The plans depend on the number of blocks of `kv_cache`.
    """
    if _may_use_cudnn(model.shape) and kv_cache.layers:
        prepare_chunk_attention(
            kv_cache.layers[0],
            model.shape.num_heads,
            model.shape.attention_scale,
            dtype,
            min(config.max_num_batched_tokens, max_model_len),
            -(-max_model_len // config.block_size),
        )


def _may_use_cudnn(shape: ModelConfig) -> bool:
    return shape.attention_softcap is None and shape.variants is None and shape.mla is None
