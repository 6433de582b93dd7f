# SPDX-License-Identifier: Apache-2.0
"""Shapes and bytes, against hand-computed numbers of published models."""

from quire_spec.shape import ModelShape
from quire_spec.sizing import kv_block_bytes, lora_slot_bytes, weights_bytes

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


def test_llama_8b():
    shape = ModelShape.from_config(LLAMA_8B)
    # 2 (keys, values) x 32 layers x 8 heads x 128 x 2 bytes = 131,072 bytes a token.
    assert kv_block_bytes(shape, 16, 2) == 16 * 131_072
    # Published: 8,030,261,248 parameters, of which 32 x 2 + 1 norms of 4096 are not linears or embeddings.
    assert weights_bytes(shape, 2) == 2 * (8_030_261_248 - 65 * 4096)
    # Sum of (in + out) over the seven linears is 81,920 a layer: 80 MiB at rank 16.
    assert lora_slot_bytes(shape, 16, 2) == 80 * 2**20


def test_mistral_7b():
    shape = ModelShape.from_config(MISTRAL_7B)
    # Published: 7,241,732,096 parameters.
    assert weights_bytes(shape, 2) == 2 * (7_241_732_096 - 65 * 4096)
    # The window does not make the cache smaller: blocks that have left it are kept.
    assert kv_block_bytes(shape, 16, 2) == 16 * 131_072


def test_qwen_05b():
    shape = ModelShape.from_config(QWEN_05B)
    # Published: 494,032,768 parameters; norms: 49 of 896; biases on q, k and v: 24 of 1,152.
    assert weights_bytes(shape, 2) == 2 * (494_032_768 - 49 * 896 - 24 * 1152)
