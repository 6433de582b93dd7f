# SPDX-License-Identifier: Apache-2.0
"""Settings that all kinds of layers with a state have in common. Such a layer has one state of fixed size per sequence
instead of keys and values for each token, or beside them."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Self

from quire_spec.model.hf_config import HFConfigReader

UNSUPPORTED_SWAP = (
    "layers of this model have one state per sequence, and the states of preempted sequences are not kept"
)
"""Why `swap_space` has no effect for a model whose layers have states."""

MAX_HEAD_DIM = 1024
"""Largest size of each dimension of a head's state. Published models have up to 256."""
MAX_KERNEL_SIZE = 16
_MIN_SNAPSHOTS = 8


@dataclass(frozen=True, slots=True)
class StateConfig(ABC):
    """Layers with a state. It consists of the last inputs of a short convolution, and in most kinds of the matrices of
    a recurrence, one for each head."""

    layers: tuple[bool, ...]
    """For each layer, whether it has a state."""
    attention_layers: tuple[bool, ...]
    """For each layer, whether it has attention. A layer can have both, or neither."""
    kernel_size: int
    """Number of tokens that the short convolution covers, including the present one."""

    @property
    @abstractmethod
    def conv_size(self) -> int:
        """Number of features that the short convolution changes."""

    @property
    @abstractmethod
    def recurrence_shape(self) -> tuple[int, ...]:
        """Dimensions of the matrices of all heads; (0,) if there is no recurrence."""

    @property
    @abstractmethod
    def input_size(self) -> int:
        """Number of features of a token by which it changes the state."""

    @property
    @abstractmethod
    def feature_sizes(self) -> dict[str, int]:
        """Number of features of each kind that only layers with a state have; see Architecture.linears. The names of
        the kinds begin with `state_`."""

    @abstractmethod
    def feature_ranges(self, kind: str, rank: int, size: int) -> tuple[range, ...]:
        """Return which features of a kind the tensor-parallel rank `rank` of `size` ranks stores."""

    @abstractmethod
    def shard(self, size: int) -> Self:
        """Return the configuration of the part that one of `size` tensor-parallel ranks stores."""

    @abstractmethod
    def unsupported_reason(self, size: int) -> str:
        """Return the reason why the layers cannot be split over `size` ranks; empty if they can."""

    @classmethod
    @abstractmethod
    def from_hf_config(cls, config: HFConfigReader, layers: tuple[bool, ...], attention: tuple[bool, ...]) -> Self:
        """Read config.json. The other arguments are the first fields.

        Raises:
            ConfigError: a value is missing or wrong.
        """

    @property
    def has_recurrence(self) -> bool:
        """Whether states contain matrices of a recurrence."""
        return self.recurrence_shape != (0,)

    @property
    def num_layers(self) -> int:
        """Number of layers with a state."""
        return sum(self.layers)


def state_bytes(config: StateConfig | None, element_bytes: int, state_element_bytes: int, max_drafts: int) -> int:
    """Return the bytes of the state of one sequence in all layers, and of the inputs of its drafts.

    `element_bytes` is the size of an element of the activations, which the short convolution keeps.
    `state_element_bytes` is the size of an element of the recurrent matrices. `max_drafts` is the maximum number of
    drafts in a step.
    """
    if config is None:
        return 0
    inputs = (config.conv_size * (config.kernel_size - 1) + config.input_size * max_drafts) * element_bytes
    return config.num_layers * (inputs + math.prod(config.recurrence_shape) * state_element_bytes)


def num_host_states(size: int, bytes_per_state: int) -> int:
    """Return how many snapshots of states a rank keeps in `size` bytes of host memory for KV blocks and states. They
    take at most half of it."""
    return size // 2 // bytes_per_state


def num_state_rows(max_num_seqs: int, has_snapshots: bool) -> int:
    """Return how many states the engine allocates: one for each running sequence, and snapshots for the prefix
    cache."""
    return max_num_seqs + (max(_MIN_SNAPSHOTS, max_num_seqs // 4) if has_snapshots else 0)


def shard_range(num_features: int, rank: int, size: int, offset: int = 0) -> range:
    """Return the features of a rank if `num_features`, which begin at `offset`, are divided equally."""
    return range(offset + rank * num_features // size, offset + (rank + 1) * num_features // size)
