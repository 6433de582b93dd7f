# SPDX-License-Identifier: Apache-2.0
"""Configuration of the layer of a checkpoint that predicts a further token (multi-token prediction, MTP)."""

from dataclasses import dataclass, replace
from typing import Self

from quire_spec.model.architectures import MTPNames
from quire_spec.model.memory_sizing import layer_bytes
from quire_spec.model.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class MTPConfig:
    """Configuration of an MTP layer. It reads the last hidden state of a token and the embedding of the next token."""

    layer: ModelConfig
    """Describes its decoder layer as a model that has only this layer."""
    names: MTPNames
    path: str
    """Path of its tensors in the checkpoint."""

    @classmethod
    def from_model(cls, model: ModelConfig) -> Self | None:
        """Return the configuration of the first MTP layer of a model. None: config.json describes no such layer, or the
        engine does not support it."""
        names = model.architecture_info.mtp_names
        if names is None or not model.num_nextn_predict_layers:
            return None
        # It has the parts of the last layer with attention.
        last = max(index for index in range(model.num_layers) if model.has_attention(index))
        layer = replace(
            model.with_layers(range(last, last + 1)),
            moe=replace(model.moe, layers=(True,)) if model.has_experts(last) and model.moe is not None else None,
            states=None,
            images=None,
            num_nextn_predict_layers=0,
        )
        return cls(layer, names, names.path or f"{model.architecture_info.layers_path}.{model.num_layers}")

    @property
    def layer_path(self) -> str:
        """Path of the tensors of the decoder layer in the checkpoint."""
        return f"{self.path}.{self.names.layer}" if self.names.layer else self.path

    @property
    def num_elements(self) -> int:
        """Number of weights, without norms and biases."""
        return layer_bytes(self.layer, 0, 1) + 2 * self.layer.hidden_size**2
