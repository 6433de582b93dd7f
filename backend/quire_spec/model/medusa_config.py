# SPDX-License-Identifier: Apache-2.0
"""Configuration of Medusa heads. It is read from their config.json."""

from dataclasses import dataclass
from typing import Self

from quire_spec.errors import ConfigError
from quire_spec.model.hf_config import HFConfigReader
from quire_spec.model.model_config import ModelConfig

_MAX_HEADS = 16


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Configuration of Medusa heads. Each head proposes one token, which it computes from the last hidden state of a
    model."""

    num_blocks: int
    """Number of residual blocks that each head has before its projection to the vocabulary."""

    @classmethod
    def from_config(cls, config: object, num_tokens: int) -> Self:
        """Read a config.json that is already parsed. The heads must be able to propose `num_tokens` tokens.

        Raises:
            ConfigError: a value is invalid, or there are fewer heads than `num_tokens`; the message names the key.
        """
        reader = HFConfigReader(config)
        num_heads = reader.get_int("medusa_num_heads", maximum=_MAX_HEADS)
        if num_heads < num_tokens:
            raise ConfigError(
                f"speculative_config.num_speculative_tokens: must be at most medusa_num_heads {num_heads}, got "
                f"{num_tokens}"
            )
        return cls(reader.get_int("medusa_num_layers", 1, maximum=_MAX_HEADS, minimum=0))

    def num_elements(self, target: ModelConfig, num_tokens: int) -> int:
        """Return how many weights the first `num_tokens` heads have if the model is `target`."""
        size = target.hidden_size
        return num_tokens * (self.num_blocks * (size * size + size) + target.vocab_size * size)
