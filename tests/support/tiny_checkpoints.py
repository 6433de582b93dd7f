# SPDX-License-Identifier: Apache-2.0
"""Tiny random checkpoints of each family, and adapters for them, written by transformers and peft themselves."""

import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from support.tokenizer import byte_level, save_tokenizer
from transformers import (
    ApertusConfig,
    ArceeConfig,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BioGptConfig,
    Cohere2Config,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    Ernie4_5_MoeConfig,
    Ernie4_5Config,
    Exaone4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3Config,
    Gemma3TextConfig,
    Gemma4Config,
    Gemma4TextConfig,
    Gemma4UnifiedConfig,
    Gemma4UnifiedTextConfig,
    GemmaConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    GraniteConfig,
    GraniteMoeConfig,
    GraniteMoeHybridConfig,
    HunYuanDenseV1Config,
    HunYuanMoEV1Config,
    Kimi_K25Config,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4Config,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Ministral3Config,
    Mistral3Config,
    Mistral4Config,
    Mistral4ForCausalLM,
    MistralConfig,
    MixtralConfig,
    NemotronConfig,
    NemotronHConfig,
    Olmo2Config,
    Olmo3Config,
    OlmoeConfig,
    OPTConfig,
    PersimmonConfig,
    Phi3Config,
    PhiConfig,
    Qwen2_5_VLConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen2VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
    Qwen3VLConfig,
    SeedOssConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    VaultGemmaConfig,
)
from transformers.models.internlm3.configuration_internlm3 import InternLM3Config

VOCAB = 320
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    # Not in the vocabulary, so that outputs have any length. Without an entry, the tokenizer's token would be used.
    "eos_token_id": 1_000_000,
    # Wide enough that the likeliest token leads by more than rounding can take away.
    "initializer_range": 0.3,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 64,
}
LLAMA_LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 30,
    "attention_factor": 1.2,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.4],
    "long_factor": [1.0, 2.0, 3.5, 5.0, 8.0, 12.0],
}
QWEN_WINDOWS = {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1}
QWEN3_MOE = {"head_dim": 24, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48}
# One layer in four has attention, with rotary positions in a part of each head.
HYBRID = {
    # Each layer divides small outputs by their norm, which amplifies errors of float32 less with a larger epsilon.
    "rms_norm_eps": 1e-2,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
}
HYBRID_MOE = {
    **HYBRID,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 40,
}
QWEN3_5_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "depth": 1,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
LFM2 = {
    "pad_token_id": 0,
    "norm_eps": 1e-5,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention", "conv", "conv"],
}
# One layer in four has attention.
MAMBA2 = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_head": 32,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
FALCON_H1 = {
    "pad_token_id": 0,
    "mamba_d_ssm": 96,
    "mamba_n_heads": 4,
    "mamba_d_head": 24,
    "mamba_n_groups": 1,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
    "lm_head_multiplier": 0.6,
    "embedding_multiplier": 1.7,
    "mlp_multipliers": [0.8, 0.5],
    "key_multiplier": 0.7,
    "attention_out_multiplier": 0.6,
    "attention_in_multiplier": 1.2,
    "ssm_multipliers": [0.7, 1.3, 0.8, 1.2, 0.9],
    "ssm_in_multiplier": 1.4,
    "ssm_out_multiplier": 0.5,
}
NEMOTRON_H = {
    "pad_token_id": 0,
    "layers_block_type": ["linear_attention", "moe", "full_attention", "moe", "mlp", "linear_attention"],
    "head_dim": 24,
    "mamba_num_heads": 4,
    "mamba_head_dim": 24,
    "n_groups": 2,
    "ssm_state_size": 16,
    "chunk_size": 16,
    "time_step_min": 0.5,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 40,
    "routed_scaling_factor": 1.7,
    "n_group": 2,
    "topk_group": 1,
    "rescale_prenorm_residual": False,
}
GPT_OSS = {
    "head_dim": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    # Low enough to clamp what these weights make.
    "swiglu_limit": 2.0,
    "rope_parameters": YARN_ROPE | {"truncate": False},
}
OPT = {"ffn_dim": 128, "pad_token_id": 1}
PHI3 = {"pad_token_id": 0}
GEMMA2 = {
    "head_dim": 24,
    "num_hidden_layers": 4,
    "sliding_window": 16,
    "query_pre_attn_scalar": 20,
    # Low enough to bend what these weights make.
    "attn_logit_softcapping": 4.0,
    "final_logit_softcapping": 60.0,
    "pad_token_id": 0,
}
GEMMA3 = {
    **GEMMA2,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
}
GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 5,
    "sliding_window": 16,
    "pad_token_id": 0,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
# E2B has embeddings of layers and shared keys. 31B has layers without v, whose keys are smaller.
GEMMA4_E2B = {
    **GEMMA4,
    "num_key_value_heads": 1,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size_per_layer_input": 12,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
}
GEMMA4_31B = {
    **GEMMA4,
    "num_key_value_heads": 4,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "final_logit_softcapping": 60.0,
}
DEEPSEEK = {
    "q_lora_rank": 24,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "attention_bias": True,
    "rope_parameters": {**YARN_ROPE, "mscale": 1.0, "mscale_all_dim": 0.7},
}
LATENT_EXPERTS = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
KIMI_LINEAR = {
    "rms_norm_eps": 1e-2,  # as in HYBRID
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_token": 3,
    "moe_intermediate_size": 48,
    "num_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "num_expert_group": 4,
    "topk_group": 2,
    "pad_token_id": 0,
}
GLM4 = {"head_dim": 24, "pad_token_id": 0, "eos_token_id": [], "num_key_value_heads": 2}
GRANITE = {
    "attention_multiplier": 0.1,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
# Prompts and outputs of the tests are up to four times as long as the first context.
MINISTRAL3_ROPE = {**YARN_ROPE, "original_max_position_embeddings": 24, "llama_4_scaling_beta": 0.4}
MISTRAL4 = {"rope_parameters": {**DEEPSEEK["rope_parameters"], **MINISTRAL3_ROPE}, "first_k_dense_replace": 0}
COHERE2 = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.2}
EXAONE4 = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
OLMO3 = {
    "rope_parameters": {
        "full_attention": {**YARN_ROPE, "rope_theta": 500000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}
GRANITE4 = {
    **GRANITE,
    "num_local_experts": 0,
    "layer_types": ["full_attention"] * 2,
    "shared_intermediate_size": 80,
    "position_embedding_type": "rope",
}
GLM4_MOE = {
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "n_group": 4,
    "topk_group": 2,
    "use_qk_norm": True,
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
}
LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 24,
    "intermediate_size": 48,
    "intermediate_size_mlp": 112,
    "num_local_experts": 5,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "no_rope_layer_interval": 3,
    # Shorter than prompts, so that they have several chunks.
    "attention_chunk_size": 24,
    "floor_scale": 8,
    "attn_scale": 0.5,
    "rope_parameters": {**LLAMA3_ROPE},
    "pad_token_id": 0,
}
ERNIE_MOE = {
    "num_hidden_layers": 3,
    "moe_num_experts": 6,
    "moe_k": 3,
    "moe_intermediate_size": 48,
    "moe_num_shared_experts": 2,
}
QWEN2_MOE = {"num_experts": 6, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 64}
NTK_ALPHA_ROPE = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 50.0}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "embed_dim": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
}


GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "patch_size": 4,
    "position_embedding_size": 20,
    "use_clipped_linears": True,
    "standardize": True,
}
GEMMA4_AUDIO = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "subsampling_conv_channels": [4, 4],
    "output_proj_dims": 16,
}


def _gemma3_with_vision(**values: Any) -> Gemma3Config:
    text = Gemma3TextConfig(**values).to_dict()
    return Gemma3Config(text_config=text, vision_config=VISION | {"model_type": "siglip_vision_model"})


def _gemma4(kind: type, text_kind: type, has_images: bool = False, **values: Any) -> Any:
    parts: dict[str, Any] = {"vision_config": None, "audio_config": None}
    if has_images:
        # The sound is not used, but published checkpoints contain its parts.
        parts = {"vision_config": GEMMA4_VISION, "audio_config": GEMMA4_AUDIO}
        if kind is Gemma4UnifiedConfig:
            sizes = {"mm_embed_dim": 20, "mm_posemb_size": 12, "output_proj_dims": 20}
            parts = {"vision_config": {"patch_size": 4, **sizes}, "audio_config": {"audio_embed_dim": 8}}
    return kind(text_config=text_kind(**values).to_dict(), **parts)


def _llama4(**values: Any) -> Llama4Config:
    vision = VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    return Llama4Config(text_config=Llama4TextConfig(**values).to_dict(), vision_config=vision)


def _mistral3(text_type: type, **values: Any) -> Mistral3Config:
    text, vision = text_type(**values).to_dict(), VISION | {"model_type": "pixtral"}
    return Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=text["tie_word_embeddings"])


def _kimi_k25(**values: Any) -> Kimi_K25Config:
    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = DeepseekV3Config(**values).to_dict()
    tied = text["tie_word_embeddings"]
    return Kimi_K25Config(text_config=text, vision_config=vision, projection_hidden_size=32, tie_word_embeddings=tied)


def _qwen_vl(kind: type, **values: Any) -> Any:
    tokens = {f"{name}_token_id": VOCAB + i for i, name in enumerate(("image", "video", "vision_start", "vision_end"))}
    return kind(text_config=values, vision_config=QWEN_VISION, **tokens)


def _qwen3_5(config_type: type, text_type: type, **values: Any) -> Any:
    text = text_type(**values).to_dict()
    return config_type(text_config=text, vision_config=QWEN3_5_VISION, tie_word_embeddings=text["tie_word_embeddings"])


CHECKPOINTS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-head_dim": (LlamaConfig, {"head_dim": 32, "num_hidden_layers": 3, "tie_word_embeddings": True}),
    "llama-biases": (LlamaConfig, {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 4}),
    "llama-llama3": (LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear": (
        LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0}, "num_key_value_heads": 1},
    ),
    "llama-dynamic": (LlamaConfig, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1000.0, "factor": 4.0}}),
    "llama-yarn": (LlamaConfig, {"rope_parameters": YARN_ROPE}),
    "llama-relu": (LlamaConfig, {"hidden_act": "relu"}),
    "llama-longrope": (LlamaConfig, {"rope_parameters": LLAMA_LONG_ROPE}),
    "mistral": (MistralConfig, {"sliding_window": 24, "head_dim": 24}),
    "mistral-unlimited": (MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True, "num_hidden_layers": 3}),
    "qwen2-untied": (Qwen2Config, {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96}),
    "qwen2-windows": (Qwen2Config, {**QWEN_WINDOWS, "num_hidden_layers": 3}),
    "qwen3": (Qwen3Config, {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-windows": (Qwen3Config, {**QWEN_WINDOWS, "num_hidden_layers": 3, "attention_bias": True}),
    "qwen3_moe": (Qwen3MoeConfig, {**QWEN3_MOE, "norm_topk_prob": True}),
    "qwen3_moe-mixed": (
        Qwen3MoeConfig,
        {**QWEN3_MOE, **QWEN_WINDOWS, "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    ),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "tie_word_embeddings": True, "sliding_window": 24}),
    "gpt_oss": (GptOssConfig, GPT_OSS),
    "opt": (OPTConfig, OPT),
    "opt-350m": (OPTConfig, {**OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 48}),
    "opt-galactica": (
        OPTConfig,
        {
            **OPT,
            "activation_function": "gelu",
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
            "tie_word_embeddings": False,
        },
    ),
    "opt-old": (OPTConfig, {**OPT, "_remove_final_layer_norm": True, "initializer_range": 0.15}),
    "phi3": (Phi3Config, {**PHI3, "num_key_value_heads": 4, "sliding_window": 40}),
    "phi3-longrope": (Phi3Config, {**PHI3, "original_max_position_embeddings": 48, "rope_parameters": LONG_ROPE}),
    "phi4": (Phi3Config, {**PHI3, "num_attention_heads": 8, "num_key_value_heads": 2, "sliding_window": None}),
    "phi3-partial": (Phi3Config, {**PHI3, "tie_word_embeddings": True, "rope_parameters": PARTIAL_ROPE}),
    "gemma2": (Gemma2Config, GEMMA2),
    "gemma2-uncapped": (
        Gemma2Config,
        {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None, "tie_word_embeddings": False},
    ),
    "gemma3": (Gemma3TextConfig, GEMMA3),
    "gemma4": (Gemma4TextConfig, GEMMA4_E2B),
    "gemma4-moe": (
        Gemma4TextConfig,
        {
            **(GEMMA4_31B | {"hidden_size_per_layer_input": 0, "layer_types": GEMMA4["layer_types"][:2] * 2}),
            "num_hidden_layers": 4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 3,
            "moe_intermediate_size": 48,
        },
    ),
    "gemma4-multimodal": (
        functools.partial(_gemma4, Gemma4Config, Gemma4TextConfig),
        {**GEMMA4_31B, "hidden_size_per_layer_input": 0},
    ),
    "gemma4-vision": (
        functools.partial(_gemma4, Gemma4Config, Gemma4TextConfig, True),
        {**GEMMA4_31B, "hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"},
    ),
    # Its images are causal, and have the layers' embeddings of the padding token.
    "gemma4-e2b-vision": (
        functools.partial(_gemma4, Gemma4Config, Gemma4TextConfig, True),
        {**GEMMA4_E2B, "pad_token_id": 5},
    ),
    "gemma4_unified-vision": (
        functools.partial(_gemma4, Gemma4UnifiedConfig, Gemma4UnifiedTextConfig, True),
        {**GEMMA4_31B, "sliding_window": 10},
    ),
    "gemma4_unified": (Gemma4UnifiedTextConfig, GEMMA4_31B),
    "gemma4_unified-multimodal": (
        functools.partial(_gemma4, Gemma4UnifiedConfig, Gemma4UnifiedTextConfig),
        GEMMA4_31B,
    ),
    "deepseek_v2": (
        DeepseekV2Config,
        {**DEEPSEEK, **LATENT_EXPERTS, "topk_method": "group_limited_greedy", "q_lora_rank": None},
    ),
    "deepseek_v2-lite": (
        DeepseekV2Config,
        {**DEEPSEEK, **LATENT_EXPERTS, "n_group": None, "topk_group": None, "rope_parameters": LLAMA3_ROPE},
    ),
    "deepseek_v3": (DeepseekV3Config, {**DEEPSEEK, **LATENT_EXPERTS}),
    "glm4_moe_lite": (
        Glm4MoeLiteConfig,
        {**DEEPSEEK, **LATENT_EXPERTS, "mlp_layer_types": ["dense", "sparse", "sparse"], "rope_interleave": False},
    ),
    "mistral4": (Mistral4Config, {**DEEPSEEK, **LATENT_EXPERTS, **MISTRAL4}),
    "mistral3-mistral4": (functools.partial(_mistral3, Mistral4Config), {**DEEPSEEK, **LATENT_EXPERTS, **MISTRAL4}),
    "kimi_linear": (KimiLinearConfig, KIMI_LINEAR),
    "kimi_k25": (_kimi_k25, {**DEEPSEEK, **LATENT_EXPERTS}),
    "glm4": (Glm4Config, GLM4),
    "granite": (GraniteConfig, {**GRANITE, "tie_word_embeddings": True}),
    "ministral3": (Ministral3Config, {"head_dim": 24, "rope_parameters": MINISTRAL3_ROPE}),
    "gemma3-vision": (_gemma3_with_vision, GEMMA3),
    "mistral3": (functools.partial(_mistral3, MistralConfig), {"sliding_window": None, "head_dim": 24}),
    "mistral3-ministral3": (
        functools.partial(_mistral3, Ministral3Config),
        {"rope_parameters": MINISTRAL3_ROPE, "head_dim": 24, "tie_word_embeddings": True},
    ),
    "gemma": (GemmaConfig, {"head_dim": 24, "pad_token_id": 0}),
    "olmo2": (Olmo2Config, {"attention_bias": True, "pad_token_id": 0}),
    "olmo3": (Olmo3Config, {**OLMO3, "pad_token_id": 0}),
    "seed_oss": (SeedOssConfig, {"head_dim": 24, "attention_out_bias": True, "pad_token_id": 0}),
    "exaone4": (Exaone4Config, EXAONE4),
    "exaone4-unlimited": (Exaone4Config, {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "apertus": (ApertusConfig, {"pad_token_id": 0, "rope_parameters": LLAMA3_ROPE}),
    "hunyuan": (HunYuanDenseV1Config, {"head_dim": 24, "rope_parameters": NTK_ALPHA_ROPE, "tie_word_embeddings": True}),
    "ernie4_5": (Ernie4_5Config, {"head_dim": 24, "use_bias": True}),
    "internlm3": (InternLM3Config, {"head_dim": 24, "pad_token_id": 0}),
    "glm": (GlmConfig, GLM4),
    "cohere2": (Cohere2Config, COHERE2),
    "phi": (PhiConfig, {}),
    "phi-qk_layernorm": (PhiConfig, {"qk_layernorm": True, "tie_word_embeddings": True}),
    "starcoder2": (Starcoder2Config, {"sliding_window": 24}),
    "gpt_neox": (GPTNeoXConfig, {}),
    "gpt_neox-sequential": (GPTNeoXConfig, {"use_parallel_residual": False, "attention_bias": False}),
    "granite4": (GraniteMoeHybridConfig, GRANITE4),
    "nemotron": (NemotronConfig, {"head_dim": 24, "mlp_bias": True}),
    "arcee": (ArceeConfig, {"head_dim": 24, "attention_bias": True}),
    "glm4_moe": (Glm4MoeConfig, GLM4_MOE),
    "glm4_moe-ungrouped": (
        Glm4MoeConfig,
        {
            **GLM4_MOE,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "attention_bias": True,
            "use_qk_norm": False,
        },
    ),
    "llama4": (Llama4TextConfig, LLAMA4),
    "llama4-multimodal": (
        _llama4,
        {
            **LLAMA4,
            "num_hidden_layers": 2,
            "no_rope_layer_interval": 2,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": False,
        },
    ),
    "minimax_m2": (
        MiniMaxM2Config,
        {"head_dim": 24, "num_local_experts": 6, "num_experts_per_tok": 3, "rope_parameters": PARTIAL_ROPE},
    ),
    "ernie4_5_moe": (Ernie4_5_MoeConfig, ERNIE_MOE),
    "hunyuan_moe": (HunYuanMoEV1Config, {"head_dim": 24, "num_experts": 6, "moe_topk": 3}),
    "qwen2_moe": (Qwen2MoeConfig, {**QWEN2_MOE, "num_hidden_layers": 3, "mlp_only_layers": [1]}),
    "olmoe": (OlmoeConfig, {"num_experts": 6, "num_experts_per_tok": 3, "pad_token_id": 0}),
    "qwen2_vl": (functools.partial(_qwen_vl, Qwen2VLConfig), {"rope_parameters": MROPE}),
    "qwen2_5_vl": (functools.partial(_qwen_vl, Qwen2_5_VLConfig), {"rope_parameters": MROPE}),
    "qwen3_vl": (functools.partial(_qwen_vl, Qwen3VLConfig), {"rope_parameters": MROPE, "head_dim": 16}),
    "qwen3_next": (Qwen3NextConfig, {**HYBRID_MOE, "mlp_only_layers": [1]}),
    "qwen3_5": (Qwen3_5TextConfig, {**HYBRID, "tie_word_embeddings": True, "linear_num_key_heads": 4}),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, {**HYBRID_MOE, "layer_types": None}),
    "qwen3_5-vision": (functools.partial(_qwen3_5, Qwen3_5Config, Qwen3_5TextConfig), HYBRID),
    "qwen3_5_moe-vision": (
        functools.partial(_qwen3_5, Qwen3_5MoeConfig, Qwen3_5MoeTextConfig),
        {**HYBRID_MOE, "num_experts": 8},
    ),
    "granite4-mamba": (
        GraniteMoeHybridConfig,
        {**GRANITE, **MAMBA2, "tie_word_embeddings": True, "num_local_experts": 0},
    ),
    "granite4-moe": (
        GraniteMoeHybridConfig,
        {
            **(GRANITE | MAMBA2),
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 80,
            "intermediate_size": 48,
            "position_embedding_type": "rope",
        },
    ),
    "falcon_h1": (FalconH1Config, FALCON_H1),
    "falcon_h1-norm": (
        FalconH1Config,
        {
            **FALCON_H1,
            "mamba_rms_norm": True,
            "mamba_n_groups": 2,
            "projectors_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "nemotron_h": (NemotronHConfig, NEMOTRON_H),
    "nemotron_h-latent": (
        NemotronHConfig,
        {
            **NEMOTRON_H,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "moe_latent_size": 32,
            "use_bias": True,
            "mlp_bias": True,
            "use_conv_bias": False,
            "n_groups": 1,
        },
    ),
    "lfm2": (Lfm2Config, {**LFM2, "block_ffn_dim_multiplier": 1.1, "block_multiple_of": 16}),
    "lfm2-biases": (Lfm2Config, {**LFM2, "block_auto_adjust_ff_dim": False, "conv_bias": True, "conv_L_cache": 4}),
    "lfm2_moe": (
        Lfm2MoeConfig,
        {**LFM2, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "num_dense_layers": 1},
    ),
    "smollm3": (SmolLM3Config, {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "pad_token_id": 0}),
}
"""One row per family and per shape that takes another path."""
TRANSFORMERS_CHECKPOINTS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "stablelm": (StableLmConfig, {"use_qkv_bias": True, "qk_layernorm": True}),
    "persimmon": (PersimmonConfig, {}),
    "cohere": (CohereConfig, {"use_qk_norm": True, "pad_token_id": 0}),
    "vaultgemma": (
        VaultGemmaConfig,
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 24}
        | {"query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 20.0},
    ),
    "granitemoe": (
        GraniteMoeConfig,
        {"num_local_experts": 8, "num_experts_per_tok": 2, "attention_multiplier": 0.3, "embedding_multiplier": 3.0}
        | {"residual_multiplier": 0.8, "logits_scaling": 4.0},
    ),
    "gpt2": (GPT2Config, {}),
    "biogpt": (BioGptConfig, {}),
}
"""The same for models that classes of transformers compute, because there is no class of Quire."""


# transformers has the class, but its table lacks it.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)


def make_checkpoint(folder: Path, name: str, **save: Any) -> Path:
    """Write checkpoint `name` into `folder`; `save` goes to transformers' save_pretrained."""
    kind, overrides = (CHECKPOINTS | TRANSFORMERS_CHECKPOINTS)[name]
    return write_checkpoint(folder, kind(**(BASE | overrides)), sum(map(ord, name)), **save)


def write_checkpoint(folder: Path, config: Any, seed: int, **save: Any) -> Path:
    """Write a random checkpoint of a config of transformers into `folder`; `save` goes to its save_pretrained."""
    model = make_initial_model(config, seed)
    with torch.no_grad():
        for name, tensor in trained_tensors(model).items():
            # transformers starts biases at 0, norms at 1 and others at fixed values, where a mistake would not show.
            if tensor.dim() < 2 or len(tensor.unique()) == 1:
                # Sinks must be as large as the scores of attention, and this bias as large as those of experts.
                scales = {"sinks": 20.0, "e_score_correction_bias": 1.0, "expert_bias": 1.0, "D": 2.0}
                tensor.add_(torch.randn_like(tensor) * scales.get(name.rpartition(".")[2], 0.3))
            if name.endswith("act_fn.eps"):
                tensor.sub_(2.0)  # it replaces negative inputs above it
            if name.endswith("A_log"):
                # Otherwise, most states forget all tokens before the last one.
                tensor.sub_(3.0)
    model.save_pretrained(folder, **save)
    # transformers also renames other modules of the same name. The published checkpoints have these names.
    published = {
        "kimi_k25": (r"model\.blocks\.", "model.layers."),
        "kimi_linear": (r"block_sparse_moe\.(?=\w+_proj)", "mlp."),
    }
    if config.model_type in published:
        tensors = load_file(folder / "model.safetensors")
        renamed = {re.sub(*published[config.model_type], name): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_initial_model(config: Any, seed: int) -> Any:
    """The model of a config of transformers, as training would start."""
    torch.manual_seed(seed)
    return _auto_class(config).from_config(config, dtype=torch.float32).eval()


def trained_tensors(model: Any) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a model of transformers, without the parts for images."""
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if tensor.is_floating_point() and not re.search(r"vision|visual|multi_modal|mm_projector|audio", name)
    }
    # A tied output projection is the embedding.
    return {name: tensors[name] for name in {tensor.data_ptr(): name for name, tensor in tensors.items()}.values()}


def load_oracle(folder: Path, dtype: torch.dtype = torch.float32, **load: Any) -> Any:
    """The checkpoint in transformers, on the CPU; `load` goes to its from_pretrained."""
    model = _auto_class(AutoConfig.from_pretrained(folder)).from_pretrained(folder, dtype=dtype, **load).eval()
    # transformers 5.24 cannot run Llama 4 with its vision tower on a prompt without images.
    return model.language_model if model.config.model_type == "llama4" else model


def _auto_class(config: Any) -> Any:
    return AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM


def make_adapter(checkpoint: Path, folder: Path, seed: int = 0, **config: Any) -> Path:
    """Write an adapter with random A and B into `folder`; `config` goes to peft's LoraConfig."""
    torch.manual_seed(seed)
    defaults = {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return save_random_adapter(load_oracle(checkpoint), LoraConfig(**(defaults | config)), folder)


def save_random_adapter(model: Any, config: LoraConfig, folder: Path) -> Path:
    """Write an adapter of `model` whose every trained parameter is random."""
    with library_warnings_ignored():
        adapted = get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name or "lora_embedding_A" in name:  # what PEFT starts at 0
                    parameter.copy_(torch.randn_like(parameter) * 0.1)
                elif "trainable_tokens_delta" in name or "modules_to_save" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
                elif "lora_magnitude_vector" in name:
                    parameter.mul_(1 + torch.randn_like(parameter) * 0.3)
                elif name.endswith("bias") and parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
        adapted.save_pretrained(folder)
    return folder


def load_adapted_oracle(checkpoint: Path, adapter: Path) -> Any:
    """An adapter on its checkpoint in peft, not merged."""
    with library_warnings_ignored():
        return PeftModel.from_pretrained(load_oracle(checkpoint), adapter).eval()


def load_summed_oracle(checkpoint: Path, adapters: Mapping[str, Path], parts: Sequence[tuple[str, float]]) -> Any:
    """A weighted sum of adapters on their checkpoint in peft, not merged."""
    with library_warnings_ignored():
        names = [name for name, _ in parts]
        model = PeftModel.from_pretrained(load_oracle(checkpoint), adapters[names[0]], adapter_name=names[0])
        for name in names[1:]:
            model.load_adapter(adapters[name], name)
        model.add_weighted_adapter(names, [weight for _, weight in parts], "default", combination_type="cat")
        model.set_adapter("default")
        return model.eval()


def make_llama(folder: Path, seed: int = 0, tokenizer: bool = True, max_positions: int = 2048) -> Path:
    """Write a Llama checkpoint into `folder`, float32, 384 tokens, none of which ends an output."""
    config = LlamaConfig(**(BASE | {"vocab_size": 384, "max_position_embeddings": max_positions}))
    write_checkpoint(folder, config, seed)
    return save_tokenizer(byte_level(), folder) if tokenizer else folder


def make_llama_adapter(model: Path, folder: Path, seed: int) -> Path:
    """A random PEFT adapter that changes the output."""
    return make_adapter(model, folder, seed, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"])


def greedy_output(folder: Path, prompt: list[int], max_tokens: int) -> list[int]:
    """What transformers generates, without sampling."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
    return output[0, len(prompt) :].tolist()


@contextmanager
def library_warnings_ignored() -> Iterator[None]:
    """peft calls what transformers deprecates, and advises trainers; neither is ours to change."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        # PEFT adds a pattern for fused experts, and reports that nothing matches it.
        warnings.filterwarnings(
            "ignore", "The following (rank|alpha)_pattern keys did not match.*gate_up_proj", RuntimeWarning
        )
        yield
