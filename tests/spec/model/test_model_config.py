# SPDX-License-Identifier: Apache-2.0
"""ModelShape: config.json in every dialect, and refused with the key that is wrong."""

import json

import pytest

from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig

NUMBERS = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


def _shape(architecture="LlamaForCausalLM", **values):
    """`values` over what every config.json has; ... takes a key away."""
    config = NUMBERS | {"architectures": [architecture]} | values
    return ModelConfig.from_config({key: value for key, value in config.items() if value is not ...})


def test_what_llama_leaves_out():
    shape = _shape()
    assert (shape.num_kv_heads, shape.head_dim, shape.attention_scale) == (4, 16, 0.25)
    assert (shape.dtype, shape.eos_token_ids, shape.tie_word_embeddings, shape.norm_eps) == ("float32", (), False, 1e-6)
    assert (shape.rope.rope_type, shape.rope.theta, shape.rope.dim) == ("default", 10000.0, 16)
    assert shape.sliding_windows == (None,) * 4


def test_null_is_absent():
    assert _shape(head_dim=None, num_key_value_heads=None, rope_scaling=None, eos_token_id=None, dtype=None) == _shape()


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"eos_token_id": 3}, (3,)),
        ({"eos_token_id": [3, 7]}, (3, 7)),
    ],
)
def test_ends_of_sequence(values, expected):
    assert _shape(**values).eos_token_ids == expected


def test_biases():
    qwen = _shape("Qwen2ForCausalLM", num_key_value_heads=2, attention_bias=False)
    assert (qwen.attention_bias, qwen.output_bias, qwen.mlp_bias) == (True, False, False)
    llama = _shape(attention_bias=True, mlp_bias=True)
    assert (llama.attention_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)


LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "dialect",
    [
        {"rope_parameters": LINEAR | {"rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_scaling": LINEAR},
        {"rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 4}},
        # What transformers 5 makes of both.
        {"rope_theta": 500.0, "rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {}, "rope_parameters": LINEAR | {"rope_theta": 500.0}},
    ],
    ids=["transformers 5", "transformers 4", "type", "both", "an empty one"],
)
def test_dialects_of_rope(dialect):
    assert _shape(**dialect) == _shape(rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0})


def test_yarn_takes_its_factor_from_the_lengths():
    rope = _shape(rope_scaling={"type": "yarn", "original_max_position_embeddings": 64}).rope
    assert (rope.factor, rope.original_max_position) == (8.0, 64)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_longrope_of_phi(name):
    scaling = {"type": name, "short_factor": [1.0] * 8, "long_factor": [2] * 8}
    shape = _shape("Phi3ForCausalLM", max_position_embeddings=4096 * 32, rope_scaling=scaling)
    assert (shape.rope.rope_type, shape.long_rope_threshold, shape.rope.factor) == ("longrope", 4096, 32.0)
    assert shape.rope.attention_factor == pytest.approx(1.1902380714238083)  # sqrt(1 + ln 32 / ln 4096)


def test_yarn_of_others_is_no_longrope():
    scaling = {"type": "yarn", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert _shape(rope_scaling=scaling).rope.rope_type == "yarn"


def test_qwen_leaves_out_as_many_kv_heads_as_its_class_has():
    qwen = {"num_attention_heads": 64, "head_dim": 16}
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert _shape(name, **qwen).num_kv_heads == 32
        assert _shape(name, **qwen, num_key_value_heads=None).num_kv_heads == 64


def test_gemmas_activation_may_be_null():
    assert _shape("Gemma2ForCausalLM", hidden_activation=None).activation == "gelu_pytorch_tanh"


def test_swish_is_silu():
    """As `ACT2FN` of transformers has it."""
    assert _shape(hidden_act="swish").activation == "silu"
    assert _shape("OPTForCausalLM", ffn_dim=8, activation_function="swish").activation == "silu"


def test_mistral_has_its_window_in_every_layer():
    assert _shape("MistralForCausalLM", num_key_value_heads=2).sliding_windows == (4096,) * 4
    assert _shape("MistralForCausalLM", num_key_value_heads=2, sliding_window=16).sliding_windows == (16,) * 4
    assert _shape("MistralForCausalLM", num_key_value_heads=2, sliding_window=None).sliding_windows == (None,) * 4


def test_ministral_has_its_window_in_the_layers_that_it_lists():
    ministral = {"num_key_value_heads": 2, "sliding_window": 16}
    listed = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    assert _shape("MistralForCausalLM", **ministral, layer_types=listed).sliding_windows == (None, 16, 16, None)
    assert _shape("MistralForCausalLM", **ministral, layer_types=None).sliding_windows == (16,) * 4


def test_llama_has_no_window_whatever_its_config_says():
    assert _shape(sliding_window=16, layer_types=["sliding_attention"] * 4).sliding_windows == (None,) * 4


QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 3}


@pytest.mark.parametrize(
    ("values", "windows"),
    [
        ({"sliding_window": 16, "max_window_layers": 3}, (None,) * 4),
        (QWEN_WINDOWS, (None, None, None, 16)),
        (QWEN_WINDOWS | {"layer_types": ["sliding_attention", "full_attention"] * 2}, (16, None, 16, None)),
        (QWEN_WINDOWS | {"sliding_window": None}, (None,) * 4),
        (QWEN_WINDOWS | {"max_window_layers": 0}, (16,) * 4),
    ],
    ids=["off", "upper layers", "listed", "no width", "all layers"],
)
def test_windows_of_qwen(values, windows):
    assert _shape("Qwen2ForCausalLM", num_key_value_heads=2, **values).sliding_windows == windows


def test_windows_of_gemma_alternate():
    gemma = {"hidden_size": 64, "head_dim": None}
    assert _shape("Gemma2ForCausalLM", **gemma).sliding_windows == (4096, None, 4096, None)
    assert _shape("Gemma2ForCausalLM", **gemma, sliding_window=None).sliding_windows == (None,) * 4
    listed = ["full_attention"] * 3 + ["sliding_attention"]
    assert _shape("Gemma2ForCausalLM", **gemma, layer_types=listed).sliding_windows == (None, None, None, 4096)


def test_what_gemma_leaves_out():
    shape = _shape("Gemma2ForCausalLM")
    assert (shape.num_kv_heads, shape.head_dim, shape.attention_scale) == (4, 256, 1 / 16)
    assert (shape.attention_softcap, shape.logits_softcap, shape.activation) == (50.0, 30.0, "gelu_pytorch_tanh")
    assert shape.tie_word_embeddings


def test_llama_knows_no_soft_caps():
    shape = _shape(attn_logit_softcapping=5.0, final_logit_softcapping=5.0, query_pre_attn_scalar=1)
    assert (shape.attention_softcap, shape.logits_softcap, shape.attention_scale) == (None, None, 0.25)


def test_opt():
    values = {"intermediate_size": ..., "ffn_dim": 128, "word_embed_proj_dim": 48, "num_key_value_heads": 2}
    shape = _shape("OPTForCausalLM", **values, enable_bias=False, do_layer_norm_before=False)
    assert (shape.intermediate_size, shape.embedding_size, shape.num_learned_positions) == (128, 48, 514)
    # It has no grouped heads, whatever config.json says.
    assert (shape.num_kv_heads, shape.rope, shape.activation, shape.norm_eps) == (4, None, "relu", 1e-5)
    assert not shape.attention_bias and not shape.output_bias and not shape.mlp_bias
    assert not shape.flags["do_layer_norm_before"] and shape.flags["layer_norm_elementwise_affine"]


@pytest.mark.parametrize(
    "dialect", [{"partial_rotary_factor": 0.75}, {"rope_parameters": {"partial_rotary_factor": 0.75}}]
)
def test_partly_rotated_heads(dialect):
    assert _shape("Phi3ForCausalLM", **dialect).rope.dim == 12
    assert _shape(**dialect).rope.dim == 16


REFUSALS = {
    "an unknown architecture": (
        {"architectures": ["MambaForCausalLM"]},
        "'MambaForCausalLM' is not supported; .* Llama",
    ),
    "no architecture": ({"architectures": None}, "'none' is not supported"),
    "an architecture that is no name": ({"architectures": [["a"]]}, "is not supported"),
    "a missing number": ({"hidden_size": ...}, "hidden_size is missing"),
    "text for a number": ({"hidden_size": "64"}, "hidden_size: '64' is not a positive integer"),
    "a fraction": ({"num_hidden_layers": 4.5}, "num_hidden_layers: 4.5 is not a positive integer"),
    "truth for a number": ({"vocab_size": True}, "vocab_size: True is not a positive integer"),
    "too many layers": ({"num_hidden_layers": 10**12}, "num_hidden_layers: 1000000000000 is not at most 4096"),
    "a huge number": ({"hidden_size": 10**400}, "hidden_size: 1000.* is not at most 2147483647"),
    "a huge fraction": ({"rms_norm_eps": 10**400}, "rms_norm_eps: 1000.* is not a positive number"),
    "not a number": ({"rope_theta": float("nan")}, "rope_theta: nan is not a positive number"),
    "angles that do not shrink": ({"rope_theta": 1}, "rope_theta: 1.0 is not more than 1"),
    "zero": ({"num_attention_heads": 0}, "num_attention_heads: 0 is not a positive integer"),
    "a list for a number": ({"max_position_embeddings": [1]}, "max_position_embeddings: .* is not a positive integer"),
    "text for a flag": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes' is not true or false"),
    "a number for a flag": ({"attention_bias": 1}, "attention_bias: 1 is not true or false"),
    "a number for text": ({"torch_dtype": 16}, "torch_dtype: 16 is not a string"),
    "an unknown activation": ({"hidden_act": "mish"}, "hidden_act: 'mish' is not supported; supported are silu"),
    "text for a small number": ({"rms_norm_eps": "1e-6"}, "rms_norm_eps: '1e-6' is not a positive number"),
    "an end that is no token": ({"eos_token_id": [1, "2"]}, "eos_token_id: .* is not a token id or a list"),
    "KV heads that divide nothing": ({"num_key_value_heads": 3}, "num_key_value_heads: 3 is not a divisor of"),
    "heads that divide nothing": ({"num_attention_heads": 5}, "num_attention_heads: 5 is not a divisor of hidden_size"),
    "a flag of the family alone": (
        {"architectures": ["OPTForCausalLM"], "ffn_dim": 8, "do_layer_norm_before": "no"},
        "do_layer_norm_before: 'no' is not true or false",
    ),
    "a cap that is text": (
        {"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": "30"},
        "final_logit_softcapping: '30' is not a positive number",
    ),
    "an odd head": ({"head_dim": 15}, "15 of head_dim 15 elements rotate"),
    "a short longrope": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
        "short_factor: .* is not 8 numbers, one for each rotated pair",
    ),
    "a longrope of text": (
        {"rope_scaling": {"type": "su", "short_factor": ["1"] * 8, "long_factor": [1.0] * 8}},
        "short_factor: .* is not a list of positive numbers",
    ),
    "a longrope of nothing": (
        {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "factor": 2},
            "original_max_position_embeddings": 1,
        },
        "original_max_position_embeddings: 1 is not more than 1",
    ),
    "attention to what comes after": ({"is_causal": False}, "is_causal: False is not supported"),
    "attention both ways": (
        {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
        "use_bidirectional_attention: True is not supported",
    ),
    "layers of their own": (
        {"per_layer_config": {"0": {"rms_norm_eps": 0.1}}},
        "per_layer_config: layers that differ from each other are not supported",
    ),
    "another model's type": (
        {"model_type": "mistral"},
        "model_type 'mistral' is not the one of architecture 'LlamaForCausalLM', which is 'llama'",
    ),
    "a part of each head, stretched": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
        "partial_rotary_factor: 0.5 is not supported beside rope scaling 'linear'",
    ),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config: quantized checkpoints are not supported"),
    "a rope that is no object": ({"rope_scaling": "linear"}, "rope_scaling: expected an object, found 'linear'"),
    "an unknown rope": (
        {"rope_scaling": {"type": "ntk"}},
        "rope scaling 'ntk' is not supported; supported are default",
    ),
    "a rope without its factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
    "a rope with a wrong number": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": "1"}},
        "rope_parameters: low_freq_factor: '1' is not a positive number",
    ),
    "bands the wrong way round": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
        "high_freq_factor: 1.0 is not more than low_freq_factor 4.0",
    ),
    "a rope for each layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "one rope for each layer type is not supported",
    ),
}


@pytest.mark.parametrize(("values", "complaint"), REFUSALS.values(), ids=REFUSALS.keys())
def test_refusals_name_the_key(values, complaint):
    with pytest.raises(ConfigError, match=complaint):
        _shape(**values)


@pytest.mark.parametrize("kinds", [["full_attention"] * 3, ["chunked_attention"] * 4, "full_attention", [1, 2, 3, 4]])
def test_layer_types_are_checked(kinds):
    with pytest.raises(ConfigError, match=r"layer_types: .* is not"):
        _shape("Qwen2ForCausalLM", num_key_value_heads=2, **QWEN_WINDOWS, layer_types=kinds)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "1" * 5000, "3", '{"architectures"'])
def test_a_file_that_is_no_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_a_file_is_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(NUMBERS | {"architectures": ["LlamaForCausalLM"]}))
    assert ModelConfig.load(tmp_path) == _shape()
