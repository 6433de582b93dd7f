# SPDX-License-Identifier: Apache-2.0
"""Kimi Linear: most layers have Kimi Delta Attention, and the others have latent attention without positions."""

from types import MappingProxyType
from typing import ClassVar

from quire_engine.models.hybrid.decoder import HybridDecoderLayer, HybridForCausalLM
from quire_engine.models.layers.kimi_delta_attention import KimiDeltaAttention
from quire_engine.models.layers.latent_attention import LatentAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_spec.model.model_config import ModelConfig


class KimiLinearDecoderLayer(HybridDecoderLayer):
    """Kimi Delta Attention or latent attention, and an MLP or experts."""

    NAMES = MappingProxyType({"state_layer": "self_attn"})
    ATTENTION: ClassVar[type[LatentAttention]] = LatentAttention  # type: ignore[assignment]

    @classmethod
    def build_state_layer(cls, shape: ModelConfig, index: int, factory: ParamFactory) -> KimiDeltaAttention:
        """See HybridDecoderLayer.build_state_layer."""
        return KimiDeltaAttention(shape, index, factory)


class KimiLinearForCausalLM(HybridForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = KimiLinearDecoderLayer
