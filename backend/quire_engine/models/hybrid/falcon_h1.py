# SPDX-License-Identifier: Apache-2.0
"""Falcon-H1: each layer has Mamba-2 and attention in parallel, and many activations are multiplied by factors."""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.kv_cache.state_cache import LayerStates
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.mamba2 import Mamba2
from quire_engine.models.layers.mlp import MLP
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from quire_spec.model.model_config import ModelConfig


class FalconH1Attention(RotaryAttention):
    """Attention whose keys are multiplied by a factor."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        # Scores are linear in the keys.
        self.scale *= shape.factors["key_multiplier"]


class FalconH1MLP(MLP):
    """Gated MLP whose gate and output are multiplied by factors."""

    PATH = "feed_forward"

    def __init__(self, shape: ModelConfig, factory: ParamFactory, layer: int = 0, path: str = "") -> None:
        super().__init__(shape, factory, layer, path)
        self.gate_multiplier, self.down_multiplier = (shape.factors[f"mlp_multipliers.{i}"] for i in range(2))
        self.intermediate_size = shape.intermediate_size

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """See MLP."""
        gate_up = self.gate_up_proj(x, batch)
        gate_up[:, : self.intermediate_size].mul_(self.gate_multiplier)
        out = self.down_proj(self.activate(gate_up), batch).mul_(self.down_multiplier)
        return out if residual is None else residual.add_(out)


class FalconH1DecoderLayer(LlamaDecoderLayer):
    """Mamba-2 beside attention, and an MLP."""

    NAMES = MappingProxyType({"post_attention_layernorm": "pre_ff_layernorm", "mlp": "feed_forward"})
    ATTENTION = FalconH1Attention
    MLP = FalconH1MLP

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.mamba = Mamba2(shape, factory, "mamba", [shape.factors[f"ssm_multipliers.{i}"] for i in range(5)])
        self.factors = shape.factors

    def __call__(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        kv_cache: tuple[LayerStates, Tensor],  # type: ignore[override]
        batch: ForwardBatch,
    ) -> Tensor:
        """See LlamaDecoderLayer. The cache of a layer contains its states, and its keys and values."""
        states, keys_and_values = kv_cache
        x, factors = self.input_layernorm(hidden, batch), self.factors
        mamba = self.mamba(x * factors["ssm_in_multiplier"], states, batch)
        attention = self.self_attn(x * factors["attention_in_multiplier"], rope, keys_and_values, batch)
        mamba.mul_(factors["ssm_out_multiplier"]).add_(attention.mul_(factors["attention_out_multiplier"]))
        hidden.add_(mamba)
        return self.mlp(self.post_attention_layernorm(hidden, batch), batch, residual=hidden)

    def weights(self) -> None:
        """See LlamaDecoderLayer.weights."""


class FalconH1ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    NAMES = MappingProxyType({"norm": "final_layernorm"})
    LAYER = FalconH1DecoderLayer

    def layer_arguments(
        self, hidden: Tensor, batch: ForwardBatch, kv_cache: KVCache
    ) -> tuple[list[tuple[Tensor, Tensor]], Sequence[Any], Sequence[ForwardBatch]]:
        """See LlamaForCausalLM.layer_arguments and FalconH1DecoderLayer."""
        assert kv_cache.states is not None
        ropes, caches, batches = super().layer_arguments(hidden, batch, kv_cache)
        return ropes, [(kv_cache.states.layers[layer], cache) for layer, cache in enumerate(caches)], batches

    def embed(self, batch: ForwardBatch) -> Tensor:
        """See CausalLM.embed."""
        return super().embed(batch).mul_(self.shape.factors["embedding_multiplier"])

    def compute_logits(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See CausalLM.compute_logits."""
        return super().compute_logits(hidden, batch).mul_(self.shape.factors["lm_head_multiplier"])
