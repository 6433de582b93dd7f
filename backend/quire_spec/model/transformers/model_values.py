# SPDX-License-Identifier: Apache-2.0
"""Reads from config.json what the engine must know about a model that a class of transformers computes.

Pure. It reads only keys that most configs of transformers have. The rest of config.json is read by transformers itself.
"""

from collections.abc import Mapping
from typing import Any

from quire_spec.errors import ConfigError, truncated_repr
from quire_spec.model.architectures import Architecture
from quire_spec.model.hf_config import HFConfigReader

_MAX_LAYERS = 4096
_REQUIRED_KEYS = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings")
_ROPES_OF_WHOLE_STEPS = ("dynamic", "longrope")
"""In transformers, the frequencies of these rope types depend on the longest sequence of a step."""


def read_values(config: Mapping[str, Any], architecture: Architecture) -> dict[str, Any]:
    """Return the fields of a ModelConfig that depend on config.json. `architecture` is the row of the table.

    Raises:
        ConfigError: a key is missing or wrong, or its value is not supported with `model_impl` transformers.
    """
    values = {key: value for key, value in config.items() if key not in architecture.ignored_keys}
    values |= {name: config[alias] for name, alias in architecture.key_aliases.items() if alias in config}
    for name in _REQUIRED_KEYS:
        alias = architecture.key_aliases.get(name, name)
        if values.get(name) is None and architecture.defaults.get(name) is None:
            raise ConfigError(f"config.json: {alias} is missing")
    reader = HFConfigReader(values, architecture.defaults)
    _reject_unsupported(reader)
    heads, hidden = reader.get_int("num_attention_heads"), reader.get_int("hidden_size")
    kv_heads = reader.get_int("num_key_value_heads", heads)
    if heads % kv_heads:
        raise reader.error("num_key_value_heads", kv_heads, f"a divisor of num_attention_heads {heads}")
    if "head_dim" not in reader and hidden % heads:
        raise reader.error("num_attention_heads", heads, f"a divisor of hidden_size {hidden} unless head_dim is set")
    num_layers = reader.get_int("num_hidden_layers", maximum=_MAX_LAYERS)
    return {
        "num_layers": num_layers,
        "hidden_size": hidden,
        "intermediate_size": reader.get_int("intermediate_size", 4 * hidden),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": reader.get_int("head_dim", hidden // heads),
        "vocab_size": reader.get_int("vocab_size"),
        "embedding_size": hidden,
        "max_position_embeddings": reader.get_int("max_position_embeddings"),
        "sliding_windows": _sliding_windows(reader, num_layers),
        "tie_word_embeddings": reader.get_bool("tie_word_embeddings", True),
        "dtype": reader.get_str("dtype", reader.get_str("torch_dtype", "float32")),
        "eos_token_ids": reader.get_token_ids("eos_token_id"),
    }


def _sliding_windows(reader: HFConfigReader, num_layers: int) -> tuple[int | None, ...]:
    """Return the windows of the layers that `layer_types` lists. Other layers keep all tokens: if their attention has a
    window, they keep more than it reads."""
    types = reader.get_str_list("layer_types") if "layer_types" in reader else ()
    if others := sorted(set(types) - {"full_attention", "sliding_attention"}):
        raise ConfigError(
            f"config.json: layer_types: {truncated_repr(others[0])} is not supported with model_impl transformers, "
            "only full_attention and sliding_attention"
        )
    if "sliding_attention" not in types:
        return (None,) * num_layers
    window = reader.get_int("sliding_window")
    if len(types) < num_layers:
        raise reader.error("layer_types", list(types), "a list with a type for each layer")
    return tuple(window if kind == "sliding_attention" else None for kind in types[:num_layers])


def _reject_unsupported(reader: HFConfigReader) -> None:
    if (method := reader.get_section("quantization_config", "compression_config")).is_empty is False:
        raise ConfigError(
            "config.json: quantization_config: the weights are quantized "
            f"({truncated_repr(method.get_raw('quant_method'))}), and model_impl transformers serves only weights that "
            "are not; use a checkpoint without quantization, and set quantization"
        )
    if not reader.get_section("per_layer_config").is_empty:
        raise ConfigError("config.json: per_layer_config: a separate configuration for each layer is not supported")
    for key, required in (("is_causal", True), ("use_bidirectional_attention", False)):
        if key in reader and reader.get_raw(key) is not required:
            raise reader.error(key, reader.get_raw(key), f"{required} (only causal attention is supported)")
    rope = reader.get_section("rope_scaling", "rope_parameters")
    sections = [rope, *(rope.get_section(key) for key in rope if isinstance(rope.get_raw(key), Mapping))]
    for section in sections:
        kind = section.get_raw("rope_type") or section.get_raw("type")
        if kind in _ROPES_OF_WHOLE_STEPS:
            raise ConfigError(
                f"config.json: rope_scaling: rope type {kind} is not supported with model_impl transformers, because "
                "there it depends on the longest sequence of a step; remove it to serve the length that was trained"
            )
