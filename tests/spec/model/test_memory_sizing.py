# SPDX-License-Identifier: Apache-2.0
"""Memory sizing against hand-computed values of published models."""

import pytest

from quire_spec.model.memory_sizing import kv_block_bytes, lora_slot_bytes, weights_bytes
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
LLAMA2_7B = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
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
QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
OPT_125M = {
    "architectures": ["OPTForCausalLM"],
    "hidden_size": 768,
    "ffn_dim": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 50272,
    "max_position_embeddings": 2048,
    "word_embed_proj_dim": 768,
}
OPT_350M = OPT_125M | {
    "hidden_size": 1024,
    "ffn_dim": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "word_embed_proj_dim": 512,
    "do_layer_norm_before": False,
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
PHI4_MINI = PHI3_MINI | {
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48},
    "sliding_window": 262144,
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
GEMMA2_9B = GEMMA2_2B | {
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_hidden_layers": 42,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 224,
}


def test_llama_8b():
    model_config = ModelConfig.from_config(LLAMA_8B)
    # 2 (keys, values) x 32 layers x 8 heads x 128 x 2 bytes = 131,072 bytes per token.
    assert kv_block_bytes(model_config, 16, 2) == 16 * 131_072
    # Published: 8,030,261,248 parameters, of which 32 x 2 + 1 norms of 4096 are not linears or embeddings.
    assert weights_bytes(model_config, 2) == 2 * (8_030_261_248 - 65 * 4096)
    # The sum of (in + out) over the seven linears is 81,920 per layer: 80 MiB at rank 16. The embedding and the output
    # projection have 132,352 each.
    assert lora_slot_bytes(model_config, 16, 2) == 80 * 2**20 + 2 * 16 * 2 * 132_352


def test_adapter_slot_is_padded_to_even_rank_and_cache_lines():
    model_config = ModelConfig.from_config(LLAMA_8B)
    assert lora_slot_bytes(model_config, 15, 2) == lora_slot_bytes(model_config, 16, 2)
    odd = ModelConfig.from_config(LLAMA_8B | {"vocab_size": 1001})
    even = ModelConfig.from_config(LLAMA_8B | {"vocab_size": 1008})
    assert lora_slot_bytes(odd, 2, 2) == lora_slot_bytes(even, 2, 2)


# The published number of parameters, and how many of them are norms and biases, which weights_bytes ignores.
PUBLISHED = {
    "Mistral-7B-v0.1": (MISTRAL_7B, 7_241_732_096, 65 * 4096),
    "Qwen2.5-0.5B": (QWEN_05B, 494_032_768, 49 * 896 + 24 * 1152),
    "Qwen3-0.6B": (QWEN3_06B, 596_049_920, 57 * 1024 + 56 * 128),
    "opt-125m": (OPT_125M, 125_239_296, 12 * (5 * 768 + 3072) + 25 * 2 * 768),
    "opt-350m": (OPT_350M, 331_196_416, 24 * (5 * 1024 + 4096) + 48 * 2 * 1024),
    "Phi-3-mini-4k": (PHI3_MINI, 3_821_079_552, 65 * 3072),
    "Phi-4-mini": (PHI4_MINI, 3_836_021_760, 65 * 3072),
    "gemma-2-2b": (GEMMA2_2B, 2_614_341_888, 105 * 2304),
    "gemma-2-9b": (GEMMA2_9B, 9_241_705_984, 169 * 3584),
    "Llama-2-7b": (LLAMA2_7B, 6_738_415_616, 65 * 4096),
}


@pytest.mark.parametrize(("config", "parameters", "small"), PUBLISHED.values(), ids=PUBLISHED.keys())
def test_weights_of_published_models(config, parameters, small):
    assert weights_bytes(ModelConfig.from_config(config), 2) == 2 * (parameters - small)


def test_sliding_window_does_not_shrink_the_kv_cache():
    # 2 (keys, values) x 32 layers x 8 heads x 128 x 2 bytes per token. KV blocks outside the window are kept.
    assert kv_block_bytes(ModelConfig.from_config(MISTRAL_7B), 16, 2) == 16 * 131_072


def test_kv_block_with_explicit_head_dim():
    # 2 x 26 layers x 4 heads x 256 x 2 bytes per token.
    assert kv_block_bytes(ModelConfig.from_config(GEMMA2_2B), 16, 2) == 16 * 106_496


def test_adapter_slot_of_fused_linears():
    # qkv (3072 + 9216), o (2 x 3072), gate and up (3072 + 16384), down (8192 + 3072), 32 layers.
    assert lora_slot_bytes(ModelConfig.from_config(PHI3_MINI), 16, 2) == 16 * 32 * 2 * (
        12288 + 6144 + 19456 + 11264
    ) + 2 * 16 * 2 * (32064 + 3072)
