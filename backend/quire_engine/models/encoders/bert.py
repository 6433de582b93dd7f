# SPDX-License-Identifier: Apache-2.0
"""BERT, RoBERTa, XLM-RoBERTa and DistilBERT: learned positions, types of tokens, and norms after attention and MLP."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.encoders.encoder import Encoder
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory, build_linear
from quire_engine.models.layers.module import Module
from quire_engine.models.layers.norm import LayerNorm
from quire_engine.weights.param_shard import LoadTarget
from quire_kernels import ACTIVATIONS, encoder_attention
from quire_spec.model.model_config import ModelConfig


class BertLayer(Module):
    """Attention and MLP, each added to its input and then normalized."""

    NAMES: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"attention_norm": "attention.output.LayerNorm", "output_norm": "output.LayerNorm"}
    )

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        *qkv, output, up, down = shape.architecture_info.linears
        self.num_heads, self.head_dim, self.scale = shape.num_heads, shape.head_dim, shape.attention_scale
        self.qkv = build_linear(shape, qkv, factory, shape.attention_bias)
        self.attention_output = build_linear(shape, [output], factory, shape.output_bias)
        self.attention_norm = LayerNorm(shape.hidden_size, shape.norm_eps, factory)
        self.intermediate = build_linear(shape, [up], factory, shape.mlp_bias)
        self.output = build_linear(shape, [down], factory, shape.mlp_bias)
        self.output_norm = LayerNorm(shape.hidden_size, shape.norm_eps, factory)
        self.activate = ACTIVATIONS[shape.activation]

    def __call__(self, hidden: Tensor, batch: ForwardBatch, bias: Tensor | None) -> Tensor:
        """Apply the layer to [num_tokens, hidden_size], which is overwritten. `bias`: see `encoder_attention`."""
        qkv = self.qkv(hidden, batch).view(hidden.shape[0], -1, self.head_dim)
        attended = encoder_attention(qkv, self.num_heads, batch.attention, self.scale, bias=bias)
        hidden = self.attention_norm(self.attention_output(attended.flatten(1), batch, hidden), batch)
        return self.output_norm(self.output(self.activate(self.intermediate(hidden, batch)), batch, hidden), batch)


class DistilBertLayer(BertLayer):
    """The same layer with other names."""

    NAMES: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"attention_norm": "sa_layer_norm", "output_norm": "output_layer_norm"}
    )


class BertModel(Encoder):
    """Computes the last hidden states from token ids."""

    NAMES: ClassVar[Mapping[str, str]] = MappingProxyType({"embedding_norm": "embeddings.LayerNorm"})
    LAYER: ClassVar[type[BertLayer]] = BertLayer
    layers: list[BertLayer]

    def build_layers(self, factory: ParamFactory) -> None:
        """See CausalLM.build_layers."""
        shape = self.shape
        assert shape.encoder is not None
        self.positions = factory.empty(shape.num_learned_positions, shape.hidden_size)
        self.token_types = factory.empty(shape.encoder.num_token_types, shape.hidden_size)
        self.embedding_norm = LayerNorm(shape.hidden_size, shape.norm_eps, factory)
        self.layers = [self.LAYER(shape, factory) for _ in range(shape.num_layers)]
        self.padding_id = shape.encoder.padding_id

    def forward_layers(self, batch: ForwardBatch, kv_cache: KVCache) -> Tensor:
        """See CausalLM.forward_layers."""
        hidden = self.embed(batch)
        if len(self.token_types) > 1 and batch.token_types is not None:
            hidden += F.embedding(batch.token_types, self.token_types)
        elif len(self.token_types):
            hidden += self.token_types[0]
        hidden += F.embedding(self._position_ids(batch), self.positions)
        hidden = self.embedding_norm(hidden, batch)
        bias = self.attention_bias(batch)
        for layer in self.layers:
            hidden = layer(hidden, batch, bias)
        return hidden

    def attention_bias(self, batch: ForwardBatch) -> Tensor | None:
        """Return what is added to the scores of attention, see `encoder_attention`."""
        return None

    def top_level_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See CausalLM.top_level_tensors."""
        yield f"{prefix}embeddings.position_embeddings.weight", self.positions
        if len(self.token_types):
            yield f"{prefix}embeddings.token_type_embeddings.weight", self.token_types
        yield from self.embedding_norm.tensors(f"{prefix}embeddings.LayerNorm.")

    def _position_ids(self, batch: ForwardBatch) -> Tensor:
        """Return the rows of the table of positions [num_tokens]. In RoBERTa, padding tokens have the row of their id,
        and positions count only the other tokens of a sequence."""
        if self.padding_id is None:
            return batch.positions
        is_text = batch.token_ids != self.padding_id
        counts = is_text.cumsum(0)
        before = F.pad(counts, (1, 0))[batch.attention.query_starts[:-1].long()]
        counts -= before.repeat_interleave(batch.attention.context_lengths.long(), output_size=len(counts))
        return counts * is_text + self.padding_id


class DistilBertModel(BertModel):
    """Has no types of tokens."""

    LAYER: ClassVar[type[BertLayer]] = DistilBertLayer


RobertaModel = XLMRobertaModel = BertModel
