# SPDX-License-Identifier: Apache-2.0
"""Decoder in which some layers have a state per sequence, instead of attention or beside it."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.kv_cache.state_cache import LayerStates
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from quire_spec.model.model_config import ModelConfig


class StateLayer(Protocol):
    """A part of a decoder layer that has a state per sequence."""

    def __call__(self, x: Tensor, states: LayerStates, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """Compute the output for the input [num_tokens, hidden_size], and update the states of the batch.

        If `residual` is given, add the output to it in place.
        """


class HybridDecoderLayer(LlamaDecoderLayer):
    """A layer with a state or with attention, followed by an MLP or experts."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        self.input_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, factory)
        self.state_layer: StateLayer | None = None
        if shape.has_state(index):
            self.state_layer = self.build_state_layer(shape, index, factory)
        else:
            self.self_attn = self.ATTENTION(shape, index, factory)
        self.post_attention_layernorm = self.NORM(shape.hidden_size, shape.norm_eps, factory)
        self.mlp = self.build_mlp(shape, index, factory)

    @classmethod
    @abstractmethod
    def build_state_layer(cls, shape: ModelConfig, index: int, factory: ParamFactory) -> StateLayer:
        """Return the part of layer `index` with a state."""

    def mix(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        kv_cache: Tensor | LayerStates,
        batch: ForwardBatch,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Compute the part with a state, or attention. If `residual` is given, add the output to it in place."""
        if isinstance(kv_cache, LayerStates):
            assert self.state_layer is not None
            return self.state_layer(x, kv_cache, batch, residual)
        return self.self_attn(x, rope, kv_cache, batch, residual)

    def __call__(
        self, hidden: Tensor, rope: tuple[Tensor, Tensor], kv_cache: Tensor | LayerStates, batch: ForwardBatch
    ) -> Tensor:
        """See LlamaDecoderLayer. The cache of a layer with a state contains the states."""
        self.mix(self.input_layernorm(hidden, batch), rope, kv_cache, batch, residual=hidden)
        return self.mlp(self.post_attention_layernorm(hidden, batch), batch, residual=hidden)

    def weights(self) -> None:
        """See LlamaDecoderLayer.weights."""


class HybridForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER: ClassVar[type[LlamaDecoderLayer]] = HybridDecoderLayer

    def layer_arguments(
        self, hidden: Tensor, batch: ForwardBatch, kv_cache: KVCache
    ) -> tuple[list[tuple[Tensor, Tensor]], Sequence[Any], Sequence[ForwardBatch]]:
        """See LlamaForCausalLM.layer_arguments. The cache of a layer with a state contains the states."""
        ropes, caches, batches = super().layer_arguments(hidden, batch, kv_cache)
        if kv_cache.states is not None:
            caches = [kv_cache.states.layers.get(layer, cache) for layer, cache in enumerate(caches)]
        return ropes, caches, batches
