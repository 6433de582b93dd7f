# SPDX-License-Identifier: Apache-2.0
"""Translates the header of a GGUF file to the config.json and the tensor names of transformers.

Source of the keys and names: docs/gguf.md of ggml, and constants.py of the package `gguf`.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire_spec.errors import ConfigError, truncated_repr
from quire_spec.model.gguf.header import GGUFHeader, GGUFTensorInfo

ROPE_FACTORS = "rope_freqs.weight"
"""A tensor of Llama 3.1 and later: the numbers by which the frequencies of the rotary embedding are divided."""
METHOD = "gguf"
_LLAMA3_FACTORS = (8.0, 32.0)
"""Factors of the models that Meta has published."""
_TOLERANCE = 1e-4
EXPERT = "{expert}"
"""Stands for the index of an expert in the name of a tensor. GGUF stores one tensor for all experts."""
_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_OUTER_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LINEARS = {
    **{f"attn_{short}": f"self_attn.{short}_proj" for short in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
}
_SHARED_EXPERTS = {
    **{f"ffn_{name}_shexp": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_SOFTMAX = 1
"""Number of the function that computes the scores of experts (`expert_gating_func`)."""
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_FOUR_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class GGUFMixture:
    """The tensors of layers with experts, and how a router weighs the experts that it chooses."""

    block: str
    """Path of the mixture in a layer of transformers."""
    projections: tuple[str, str, str]
    """Names of an expert's projections: gate, up and down."""
    normalizes: bool
    """Whether the weights of a token's experts are divided by their sum. llama.cpp decides it by the architecture."""
    shared: Mapping[str, str] = field(default_factory=dict)
    """Linear layers that compute every token."""

    @property
    def linears(self) -> dict[str, str]:
        """Maps the names of modules to those in transformers."""
        experts = zip(("gate", "up", "down"), self.projections, strict=True)
        return {
            "ffn_gate_inp": f"{self.block}.gate",
            **{f"ffn_{short}_exps": f"{self.block}.experts.{EXPERT}.{name}" for short, name in experts},
            **self.shared,
        }


@dataclass(frozen=True, slots=True)
class GGUFArchitecture:
    """How an architecture of GGUF differs from one of transformers."""

    name: str
    """Name of the architecture in config.json."""
    model_type: str
    norms: Mapping[str, str] = field(default_factory=lambda: _NORMS)
    has_permuted_heads: bool = False
    """Whether the rows of q and k are in the order of the original Llama: the two elements that are rotated together
    are neighbours."""
    has_shifted_norms: bool = False
    """Whether the weights of norms are stored plus 1."""
    layers_with_other_scale: int = 0
    """In the model with this number of layers, queries are scaled by the hidden size of a head and not by its
    dimension. 0: there is no such model."""
    mixture: GGUFMixture | None = None
    """The experts in place of the MLP of each layer."""


_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
ARCHITECTURES = {
    "llama": GGUFArchitecture("LlamaForCausalLM", "llama", has_permuted_heads=True),
    "qwen2": GGUFArchitecture("Qwen2ForCausalLM", "qwen2"),
    "qwen3": GGUFArchitecture("Qwen3ForCausalLM", "qwen3", _NORMS | _HEAD_NORMS),
    "qwen2moe": GGUFArchitecture(
        "Qwen2MoeForCausalLM", "qwen2_moe", mixture=GGUFMixture("mlp", _PROJECTIONS, False, _SHARED_EXPERTS)
    ),
    "qwen3moe": GGUFArchitecture(
        "Qwen3MoeForCausalLM", "qwen3_moe", _NORMS | _HEAD_NORMS, mixture=GGUFMixture("mlp", _PROJECTIONS, True)
    ),
    "gemma": GGUFArchitecture("GemmaForCausalLM", "gemma", has_shifted_norms=True),
    "gemma2": GGUFArchitecture("Gemma2ForCausalLM", "gemma2", _FOUR_NORMS, False, True, 46),
    "gemma3": GGUFArchitecture("Gemma3ForCausalLM", "gemma3_text", _FOUR_NORMS | _HEAD_NORMS, False, True, 62),
}
"""Maps general.architecture to the architecture."""
_MIXTRAL = GGUFArchitecture(
    "MixtralForCausalLM",
    "mixtral",
    has_permuted_heads=True,
    mixture=GGUFMixture("block_sparse_moe", ("w1", "w3", "w2"), True),
)
"""GGUF calls it llama, too."""


def architecture_of(header: GGUFHeader) -> GGUFArchitecture:
    """Return the architecture; raises ConfigError if it is not supported."""
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ConfigError(
            f"general.architecture {truncated_repr(name)} is not supported; GGUF files of "
            f"{', '.join(ARCHITECTURES)} are; use the model's safetensors"
        )
    num_experts = _Metadata(header.metadata).integer("expert_count", 0)
    architecture = _MIXTRAL if name == "llama" and num_experts else ARCHITECTURES[name]
    if bool(num_experts) != bool(architecture.mixture):
        raise ConfigError(
            f"{name}.expert_count is {num_experts}, which is not supported in GGUF; use the model's safetensors"
        )
    return architecture


def checkpoint_name(name: str, architecture: GGUFArchitecture) -> str:
    """Return the name of a tensor in transformers; raises ConfigError if the tensor is not known. EXPERT stands for the
    index in the name of a tensor of all experts."""
    if name in _OUTER_NAMES:
        return _OUTER_NAMES[name]
    if match := _LAYER.fullmatch(name):
        module, _, parameter = match[2].rpartition(".")
        experts = architecture.mixture.linears if architecture.mixture else {}
        path = experts.get(module) or _LINEARS.get(module) or architecture.norms.get(module)
        if path is not None and parameter in (("weight",) if module in experts else ("weight", "bias")):
            return f"model.layers.{match[1]}.{path}.{parameter}"
    raise ConfigError(f"{name} is not a tensor of {architecture.name}; use the model's safetensors")


def config_from_header(header: GGUFHeader, rope_factors: Sequence[float] | None = None) -> dict[str, Any]:
    """Return the content of config.json.

    Args:
        header: the header of the file.
        rope_factors: the values of ROPE_FACTORS; None if they have not been read.

    Raises:
        ConfigError: the architecture or a value is not supported.
    """
    architecture, read = architecture_of(header), _Metadata(header.metadata)
    embedding = _require_tensor(header, "token_embd.weight")
    hidden, num_heads = read.integer("embedding_length"), read.integer("attention.head_count")
    head_dim = read.integer("attention.key_length", hidden // num_heads)
    config: dict[str, Any] = {
        "architectures": [architecture.name],
        "model_type": architecture.model_type,
        "hidden_size": hidden,
        "intermediate_size": read.integer("feed_forward_length", 0 if architecture.mixture else None),
        "num_hidden_layers": read.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": read.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_position_embeddings": read.integer("context_length"),
        "rms_norm_eps": read.number("attention.layer_norm_rms_epsilon"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
    }
    if "rope.freq_base" in read:
        config["rope_theta"] = read.number("rope.freq_base")
    if read.integer("rope.dimension_count", head_dim) != head_dim:
        raise ConfigError("rope.dimension_count must be the size of a head; use the model's safetensors")
    if architecture.mixture is not None:
        config |= _mixture_keys(header, architecture.mixture, read)
    config |= _biases(header, architecture) | _gemma_keys(read, architecture, hidden, num_heads, head_dim)
    if scaling := _rope_scaling(read, rope_factors, config):
        config["rope_scaling"] = scaling
    for kind in ("bos", "eos"):
        token = header.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        config[f"{kind}_token_id"] = token if isinstance(token, int) else None
    types = sorted({tensor.type.name for tensor in header.tensors.values() if not tensor.type.is_float})
    if types:
        config["quantization_config"] = {"quant_method": METHOD, "types": types}
    return config


class _Metadata:
    """Reads the metadata of the architecture, and checks the types of the values."""

    def __init__(self, metadata: Mapping[str, Any]) -> None:
        self._values, self._prefix = metadata, f"{metadata['general.architecture']}."

    def __contains__(self, key: str) -> bool:
        return self._prefix + key in self._values

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._value(key, default)
        if type(value) is not int or value < 0:
            raise ConfigError(f"{self._prefix}{key} must be one integer, got {truncated_repr(value)}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ConfigError(f"{self._prefix}{key} must be a number, got {truncated_repr(value)}")
        # float32 in the file: 1e-6 would be 9.999999974752427e-07.
        return float(f"{value:.7g}")

    def text(self, key: str, default: str) -> str:
        return str(self._value(key, default))

    def _value(self, key: str, default: Any) -> Any:
        value = self._values.get(self._prefix + key, default)
        if value is None:
            raise ConfigError(f"{self._prefix}{key} is missing; convert the model again")
        return value


def _require_tensor(header: GGUFHeader, name: str) -> GGUFTensorInfo:
    if name not in header.tensors or len(header.tensors[name].shape) != 2:
        raise ConfigError(f"{name} is missing or is not a matrix; download the file again")
    return header.tensors[name]


def _dtype(header: GGUFHeader) -> str:
    """Return the dtype of the matrices if none of them is quantized. Otherwise, return bfloat16."""
    kinds = {tensor.type.name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return {"F32": "float32", "F16": "float16"}.get(next(iter(kinds)), "bfloat16") if len(kinds) == 1 else "bfloat16"


def _biases(header: GGUFHeader, architecture: GGUFArchitecture) -> dict[str, Any]:
    biases = {"attention_bias": "blk.0.attn_q.bias" in header.tensors}
    if architecture.model_type == "llama":
        return biases | {"mlp_bias": "blk.0.ffn_gate.bias" in header.tensors}
    return biases if architecture.model_type == "qwen3" else {}


def _mixture_keys(header: GGUFHeader, mixture: GGUFMixture, read: _Metadata) -> dict[str, Any]:
    """Return the keys of a mixture. The sizes of experts are those of their tensors, because old files do not have
    them in the metadata."""
    num_experts = read.integer("expert_count")
    for layer in range(read.integer("block_count")):
        down = header.tensors.get(f"blk.{layer}.ffn_down_exps.weight")
        if down is None or len(down.shape) != 3 or down.shape[0] != num_experts:
            raise ConfigError(
                f"blk.{layer}.ffn_down_exps.weight is missing or does not contain {num_experts} experts; GGUF is "
                "supported only with experts in every layer, in one tensor; use the model's safetensors"
            )
    unsupported = {
        "expert_gating_func": read.integer("expert_gating_func", _SOFTMAX) != _SOFTMAX,
        "expert_weights_scale": read.number("expert_weights_scale", 1.0) not in (0.0, 1.0),
        "expert_group_count": read.integer("expert_group_count", 1) > 1,
    }
    if key := next((key for key, is_set in unsupported.items() if is_set), None):
        raise ConfigError(f"{key} is not supported with this architecture in GGUF; use the model's safetensors")
    inner = header.tensors["blk.0.ffn_down_exps.weight"].shape[-1]
    keys: dict[str, Any] = {"num_experts_per_tok": read.integer("expert_used_count")}
    if mixture is _MIXTRAL.mixture:
        return keys | {"num_local_experts": num_experts, "intermediate_size": inner}
    keys |= {"num_experts": num_experts, "moe_intermediate_size": inner, "norm_topk_prob": mixture.normalizes}
    if mixture.shared:
        shared = _require_tensor(header, "blk.0.ffn_down_shexp.weight")
        keys["shared_expert_intermediate_size"] = shared.shape[-1]
    return keys


def _gemma_keys(
    read: _Metadata, architecture: GGUFArchitecture, hidden: int, num_heads: int, head_dim: int
) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    if "attention.sliding_window" in read and architecture.has_shifted_norms:
        keys["sliding_window"] = read.integer("attention.sliding_window")
    if architecture.model_type == "gemma2":
        keys["attn_logit_softcapping"] = read.number("attn_logit_softcapping", 50.0)
        keys["final_logit_softcapping"] = read.number("final_logit_softcapping", 30.0)
    if architecture.layers_with_other_scale:
        is_other = read.integer("block_count") == architecture.layers_with_other_scale
        keys["query_pre_attn_scalar"] = hidden // num_heads if is_other else head_dim
    return keys


def _rope_scaling(
    read: _Metadata, rope_factors: Sequence[float] | None, config: Mapping[str, Any]
) -> dict[str, Any] | None:
    kind = read.text("rope.scaling.type", "none")
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"rope.scaling.type {kind!r} is not supported in GGUF; use the model's safetensors")
    if rope_factors is not None:
        return _llama3_scaling(rope_factors, config["rope_theta"], config["head_dim"])
    if kind == "none":
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": read.number("rope.scaling.factor")}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = read.integer("rope.scaling.original_context_length")
    return scaling


def _llama3_scaling(factors: Sequence[float], theta: float, dim: int) -> dict[str, Any]:
    """Return the scaling of Llama 3.1 and later that has these factors; raises ConfigError if there is none."""
    for factor in _LLAMA3_FACTORS:
        scaling = {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        expected = [_llama3_factor(theta ** (2 * i / dim) * 2 * math.pi, factor) for i in range(dim // 2)]
        is_equal = len(factors) == len(expected) and all(
            abs(found - wanted) <= _TOLERANCE * wanted for found, wanted in zip(factors, expected, strict=True)
        )
        if is_equal:
            return scaling
    raise ConfigError(f"{ROPE_FACTORS} is not the scaling of a known Llama 3 model; use the model's safetensors")


def _llama3_factor(wavelength: float, factor: float, low: float = 1.0, high: float = 4.0, length: int = 8192) -> float:
    """Return the number by which a frequency is divided. See RopeConfig."""
    if wavelength < length / high:
        return 1.0
    if wavelength > length / low:
        return factor
    smooth = (length / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)
