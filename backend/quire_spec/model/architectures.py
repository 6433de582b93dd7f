# SPDX-License-Identifier: Apache-2.0
"""Table of the supported architectures.

The table contains only data, so that the planner can read it without loading the code of the models.

A row describes the linears of a layer. It also describes which keys of config.json have another meaning than in Llama.
These differences are taken from transformers. Each row names a module of quire_engine/models, which contains the model
code.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
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
GLM4_LINEARS = {
    "self_attn.q_proj": ("hidden", "q"),
    "self_attn.k_proj": ("hidden", "kv"),
    "self_attn.v_proj": ("hidden", "kv"),
    "self_attn.o_proj": ("q", "hidden"),
    "mlp.gate_up_proj": ("hidden", "gate_up"),
    "mlp.down_proj": ("inner", "hidden"),
}
GATED_ATTENTION_LINEARS = {
    **LLAMA_LINEARS,
    # The features of each head are followed by those of its output gate.
    "self_attn.q_proj": ("hidden", "q_gate"),
}
QWEN3_NEXT_LINEARS = {
    **GATED_ATTENTION_LINEARS,
    "linear_attn.in_proj_qkvz": ("hidden", "state_qkvz"),
    "linear_attn.in_proj_ba": ("hidden", "state_head_pairs"),
    "linear_attn.out_proj": ("state_values", "hidden"),
}
QWEN3_5_LINEARS = {
    **GATED_ATTENTION_LINEARS,
    "linear_attn.in_proj_qkv": ("hidden", "state_qkv"),
    "linear_attn.in_proj_z": ("hidden", "state_values"),
    "linear_attn.in_proj_b": ("hidden", "state_heads"),
    "linear_attn.in_proj_a": ("hidden", "state_heads"),
    "linear_attn.out_proj": ("state_values", "hidden"),
}


def _mamba2_linears(path: str) -> dict[str, tuple[str, str]]:
    """Return the linears of Mamba-2 at a path in the layer."""
    return {f"{path}.in_proj": ("hidden", "state_gate_xbc_dt"), f"{path}.out_proj": ("state_values", "hidden")}


def _shared_linears(path: str) -> dict[str, tuple[str, str]]:
    """Return the linears of shared experts at a path in the layer."""
    return {
        f"{path}.gate_proj": ("hidden", "shared_inner"),
        f"{path}.up_proj": ("hidden", "shared_inner"),
        f"{path}.down_proj": ("shared_inner", "hidden"),
    }


SHARED_EXPERT_LINEARS = {
    **_shared_linears("mlp.shared_expert"),
    "mlp.shared_expert_gate": ("hidden", "one"),
}


WHOLE_PATH_LINEARS = frozenset(
    (
        *("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense"),
        *("intermediate.dense", "output.dense", "attn.Wqkv", "attn.Wo", "mlp.Wi", "mlp.Wo"),
        *("attention.q_lin", "attention.k_lin", "attention.v_lin", "attention.out_lin", "ffn.lin1", "ffn.lin2"),
        *(f"attention.attn.{name}" for name in "qkvo"),
    )
)
"""Linears of encoders. The whole path identifies them, because several linears of a layer can end in the same name."""


def module_name(path: str) -> str:
    """Return the name that identifies a linear, a router or a projection of experts among those of a layer. It is the
    path within attention, MLP or experts. The linears of shared experts have the names of those of an MLP, so their
    names contain that of the shared experts."""
    if path in WHOLE_PATH_LINEARS or path.startswith(("experts.", "router.")):
        return path
    return path.partition(".")[2] or path


GEMMA4_LINEARS = {
    **LLAMA_LINEARS,
    "per_layer_input_gate": ("hidden", "per_layer"),
    "per_layer_projection": ("per_layer", "hidden"),
}
LFM2_LINEARS = {
    "self_attn.q_proj": ("hidden", "q"),
    "self_attn.k_proj": ("hidden", "kv"),
    "self_attn.v_proj": ("hidden", "kv"),
    "self_attn.out_proj": ("q", "hidden"),
    "conv.in_proj": ("hidden", "state_gates_and_input"),
    "conv.out_proj": ("state_values", "hidden"),
    "feed_forward.w1": ("hidden", "inner"),
    "feed_forward.w3": ("hidden", "inner"),
    "feed_forward.w2": ("inner", "hidden"),
}
LATENT_LINEARS = {
    "self_attn.q_proj": ("hidden", "q"),
    "self_attn.q_a_proj": ("hidden", "query_latent"),
    "self_attn.q_b_proj": ("query_latent", "q"),
    "self_attn.kv_a_proj_with_mqa": ("hidden", "latent_row"),
    "self_attn.kv_b_proj": ("kv_latent", "keys_and_values"),
    "self_attn.o_proj": ("values", "hidden"),
    "mlp.gate_proj": ("hidden", "inner"),
    "mlp.up_proj": ("hidden", "inner"),
    "mlp.down_proj": ("inner", "hidden"),
    **_shared_linears("mlp.shared_experts"),
}
KIMI_LINEAR_LINEARS = {
    **LATENT_LINEARS,
    # Kimi Delta Attention also has q_proj and o_proj; see Architecture.state_linears.
    "self_attn.k_proj": ("hidden", "state_values"),
    "self_attn.v_proj": ("hidden", "state_values"),
    "self_attn.b_proj": ("hidden", "state_heads"),
    "self_attn.forget_gate.f_a_proj": ("hidden", "state_gate_latent"),
    "self_attn.forget_gate.f_b_proj": ("state_gate_latent", "state_values"),
    "self_attn.g_a_proj": ("hidden", "state_gate_latent"),
    "self_attn.g_b_proj": ("state_gate_latent", "state_values"),
}
_IGNORED_BY_LATENT_ATTENTION = ("num_key_value_heads", "head_dim", "partial_rotary_factor")
UNSHARDED_KINDS = (
    "hidden",
    "per_layer",
    "query_latent",
    "latent_row",
    "kv_latent",
    "expert_latent",
    "state_gate_latent",
)
"""Kinds of features that every tensor-parallel rank has."""
_GEMMA4_DEFAULTS = {
    "vocab_size": 262144,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "global_head_dim": 512,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 256,
    "enable_moe_block": False,
    "moe_intermediate_size": None,
    "vocab_size_per_layer_input": 262144,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 512,
    "attention_multiplier": 1.0,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
    "rope_local_base_freq": 10000.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
    },
}


APERTUS_LINEARS = {path: kinds for path, kinds in LLAMA_LINEARS.items() if path != "mlp.gate_proj"}
PHI_LINEARS = {
    "self_attn.q_proj": ("hidden", "q"),
    "self_attn.k_proj": ("hidden", "kv"),
    "self_attn.v_proj": ("hidden", "kv"),
    "self_attn.dense": ("q", "hidden"),
    "mlp.fc1": ("hidden", "inner"),
    "mlp.fc2": ("inner", "hidden"),
}
STARCODER2_LINEARS = {
    "self_attn.q_proj": ("hidden", "q"),
    "self_attn.k_proj": ("hidden", "kv"),
    "self_attn.v_proj": ("hidden", "kv"),
    "self_attn.o_proj": ("q", "hidden"),
    "mlp.c_fc": ("hidden", "inner"),
    "mlp.c_proj": ("inner", "hidden"),
}
GPT_NEOX_LINEARS = {
    "attention.query_key_value": ("hidden", "qkv_by_head"),
    "attention.dense": ("q", "hidden"),
    "mlp.dense_h_to_4h": ("hidden", "inner"),
    "mlp.dense_4h_to_h": ("inner", "hidden"),
}
FALCON_H1_LINEARS = {
    **{path: kinds for path, kinds in LLAMA_LINEARS.items() if path.startswith("self_attn.")},
    **_mamba2_linears("mamba"),
    "feed_forward.gate_proj": ("hidden", "inner"),
    "feed_forward.up_proj": ("hidden", "inner"),
    "feed_forward.down_proj": ("inner", "hidden"),
}
NEMOTRON_H_LINEARS = {
    "mixer.q_proj": ("hidden", "q"),
    "mixer.k_proj": ("hidden", "kv"),
    "mixer.v_proj": ("hidden", "kv"),
    "mixer.o_proj": ("q", "hidden"),
    **_mamba2_linears("mixer"),
    "mixer.up_proj": ("hidden", "inner"),
    "mixer.down_proj": ("inner", "hidden"),
    "mixer.fc1_latent_proj": ("hidden", "expert_latent"),
    "mixer.fc2_latent_proj": ("expert_latent", "hidden"),
    "mixer.shared_experts.up_proj": ("hidden", "shared_inner"),
    "mixer.shared_experts.down_proj": ("shared_inner", "hidden"),
}
GRANITE_HYBRID_LINEARS = {
    "self_attn.q_proj": ("hidden", "q"),
    "self_attn.k_proj": ("hidden", "kv"),
    "self_attn.v_proj": ("hidden", "kv"),
    "self_attn.o_proj": ("q", "hidden"),
    "shared_mlp.input_linear": ("hidden", "gate_up"),
    "shared_mlp.output_linear": ("inner", "hidden"),
    **_mamba2_linears("mamba"),
}


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """Names of a mixture of experts within a layer."""

    router: str = "gate"
    """Path of the router in transformers 5 and PEFT, and in checkpoints if `router_in_checkpoints` is empty."""
    router_in_checkpoints: str = ""
    block: str = "mlp"
    """Path of the mixture in checkpoints."""
    module: str = "mlp"
    """Path of the mixture in transformers 5 and PEFT. They call it `mlp` in most architectures. Empty: the router and
    the experts are parts of the layer."""
    projections: tuple[str, ...] | None = ("gate_proj", "up_proj", "down_proj")
    """Gate, up and down in checkpoints and adapters that have tensors for each expert; only up and down if experts have
    no gate. None: only tensors for all experts together exist."""
    alternates: bool = False
    """Whether the output features of gate and up alternate. Otherwise, up follows gate."""
    correction_bias: str = ""
    """Path of the bias that is added to the router's scores to choose experts. Empty: there is none."""
    shared: str = ""
    """Path of the shared experts, which compute every token. Empty: there are none."""
    is_beside_mlp: bool = False
    """Whether a layer has both an MLP and the mixture, whose outputs are added."""
    shared_gate: str = ""
    """Path of the linear layer whose sigmoid multiplies the output of the shared experts. Empty: there is none."""
    has_exchanged_matrices: bool = False
    """Whether A and B of an adapter of the experts have exchanged sizes in PEFT, because the weights of the experts are
    transposed: B A is then the transposed change."""
    latent_projections: tuple[str, ...] = ()
    """Paths of the linear layers before and after the experts, if MoEConfig.latent_size is not 0."""

    @property
    def is_gated(self) -> bool:
        """Whether the experts have a gate."""
        return self.projections is None or len(self.projections) == 3

    @property
    def adapted_projections(self) -> dict[str, tuple[str, ...]]:
        """The parameters of all experts by path in the mixture in transformers 5, each with its names in adapters with
        tensors for each expert (see `projections`). No names: there are no such adapters."""
        names = () if self.projections is None or self.has_exchanged_matrices else self.projections
        return {f"experts.{'gate_up' if self.is_gated else 'up'}_proj": names[:-1], "experts.down_proj": names[-1:]}

    def path_of(self, name: str) -> str:
        """Return the path of a part of the mixture within a layer, in transformers 5 and PEFT."""
        return f"{self.module}.{name}" if self.module else name


@dataclass(frozen=True, slots=True)
class MTPNames:
    """Names of the tensors of a layer that predicts a further token (MTP). The defaults are those of DeepSeek V3."""

    path: str = ""
    """Path of the tensors in a checkpoint. Empty: it is the path of the layer after the last one."""
    embedding_norm: str = "enorm"
    hidden_norm: str = "hnorm"
    projection: str = "eh_proj"
    output_norm: str = "shared_head.norm"
    layer: str = ""
    """Path of the decoder layer below `path`. Empty: its tensors are directly below `path`."""


_QWEN_MTP = MTPNames("mtp", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm", "layers.0")
_GEMMA4_EXPERTS = ExpertNames(router="router.proj", block="", module="", projections=None, is_beside_mlp=True)
GATED_SHARED_EXPERT = ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate")


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the table. The default values of the fields describe Llama."""

    model_type: str
    """The value of `model_type` in config.json. transformers uses it to select the model."""

    module: str
    """The module of quire_engine/models that defines the model class; see `quire_engine.models.registry`."""

    linears: Mapping[str, tuple[str, str]] = field(default_factory=lambda: LLAMA_LINEARS)
    """Maps the path of each linear in a layer to the kinds of its input and output features; see
    `memory_sizing.linear_sizes`. An adapter can change every linear of this table."""

    state_linears: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """The kinds of features that some linears of `linears` have in layers with a state, if they differ there."""

    paths_in_checkpoints: Mapping[str, str] = field(default_factory=dict)
    """Maps the beginnings of the paths of some linears to those that checkpoints have. `linears` contains the paths of
    transformers 5 and PEFT."""

    layers_path: str = "model.layers"
    """The names of the layers' tensors in a checkpoint begin with this path."""

    inner_path: str = ""
    """Path of the inner model, which contains the embedding. Empty: it is the module that contains the layers."""

    key_aliases: Mapping[str, str] = field(default_factory=dict)
    """Some keys of Llama's config.json have another name in this architecture. Maps Llama's name of such a key to that
    other name."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Default values that transformers uses for keys of config.json.

    The table contains only keys that Llama does not have, or for which Llama has another default.
    """

    ignored_keys: tuple[str, ...] = ()
    """Keys that have a meaning in Llama's config.json but are ignored for this architecture."""

    biases: tuple[bool | str, bool | str, bool | str] = (False, False, False)
    """Whether linears have biases.

    The first value applies to q, k and v, the second to the output projection of attention, and the third to the MLP.
    If a value is a string, it names the key of config.json that contains the value.
    """

    uses_sliding_window: Callable[[HFConfigReader, int], bool] | None = None
    """A function that returns True if a layer uses sliding-window attention. If it is None, no layer has a sliding
    window, even if config.json sets `sliding_window`."""

    learned_position_offset: int | None = None
    """Number of rows that the table of learned positions has before position 0. None: positions are rotary."""

    uses_rope: Callable[[HFConfigReader, int], bool] | None = None
    """A function that returns True if a layer has rotary positions. If it is None, all layers have rotary positions,
    unless positions are learned."""

    rope_aliases: Mapping[str, str] = field(default_factory=dict)
    """Some rope types in config.json have another meaning in this architecture. Maps the name of such a type to the
    rope type that it means."""

    has_attention_chunks: Callable[[HFConfigReader, int], bool] | None = None
    """A function that returns True if the tokens of a layer attend only to tokens of the same chunk of
    `attention_chunk_size` tokens. If it is None, no layer has chunks."""

    local_rope_theta: str | None = None
    """Key of config.json that contains the rope base of the layers with a sliding window. None: all layers have the
    same base."""

    has_layer_variants: bool = False
    """Whether layers differ in their heads, their MLP and their inputs; see LayerVariants."""

    has_latent_attention: bool = False
    """Whether layers have latent attention; see LatentAttentionConfig."""

    text_types: tuple[str, ...] = ()
    """For a multimodal architecture: the values that `model_type` in `text_config` can have. The row with this model
    type describes the language model; ImageConfig describes how it reads images."""

    row_by_text_type: Mapping[str, str] = field(default_factory=dict)
    """Other values of `model_type` in `text_config`, and the row that replaces this one."""

    mrope_section: tuple[int, ...] = ()
    """For a language model with a time, a row and a column as positions: the default number of pairs of rotated
    elements of each. Empty: a token has one position."""

    mrope_interleaved: bool = False
    """Whether pairs of the three positions alternate."""

    flags: tuple[str, ...] = ()
    """Boolean keys of config.json that are used only by the model code of this architecture. `defaults` contains each
    of them."""

    factors: tuple[str, ...] = ()
    """Numeric keys of config.json that are used only by the model code of this architecture. Their values must be
    positive, and `defaults` has a value for each key."""

    factor_lists: Mapping[str, int] = field(default_factory=dict)
    """Keys like those of `factors` whose values are lists, with the length of each list. null stands for factors of 1.
    """

    has_single_blocks: bool = False
    """Whether a layer is only attention, a part with a state, an MLP or experts."""

    activations: tuple[str, ...] = ()
    """Names of activation functions that this architecture supports besides capabilities.ACTIVATIONS."""

    activation_aliases: Mapping[str, str] = field(default_factory=dict)
    """Some activation functions have another meaning in this architecture. Maps the name in config.json to the name of
    the function that it means."""

    required: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Keys of config.json of which only one value is supported. Maps a key to this value, and to the name of the
    feature that other values need. null is the same as this value."""

    saved_as: str = ""
    """transformers writes the name of this architecture for a model of this type. Empty: the key of the row."""

    embedding: str = "embed_tokens"
    """The name of the embedding in a checkpoint."""

    unused_prefixes: tuple[str, ...] = ()
    """Tensors of a checkpoint whose names begin with these texts belong to parts that the layers do not need."""

    has_lm_head_bias: bool = False
    """Whether the output projection has a bias."""

    uses_experts: Callable[[HFConfigReader, int], bool] | None = None
    """A function that returns True if a layer has a mixture of experts instead of an MLP; see MoEConfig. If it is None,
    no layer has experts."""

    expert_names: ExpertNames = ExpertNames()
    """Names of the experts, if layers have them."""

    uses_state: Callable[[HFConfigReader, int], bool] | None = None
    """A function that returns True if a layer has a state; see StateConfig. If it is None, no layer has a state."""

    uses_attention: Callable[[HFConfigReader, int], bool] | None = None
    """A function that returns True if a layer has attention. If it is None, all layers without a state have it."""

    state_kind: str = "gated_delta_net"
    """The kind of the layers with a state: "gated_delta_net", "kimi_delta", "short_conv" or "mamba2"."""

    translate: Callable[[HFConfigReader], Mapping[str, Any]] | None = None
    """A function that computes keys of config.json with the meaning of Llama's from other keys. If it is None, there
    are none."""

    mtp_names: MTPNames | None = None
    """Names of the layer that predicts a further token, if num_nextn_predict_layers of ModelConfig is not 0. None: such
    layers are not supported."""

    router_scoring: str = "softmax"
    """The function that computes the scores of experts: "softmax" or "sigmoid"."""

    has_float32_router: bool = False
    """If True, routers have float32 weights and logits in any dtype of the model, as in transformers."""

    @property
    def parent_path(self) -> str:
        """Path of the inner model, with a dot at its end."""
        return f"{self.inner_path or self.layers_path.rpartition('.')[0]}."

    def checkpoint_path(self, path: str) -> str:
        """Return the path that checkpoints have for a linear in a layer."""
        for start, other in self.paths_in_checkpoints.items():
            if path.startswith(start):
                return other + path.removeprefix(start)
        return path


def _always(config: HFConfigReader, index: int) -> bool:
    return True


def _is_sliding_unless_listed(config: HFConfigReader, index: int) -> bool:
    is_sliding = _is_sliding_by_layer_types(config, index)
    return True if is_sliding is None else is_sliding


def _is_sliding_by_layer_types(config: HFConfigReader, index: int) -> bool | None:
    """Read `layer_types` from config.json. Return None if it is absent, because only transformers 4.54 or later writes
    it."""
    if "layer_types" not in config:
        return None
    layer_types = config.get_str_list("layer_types")
    if index >= len(layer_types) or layer_types[index] not in ("full_attention", "sliding_attention"):
        raise config.error("layer_types", list(layer_types), "full_attention or sliding_attention for each layer")
    return layer_types[index] == "sliding_attention"


def _is_sliding_if_enabled(config: HFConfigReader, index: int) -> bool:
    return config.get_bool("use_sliding_window")


def _is_sliding_upper_layer(config: HFConfigReader, index: int) -> bool:
    if not config.get_bool("use_sliding_window"):
        return False
    is_sliding = _is_sliding_by_layer_types(config, index)
    return index >= config.get_int("max_window_layers", minimum=0) if is_sliding is None else is_sliding


def _is_sliding_even_lower_layer(config: HFConfigReader, index: int) -> bool:
    if not config.get_bool("use_sliding_window"):
        return False
    is_sliding = _is_sliding_by_layer_types(config, index)
    is_lower = index < config.get_int("max_window_layers", minimum=0)
    return index % 2 == 0 and is_lower if is_sliding is None else is_sliding


def _is_sliding_even_layer(config: HFConfigReader, index: int) -> bool:
    is_sliding = _is_sliding_by_layer_types(config, index)
    return index % 2 == 0 if is_sliding is None else is_sliding


def _is_sliding_by_pattern(config: HFConfigReader, index: int) -> bool:
    is_sliding = _is_sliding_by_layer_types(config, index)
    return (index + 1) % config.get_int("sliding_window_pattern") != 0 if is_sliding is None else is_sliding


def _uses_rope_in_window(config: HFConfigReader, index: int) -> bool:
    return "sliding_window" in config and _is_sliding_by_pattern(config, index)


def _uses_rope_unless_hybrid(config: HFConfigReader, index: int) -> bool:
    return "sliding_window" not in config or _is_sliding_by_pattern(config, index)


def _uses_rope_of_granite_hybrid(config: HFConfigReader, index: int) -> bool:
    return config.get_raw("position_embedding_type") == "rope"


def _uses_rope_never(config: HFConfigReader, index: int) -> bool:
    return False


def _is_sliding_unless_sixth_or_last(config: HFConfigReader, index: int) -> bool:
    is_sliding = _is_sliding_by_layer_types(config, index)
    is_last = index + 1 == config.get_int("num_hidden_layers")
    return not is_last and ((index + 1) % 6 != 0 if is_sliding is None else is_sliding)


def _uses_rope_unless_listed(config: HFConfigReader, index: int) -> bool:
    """Read `no_rope_layers`. It is a list with a number for each layer; 1 means that the layer has rotary positions."""
    if "no_rope_layers" not in config:
        return (index + 1) % config.get_int("no_rope_layer_interval") != 0
    layers = config.get_int_list("no_rope_layers")
    if index >= len(layers):
        raise config.error("no_rope_layers", list(layers), "a list of 0 or 1 for each layer")
    return layers[index] != 0


def _is_sliding_without_rope(config: HFConfigReader, index: int) -> bool:
    if not config.get_bool("use_sliding_window"):
        return False
    is_sliding = _is_sliding_by_layer_types(config, index)
    return not _uses_rope_unless_listed(config, index) if is_sliding is None else is_sliding


def _uses_experts_if_any(config: HFConfigReader, index: int) -> bool:
    return config.get_int("num_local_experts", minimum=0) > 0


def _uses_experts_unless_listed(config: HFConfigReader, index: int) -> bool:
    if "mlp_only_layers" in config and index in config.get_int_list("mlp_only_layers"):
        return False
    return (index + 1) % config.get_int("decoder_sparse_step") == 0


def _uses_experts_after_dense(config: HFConfigReader, index: int) -> bool:
    return index >= config.get_int("first_k_dense_replace", minimum=0)


def _uses_experts_if_enabled(config: HFConfigReader, index: int) -> bool:
    return config.get_bool("enable_moe_block")


def _uses_experts_by_mlp_type(config: HFConfigReader, index: int) -> bool:
    if "mlp_layer_types" not in config:
        return index > 0
    types = config.get_str_list("mlp_layer_types")
    if index >= len(types) or types[index] not in ("dense", "sparse"):
        raise config.error("mlp_layer_types", list(types), "dense or sparse for each layer")
    return types[index] == "sparse"


def _uses_experts_of_kimi_linear(config: HFConfigReader, index: int) -> bool:
    uses_experts = _uses_experts_by_mlp_type if "mlp_layer_types" in config else _uses_experts_after_dense
    return uses_experts(config, index)


def _uses_experts_of_llama4(config: HFConfigReader, index: int) -> bool:
    if "moe_layers" in config:
        return index in config.get_int_list("moe_layers")
    return (index + 1) % config.get_int("interleave_moe_layer_step") == 0


def _has_chunks_of_llama4(config: HFConfigReader, index: int) -> bool:
    if "layer_types" not in config:
        return _uses_rope_unless_listed(config, index)
    layer_types = config.get_str_list("layer_types")
    if index >= len(layer_types) or layer_types[index] not in ("full_attention", "chunked_attention"):
        raise config.error("layer_types", list(layer_types), "full_attention or chunked_attention for each layer")
    return layer_types[index] == "chunked_attention"


def _uses_experts_in_range(config: HFConfigReader, index: int) -> bool:
    last = config.get_raw("moe_layer_end_index")
    if type(last) is not int:
        raise config.error("moe_layer_end_index", last, "the index of a layer, or -1 for the last layer")
    is_inside = config.get_int("moe_layer_start_index", minimum=0) <= index and (last == -1 or index <= last)
    return is_inside and (index + 1) % config.get_int("moe_layer_interval") == 0


def _is_listed_as(kind: str) -> Callable[[HFConfigReader, int], bool]:
    """Return a function that returns True if `layer_types` contains `kind` for a layer."""

    def is_listed(config: HFConfigReader, index: int) -> bool:
        layer_types = config.get_str_list("layer_types")
        if index >= len(layer_types):
            raise config.error("layer_types", list(layer_types), "a list with an item for each layer")
        return _LAYER_TYPES.get(layer_types[index], layer_types[index]) == kind

    return is_listed


_LAYER_TYPES = {
    "mamba": "linear_attention",
    "attention": "full_attention",
    # Characters of hybrid_override_pattern
    "M": "linear_attention",
    "*": "full_attention",
    "E": "moe",
    "-": "mlp",
}
"""Names of kinds of layers in earlier checkpoints of hybrid models, with their names in transformers 5."""


def _translate_granite_hybrid(config: HFConfigReader) -> dict[str, Any]:
    """Rename the kinds of layers."""
    if "layer_types" not in config:
        return {"layer_types": ["linear_attention"] * config.get_int("num_hidden_layers")}
    layer_types = [_LAYER_TYPES.get(name, name) for name in config.get_str_list("layer_types")]
    if not {*layer_types} <= {"linear_attention", "full_attention"}:
        raise config.error("layer_types", layer_types, "linear_attention (Mamba-2) or full_attention for each layer")
    return {"layer_types": layer_types}


def _translate_nemotron_h(config: HFConfigReader) -> dict[str, Any]:
    """List the layers, and rename the settings of Mamba-2 as in Granite 4."""
    key = next((key for key in ("layers_block_type", "layer_types") if key in config), "hybrid_override_pattern")
    names = list(config.get_str(key)) if key == "hybrid_override_pattern" else config.get_str_list(key)
    layer_types = [_LAYER_TYPES.get(name, name) for name in names]
    if not {*layer_types} <= {"linear_attention", "full_attention", "mlp", "moe"}:
        raise config.error(key, list(names), "linear_attention, full_attention, mlp or moe for each layer")
    num_heads, head_dim = config.get_int("mamba_num_heads"), config.get_int("mamba_head_dim")
    values = {
        "layer_types": layer_types,
        "num_hidden_layers": len(layer_types),
        "mamba_n_heads": num_heads,
        "mamba_d_head": head_dim,
        "mamba_d_ssm": num_heads * head_dim,
        "mamba_d_state": config.get_int("ssm_state_size"),
        "mamba_proj_bias": config.get_bool("use_bias"),
        "projectors_bias": config.get_bool("use_bias"),
        # transformers reads the lower limit from another key than time_step_limit.
        "time_step_limit": [config.get_raw("mamba_dt_min") or config.get_raw("time_step_min"), float("inf")],
    }
    names_of = {"mamba_n_groups": "n_groups", "mamba_d_conv": "conv_kernel", "mamba_conv_bias": "use_conv_bias"}
    return values | {key: config.get_raw(key if key in config else other) for key, other in names_of.items()}


def _translate_kimi_linear(config: HFConfigReader) -> dict[str, Any]:
    """List the layers, and name the settings of Kimi Delta Attention as in Gated DeltaNet. Published checkpoints have
    them in an object of their own, in which layers are counted from 1."""
    published, num_layers = config.get_section("linear_attn_config"), config.get_int("num_hidden_layers")
    num_heads = published.get_int("num_heads", config.get_int("linear_num_heads"))
    head_dim = published.get_int("head_dim", config.get_int("linear_head_dim"))
    kernel_size = published.get_int("short_conv_kernel_size", config.get_int("linear_conv_kernel_dim"))
    values = {
        **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), num_heads),
        **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), head_dim),
        "linear_conv_kernel_dim": kernel_size,
    }
    if "layer_types" in config:
        return values
    # As in transformers, every fourth layer after the first one has attention by default.
    attention = [index + 1 for index in range(4, num_layers, 4)]
    if "full_attn_layers" in published and "kda_layers" in published:
        attention = list(published.get_int_list("full_attn_layers"))
        listed = sorted((*attention, *published.get_int_list("kda_layers")))
        if listed != list(range(1, num_layers + 1)):
            raise config.error(
                "linear_attn_config", listed, "each layer, counted from 1, in either full_attn_layers or kda_layers"
            )
    types = ("full_attention" if index + 1 in attention else "linear_attention" for index in range(num_layers))
    return {**values, "layer_types": list(types)}


def _translate_llama4(config: HFConfigReader) -> dict[str, Any]:
    """Rename the sizes, and read a switch that some checkpoints have as a number."""
    return {
        "intermediate_size": config.get_int("intermediate_size_mlp"),
        "moe_intermediate_size": config.get_int("intermediate_size"),
        "attn_temperature_tuning": bool(config.get_raw("attn_temperature_tuning")),
    }


def _translate_lfm2(config: HFConfigReader) -> dict[str, Any]:
    """Compute the size of the MLP as transformers does, and list the layers."""
    size = config.get_int("block_ff_dim" if "block_ff_dim" in config else "intermediate_size")
    if config.get_bool("block_auto_adjust_ff_dim"):
        size = int(config.get_float("block_ffn_dim_multiplier") * (2 * size // 3))
        multiple = config.get_int("block_multiple_of")
        size = -(-size // multiple) * multiple
    return {"intermediate_size": size, **_translate_lfm2_layers(config)}


def _translate_lfm2_layers(config: HFConfigReader) -> dict[str, Any]:
    """List the layers, as early checkpoints have only the indices of those with attention."""
    num_layers = config.get_int("num_hidden_layers")
    if "layer_types" in config:
        layer_types = config.get_str_list("layer_types")
        if len(layer_types) < num_layers or not {*layer_types} <= {"conv", "full_attention"}:
            raise config.error("layer_types", list(layer_types), "conv or full_attention for each layer")
        return {}
    attention = config.get_int_list("full_attn_idxs") if "full_attn_idxs" in config else range(num_layers)
    return {"layer_types": ["full_attention" if index in attention else "conv" for index in range(num_layers)]}


def _uses_experts_after_dense_layers(config: HFConfigReader, index: int) -> bool:
    return index >= config.get_int("num_dense_layers", minimum=0)


def _uses_state_unless_interval(config: HFConfigReader, index: int) -> bool:
    """Read `layer_types`, or `full_attention_interval` if it is absent."""
    if "layer_types" not in config:
        return (index + 1) % config.get_int("full_attention_interval") != 0
    layer_types = config.get_str_list("layer_types")
    if index >= len(layer_types) or layer_types[index] not in ("full_attention", "linear_attention"):
        raise config.error("layer_types", list(layer_types), "full_attention or linear_attention for each layer")
    return layer_types[index] == "linear_attention"


_GATED_DELTA_NET_DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_QWEN3_5 = Architecture(
    "qwen3_5_text",
    "hybrid.qwen3_next",
    linears=QWEN3_5_LINEARS,
    defaults={**_GATED_DELTA_NET_DEFAULTS, "num_key_value_heads": 4},
    biases=("attention_bias", "attention_bias", False),
    uses_state=_uses_state_unless_interval,
    rope_aliases={"mrope": "default"},
    mrope_section=(11, 11, 10),
    mrope_interleaved=True,
    key_aliases={"num_nextn_predict_layers": "mtp_num_hidden_layers"},
    mtp_names=_QWEN_MTP,
)
_QWEN3_5_MOE = replace(
    _QWEN3_5,
    model_type="qwen3_5_moe_text",
    linears={**QWEN3_5_LINEARS, **SHARED_EXPERT_LINEARS},
    defaults={
        **_GATED_DELTA_NET_DEFAULTS,
        "num_key_value_heads": 2,
        # No layer has an MLP.
        "intermediate_size": 512,
        "num_local_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
    },
    uses_experts=_always,
    expert_names=GATED_SHARED_EXPERT,
)


_FALCON_H1_FACTORS = (
    *("embedding_multiplier", "lm_head_multiplier", "key_multiplier", "attention_in_multiplier"),
    *("attention_out_multiplier", "ssm_in_multiplier", "ssm_out_multiplier"),
)
_LFM2 = Architecture(
    "lfm2",
    "hybrid.lfm2",
    linears=LFM2_LINEARS,
    key_aliases={"rms_norm_eps": "norm_eps", "tie_word_embeddings": "tie_embedding"},
    defaults={
        "intermediate_size": 12288,
        "num_key_value_heads": 8,
        "max_position_embeddings": 128000,
        "rope_theta": 1000000.0,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "conv_bias": False,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_ffn_dim_multiplier": 1.0,
        "block_auto_adjust_ff_dim": True,
    },
    uses_state=_is_listed_as("conv"),
    state_kind="short_conv",
    translate=_translate_lfm2,
)


_LLAMA4 = Architecture(
    "llama4_text",
    "moe.llama4",
    linears={
        **{path: kinds for path, kinds in LLAMA_LINEARS.items() if path.startswith("self_attn.")},
        "feed_forward.gate_proj": ("hidden", "inner"),
        "feed_forward.up_proj": ("hidden", "inner"),
        "feed_forward.down_proj": ("inner", "hidden"),
        **_shared_linears("feed_forward.shared_expert"),
    },
    defaults={
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "intermediate_size": 8192,
        "intermediate_size_mlp": 16384,
        "moe_intermediate_size": 8192,
        "n_shared_experts": 1,
        "num_local_experts": 16,
        "num_experts_per_tok": 1,
        "norm_topk_prob": False,
        "interleave_moe_layer_step": 1,
        "no_rope_layer_interval": 4,
        "attention_chunk_size": 8192,
        "use_qk_norm": True,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "attn_scale": 0.1,
    },
    biases=("attention_bias", "attention_bias", False),
    translate=_translate_llama4,
    uses_rope=_uses_rope_unless_listed,
    has_attention_chunks=_has_chunks_of_llama4,
    flags=("use_qk_norm", "attn_temperature_tuning"),
    factors=("floor_scale", "attn_scale"),
    uses_experts=_uses_experts_of_llama4,
    expert_names=ExpertNames(
        router="router",
        block="feed_forward",
        module="feed_forward",
        shared="shared_expert",
        has_exchanged_matrices=True,
    ),
    router_scoring="sigmoid",
)
_DEEPSEEK_V3 = Architecture(
    "deepseek_v3",
    "moe.deepseek",
    linears=LATENT_LINEARS,
    key_aliases={"num_experts": "n_routed_experts"},
    ignored_keys=_IGNORED_BY_LATENT_ATTENTION,
    defaults={
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
    },
    biases=("attention_bias", "attention_bias", False),
    uses_experts=_uses_experts_after_dense,
    expert_names=ExpertNames(correction_bias="gate.e_score_correction_bias", shared="shared_experts"),
    router_scoring="sigmoid",
    has_float32_router=True,
    has_latent_attention=True,
    mtp_names=MTPNames(),
)
_MISTRAL4 = replace(
    _DEEPSEEK_V3,
    model_type="mistral4",
    defaults={
        "num_experts": 128,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 0,
    },
    expert_names=ExpertNames(shared="shared_experts"),
    router_scoring="softmax",
    has_float32_router=False,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": Architecture("llama", "llama", biases=("attention_bias", "attention_bias", "mlp_bias")),
    "MistralForCausalLM": Architecture(
        "mistral",
        "llama",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        uses_sliding_window=_is_sliding_unless_listed,
    ),
    "Qwen2ForCausalLM": Architecture(
        "qwen2",
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
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        "qwen3",
        defaults={
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
        },
        biases=("attention_bias", "attention_bias", False),
        uses_sliding_window=_is_sliding_if_enabled,
        uses_experts=_uses_experts_unless_listed,
    ),
    "MixtralForCausalLM": Architecture(
        "mixtral",
        "llama",
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1000000.0,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        uses_sliding_window=_always,
        uses_experts=_always,
        expert_names=ExpertNames(block="block_sparse_moe", projections=("w1", "w3", "w2")),
    ),
    "GptOssForCausalLM": Architecture(
        "gpt_oss",
        "gpt_oss",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "sliding_window": 128,
            "rope_theta": 150000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "original_max_position_embeddings": 4096,
                "truncate": False,
            },
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        biases=("attention_bias", "attention_bias", False),
        uses_sliding_window=_is_sliding_even_layer,
        uses_experts=_always,
        expert_names=ExpertNames(router="router", projections=None, alternates=True),
        factors=("swiglu_alpha", "swiglu_limit"),
    ),
    "OPTForCausalLM": Architecture(
        "opt",
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
        "phi3",
        linears=PHI3_LINEARS,
        defaults={"rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 4096},
        uses_sliding_window=_always,
        # Early Phi-3 checkpoints use the name yarn for longrope.
        rope_aliases={"yarn": "longrope"},
    ),
    "Gemma2ForCausalLM": Architecture(
        "gemma2",
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
    "Gemma3ForCausalLM": Architecture(
        "gemma3_text",
        "gemma3",
        key_aliases={"hidden_act": "hidden_activation"},
        defaults={
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "num_attention_heads": 8,
            "head_dim": 256,
            "num_key_value_heads": 4,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 4096,
            "sliding_window_pattern": 6,
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": None,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "tie_word_embeddings": True,
        },
        biases=("attention_bias", "attention_bias", False),
        uses_sliding_window=_is_sliding_by_pattern,
        local_rope_theta="rope_local_base_freq",
    ),
    "Gemma3ForConditionalGeneration": Architecture(
        "gemma3", "gemma3", layers_path="model.language_model.layers", text_types=("gemma3_text",)
    ),
    "Gemma4ForCausalLM": Architecture(
        "gemma4_text",
        "gemma4",
        linears=GEMMA4_LINEARS,
        key_aliases={"hidden_act": "hidden_activation", "num_experts_per_tok": "top_k_experts"},
        defaults=_GEMMA4_DEFAULTS,
        biases=("attention_bias", "attention_bias", False),
        uses_sliding_window=_is_sliding_unless_sixth_or_last,
        local_rope_theta="rope_local_base_freq",
        uses_experts=_uses_experts_if_enabled,
        expert_names=_GEMMA4_EXPERTS,
        has_layer_variants=True,
    ),
    "Gemma4ForConditionalGeneration": Architecture(
        "gemma4",
        "gemma4",
        layers_path="model.language_model.layers",
        linears=GEMMA4_LINEARS,
        expert_names=_GEMMA4_EXPERTS,
        text_types=("gemma4_text",),
    ),
    "Gemma4UnifiedForCausalLM": Architecture(
        "gemma4_unified_text",
        "gemma4",
        linears=GEMMA4_LINEARS,
        key_aliases={"hidden_act": "hidden_activation"},
        defaults={
            **_GEMMA4_DEFAULTS,
            "max_position_embeddings": 262144,
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
        },
        biases=("attention_bias", "attention_bias", False),
        uses_sliding_window=_is_sliding_unless_sixth_or_last,
        local_rope_theta="rope_local_base_freq",
        has_layer_variants=True,
    ),
    "Gemma4UnifiedForConditionalGeneration": Architecture(
        "gemma4_unified",
        "gemma4",
        layers_path="model.language_model.layers",
        linears=GEMMA4_LINEARS,
        text_types=("gemma4_unified_text",),
    ),
    "Glm4ForCausalLM": Architecture(
        "glm4",
        "glm4",
        linears=GLM4_LINEARS,
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        biases=("attention_bias", False, False),
    ),
    "GraniteForCausalLM": Architecture(
        "granite",
        "granite",
        defaults={
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
        },
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        factors=("embedding_multiplier", "residual_multiplier", "logits_scaling"),
    ),
    "Ministral3ForCausalLM": Architecture(
        "ministral3",
        "ministral3",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1000000.0,
                "factor": 16.0,
                "original_max_position_embeddings": 16384,
                "mscale_all_dim": 1.0,
                "mscale": 1.0,
                "llama_4_scaling_beta": 0.1,
            },
        },
        uses_sliding_window=_always,
    ),
    "Mistral3ForConditionalGeneration": Architecture(
        "mistral3",
        "ministral3",
        layers_path="model.language_model.layers",
        text_types=("mistral", "ministral3"),
        row_by_text_type={"mistral4": "Mistral4ForConditionalGeneration"},
    ),
    "SmolLM3ForCausalLM": Architecture(
        "smollm3",
        "llama",
        defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2000000.0,
            "use_sliding_window": False,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        uses_sliding_window=_is_sliding_without_rope,
        uses_rope=_uses_rope_unless_listed,
    ),
    "GemmaForCausalLM": Architecture(
        "gemma",
        "dense.gemma",
        defaults={
            "head_dim": 256,
            "num_key_value_heads": 16,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        biases=("attention_bias", "attention_bias", False),
        activation_aliases={"gelu": "gelu_pytorch_tanh"},
    ),
    "Olmo2ForCausalLM": Architecture(
        "olmo2",
        "dense.olmo",
        defaults={"rms_norm_eps": 1e-5},
        biases=("attention_bias", "attention_bias", False),
    ),
    "Olmo3ForCausalLM": Architecture(
        "olmo3",
        "dense.olmo",
        defaults={
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        biases=("attention_bias", "attention_bias", False),
        uses_sliding_window=_is_sliding_by_pattern,
        local_rope_theta="rope_theta",
    ),
    "SeedOssForCausalLM": Architecture(
        "seed_oss",
        "llama",
        defaults={"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
        biases=("attention_bias", "attention_out_bias", "mlp_bias"),
    ),
    "Exaone4ForCausalLM": Architecture(
        "exaone4",
        "dense.exaone4",
        defaults={
            "num_key_value_heads": 32,
            "rms_norm_eps": 1e-5,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        },
        uses_sliding_window=_is_sliding_by_pattern,
        uses_rope=_uses_rope_unless_hybrid,
    ),
    "ApertusForCausalLM": Architecture(
        "apertus",
        "dense.apertus",
        linears=APERTUS_LINEARS,
        defaults={
            "hidden_act": "xielu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 12000000.0,
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 12000000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 8192,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            },
        },
        biases=("attention_bias", "attention_bias", False),
        activations=("xielu", "relu2"),
    ),
    "HunYuanDenseV1ForCausalLM": Architecture(
        "hunyuan_v1_dense",
        "dense.hunyuan",
        defaults={"rms_norm_eps": 1e-5},
        biases=("attention_bias", "attention_bias", False),
        rope_aliases={"dynamic": "ntk_alpha"},
    ),
    "Ernie4_5ForCausalLM": Architecture(
        "ernie4_5",
        "dense.ernie4_5",
        defaults={
            "num_key_value_heads": 2,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
        },
        biases=("use_bias", "use_bias", "use_bias"),
    ),
    "InternLM3ForCausalLM": Architecture(
        "internlm3",
        "llama",
        defaults={"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1e-5},
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        required={
            "qkv_bias": (False, "biases"),
            "bias": (False, "biases"),
        },
        saved_as="LlamaForCausalLM",
    ),
    "GlmForCausalLM": Architecture(
        "glm",
        "glm4",
        linears=GLM4_LINEARS,
        defaults={
            "head_dim": 128,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1.5625e-7,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
        biases=("attention_bias", False, False),
    ),
    "Cohere2ForCausalLM": Architecture(
        "cohere2",
        "dense.cohere2",
        key_aliases={"rms_norm_eps": "layer_norm_eps"},
        ignored_keys=("head_dim", "rms_norm_eps"),
        defaults={
            "layer_norm_eps": 1e-5,
            "logit_scale": 0.0625,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
            "tie_word_embeddings": True,
        },
        biases=("attention_bias", "attention_bias", False),
        uses_sliding_window=_is_sliding_by_pattern,
        uses_rope=_uses_rope_in_window,
        factors=("logit_scale",),
    ),
    "PhiForCausalLM": Architecture(
        "phi",
        "dense.phi",
        linears=PHI_LINEARS,
        key_aliases={"rms_norm_eps": "layer_norm_eps"},
        defaults={
            "hidden_act": "gelu_new",
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "qk_layernorm": False,
        },
        biases=(True, True, True),
        activations=("relu2",),
        flags=("qk_layernorm",),
        has_lm_head_bias=True,
    ),
    "Starcoder2ForCausalLM": Architecture(
        "starcoder2",
        "dense.starcoder2",
        linears=STARCODER2_LINEARS,
        key_aliases={"rms_norm_eps": "norm_epsilon"},
        defaults={
            "num_key_value_heads": 2,
            "hidden_act": "gelu_pytorch_tanh",
            "norm_epsilon": 1e-5,
            "use_bias": True,
            "tie_word_embeddings": True,
        },
        biases=("use_bias", "use_bias", "use_bias"),
        activations=("relu2",),
        uses_sliding_window=_always,
    ),
    "GPTNeoXForCausalLM": Architecture(
        "gpt_neox",
        "dense.gpt_neox",
        linears=GPT_NEOX_LINEARS,
        layers_path="gpt_neox.layers",
        key_aliases={
            "rms_norm_eps": "layer_norm_eps",
            "rope_theta": "rotary_emb_base",
            "partial_rotary_factor": "rotary_pct",
        },
        ignored_keys=("num_key_value_heads", "head_dim"),
        defaults={
            "hidden_act": "gelu",
            "attention_bias": True,
            "layer_norm_eps": 1e-5,
            "partial_rotary_factor": 0.25,
            "use_parallel_residual": True,
        },
        biases=("attention_bias", "attention_bias", True),
        activations=("relu2",),
        flags=("use_parallel_residual",),
        embedding="embed_in",
    ),
    "GraniteMoeHybridForCausalLM": Architecture(
        "granitemoehybrid",
        "hybrid.granite_hybrid",
        linears=GRANITE_HYBRID_LINEARS,
        key_aliases={"intermediate_size": "shared_intermediate_size"},
        defaults={
            "shared_intermediate_size": 1024,
            "num_local_experts": 8,
            "attention_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "logits_scaling": 1.0,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
        biases=("attention_bias", "attention_bias", False),
        uses_rope=_uses_rope_of_granite_hybrid,
        translate=_translate_granite_hybrid,
        uses_state=_is_listed_as("linear_attention"),
        state_kind="mamba2",
        uses_experts=_uses_experts_if_any,
        expert_names=ExpertNames(
            router="router",
            router_in_checkpoints="router.layer",
            block="block_sparse_moe",
            module="block_sparse_moe",
            projections=None,
            is_beside_mlp=True,
        ),
        factors=("embedding_multiplier", "residual_multiplier", "logits_scaling"),
    ),
    "NemotronForCausalLM": Architecture(
        "nemotron",
        "dense.nemotron",
        linears=APERTUS_LINEARS,
        key_aliases={"rms_norm_eps": "norm_eps"},
        defaults={"hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5},
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        activations=("relu2",),
    ),
    "ArceeForCausalLM": Architecture(
        "arcee",
        "dense.arcee",
        linears=APERTUS_LINEARS,
        defaults={"hidden_act": "relu2", "rms_norm_eps": 1e-5},
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        activations=("relu2",),
    ),
    "Llama4ForCausalLM": _LLAMA4,
    "Llama4ForConditionalGeneration": replace(
        _LLAMA4, model_type="llama4", layers_path="model.language_model.layers", text_types=("llama4_text",)
    ),
    "Glm4MoeForCausalLM": Architecture(
        "glm4_moe",
        "moe.glm4_moe",
        linears=LLAMA_LINEARS | _shared_linears("mlp.shared_experts"),
        key_aliases={"num_experts": "n_routed_experts"},
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 0.5,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1408,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "use_qk_norm": False,
        },
        biases=("attention_bias", False, False),
        flags=("use_qk_norm",),
        uses_experts=_uses_experts_after_dense,
        expert_names=ExpertNames(correction_bias="gate.e_score_correction_bias", shared="shared_experts"),
        mtp_names=MTPNames(),
        router_scoring="sigmoid",
        has_float32_router=True,
    ),
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek_v2",
        "moe.deepseek",
        linears=LATENT_LINEARS,
        key_aliases={"num_experts": "n_routed_experts"},
        # transformers ignores norm_topk_prob: it never normalizes the weights.
        ignored_keys=(*_IGNORED_BY_LATENT_ATTENTION, "norm_topk_prob"),
        defaults={
            "num_experts": 64,
            "moe_intermediate_size": 1407,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
            "first_k_dense_replace": 0,
        },
        biases=("attention_bias", "attention_bias", False),
        uses_experts=_uses_experts_after_dense,
        expert_names=ExpertNames(shared="shared_experts"),
        has_float32_router=True,
        has_latent_attention=True,
    ),
    "DeepseekV3ForCausalLM": _DEEPSEEK_V3,
    "Kimi_K25ForConditionalGeneration": replace(
        _DEEPSEEK_V3,
        model_type="kimi_k25",
        layers_path="model.language_model.layers",
        # kimi_k2 is the name of deepseek_v3 in the code of the checkpoint.
        text_types=("deepseek_v3", "kimi_k2"),
    ),
    "Mistral4ForCausalLM": _MISTRAL4,
    "Mistral4ForConditionalGeneration": replace(
        _MISTRAL4, model_type="mistral3", layers_path="model.language_model.layers", text_types=("mistral4",)
    ),
    "Glm4MoeLiteForCausalLM": Architecture(
        "glm4_moe_lite",
        "moe.deepseek",
        linears=LATENT_LINEARS,
        key_aliases={"num_experts": "n_routed_experts"},
        ignored_keys=_IGNORED_BY_LATENT_ATTENTION,
        defaults={
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1536,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
            "n_group": 1,
            "topk_group": 1,
        },
        biases=("attention_bias", "attention_bias", False),
        uses_experts=_uses_experts_by_mlp_type,
        expert_names=ExpertNames(correction_bias="gate.e_score_correction_bias", shared="shared_experts"),
        mtp_names=MTPNames(),
        router_scoring="sigmoid",
        has_float32_router=True,
        has_latent_attention=True,
    ),
    "KimiLinearForCausalLM": Architecture(
        "kimi_linear",
        "hybrid.kimi_linear",
        linears=KIMI_LINEAR_LINEARS,
        state_linears={
            "self_attn.q_proj": ("hidden", "state_values"),
            "self_attn.o_proj": ("state_values", "hidden"),
        },
        paths_in_checkpoints={
            "self_attn.forget_gate.": "self_attn.",
            "mlp.shared_experts.": "block_sparse_moe.shared_experts.",
        },
        key_aliases={
            "max_position_embeddings": "model_max_length",
            "num_experts_per_tok": "num_experts_per_token",
            "n_shared_experts": "num_shared_experts",
            "norm_topk_prob": "moe_renormalize",
            "n_group": "num_expert_group",
        },
        ignored_keys=_IGNORED_BY_LATENT_ATTENTION,
        defaults={
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 1048576,
            "num_experts": 256,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1024,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.446,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "linear_num_heads": 32,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
        biases=("attention_bias", "attention_bias", False),
        required={
            "mla_use_nope": (True, "rotary positions of latent attention"),
            "moe_router_activation_func": ("sigmoid", "other scores of experts"),
            "moe_layer_freq": (1, "layers without experts between others"),
        },
        translate=_translate_kimi_linear,
        uses_rope=_uses_rope_never,
        uses_state=_is_listed_as("linear_attention"),
        uses_experts=_uses_experts_of_kimi_linear,
        expert_names=ExpertNames(
            block="block_sparse_moe",
            projections=("w1", "w3", "w2"),
            correction_bias="gate.e_score_correction_bias",
            shared="shared_experts",
        ),
        state_kind="kimi_delta",
        router_scoring="sigmoid",
        has_float32_router=True,
        has_latent_attention=True,
    ),
    "MiniMaxM2ForCausalLM": Architecture(
        "minimax_m2",
        "moe.minimax_m2",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rope_theta": 5000000.0,
            "partial_rotary_factor": 1.0,
            "rotary_dim": None,
            "num_local_experts": 256,
            "num_experts_per_tok": 8,
        },
        uses_experts=_always,
        expert_names=ExpertNames(
            block="block_sparse_moe", projections=("w1", "w3", "w2"), correction_bias="e_score_correction_bias"
        ),
        router_scoring="sigmoid",
    ),
    "Ernie4_5_MoeForCausalLM": Architecture(
        "ernie4_5_moe",
        "moe.ernie4_5_moe",
        linears=LLAMA_LINEARS | _shared_linears("mlp.shared_experts"),
        key_aliases={
            "num_experts": "moe_num_experts",
            "num_experts_per_tok": "moe_k",
            "n_shared_experts": "moe_num_shared_experts",
        },
        defaults={
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": True,
            "num_experts": 64,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1536,
            "n_shared_experts": 2,
            "moe_layer_start_index": 1,
            "moe_layer_end_index": -1,
            "moe_layer_interval": 1,
            "moe_norm_min": 1e-12,
        },
        biases=("use_bias", "use_bias", "use_bias"),
        uses_experts=_uses_experts_in_range,
        expert_names=ExpertNames(correction_bias="moe_statics.e_score_correction_bias", shared="shared_experts"),
        has_float32_router=True,
    ),
    "HunYuanMoEV1ForCausalLM": Architecture(
        "hunyuan_v1_moe",
        "moe.hunyuan_moe",
        linears=LLAMA_LINEARS | _shared_linears("mlp.shared_mlp"),
        key_aliases={"num_experts_per_tok": "moe_topk"},
        defaults={
            "rms_norm_eps": 1e-5,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "n_shared_experts": 1,
        },
        biases=("attention_bias", "attention_bias", False),
        rope_aliases={"dynamic": "ntk_alpha"},
        uses_experts=_always,
        expert_names=ExpertNames(router="gate.wg", shared="shared_mlp"),
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2_moe",
        "llama",
        linears=LLAMA_LINEARS | SHARED_EXPERT_LINEARS,
        defaults={
            "num_key_value_heads": 16,
            "use_sliding_window": False,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_experts": 60,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "qkv_bias": True,
        },
        biases=("qkv_bias", False, False),
        uses_sliding_window=_is_sliding_even_lower_layer,
        uses_experts=_uses_experts_unless_listed,
        expert_names=GATED_SHARED_EXPERT,
    ),
    "OlmoeForCausalLM": Architecture(
        "olmoe",
        "moe.olmoe",
        ignored_keys=("head_dim",),
        defaults={
            "rms_norm_eps": 1e-5,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "norm_topk_prob": False,
        },
        biases=("attention_bias", "attention_bias", False),
        required={"clip_qkv": (None, "clipped queries, keys and values")},
        uses_experts=_always,
    ),
    "FalconH1ForCausalLM": Architecture(
        "falcon_h1",
        "hybrid.falcon_h1",
        linears=FALCON_H1_LINEARS,
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_rms_norm": False,
            "mamba_norm_before_gate": True,
            "projectors_bias": False,
            **dict.fromkeys(_FALCON_H1_FACTORS, 1.0),
        },
        biases=("attention_bias", "attention_bias", "mlp_bias"),
        factors=_FALCON_H1_FACTORS,
        factor_lists={"mlp_multipliers": 2, "ssm_multipliers": 5},
        uses_state=_always,
        uses_attention=_always,
        state_kind="mamba2",
    ),
    "NemotronHForCausalLM": Architecture(
        "nemotron_h",
        "hybrid.nemotron_h",
        linears=NEMOTRON_H_LINEARS,
        key_aliases={
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "mlp_hidden_act",
            "num_experts": "n_routed_experts",
            "shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
        },
        # transformers never ties the output projection to the embedding.
        ignored_keys=("tie_word_embeddings",),
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "mlp_hidden_act": "relu2",
            "layer_norm_epsilon": 1e-5,
            "intermediate_size": 21504,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 7688,
            "shared_expert_intermediate_size": 7688,
            "moe_latent_size": None,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "conv_kernel": 4,
            "time_step_min": 0.001,
            "use_conv_bias": True,
            "use_bias": False,
        },
        biases=(False, False, "mlp_bias"),
        activations=("relu2",),
        translate=_translate_nemotron_h,
        uses_rope=_uses_rope_never,
        uses_state=_is_listed_as("linear_attention"),
        uses_attention=_is_listed_as("full_attention"),
        uses_experts=_is_listed_as("moe"),
        state_kind="mamba2",
        has_single_blocks=True,
        embedding="embeddings",
        expert_names=ExpertNames(
            block="mixer",
            module="mixer",
            projections=("up_proj", "down_proj"),
            correction_bias="gate.e_score_correction_bias",
            shared="shared_experts",
            latent_projections=("fc1_latent_proj", "fc2_latent_proj"),
        ),
        router_scoring="sigmoid",
        has_float32_router=True,
    ),
    "Lfm2ForCausalLM": _LFM2,
    "Lfm2MoeForCausalLM": replace(
        _LFM2,
        model_type="lfm2_moe",
        defaults={
            **{key: value for key, value in _LFM2.defaults.items() if not key.startswith("block_")},
            "intermediate_size": 7168,
            "moe_intermediate_size": 1792,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "num_dense_layers": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        },
        required={"use_expert_bias": (True, "experts that are chosen without a bias")},
        translate=_translate_lfm2_layers,
        uses_experts=_uses_experts_after_dense_layers,
        expert_names=ExpertNames(
            block="feed_forward",
            module="feed_forward",
            projections=("w1", "w3", "w2"),
            correction_bias="expert_bias",
        ),
        router_scoring="sigmoid",
    ),
    "Qwen2VLForConditionalGeneration": Architecture(
        "qwen2_vl", "llama", layers_path="model.language_model.layers", text_types=("qwen2_vl_text",)
    ),
    "Qwen2_5_VLForConditionalGeneration": Architecture(
        "qwen2_5_vl", "llama", layers_path="model.language_model.layers", text_types=("qwen2_5_vl_text",)
    ),
    "Qwen3VLForConditionalGeneration": Architecture(
        "qwen3_vl", "qwen3", layers_path="model.language_model.layers", text_types=("qwen3_vl_text",)
    ),
    "Qwen3NextForCausalLM": replace(
        _QWEN3_5,
        model_type="qwen3_next",
        rope_aliases={},
        mrope_section=(),
        key_aliases={},
        linears={**QWEN3_NEXT_LINEARS, **SHARED_EXPERT_LINEARS},
        defaults={
            **_GATED_DELTA_NET_DEFAULTS,
            "num_key_value_heads": 2,
            "intermediate_size": 5632,
            "num_local_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            # config.json does not contain the number.
            "num_nextn_predict_layers": 1,
        },
        uses_experts=_uses_experts_unless_listed,
        expert_names=GATED_SHARED_EXPERT,
    ),
    "Qwen3_5ForCausalLM": _QWEN3_5,
    "Qwen3_5MoeForCausalLM": _QWEN3_5_MOE,
    "Qwen3_5ForConditionalGeneration": replace(
        _QWEN3_5, model_type="qwen3_5", layers_path="model.language_model.layers", text_types=("qwen3_5_text",)
    ),
    "Qwen3_5MoeForConditionalGeneration": replace(
        _QWEN3_5_MOE,
        model_type="qwen3_5_moe",
        layers_path="model.language_model.layers",
        text_types=("qwen3_5_moe_text",),
    ),
}
"""Rows of the table. The key of a row is the name that config.json has in `architectures`."""

QWEN_VL_DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 80,
}
TEXT_MODELS: Mapping[str, Architecture] = {
    name: Architecture(
        name,
        "llama",
        defaults=QWEN_VL_DEFAULTS,
        biases=(True, False, False),
        uses_sliding_window=_is_sliding_upper_layer,
        rope_aliases={"mrope": "default"},
        mrope_section=(16, 24, 24),
    )
    for name in ("qwen2_vl_text", "qwen2_5_vl_text")
} | {
    "qwen3_vl_text": Architecture(
        "qwen3_vl_text",
        "qwen3",
        defaults={"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0},
        biases=("attention_bias", "attention_bias", False),
        rope_aliases={"mrope": "default"},
        mrope_section=(24, 20, 20),
        mrope_interleaved=True,
    ),
}
"""Rows for language models that exist only inside a multimodal model, by `model_type`. The three positions of a text
token are equal, so mrope is the same as rope in a text."""
