# SPDX-License-Identifier: Apache-2.0
"""ModelConfig: reading config.json in all formats, and errors that name the wrong key."""

import json

import pytest

from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import ConfigError
from quire_spec.model.memory_sizing import layer_linear_sizes, linear_sizes
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.parallel.tensor_parallel import TensorParallelShard

NUMBERS = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 512,
}


def make_config(architecture="LlamaForCausalLM", **values):
    """Return the config of a minimal config.json with `values`; the value ... removes a key."""
    config = NUMBERS | {"architectures": [architecture]} | values
    return ModelConfig.from_config({key: value for key, value in config.items() if value is not ...})


def test_llama_defaults():
    config = make_config()
    assert (config.num_kv_heads, config.head_dim, config.attention_scale) == (4, 16, 0.25)
    assert (config.dtype, config.eos_token_ids, config.tie_word_embeddings, config.norm_eps) == (
        "float32",
        (),
        False,
        1e-6,
    )
    assert (config.ropes[0].rope_type, config.ropes[0].theta, config.ropes[0].dim) == ("default", 10000.0, 16)
    assert config.sliding_windows == (None,) * 4


def test_null_is_absent():
    assert (
        make_config(head_dim=None, num_key_value_heads=None, rope_scaling=None, eos_token_id=None, dtype=None)
        == make_config()
    )


LINEAR = {"rope_type": "linear", "factor": 4.0}


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": LINEAR | {"rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_scaling": LINEAR},
        {"rope_theta": 500, "rope_scaling": {"type": "linear", "factor": 4}},
        # As transformers 5 writes both.
        {"rope_theta": 500.0, "rope_scaling": LINEAR, "rope_parameters": {"rope_type": "default"}},
        {"rope_scaling": {}, "rope_parameters": LINEAR | {"rope_theta": 500.0}},
    ],
    ids=["transformers 5", "transformers 4", "type", "both", "empty rope_scaling"],
)
def test_rope_formats(values):
    assert make_config(**values) == make_config(
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0}
    )


def test_eos_token_id_or_ids():
    assert make_config(eos_token_id=3).eos_token_ids == (3,)
    assert make_config(eos_token_id=[3, 7]).eos_token_ids == (3, 7)


def test_numbers_without_a_fraction_are_integers():
    """JSON does not distinguish 2 and 2.0; some writers emit every number as a double."""
    as_doubles = {key: float(value) for key, value in NUMBERS.items() if type(value) is int}
    assert make_config(**as_doubles, eos_token_id=[2.0, 3]) == make_config(eos_token_id=[2, 3])


@pytest.mark.parametrize(
    ("architecture", "scaling", "length"),
    [
        ("LlamaForCausalLM", None, 512),
        ("LlamaForCausalLM", {"type": "yarn", "factor": 4.0}, 2048),
        ("LlamaForCausalLM", {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ("LlamaForCausalLM", {"type": "yarn", "factor": 2.5, "original_max_position_embeddings": 100}, 512),
        ("LlamaForCausalLM", {"type": "linear", "factor": 1.5}, 768),
        ("LlamaForCausalLM", {"type": "linear", "factor": 1e15}, 2**31 - 1),
        ("LlamaForCausalLM", {"type": "dynamic", "factor": 4.0}, 512),
        ("SmolLM3ForCausalLM", {"type": "yarn", "factor": 2.0}, 1024),
        # Layers with a sliding window keep the default rope type.
        ("Gemma3ForCausalLM", {"rope_type": "linear", "factor": 8.0}, 512),
    ],
)
def test_rope_scaling_extends_the_length(architecture, scaling, length):
    extra = {"head_dim": 16, "num_key_value_heads": 4} | ({"num_hidden_layers": 8} if "Gemma" in architecture else {})
    assert make_config(architecture, rope_scaling=scaling, **extra).max_length == length


def test_yarn_factor_defaults_to_ratio_of_lengths():
    rope = make_config(rope_scaling={"type": "yarn", "original_max_position_embeddings": 64}).ropes[0]
    assert (rope.factor, rope.original_max_position) == (8.0, 64)


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_phi3_longrope_aliases(name):
    scaling = {"type": name, "short_factor": [1.0] * 8, "long_factor": [2] * 8}
    config = make_config("Phi3ForCausalLM", max_position_embeddings=4096 * 32, rope_scaling=scaling)
    assert (config.ropes[0].rope_type, config.long_rope_threshold, config.ropes[0].factor) == ("longrope", 4096, 32.0)
    assert config.ropes[0].attention_factor == pytest.approx(1.1902380714238083)  # sqrt(1 + ln 32 / ln 4096)


def test_yarn_is_longrope_only_in_phi3():
    scaling = {"type": "yarn", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert make_config(rope_scaling=scaling).ropes[0].rope_type == "yarn"


def test_qwen_default_of_kv_heads():
    qwen = {"num_attention_heads": 64, "head_dim": 16}
    for name in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        assert make_config(name, **qwen).num_kv_heads == 32
        assert make_config(name, **qwen, num_key_value_heads=None).num_kv_heads == 64


def test_qwen3_moe_layers_with_experts():
    moe = make_config("Qwen3MoeForCausalLM", decoder_sparse_step=2, mlp_only_layers=[1], num_experts=8).moe
    assert (moe.layers, moe.num_experts, moe.normalize) == ((False, False, False, True), 8, False)
    assert make_config("Qwen3MoeForCausalLM", mlp_only_layers=[0, 1, 2, 3]).moe is None
    with pytest.raises(ConfigError, match="num_experts_per_tok: must be at most num_local_experts, which is 4, got 5"):
        make_config("MixtralForCausalLM", num_local_experts=4, num_experts_per_tok=5, num_key_value_heads=4)


def test_gemma_activation_can_be_null():
    assert make_config("Gemma2ForCausalLM", hidden_activation=None).activation == "gelu_pytorch_tanh"


def test_swish_is_an_alias_of_silu():
    """As in `ACT2FN` of transformers."""
    assert make_config(hidden_act="swish").activation == "silu"
    assert make_config("OPTForCausalLM", ffn_dim=8, activation_function="swish").activation == "silu"


def test_mistral_sliding_window_applies_to_every_layer():
    assert make_config("MistralForCausalLM", num_key_value_heads=2).sliding_windows == (4096,) * 4
    assert make_config("MistralForCausalLM", num_key_value_heads=2, sliding_window=16).sliding_windows == (16,) * 4
    assert make_config("MistralForCausalLM", num_key_value_heads=2, sliding_window=None).sliding_windows == (None,) * 4


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
def test_qwen_sliding_windows(values, windows):
    assert make_config("Qwen2ForCausalLM", num_key_value_heads=2, **values).sliding_windows == windows


def test_gemma_sliding_windows_alternate():
    gemma = {"hidden_size": 64, "head_dim": None}
    assert make_config("Gemma2ForCausalLM", **gemma).sliding_windows == (4096, None, 4096, None)
    assert make_config("Gemma2ForCausalLM", **gemma, sliding_window=None).sliding_windows == (None,) * 4
    listed = ["full_attention"] * 3 + ["sliding_attention"]
    assert make_config("Gemma2ForCausalLM", **gemma, layer_types=listed).sliding_windows == (None, None, None, 4096)


def test_gemma_defaults():
    config = make_config("Gemma2ForCausalLM")
    assert (config.num_kv_heads, config.head_dim, config.attention_scale) == (4, 256, 1 / 16)
    assert (config.attention_softcap, config.logits_softcap, config.activation) == (50.0, 30.0, "gelu_pytorch_tanh")
    assert config.tie_word_embeddings


GEMMA3_BY_TYPE = {
    "full_attention": LINEAR | {"rope_theta": 5000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 70.0},
}


@pytest.mark.parametrize(
    "values",
    [
        {"rope_parameters": GEMMA3_BY_TYPE},
        {"rope_scaling": LINEAR, "rope_theta": 5000.0, "rope_local_base_freq": 70.0},
    ],
    ids=["transformers 5", "transformers 4"],
)
def test_gemma3_layers_alternate_windows_and_ropes(values):
    config = make_config("Gemma3ForCausalLM", num_hidden_layers=7, sliding_window=16, **values)
    assert config.sliding_windows == (16,) * 5 + (None, 16)
    assert [rope.theta for rope in config.ropes] == [70.0] * 5 + [5000.0, 70.0]
    assert [rope.factor for rope in config.ropes] == [1.0] * 5 + [4.0, 1.0]
    alternating = make_config("Gemma3ForCausalLM", sliding_window_pattern=2)
    assert [rope.theta for rope in alternating.ropes] == [1e4, 1e6, 1e4, 1e6]


@pytest.mark.parametrize(
    ("values", "kinds"),
    [
        ({}, ["default", "default", "default", "none"]),
        ({"no_rope_layer_interval": 2}, ["default", "none"] * 2),
        ({"no_rope_layers": [0, 1, 1, 1, 0]}, ["none", "default", "default", "default"]),
    ],
    ids=["every fourth", "interval", "listed"],
)
def test_smollm3_layers_without_rope(values, kinds):
    config = make_config("SmolLM3ForCausalLM", **values, use_sliding_window=True, sliding_window=16)
    assert [rope.rope_type for rope in config.ropes] == kinds
    assert config.sliding_windows == tuple(16 if kind == "none" else None for kind in kinds)


def test_language_model_of_gemma3_with_vision():
    """The `text_config` of gemma-3-4b names few values."""
    text = {key: NUMBERS[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    text |= {"model_type": "gemma3_text", "rope_scaling": LINEAR, "sliding_window": 1024, "eos_token_id": 1}
    config = make_config("Gemma3ForConditionalGeneration", text_config=text, eos_token_id=[1, 106])
    assert (config.num_heads, config.vocab_size, config.max_position_embeddings) == (8, 262208, 131072)
    assert (config.eos_token_ids, config.sliding_windows) == ((1, 106), (1024,) * 4)
    assert config.tied_embedding_name == "model.language_model.embed_tokens.weight"


KV = {"num_key_value_heads": 4}


@pytest.mark.parametrize(
    ("architecture", "values", "message"),
    [
        ("GraniteMoeHybridForCausalLM", {}, "layer_types: must be at least one layer with full_attention"),
        (
            "GraniteMoeHybridForCausalLM",
            {"layer_types": ["conv"] * 4},
            "layer_types: must be linear_attention .Mamba-2",
        ),
        (
            "FalconH1ForCausalLM",
            KV | {"mamba_n_groups": 3},
            "mamba_n_groups: must be a divisor of mamba_n_heads, which is",
        ),
        ("FalconH1ForCausalLM", KV | {"mamba_d_head": 9}, "mamba_n_heads: must be a number that divides"),
        ("FalconH1ForCausalLM", KV | {"time_step_limit": [1, 0.5]}, "time_step_limit: must be two numbers"),
        (
            "FalconH1ForCausalLM",
            KV | {"mlp_multipliers": [1.0]},
            "mlp_multipliers: must be a list of 2 positive numbers",
        ),
        (
            "NemotronHForCausalLM",
            KV | {"hybrid_override_pattern": "M*?E"},
            "hybrid_override_pattern: must be linear_att",
        ),
        (
            "Lfm2ForCausalLM",
            KV | {"layer_types": ["mamba"] * 4},
            "layer_types: must be conv or full_attention for each",
        ),
        ("Lfm2MoeForCausalLM", KV | {"use_expert_bias": False}, "use_expert_bias: must be True"),
        ("OlmoeForCausalLM", {"clip_qkv": 8.0}, "clip_qkv: must be None .clipped queries, keys and values: not supp"),
        ("InternLM3ForCausalLM", {"qkv_bias": True}, "qkv_bias: must be False .biases: not supported"),
        (
            "Glm4MoeForCausalLM",
            {"num_key_value_heads": 4, "n_group": 3, "topk_group": 1},
            "n_group: must be a divisor of num_experts 128",
        ),
        (
            "Glm4MoeForCausalLM",
            {"num_key_value_heads": 4, "n_group": 32, "topk_group": 1},
            "num_experts_per_tok: must be at most the number of",
        ),
        ("Ernie4_5_MoeForCausalLM", {"moe_layer_end_index": "last"}, "moe_layer_end_index: must be the index"),
        (
            "Llama4ForCausalLM",
            {"num_key_value_heads": 4, "layer_types": ["sliding_attention"] * 4},
            "layer_types: must be full_attention or chunked_attention for each layer",
        ),
    ],
)
def test_refuses_what_a_family_lacks(architecture, values, message):
    with pytest.raises(ConfigError, match=message):
        make_config(architecture, **values)


def test_llama4_alternates():
    values = {"num_key_value_heads": 4, "attn_temperature_tuning": 4, "interleave_moe_layer_step": 2}
    config = make_config("Llama4ForCausalLM", **values, intermediate_size=32, intermediate_size_mlp=64)
    assert config.attention_chunk_sizes == (8192, 8192, 8192, None)
    assert [rope.rope_type for rope in config.ropes] == ["default"] * 3 + ["none"]
    assert config.moe.layers == (False, True) * 2 and config.flags["attn_temperature_tuning"]
    assert (config.intermediate_size, config.moe.intermediate_size) == (64, 32)
    assert make_config("Llama4ForCausalLM", **values, attention_chunk_size=None).attention_chunk_sizes == (None,) * 4


KIMI = {"kv_lora_rank": 40, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 72}


def test_early_configs_of_hybrid_models():
    """As the checkpoints have them that were published before transformers 5."""
    nemotron = make_config("NemotronHForCausalLM", **KV, hybrid_override_pattern="M-*E", num_hidden_layers=...)
    assert [nemotron.has_state(i) for i in range(4)] == [True, False, False, False]
    assert (nemotron.has_attention(2), nemotron.has_experts(3), nemotron.num_kv_layers) == (True, True, 1)
    granite = make_config("GraniteMoeHybridForCausalLM", layer_types=["mamba", "attention"] * 2, mamba_n_heads=8)
    assert granite.states.layers == (True, False, True, False)
    layers = {"full_attn_layers": [3], "kda_layers": [1, 2, 4]}
    published = {"linear_attn_config": {**layers, "head_dim": 32, "num_heads": 6, "short_conv_kernel_size": 3}}
    kimi = make_config("KimiLinearForCausalLM", **published, **KIMI, max_position_embeddings=..., model_max_length=96)
    assert (kimi.states.layers, kimi.max_length) == ((True, True, False, True), 96)
    assert (kimi.states.num_value_heads, kimi.states.key_head_dim, kimi.states.kernel_size) == (6, 32, 3)
    assert kimi.moe.layers == (False, True, True, True)
    # Both kinds of layers have projections with these names.
    sizes = [layer_linear_sizes(kimi, layer) for layer in (1, 2)]
    assert [each["self_attn.q_proj"] for each in sizes] == [(64, 192), (64, 96)]
    assert [each["self_attn.o_proj"] for each in sizes] == [(192, 64), (64, 64)]
    assert "self_attn.k_proj" not in sizes[1] and "self_attn.kv_b_proj" not in sizes[0]
    lfm2 = {"full_attn_idxs": [2], "block_ff_dim": 768, "tie_embedding": False}
    config = make_config("Lfm2ForCausalLM", **KV, **lfm2, intermediate_size=8)
    assert (config.states.layers, config.intermediate_size) == ((True, True, False, True), 512)
    assert not config.tie_word_embeddings


def test_internlm3_is_llama_for_transformers():
    config = make_config(model_type="internlm3", num_key_value_heads=None)
    assert (config.architecture, config.head_dim) == ("InternLM3ForCausalLM", 128)


def test_early_qwen_vl_configs_have_no_text_config():
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    kv = {"num_key_value_heads": 2}
    config = make_config("Qwen2_5_VLForConditionalGeneration", model_type="qwen2_5_vl", rope_scaling=rope, **kv)
    text = NUMBERS | kv | {"model_type": "qwen2_5_vl_text", "rope_parameters": {"rope_type": "default", **rope}}
    nested = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "text_config": text}
    assert config == ModelConfig.from_config(nested)
    assert (config.ropes[0].rope_type, config.ropes[0].theta, config.attention_bias) == ("default", 1000000.0, True)


def test_minimax_rotates_a_part_of_each_head():
    assert make_config("MiniMaxM2ForCausalLM", rotary_dim=64, num_key_value_heads=4).ropes[0].dim == 64


def test_hunyuan_has_a_number_of_experts_for_each_layer():
    config = make_config("HunYuanMoEV1ForCausalLM", num_experts=8, moe_topk=[2] * 4)
    assert config.moe is not None and config.moe.top_k == 2
    assert config.moe.shared_intermediate_size == config.intermediate_size


def test_opt():
    values = {"intermediate_size": ..., "ffn_dim": 128, "word_embed_proj_dim": 48, "num_key_value_heads": 2}
    config = make_config("OPTForCausalLM", **values, enable_bias=False, do_layer_norm_before=False)
    assert (config.intermediate_size, config.embedding_size, config.num_learned_positions) == (128, 48, 514)
    # OPT ignores num_key_value_heads.
    assert (config.num_kv_heads, config.ropes, config.activation, config.norm_eps) == (4, (), "relu", 1e-5)
    assert not config.attention_bias and not config.output_bias and not config.mlp_bias
    assert not config.flags["do_layer_norm_before"] and config.flags["layer_norm_elementwise_affine"]


STABLELM = NUMBERS | {"architectures": ["StableLmForCausalLM"], "model_type": "stablelm", "num_key_value_heads": 2}


def test_classes_of_transformers_compute_other_architectures():
    config = ModelConfig.from_config(STABLELM)
    assert (config.model_impl, config.is_native, config.num_kv_heads, config.head_dim) == ("transformers", False, 2, 16)
    assert linear_sizes(config)["self_attn.k_proj"] == (64, 32)
    assert config.tied_embedding_name is None
    gpt2 = {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": 320}
    config = ModelConfig.from_config(gpt2 | {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"})
    assert (config.hidden_size, config.num_layers, config.num_heads, config.max_length) == (64, 4, 4, 128)
    assert config.tied_embedding_name == "transformer.wte.weight"
    llama = NUMBERS | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    assert ModelConfig.from_config(llama).is_native
    assert not ModelConfig.from_config(llama, "transformers").is_native


@pytest.mark.parametrize("name", ["Gemma3TextModel", "Gemma3TextForSequenceClassification", "Gemma3ForCausalLM"])
def test_names_of_text_models_with_other_heads_are_those_of_transformers(name):
    config = NUMBERS | {"architectures": [name], "model_type": "gemma3_text"}
    assert ModelConfig.from_config(config).architecture == "Gemma3ForCausalLM"
    with pytest.raises(ConfigError, match="use_bidirectional_attention: must be False"):
        ModelConfig.from_config(config | {"use_bidirectional_attention": True})
    with pytest.raises(ConfigError, match=f"'{name}' must be 'gemma3_text', got 'gemma3'; (save|correct one)"):
        ModelConfig.from_config(config | {"model_type": "gemma3"})


def test_windows_of_classes_of_transformers_come_from_layer_types():
    types = ["sliding_attention", "full_attention"] * 2
    config = ModelConfig.from_config(STABLELM | {"layer_types": types, "sliding_window": 24})
    assert config.sliding_windows == (24, None, 24, None)
    assert ModelConfig.from_config(STABLELM | {"sliding_window": 24}).sliding_windows == (None,) * 4


@pytest.mark.parametrize(
    ("config", "model_impl", "message"),
    [
        (STABLELM, "quire", "Quire has no class for it; model_impl transformers can serve this model, but more slowly"),
        (
            STABLELM | {"architectures": ["BloomForCausalLM"]},
            "auto",
            "'BloomForCausalLM' is not supported: Quire has no class for it, and no class of transformers can serve "
            "it: its attention does not call the attention functions of transformers",
        ),
        (
            STABLELM | {"architectures": ["XForCausalLM"]},
            "transformers",
            "'XForCausalLM' cannot be served with model_impl transformers: transformers 5.24 has no class of this name",
        ),
        (STABLELM | {"architectures": ["GPT2ForSequenceClassification"]}, "auto", "ForSequenceClassification does not"),
        (STABLELM | {"architectures": ["LlamaModel"]}, "transformers", "generate text .* ends in Model does not"),
        (STABLELM | {"architectures": ["XLMHeadModel"]}, "auto", "has no class of this name for generating text"),
        (STABLELM | {"architectures": ["T5ForConditionalGeneration"]}, "auto", "reads images, sound or a second text"),
        (
            NUMBERS | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "mish"},
            "auto",
            "hidden_act: must be one of .*, got 'mish'; model_impl transformers can serve this model",
        ),
        (
            NUMBERS | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"},
            "transformers",
            "some of its layers have states",
        ),
        (STABLELM | {"model_type": "llama"}, "auto", "must be 'stablelm', got 'llama'; correct one of them"),
        (STABLELM | {"hidden_size": None}, "auto", "hidden_size is missing"),
        (STABLELM | {"rope_parameters": {"rope_type": "dynamic"}}, "auto", "rope type dynamic is not supported with"),
        (STABLELM | {"quantization_config": {"quant_method": "awq"}}, "auto", r"the weights are quantized \('awq'\)"),
        (STABLELM | {"is_causal": False}, "auto", "is_causal: must be True .only causal attention"),
    ],
)
def test_what_classes_of_transformers_cannot_serve_is_refused(config, model_impl, message):
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_config(config, model_impl)


def test_classes_of_transformers_run_on_one_rank():
    shape = ModelConfig.from_config(STABLELM)
    with pytest.raises(
        ConfigError, match=r"tensor_parallel_size: 2 .* model_impl transformers runs on one rank; use 1"
    ):
        TensorParallelShard(shape, 0, 2).validate()
    with pytest.raises(ConfigError, match="eagle3 does not support model_impl transformers"):
        SpeculativeConfig("eagle3", 2, model="heads").check_target(shape)


INVALID_CONFIGS = {
    "encoder": (
        {"architectures": ["DebertaV2ForSequenceClassification"]},
        "is an encoder that is not served; use a decoder",
    ),
    "unknown architecture": ({"architectures": ["MambaForCausalLM"]}, "of its layers have states instead of keys"),
    "no architecture": ({"architectures": None}, "'none' is not supported"),
    "missing number": ({"hidden_size": ...}, "hidden_size is missing"),
    "text for a number": ({"hidden_size": "64"}, "hidden_size: must be a positive integer, got '64'"),
    "fraction": ({"num_hidden_layers": 4.5}, "num_hidden_layers: must be a positive integer, got 4.5"),
    "boolean for a number": ({"vocab_size": True}, "vocab_size: must be a positive integer, got True"),
    "too many layers": ({"num_hidden_layers": 10**12}, "num_hidden_layers: must be at most 4096, got 1000000000000"),
    "huge integer": ({"hidden_size": 10**400}, "hidden_size: must be at most 2147483647, got 1000"),
    "huge number": ({"rms_norm_eps": 10**400}, "rms_norm_eps: must be a positive number, got 1000"),
    "not a number": ({"rope_theta": float("nan")}, "rope_theta: must be a positive number, got nan"),
    "rope_theta of 1": ({"rope_theta": 1}, "rope_theta: must be more than 1, got 1.0"),
    "text for a flag": ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: must be true or false, got 'yes'"),
    "number for text": ({"torch_dtype": 16}, "torch_dtype: must be a string, got 16"),
    "unknown activation": ({"hidden_act": "mish"}, "hidden_act: must be one of silu, .*, got 'mish'"),
    "text for a token id": ({"eos_token_id": [1, "2"]}, "eos_token_id: must be a token id or a list of token ids, got"),
    "KV heads": ({"num_key_value_heads": 3}, "num_key_value_heads: must be a divisor of num_attention_heads 4, got 3"),
    "heads": ({"num_attention_heads": 5}, "num_attention_heads: must be a divisor of hidden_size 64 .*, got 5"),
    "odd head_dim": ({"head_dim": 15}, "must be an even number from 2 to head_dim 15, got 15"),
    "longrope with too few factors": (
        {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
        "short_factor: must be 8 numbers, one for each rotated pair, got",
    ),
    "longrope with text factors": (
        {"rope_scaling": {"type": "su", "short_factor": ["1"] * 8, "long_factor": [1.0] * 8}},
        "short_factor: must be a list of positive numbers, got",
    ),
    "longrope with original length 1": (
        {
            "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8, "factor": 2},
            "original_max_position_embeddings": 1,
        },
        "original_max_position_embeddings: must be more than 1, got 1",
    ),
    "attention that is not causal": ({"is_causal": False}, "is_causal: must be True .*, got False"),
    "bidirectional attention": (
        {"architectures": ["Gemma2ForCausalLM"], "use_bidirectional_attention": True},
        "use_bidirectional_attention: must be False .*, got True",
    ),
    "per-layer config": (
        {"per_layer_config": {"0": {"rms_norm_eps": 0.1}}},
        "per_layer_config: a separate configuration for each layer is not supported",
    ),
    "model_type of another architecture": (
        {"model_type": "mistral"},
        "model_type of architecture 'LlamaForCausalLM' must be 'llama', got 'mistral'",
    ),
    "partial rotary factor with scaling": (
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5},
        "partial_rotary_factor: must be 1 with rope scaling 'linear' .*, got 0.5",
    ),
    "quantized": (
        {"quantization_config": {"bits": 4}},
        "quantization_config: quant_method is missing",
    ),
    "text for rope scaling": ({"rope_scaling": "linear"}, "rope_scaling: expected an object, got 'linear'"),
    "unknown rope type": (
        {"rope_scaling": {"type": "ntk"}},
        "rope scaling 'ntk' is not supported; supported types are default",
    ),
    "rope scaling without factor": ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
    "rope frequency factors in wrong order": (
        {"rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 4, "high_freq_factor": 1}},
        "high_freq_factor: must be more than low_freq_factor 4.0, got 1.0",
    ),
    "rope per layer type": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "separate parameters per layer type are not supported",
    ),
    "another language model": (
        {"architectures": ["Mistral3ForConditionalGeneration"], "text_config": {"model_type": "llama"}},
        "text_config: model_type must be one of mistral, ministral3, got 'llama'",
    ),
    "rope for too few layers": (
        {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": [1, 1, 0]},
        r"no_rope_layers: must be a list of 0 or 1 for each layer, got \[1, 1, 0\]",
    ),
    "text for a list of integers": (
        {"architectures": ["SmolLM3ForCausalLM"], "no_rope_layers": ["1"] * 4},
        "no_rope_layers: must be a list of integers, got",
    ),
}


@pytest.mark.parametrize(("values", "message"), INVALID_CONFIGS.values(), ids=INVALID_CONFIGS.keys())
def test_error_names_the_key(values, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**values)


@pytest.mark.parametrize("kinds", [["full_attention"] * 3, ["chunked_attention"] * 4, "full_attention", [1, 2, 3, 4]])
def test_rejects_invalid_layer_types(kinds):
    with pytest.raises(ConfigError, match=r"layer_types: must be "):
        make_config("Qwen2ForCausalLM", num_key_value_heads=2, **QWEN_WINDOWS, layer_types=kinds)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "1" * 5000, "3", '{"architectures"'])
def test_rejects_file_without_json_object(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelConfig.load(tmp_path)


def test_load(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(NUMBERS | {"architectures": ["LlamaForCausalLM"]}))
    assert ModelConfig.load(tmp_path) == make_config()
