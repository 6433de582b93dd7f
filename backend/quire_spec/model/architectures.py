# SPDX-License-Identifier: Apache-2.0
"""Families: what the checkpoints of an architecture have in common, as data, so that the planner needs no model code.

One row an architecture. A row says how transformers reads that family's config.json where this is not how it reads
Llama's, and names the linears of a layer; the model's code is the row's module in quire_engine/models.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from quire_spec.model.hf_config import HFConfigReader

LLAMA_LINEARS = {
    "self_attn.q_proj": ("hidden", "q"),
    "self_attn.k_proj": ("hidden", "kv"),
    "self_attn.v_proj": ("hidden", "kv"),
    "self_attn.o_proj": ("q", "hidden"),
    "mlp.gate_proj": ("hidden", "inner"),
    "mlp.up_proj": ("hidden", "inner"),
    "mlp.down_proj": ("inner", "hidden"),
}
OPT_LINEARS = {
    "self_attn.q_proj": ("hidden", "q"),
    "self_attn.k_proj": ("hidden", "kv"),
    "self_attn.v_proj": ("hidden", "kv"),
    "self_attn.out_proj": ("q", "hidden"),
    "fc1": ("hidden", "inner"),
    "fc2": ("inner", "hidden"),
}
PHI3_LINEARS = {
    "self_attn.qkv_proj": ("hidden", "qkv"),
    "self_attn.o_proj": ("q", "hidden"),
    "mlp.gate_up_proj": ("hidden", "gate_up"),
    "mlp.down_proj": ("inner", "hidden"),
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table; what it leaves out is as in Llama."""

    module: str
    """Module of quire_engine/models that defines the model class, see `quire_engine.models.registry`."""

    linears: Mapping[str, tuple[str, str]] = field(default_factory=lambda: LLAMA_LINEARS)
    """Each linear of a layer by its path there: size of its input and output, see `sizing.linears`. Adapters can
    change all of them."""

    layers_path: str = "model.layers"
    """Path of the layers in a checkpoint."""

    key_aliases: Mapping[str, str] = field(default_factory=dict)
    """Llama's keys of config.json that have another name here."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that this family has beside Llama's, or with other defaults, and what transformers takes
    where they are absent."""

    ignored_keys: tuple[str, ...] = ()
    """Llama's keys of config.json that mean nothing here."""

    biases: tuple[bool | str, bool | str, bool | str] = (False, False, False)
    """On q, k and v; on the output of attention; in the MLP: yes, no, or the flag that says."""

    uses_sliding_window: Callable[[HFConfigReader, int], bool] | None = None
    """Whether attention of a layer is limited to `sliding_window`; None: never, whatever config.json says."""

    learned_position_offset: int | None = None
    """Positions are learnt and not rotary, and the table has this many rows before the one of the first token."""

    flags: tuple[str, ...] = ()
    """Switches of config.json that only this family's model code knows, all of them in `defaults`."""


def _is_sliding_always(config: HFConfigReader, index: int) -> bool:
    return True


def _is_sliding_unless_listed(config: HFConfigReader, index: int) -> bool:
    is_sliding = _is_sliding_by_layer_types(config, index)
    return True if is_sliding is None else is_sliding


def _is_sliding_by_layer_types(config: HFConfigReader, index: int) -> bool | None:
    """What `layer_types` says, as transformers writes it since 4.54; None: it is not there."""
    if "layer_types" not in config:
        return None
    layer_types = config.get_str_list("layer_types")
    if index >= len(layer_types) or layer_types[index] not in ("full_attention", "sliding_attention"):
        raise config.error("layer_types", list(layer_types), "full_attention or sliding_attention for each layer")
    return layer_types[index] == "sliding_attention"


def _is_sliding_upper_layer(config: HFConfigReader, index: int) -> bool:
    if not config.get_bool("use_sliding_window"):
        return False
    is_sliding = _is_sliding_by_layer_types(config, index)
    return index >= config.get_int("max_window_layers", minimum=0) if is_sliding is None else is_sliding


def _is_sliding_even_layer(config: HFConfigReader, index: int) -> bool:
    is_sliding = _is_sliding_by_layer_types(config, index)
    return index % 2 == 0 if is_sliding is None else is_sliding


ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", biases=("attention_bias", "attention_bias", "mlp_bias")),
    "MistralForCausalLM": Architecture(
        "llama",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        uses_sliding_window=_is_sliding_unless_listed,
    ),
    "Qwen2ForCausalLM": Architecture(
        "llama",
        defaults={
            "num_key_value_heads": 32,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        biases=(True, False, False),
        uses_sliding_window=_is_sliding_upper_layer,
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        defaults={
            "num_key_value_heads": 32,
            "head_dim": 128,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
        },
        biases=("attention_bias", "attention_bias", False),
        uses_sliding_window=_is_sliding_upper_layer,
    ),
    "OPTForCausalLM": Architecture(
        "opt",
        linears=OPT_LINEARS,
        layers_path="model.decoder.layers",
        key_aliases={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        ignored_keys=("num_key_value_heads", "head_dim", "rms_norm_eps"),
        defaults={
            "activation_function": "relu",
            "enable_bias": True,
            "tie_word_embeddings": True,
            "rms_norm_eps": 1e-5,
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "layer_norm_elementwise_affine": True,
        },
        biases=("enable_bias", "enable_bias", "enable_bias"),
        learned_position_offset=2,
        flags=("do_layer_norm_before", "_remove_final_layer_norm", "layer_norm_elementwise_affine"),
    ),
    "Phi3ForCausalLM": Architecture(
        "phi3",
        linears=PHI3_LINEARS,
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096},
        uses_sliding_window=_is_sliding_always,
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2",
        key_aliases={"hidden_act": "hidden_activation"},
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "query_pre_attn_scalar": 256,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        biases=("attention_bias", "attention_bias", False),
        uses_sliding_window=_is_sliding_even_layer,
    ),
}
"""By the name that config.json gives in `architectures`."""
