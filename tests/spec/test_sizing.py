# SPDX-License-Identifier: Apache-2.0
"""Shapes and bytes, against hand-computed numbers of published models."""

import pytest

from quire_spec.errors import ConfigError
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
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
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


def test_llama_8b():
    shape = ModelShape.from_config(LLAMA_8B)
    assert (shape.head_dim, shape.rope_theta, shape.eos_token_ids) == (128, 500000.0, (128001, 128009))
    # 2 (keys, values) x 32 layers x 8 heads x 128 x 2 bytes = 131,072 bytes a token.
    assert kv_block_bytes(shape, 16, 2) == 16 * 131_072
    # Published: 8,030,261,248 parameters, of which 32 x 2 + 1 norms of 4096 are not linears or embeddings.
    assert weights_bytes(shape, 2) == 2 * (8_030_261_248 - 65 * 4096)
    # Sum of (in + out) over the seven linears is 81,920 a layer: 80 MiB at rank 16.
    assert lora_slot_bytes(shape, 16, 2) == 80 * 2**20


def test_qwen_05b_has_tied_embeddings_and_biases():
    shape = ModelShape.from_config(QWEN_05B)
    assert (shape.tie_word_embeddings, shape.attention_bias, shape.output_bias) == (True, True, False)
    assert (shape.rope_theta, shape.rope_scaling, shape.dtype) == (1000000.0, None, "bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "'MambaForCausalLM' is not supported; supported are Llama"),
        ({"architectures": None}, "'none' is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window is not supported"),
        ({"hidden_size": ...}, "hidden_size is missing"),
    ],
)
def test_refusals(change, message):
    config = {k: v for k, v in (LLAMA_8B | change).items() if v is not ...}
    with pytest.raises(ConfigError, match=message):
        ModelShape.from_config(config)
