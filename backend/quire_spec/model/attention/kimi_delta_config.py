# SPDX-License-Identifier: Apache-2.0
"""Settings of layers with Kimi Delta Attention."""

from dataclasses import dataclass

from quire_spec.model.attention.linear_attention_config import LinearAttentionConfig
from quire_spec.model.attention.state_config import shard_range


@dataclass(frozen=True, slots=True)
class KimiDeltaConfig(LinearAttentionConfig):
    """Gated DeltaNet in which each element of a key has its own decay. The decays and the output gates are projected
    through latent vectors of the size of a head."""

    @property
    def input_size(self) -> int:
        """The input of the convolution, the learning rates and the decays; see StateConfig.input_size."""
        return self.conv_size + self.num_value_heads + self.key_size

    @property
    def feature_sizes(self) -> dict[str, int]:
        """See StateConfig.feature_sizes. Queries and keys are as large as values."""
        return {
            "state_values": self.value_size,
            "state_heads": self.num_value_heads,
            "state_gate_latent": self.value_head_dim,
        }

    def feature_ranges(self, kind: str, rank: int, size: int) -> tuple[range, ...]:
        """See StateConfig.feature_ranges. Every rank has the whole latent vectors."""
        num_features = self.feature_sizes[kind]
        return (range(num_features) if kind == "state_gate_latent" else shard_range(num_features, rank, size),)
