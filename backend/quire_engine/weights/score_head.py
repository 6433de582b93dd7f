# SPDX-License-Identifier: Apache-2.0
"""The head of a classifier: converts the pooled vectors of prompts to scores. All numbers are float32."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

from quire_engine.weights.loader import CheckpointTensors
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": functional.gelu,
    "Sigmoid": torch.sigmoid,
    "SiLU": functional.silu,
    "Softmax": lambda x: torch.softmax(x, -1),
}
"""Activations by the names of their classes in torch.nn."""


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """The last layer of a classifier. Those of encoders and reward models have another layer before it."""

    weight: Tensor
    """[num_labels, hidden_size]."""
    bias: Tensor | None = None
    dense: Tensor | None = None
    """[hidden_size, hidden_size]: the layer before the last one; None if there is none."""
    dense_bias: Tensor | None = None
    activation: str = "Identity"
    """Follows `dense`."""
    norm: Tensor | None = None
    """[hidden_size]: scale of the norm that follows the activation; None if there is none."""
    norm_bias: Tensor | None = None
    norm_eps: float = 1e-5

    @property
    def num_labels(self) -> int:
        """Number of scores."""
        return len(self.weight)

    @property
    def num_bytes(self) -> int:
        """Bytes of the layers."""
        parts = self.weight, self.bias, self.dense, self.dense_bias, self.norm, self.norm_bias
        return sum(part.nbytes for part in parts if part is not None)

    def __call__(self, vectors: Tensor) -> Tensor:
        """Return the scores [num_vectors, num_labels] of vectors [num_vectors, hidden_size]."""

        def local(part: Tensor | None) -> Tensor | None:
            return None if part is None else part.to(vectors.device)

        if self.dense is not None:
            dense = functional.linear(vectors, self.dense.to(vectors.device), local(self.dense_bias))
            vectors = ACTIVATIONS[self.activation](dense)
        if self.norm is not None:
            vectors = functional.layer_norm(
                vectors, vectors.shape[-1:], local(self.norm), local(self.norm_bias), self.norm_eps
            )
        return functional.linear(vectors, self.weight.to(vectors.device), local(self.bias))

    @classmethod
    def load(cls, folder: Path, shape: ModelConfig) -> Self:
        """Read the head of a checkpoint. Raises ConfigError if a tensor is missing or has the wrong shape."""
        tensors, size = CheckpointTensors(folder, shape.quantization), shape.embedding_size

        def read(name: str, *expected: int) -> Tensor:
            source = tensors.find(name)
            if source is None:
                raise ConfigError(f"{folder}: {name} is missing; the checkpoint is incomplete")
            if tuple(source.shape) != expected:
                raise ConfigError(f"{folder}: {name} has shape {tuple(source.shape)}; config.json implies {expected}")
            columns = range(expected[1]) if len(expected) > 1 else range(1)
            return source.read(0, range(expected[0]), columns, torch.float32).float()

        encoder = shape.encoder
        if encoder is None and shape.head in ("reward", "step_reward"):
            return cls(
                read("score.2.weight", shape.num_labels, size),
                read("score.2.bias", shape.num_labels),
                read("score.0.weight", size, size),
                read("score.0.bias", size),
                "ReLU",
            )
        if encoder is None:
            # GPT-NeoX has another name for the head of its classifier of tokens.
            name = "score" if tensors.find("classifier.weight") is None else "classifier"
            bias = read(f"{name}.bias", shape.num_labels) if shape.head == "token_score" else None
            return cls(read(f"{name}.weight", shape.num_labels, size), bias)
        names = encoder.score
        return cls(
            read(f"{names.out}.weight", shape.num_labels, size),
            read(f"{names.out}.bias", shape.num_labels),
            read(f"{names.dense}.weight", size, size) if names.dense else None,
            read(f"{names.dense}.bias", size) if names.dense and encoder.score_dense_bias else None,
            encoder.activation,
            read(f"{names.norm}.weight", size) if names.norm else None,
            read(f"{names.norm}.bias", size) if names.norm and encoder.score_norm_bias else None,
            shape.norm_eps,
        )
