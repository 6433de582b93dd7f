# SPDX-License-Identifier: Apache-2.0
"""What encoders have and decoders do not: types of tokens, and heads of several layers."""

from dataclasses import dataclass
from typing import Self

from quire_spec.model.hf_config import HFConfigReader

_ACTIVATIONS = {"tanh": "Tanh", "gelu": "GELU", "relu": "ReLU", "silu": "SiLU"}
"""Maps activations of config.json to classes of torch.nn."""


@dataclass(frozen=True, slots=True)
class ScoreNames:
    """Names of the tensors of a classifier's head: the vector passes `dense`, its activation and `norm`, then `out`."""

    out: str
    dense: str = ""
    """Empty: there is no such layer."""
    norm: str = ""
    activation: str = "Tanh"
    """Class of torch.nn that follows `dense`, unless config.json names one."""


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Describes an encoder."""

    num_token_types: int
    """Number of types that a token can have. The tokens of the second text of a pair have type 1. 0: tokens have no
    types."""
    padding_id: int | None
    """Padding tokens have no position of their own in such models. None: every token has one."""
    score: ScoreNames
    """Names of a classifier's head."""
    activation: str
    """Class of torch.nn that follows `score.dense`."""
    score_dense_bias: bool = True
    score_norm_bias: bool = False
    score_pooling: str = "cls"
    """PoolerConfig.pooling of a classifier."""

    @classmethod
    def from_hf_config(cls, config: HFConfigReader, score: ScoreNames, skips_padding: bool) -> Self:
        """Read config.json. Raises ConfigError if a value is not supported."""
        num_types = config.get_int("type_vocab_size", minimum=0) if "type_vocab_size" in config else 0
        padding_id = config.get_int("pad_token_id", minimum=0) if skips_padding else None
        if "classifier_pooling" not in config:
            return cls(num_types, padding_id, score, score.activation)
        pooling, activation = config.get_str("classifier_pooling"), config.get_str("classifier_activation")
        if pooling not in ("cls", "mean"):
            raise config.error("classifier_pooling", pooling, "cls or mean")
        if activation not in _ACTIVATIONS:
            raise config.error("classifier_activation", activation, f"one of {', '.join(_ACTIVATIONS)}")
        biases = config.get_bool("classifier_bias"), config.get_bool("norm_bias")
        return cls(num_types, padding_id, score, _ACTIVATIONS[activation], *biases, pooling)
