# SPDX-License-Identifier: Apache-2.0
"""Nemotron-H and Nemotron 3: each layer is only one block, which is Mamba-2, attention, an MLP or experts."""

from types import MappingProxyType

from torch import Tensor

from quire_engine.kv_cache.state_cache import LayerStates
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.hybrid.decoder import HybridForCausalLM
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.mamba2 import Mamba2
from quire_engine.models.layers.mlp import UngatedMLP
from quire_engine.models.layers.moe import MoE
from quire_engine.models.layers.norm import WideRMSNorm
from quire_engine.models.llama import LlamaDecoderLayer
from quire_spec.model.model_config import ModelConfig


class NemotronHAttention(RotaryAttention):
    """Attention without positions."""

    PATH = "mixer"


class NemotronHDecoderLayer(LlamaDecoderLayer):
    """One block, which reads the normalized residual stream, and adds its output to the residual stream."""

    NORM = WideRMSNorm

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        self.norm = self.NORM(shape.hidden_size, shape.norm_eps, factory)
        self.mixer: Mamba2 | NemotronHAttention | MoE | UngatedMLP
        if shape.has_state(index):
            self.mixer = Mamba2(shape, factory, "mixer")
        elif shape.has_attention(index):
            self.mixer = NemotronHAttention(shape, index, factory)
        elif shape.has_experts(index):
            self.mixer = MoE(shape, factory)
        else:
            self.mixer = UngatedMLP(shape, factory, "mixer")

    def __call__(
        self, hidden: Tensor, rope: tuple[Tensor, Tensor], kv_cache: Tensor | LayerStates, batch: ForwardBatch
    ) -> Tensor:
        """See LlamaDecoderLayer. The cache of a layer with Mamba-2 contains its states."""
        x = self.norm(hidden, batch)
        if isinstance(kv_cache, LayerStates):
            assert isinstance(self.mixer, Mamba2)
            self.mixer(x, kv_cache, batch, hidden)
        elif isinstance(self.mixer, NemotronHAttention):
            self.mixer(x, rope, kv_cache, batch, hidden)
        else:
            assert isinstance(self.mixer, MoE | UngatedMLP)
            self.mixer(x, batch, hidden)
        return hidden

    def weights(self) -> None:
        """See LlamaDecoderLayer.weights."""


class NemotronHForCausalLM(HybridForCausalLM):
    """See LlamaForCausalLM."""

    NAMES = MappingProxyType({"norm": "norm_f"})
    LAYER = NemotronHDecoderLayer
