# SPDX-License-Identifier: Apache-2.0
"""Configuration of an EAGLE-3 head.

It is read from the config.json of the head, which can have the layout of SafeAILab/EAGLE or the layout of speculators.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quire_spec.dataclass_json import read_json
from quire_spec.errors import ConfigError
from quire_spec.model.hf_config import HFConfigReader
from quire_spec.model.model_config import ModelConfig

_AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Config:
    """Configuration of an EAGLE-3 head. The head is one decoder layer, which reads hidden states of a target model."""

    layer: ModelConfig
    """Describes the decoder layer as a Llama model that has only this layer. Its vocabulary is that of the target
    model."""
    aux_layers: tuple[int, ...]
    """Indices of layers of the target model. The head reads the inputs of these layers."""
    draft_vocab_size: int
    """Number of different tokens that the head can propose."""
    norm_before_residual: bool
    """If true, the outputs of attention and of the MLP are added to the normalized hidden state. If false, they are
    added to the hidden state as it was before normalization."""
    norm_before_fc: bool
    """Whether the hidden states of the target's layers are normalized together, after they are concatenated."""
    fc_norm: bool
    """Whether the hidden states of each of the target's layers are normalized separately. It must be false if
    norm_before_fc is true."""
    norm_output: bool
    """If true, the next pass reads the hidden states after the last norm. If false, it reads those before the last
    norm."""

    @classmethod
    def load(cls, folder: Path, target: ModelConfig) -> Self:
        """Read config.json of a head in `folder`. `target` is the model for which the head proposes tokens.

        Raises:
            ConfigError: the file cannot be read, or the head does not match `target`; the message names the key.
        """
        return cls.from_config(read_json(folder / "config.json"), target)

    @classmethod
    def from_config(cls, config: object, target: ModelConfig) -> Self:
        """Read a config.json that is already parsed. Raises ConfigError if the head does not match `target`."""
        if not isinstance(config, Mapping):
            raise ConfigError(f"config.json: expected an object, got {type(config).__name__}")
        layer_config: Any = config.get("transformer_layer_config", config)
        if not isinstance(layer_config, Mapping):
            raise ConfigError("config.json: transformer_layer_config must be an object")
        as_llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1}
        as_llama["tie_word_embeddings"] = False
        ignored = ("layer_types", "eagle_config")
        layer = ModelConfig.from_config({k: v for k, v in layer_config.items() if k not in ignored} | as_llama)
        num_layers = layer_config.get("num_hidden_layers", 1)
        if num_layers != 1:
            raise ConfigError(
                f"config.json: num_hidden_layers is {num_layers!r}, but an EAGLE-3 head has 1 layer; give the head, "
                "not a whole model"
            )
        reader = HFConfigReader(config, {})
        norm_before_fc, fc_norm = (reader.get_bool(key, False) for key in ("norm_before_fc", "fc_norm"))
        if norm_before_fc and fc_norm:
            raise reader.error("fc_norm", True, "false if norm_before_fc is true")
        for key, value, expected in (
            ("vocab_size", layer.vocab_size, target.vocab_size),
            # The head reads the embeddings of the target model, so both must have the same size.
            ("hidden_size", layer.hidden_size, target.embedding_size),
        ):
            if value != expected:
                raise ConfigError(
                    f"config.json: {key} of the EAGLE-3 head is {value}, but {key} of the model is {expected}; use a "
                    "head that was trained for this model"
                )
        count = target.num_layers
        ids: tuple[int, ...] = (2, count // 2, count - 3)
        for section in (reader, reader.get_section("eagle_config")):
            if _AUX_LAYERS_KEY in section:
                ids = section.get_int_list(_AUX_LAYERS_KEY)
                break
        if len(ids) < 2 or not all(0 <= i < count for i in ids):
            raise reader.error(_AUX_LAYERS_KEY, list(ids), f"a list of at least two layers from 0 to {count - 1}")
        return cls(
            layer,
            ids,
            reader.get_int("draft_vocab_size", layer.vocab_size),
            reader.get_bool("norm_before_residual", False),
            norm_before_fc,
            fc_norm,
            reader.get_bool("norm_output", False),
        )

    def num_elements(self, target: ModelConfig) -> int:
        """Return how many weights the head has. Its norms and biases are not counted."""
        layer, hidden = self.layer, self.layer.hidden_size
        query, kv = layer.num_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        attention = 2 * hidden * (query + 2 * kv) + query * hidden
        inputs = len(self.aux_layers) * target.hidden_size
        return hidden * (inputs + 3 * layer.intermediate_size + self.draft_vocab_size) + attention
