# SPDX-License-Identifier: Apache-2.0
"""Settings of the layers with linear attention: they have one state of fixed size per sequence instead of keys and
values for each token."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from quire_spec.model.hf_config import HFConfigReader

UNSUPPORTED_TIERS = "layers of this model have one state per sequence, and the states cannot be kept in host memory"
"""Why KV offloading refuses a model with linear attention."""
UNSUPPORTED_DRAFTS = (
    "layers of this model have one state per sequence, and the states after rejected draft tokens cannot be undone"
)
"""Why speculative decoding refuses a model with linear attention."""
UNSUPPORTED_BEAMS = "layers of this model have one state per sequence, and beams cannot share it"
"""Why beam search refuses a model with linear attention."""

# A state has a row for each element of a key. Published models have 128.
_MAX_HEAD_DIM = 1024
_MIN_SNAPSHOTS = 8


@dataclass(frozen=True, slots=True)
class LinearAttentionConfig:
    """Gated DeltaNet: a short convolution over the projected queries, keys and values, followed by a recurrence with a
    matrix [key_head_dim, value_head_dim] for each value head."""

    layers: tuple[bool, ...]
    """For each layer, whether it has linear attention instead of full attention."""
    num_key_heads: int
    num_value_heads: int
    """A multiple of num_key_heads. Each key head serves several adjacent value heads."""
    key_head_dim: int
    value_head_dim: int
    kernel_size: int
    """Number of tokens that the short convolution covers, including the present one."""

    @property
    def key_size(self) -> int:
        """Number of features of all key heads."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Number of features of all value heads."""
        return self.num_value_heads * self.value_head_dim

    @property
    def conv_size(self) -> int:
        """Number of features that the short convolution changes: queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def num_layers(self) -> int:
        """Number of layers with linear attention."""
        return sum(self.layers)

    @property
    def feature_sizes(self) -> dict[str, int]:
        """Number of features of each kind that only layers with linear attention have; see Architecture.linears."""
        return {
            "state_qkv": self.conv_size,
            "state_qkvz": self.conv_size + self.value_size,
            "state_values": self.value_size,
            "state_heads": self.num_value_heads,
            "state_head_pairs": 2 * self.num_value_heads,
        }

    def feature_ranges(self, kind: str, rank: int, size: int) -> tuple[range, ...]:
        """Return which features of a kind the tensor-parallel rank `rank` of `size` ranks stores."""
        keys, values = _shard(self.key_size, rank, size), _shard(self.value_size, rank, size)
        if kind == "state_qkv":
            return keys, _shift(keys, self.key_size), _shift(values, 2 * self.key_size)
        # The features of each key head are adjacent in all other kinds.
        return (_shard(self.feature_sizes[kind], rank, size),)

    def shard(self, size: int) -> Self:
        """Return the configuration of the part that one of `size` tensor-parallel ranks stores."""
        heads, values = self.num_key_heads // size, self.num_value_heads // size
        return replace(self, num_key_heads=heads, num_value_heads=values)

    @classmethod
    def from_hf_config(
        cls, config: HFConfigReader, uses_state: Callable[[HFConfigReader, int], bool], num_layers: int
    ) -> Self | None:
        """Read config.json. Return None if all layers have full attention.

        Raises:
            ConfigError: a value is missing or wrong, or no layer has full attention.
        """
        layers = tuple(uses_state(config, index) for index in range(num_layers))
        if not any(layers):
            return None
        if all(layers):
            raise config.error("layer_types", ["linear_attention"], "at least one layer with full_attention")
        if (activation := config.get_str("hidden_act", "silu")) not in ("silu", "swish"):
            raise config.error("hidden_act", activation, "silu in a model with linear attention")
        key_heads, value_heads = config.get_int("linear_num_key_heads"), config.get_int("linear_num_value_heads")
        if value_heads % key_heads:
            raise config.error(
                "linear_num_value_heads", value_heads, f"a multiple of linear_num_key_heads, which is {key_heads}"
            )
        return cls(
            layers=layers,
            num_key_heads=key_heads,
            num_value_heads=value_heads,
            key_head_dim=config.get_int("linear_key_head_dim", maximum=_MAX_HEAD_DIM),
            value_head_dim=config.get_int("linear_value_head_dim", maximum=_MAX_HEAD_DIM),
            kernel_size=config.get_int("linear_conv_kernel_dim", maximum=16, minimum=2),
        )


def state_bytes(config: LinearAttentionConfig | None, element_bytes: int, state_element_bytes: int) -> int:
    """Return the bytes of the state of one sequence in all layers.

    `element_bytes` is the size of an element of the activations, which the short convolution keeps.
    `state_element_bytes` is the size of an element of the recurrent matrices.
    """
    if config is None:
        return 0
    convolution = config.conv_size * (config.kernel_size - 1) * element_bytes
    recurrence = config.value_size * config.key_head_dim * state_element_bytes
    return config.num_layers * (convolution + recurrence)


def num_state_rows(max_num_seqs: int, has_snapshots: bool) -> int:
    """Return how many states the engine allocates: one for each running sequence, and snapshots for the prefix
    cache."""
    return max_num_seqs + (max(_MIN_SNAPSHOTS, max_num_seqs // 4) if has_snapshots else 0)


def _shard(num_features: int, rank: int, size: int) -> range:
    return range(rank * num_features // size, (rank + 1) * num_features // size)


def _shift(source_range: range, offset: int) -> range:
    return range(source_range.start + offset, source_range.stop + offset)
