# SPDX-License-Identifier: Apache-2.0
"""Differences between the layers of one model, as Gemma 4 has them.

Layers without a sliding window have other heads than layers with one. The last layers read the keys and values of an
earlier layer. Each layer can read an embedding of its own for each token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from quire_spec.errors import ConfigError
from quire_spec.model.hf_config import HFConfigReader

_HEAD_KEYS = ("head_dim", "num_key_value_heads")


@dataclass(frozen=True, slots=True)
class LayerVariants:
    """How layers of a model differ. The fields of ModelConfig describe a layer with a sliding window."""

    full_num_kv_heads: int
    """Number of KV heads of the layers without a sliding window."""
    full_head_dim: int
    """Number of elements of a head of these layers."""
    full_has_values: bool
    """Whether these layers have a projection to v. If not, their values are the output of the projection to k."""
    num_kv_shared_layers: int
    """Number of layers at the end that read the keys and values of the last earlier layer of their kind."""
    shared_mlp_factor: int
    """The MLP of these layers has this multiple of the intermediate features."""
    per_layer_size: int
    """Number of elements of the embedding that each layer has for each token; 0 if layers have none."""

    @classmethod
    def from_hf_config(cls, config: HFConfigReader, sliding_windows: Sequence[int | None]) -> Self:
        """Read config.json. `sliding_windows` is a field of ModelConfig.

        Raises:
            ConfigError: a value is missing or wrong, layers differ in another way, or a shared layer has no earlier
                layer of its kind.
        """
        num_layers, num_shared = len(sliding_windows), config.get_int("num_kv_shared_layers", minimum=0)
        num_own = num_layers - num_shared
        kinds = {window is None for window in sliding_windows}
        if num_shared and {window is None for window in sliding_windows[: max(num_own, 0)]} != kinds:
            raise config.error(
                "num_kv_shared_layers", num_shared, "a number that leaves an earlier layer of each kind in layer_types"
            )
        has_values = not config.get_bool("attention_k_eq_v")
        kv_heads, head_dim = config.get_int("num_key_value_heads"), config.get_int("head_dim")
        if config.get_section("per_layer_config").is_empty:
            head_dim = config.get_int("global_head_dim")
            if not has_values:
                kv_heads = config.get_int("num_global_key_value_heads", kv_heads)
        else:
            kv_heads, head_dim = _read_full_heads(config, sliding_windows, kv_heads, head_dim)
        per_layer_size, vocab_size = (
            config.get_int("hidden_size_per_layer_input", minimum=0),
            config.get_int("vocab_size"),
        )
        if per_layer_size and (own_size := config.get_int("vocab_size_per_layer_input")) != vocab_size:
            raise config.error("vocab_size_per_layer_input", own_size, f"vocab_size {vocab_size}")
        return cls(
            full_num_kv_heads=kv_heads,
            full_head_dim=head_dim,
            full_has_values=has_values,
            num_kv_shared_layers=num_shared,
            shared_mlp_factor=2 if config.get_bool("use_double_wide_mlp") else 1,
            per_layer_size=per_layer_size,
        )


def _read_full_heads(
    config: HFConfigReader, sliding_windows: Sequence[int | None], kv_heads: int, head_dim: int
) -> tuple[int, int]:
    """Return the number of KV heads and the head dimension of the layers without a window from `per_layer_config`,
    which transformers 5 writes: it maps the index of a layer, padded with zeros, to the keys that differ."""
    section = config.get_section("per_layer_config")
    names = {name.lstrip("0") or "0": name for name in section}
    full = {str(layer) for layer, window in enumerate(sliding_windows) if window is None}
    if unknown := sorted(set(names) - full):
        raise ConfigError(
            f"config.json: per_layer_config: {unknown[0]!r} is not the index of a layer with full_attention; only "
            "these layers can have other heads"
        )
    found = set()
    for layer in full:
        keys = section.get_section(names.get(layer, layer))
        if other := sorted(set(keys) - set(_HEAD_KEYS)):
            raise ConfigError(f"config.json: per_layer_config: {other[0]!r} cannot differ between layers; remove it")
        found.add((keys.get_int("num_key_value_heads", kv_heads), keys.get_int("head_dim", head_dim)))
    if len(found) > 1:
        raise ConfigError("config.json: per_layer_config: all layers with full_attention must have the same heads")
    return found.pop()
