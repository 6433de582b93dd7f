# SPDX-License-Identifier: Apache-2.0
"""Memory sizing against hand-computed values of published models."""

import pytest

from quire_spec.model.memory_sizing import kv_block_bytes, lora_bytes, lora_pages, weights_bytes
from quire_spec.model.model_config import ModelConfig

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "torch_dtype": "bfloat16",
    "eos_token_id": [128001, 128009],
}
QWEN_05B = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "dtype": "bfloat16",
    "eos_token_id": 151645,
}
PHI3_MINI = {
    "architectures": ["Phi3ForCausalLM"],
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32064,
    "max_position_embeddings": 4096,
    "sliding_window": 2047,
}
# As released: tie_word_embeddings is absent and defaults to true.
GEMMA2_2B = {
    "architectures": ["Gemma2ForCausalLM"],
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 256000,
    "max_position_embeddings": 8192,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}


QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}
MIXTRAL_8X7B = {
    "architectures": ["MixtralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": None,
}


def test_llama_8b():
    model_config = ModelConfig.from_config(LLAMA_8B)
    # 2 (keys, values) x 32 layers x 8 heads x 128 x 2 bytes = 131,072 bytes per token.
    assert kv_block_bytes(model_config, 16, 2) == 16 * 131_072
    # Published: 8,030,261,248 parameters, of which 32 x 2 + 1 norms of 4096 are not linears or embeddings.
    assert weights_bytes(model_config, 2) == 2 * (8_030_261_248 - 65 * 4096)
    # The sum of (in + out) over the seven linears is 81,920 per layer: 80 MiB at rank 16. The embedding and the output
    # projection have 132,352 each.
    assert lora_bytes(model_config, 16, 2) == 80 * 2**20 + 2 * 16 * 2 * 132_352


def test_adapter_slot_is_padded_to_even_rank_and_cache_lines():
    model_config = ModelConfig.from_config(LLAMA_8B)
    assert lora_pages(model_config, 1, 15) == lora_pages(model_config, 1, 16) == 16
    # A whole embedding and a whole output projection have the rank 4096 of 2 * (128256 + 4096) elements.
    elements, page = 4096 * 2 * 132_352, 32 * 81_920 + 2 * 132_352
    assert lora_pages(model_config, 3, 16, has_vocab_modules=True) == 16 + 3 * -(-elements // page)
    odd = ModelConfig.from_config(LLAMA_8B | {"vocab_size": 1001})
    even = ModelConfig.from_config(LLAMA_8B | {"vocab_size": 1008})
    assert lora_bytes(odd, 2, 2) == lora_bytes(even, 2, 2)


# The published number of parameters, and how many of them are norms and biases, which weights_bytes ignores.
# tests/engine/models/test_models.py compares the bytes of all families with the tensors of a checkpoint.
PUBLISHED = {
    "Qwen2.5-0.5B": (QWEN_05B, 494_032_768, 49 * 896 + 24 * 1152),
    "Phi-3-mini-4k": (PHI3_MINI, 3_821_079_552, 65 * 3072),
    "gemma-2-2b": (GEMMA2_2B, 2_614_341_888, 105 * 2304),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624, 97 * 2048 + 96 * 128),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46_702_792_704, 65 * 4096),
}


@pytest.mark.parametrize(("config", "parameters", "small"), PUBLISHED.values(), ids=PUBLISHED.keys())
def test_weights_of_published_models(config, parameters, small):
    assert weights_bytes(ModelConfig.from_config(config), 2) == 2 * (parameters - small)


def test_kv_block_with_explicit_head_dim():
    # 2 x 26 layers x 4 heads x 256 x 2 bytes per token.
    assert kv_block_bytes(ModelConfig.from_config(GEMMA2_2B), 16, 2) == 16 * 106_496


def test_adapter_slot_of_fused_linears():
    # qkv (3072 + 9216), o (2 x 3072), gate and up (3072 + 16384), down (8192 + 3072), 32 layers.
    assert lora_bytes(ModelConfig.from_config(PHI3_MINI), 16, 2) == 16 * 32 * 2 * (
        12288 + 6144 + 19456 + 11264
    ) + 2 * 16 * 2 * (32064 + 3072)
