# SPDX-License-Identifier: Apache-2.0
"""Granite 4: Granite 3 with other names of its MLP. In most models, most layers have Mamba-2 instead of attention, and
layers have experts beside the MLP; some models have no rotary positions."""

from types import MappingProxyType

from torch import Tensor

from quire_engine.kv_cache.state_cache import LayerStates
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.granite import GraniteForCausalLM
from quire_engine.models.hybrid.decoder import HybridDecoderLayer, HybridForCausalLM
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.mamba2 import Mamba2
from quire_engine.models.layers.mlp import MLP
from quire_engine.models.layers.moe import StackedMoE
from quire_spec.model.model_config import ModelConfig


class SharedMLP(MLP):
    """A gated MLP with one linear layer for gate and up."""

    PATH = "shared_mlp"
    GATE_UP = ("input_linear",)
    DOWN = "output_linear"


class GraniteMoE(StackedMoE):
    """Experts beside the MLP, with other names."""

    GATE_UP = "input_linear.weight"
    DOWN = "output_linear.weight"


class GraniteMoeHybridDecoderLayer(HybridDecoderLayer):
    """Mamba-2 or attention, and an MLP with experts beside it. All outputs are multiplied by a factor before they are
    added to the residual stream."""

    NAMES = MappingProxyType({"state_layer": "mamba", "mlp": "shared_mlp"})

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.block_sparse_moe = GraniteMoE(shape, factory) if shape.has_experts(index) else None
        self.residual_multiplier = shape.factors["residual_multiplier"]

    @classmethod
    def build_state_layer(cls, shape: ModelConfig, index: int, factory: ParamFactory) -> Mamba2:
        """See HybridDecoderLayer.build_state_layer."""
        return Mamba2(shape, factory, "mamba")

    @classmethod
    def build_mlp(cls, shape: ModelConfig, index: int, factory: ParamFactory) -> MLP:
        """See LlamaDecoderLayer.build_mlp."""
        return SharedMLP(shape, factory)

    def __call__(
        self, hidden: Tensor, rope: tuple[Tensor, Tensor], kv_cache: Tensor | LayerStates, batch: ForwardBatch
    ) -> Tensor:
        """See HybridDecoderLayer."""
        hidden.add_(
            self.mix(self.input_layernorm(hidden, batch), rope, kv_cache, batch), alpha=self.residual_multiplier
        )
        x = self.post_attention_layernorm(hidden, batch)
        out = self.mlp(x, batch)
        if self.block_sparse_moe is not None:
            out = self.block_sparse_moe(x, batch, residual=out)
        return hidden.add_(out, alpha=self.residual_multiplier)


class GraniteMoeHybridForCausalLM(HybridForCausalLM, GraniteForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = GraniteMoeHybridDecoderLayer
