# SPDX-License-Identifier: Apache-2.0
"""ModelShape: the numbers of a model that sizing and the model definitions need, from its config.json."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quire_spec import capability
from quire_spec.config_json import ConfigJson
from quire_spec.document import load
from quire_spec.errors import ConfigError
from quire_spec.families import FAMILIES, Family
from quire_spec.rope import Rope

# Shapes and adapters are tables of layers.
_MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of a decoder-only transformer."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    embedding_size: int
    """Width of the embedding and of the output projection's input; hidden_size but for some OPT."""
    max_position_embeddings: int
    num_learnt_positions: int
    """Rows of the table of learnt positions; 0 where positions are rotary."""
    rope: Rope | None
    """None where positions are learnt."""
    windows: tuple[int | None, ...]
    """For each layer, how many keys before it a token sees, itself included; None: all."""
    attention_scale: float
    """What scores are multiplied by."""
    attention_softcap: float | None
    """Bound that scores are bent towards."""
    logits_softcap: float | None
    """The same for logits."""
    norm_eps: float
    activation: str
    """Of the MLP; one of capability.ACTIVATIONS."""
    tie_word_embeddings: bool
    attention_bias: bool
    """Biases on q, k and v."""
    output_bias: bool
    """Bias on the output of attention."""
    mlp_bias: bool
    flags: Mapping[str, bool]
    """Switches that only this family has, by their names in config.json."""
    dtype: str
    """Of the checkpoint."""
    eos_token_ids: tuple[int, ...]

    @property
    def family(self) -> Family:
        """What checkpoints of this architecture have in common."""
        return FAMILIES[self.architecture]

    @property
    def tied_to(self) -> str | None:
        """The checkpoint's tensor that is the output projection too: the embedding; None: it has one of its own."""
        return f"{self.family.layers.removesuffix('layers')}embed_tokens.weight" if self.tie_word_embeddings else None

    @property
    def rope_switch(self) -> int | None:
        """Tokens beyond which all of a sequence's keys are rotated otherwise; None: never."""
        return None if self.rope is None else self.rope.switch

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Hugging Face config.json.

        Raises:
            ConfigError: the architecture is not supported (the message lists those that are), or a value is missing,
                of the wrong type, or asks for something that is not supported; the message names its key.
        """
        if not isinstance(config, Mapping):
            raise ConfigError(f"config.json: expected an object, found {type(config).__name__}")
        found = config.get("architectures") or ["none"]
        architecture = found[0] if isinstance(found, list) else found
        if not isinstance(architecture, str) or architecture not in FAMILIES:
            raise ConfigError(
                f"config.json: architecture {architecture!r} is not supported; "
                f"supported are {', '.join(capability.ARCHITECTURES)}"
            )
        family = FAMILIES[architecture]
        model_type = config.get("model_type")
        # transformers goes by the type, vLLM by the architecture: here they have to agree.
        if model_type != family.module and model_type in [each.module for each in FAMILIES.values()]:
            raise ConfigError(
                f"config.json: model_type {model_type!r} is not the one of architecture {architecture!r}, which is "
                f"{family.module!r}; correct the wrong one"
            )
        known = {key: value for key, value in config.items() if key not in family.ignored}
        return cls._read(ConfigJson(known, family.defaults), architecture)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `folder`/config.json; raises ConfigError as `from_config` does, also when it cannot be read."""
        return cls.from_config(load(folder / "config.json"))

    @classmethod
    def _read(cls, config: ConfigJson, architecture: str) -> Self:
        family = FAMILIES[architecture]
        num_layers, hidden = config.integer("num_hidden_layers", most=_MAX_LAYERS), config.integer("hidden_size")
        heads, kv_heads, head_dim = _heads(config, hidden)
        positions = config.integer("max_position_embeddings")
        qkv_bias, output_bias, mlp_bias = (b if isinstance(b, bool) else config.flag(b, False) for b in family.biases)
        _refuse_what_no_family_has(config)
        learnt = family.learnt_positions
        rope = None
        if learnt is None:
            partial = "partial_rotary_factor" in family.defaults
            rope = Rope.read(config, head_dim, positions, partial=partial)
        return cls(
            architecture=architecture,
            num_layers=num_layers,
            hidden_size=hidden,
            intermediate_size=config.integer(family.names.get("intermediate_size", "intermediate_size")),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=config.integer("vocab_size"),
            embedding_size=config.integer("word_embed_proj_dim", hidden) if learnt is not None else hidden,
            max_position_embeddings=positions,
            num_learnt_positions=0 if learnt is None else positions + learnt,
            rope=rope,
            windows=_windows(config, family, num_layers),
            attention_scale=(_own_number(config, family, "query_pre_attn_scalar") or head_dim) ** -0.5,
            attention_softcap=_own_number(config, family, "attn_logit_softcapping"),
            logits_softcap=_own_number(config, family, "final_logit_softcapping"),
            norm_eps=config.number("rms_norm_eps", 1e-6),
            activation=_activation(config, family),
            tie_word_embeddings=config.flag("tie_word_embeddings", False),
            attention_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            flags={name: config.flag(name) for name in family.flags},
            dtype=config.text("dtype", config.text("torch_dtype", "float32")),
            eos_token_ids=config.token_ids("eos_token_id"),
        )


def _refuse_what_no_family_has(config: ConfigJson) -> None:
    """Refuse what transformers would obey, whatever the family."""
    if "quantization_config" in config:
        raise ConfigError("config.json: quantization_config: quantized checkpoints are not supported")
    if not config.section("per_layer_config").empty:
        raise ConfigError("config.json: per_layer_config: layers that differ from each other are not supported")
    for key, causal in (("is_causal", True), ("use_bidirectional_attention", False)):
        if config.flag(key, causal) is not causal:
            raise config.error(key, not causal, "supported: a token sees those before it and none after it")


def _heads(config: ConfigJson, hidden_size: int) -> tuple[int, int, int]:
    """Query heads, KV heads, elements of each."""
    heads = config.integer("num_attention_heads")
    kv_heads = config.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
    if "head_dim" not in config and hidden_size % heads:
        raise config.error("num_attention_heads", heads, f"a divisor of hidden_size {hidden_size}; set head_dim")
    return heads, kv_heads, config.integer("head_dim", hidden_size // heads)


def _windows(config: ConfigJson, family: Family, num_layers: int) -> tuple[int | None, ...]:
    if family.windowed is None or "sliding_window" not in config:
        return (None,) * num_layers
    window = config.integer("sliding_window")
    return tuple(window if family.windowed(config, index) else None for index in range(num_layers))


def _own_number(config: ConfigJson, family: Family, key: str) -> float | None:
    """A number that other families ignore."""
    return config.number(key) if key in family.defaults and key in config else None


def _activation(config: ConfigJson, family: Family) -> str:
    key = family.names.get("hidden_act", "hidden_act")
    name = config.text(key, family.defaults.get(key, "silu"))
    name = capability.ACTIVATION_ALIASES.get(name, name)
    if name not in capability.ACTIVATIONS:
        raise config.error(key, name, f"supported; supported are {', '.join(capability.ACTIVATIONS)}")
    return name
