# SPDX-License-Identifier: Apache-2.0
"""DeepSeek V2 and V3, and GLM-4.7-Flash: latent attention and experts."""

from typing import ClassVar

from quire_engine.models.layers.latent_attention import LatentAttention
from quire_engine.models.llama import LlamaDecoderLayer, LlamaForCausalLM


class LatentDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with latent attention."""

    ATTENTION: ClassVar[type[LatentAttention]] = LatentAttention  # type: ignore[assignment]

    def weights(self) -> None:
        """See LlamaDecoderLayer.weights."""


class DeepseekV3ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = LatentDecoderLayer
