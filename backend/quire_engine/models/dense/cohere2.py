# SPDX-License-Identifier: Apache-2.0
"""Cohere 2 (Command R7B, Command A): attention and MLP in parallel, LayerNorm without shifts, interleaved rotary
positions in the layers with a sliding window, and scaled logits."""

from torch import Tensor

from quire_engine.models.dense.parallel import ParallelDecoderLayer
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import InterleavedAttention
from quire_engine.models.layers.norm import BiaslessLayerNorm
from quire_engine.models.llama import LlamaForCausalLM


class Cohere2DecoderLayer(ParallelDecoderLayer):
    """ParallelDecoderLayer with InterleavedAttention."""

    ATTENTION = InterleavedAttention
    NORM = BiaslessLayerNorm


class Cohere2ForCausalLM(LlamaForCausalLM):
    """See LlamaForCausalLM."""

    LAYER = Cohere2DecoderLayer

    def compute_logits(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See CausalLM.compute_logits."""
        return super().compute_logits(hidden, batch).mul_(self.shape.factors["logit_scale"])
