# SPDX-License-Identifier: Apache-2.0
"""Gemma 1: Llama with scaled embeddings, and with the factor 1 + weight in each norm."""

from quire_engine.models.gemma2 import Gemma2ForCausalLM
from quire_engine.models.layers.norm import UnitOffsetRMSNorm
from quire_engine.models.llama import LlamaDecoderLayer


class GemmaDecoderLayer(LlamaDecoderLayer):
    """Llama's layer with other norms."""

    NORM = UnitOffsetRMSNorm


class GemmaForCausalLM(Gemma2ForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = GemmaDecoderLayer
