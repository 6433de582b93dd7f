# SPDX-License-Identifier: Apache-2.0
"""Settings of layers with a gated short convolution (LFM2)."""

from dataclasses import dataclass, replace
from typing import Self

from quire_spec.model.attention.state_config import MAX_KERNEL_SIZE, StateConfig, shard_range
from quire_spec.model.hf_config import HFConfigReader


@dataclass(frozen=True, slots=True)
class ShortConvConfig(StateConfig):
    """A short convolution between two gates. Its state is only the last inputs of the convolution."""

    num_features: int
    """Number of features of the convolution, and of each gate."""
    has_bias: bool
    """Whether the convolution and the linear layers around it have biases."""

    @property
    def conv_size(self) -> int:
        """See StateConfig.conv_size."""
        return self.num_features

    @property
    def recurrence_shape(self) -> tuple[int, ...]:
        """See StateConfig.recurrence_shape."""
        return (0,)

    @property
    def input_size(self) -> int:
        """The input of the convolution; see StateConfig.input_size."""
        return self.conv_size

    @property
    def feature_sizes(self) -> dict[str, int]:
        """See StateConfig.feature_sizes."""
        return {"state_gates_and_input": 3 * self.num_features, "state_values": self.num_features}

    def feature_ranges(self, kind: str, rank: int, size: int) -> tuple[range, ...]:
        """See StateConfig.feature_ranges."""
        num_parts = self.feature_sizes[kind] // self.num_features
        return tuple(shard_range(self.num_features, rank, size, i * self.num_features) for i in range(num_parts))

    def shard(self, size: int) -> Self:
        """See StateConfig.shard."""
        return replace(self, num_features=self.num_features // size)

    def unsupported_reason(self, size: int) -> str:
        """See StateConfig.unsupported_reason."""
        if self.num_features % size:
            return f"the number of features of a short convolution, {self.num_features}, is not a multiple of {size}"
        return ""

    @classmethod
    def from_hf_config(cls, config: HFConfigReader, layers: tuple[bool, ...], attention: tuple[bool, ...]) -> Self:
        """See StateConfig.from_hf_config."""
        return cls(
            layers=layers,
            attention_layers=attention,
            kernel_size=config.get_int("conv_L_cache", maximum=MAX_KERNEL_SIZE, minimum=2),
            num_features=config.get_int("hidden_size"),
            has_bias=config.get_bool("conv_bias"),
        )
