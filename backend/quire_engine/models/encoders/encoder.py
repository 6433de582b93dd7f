# SPDX-License-Identifier: Apache-2.0
"""Base class of encoders. They share the interface of decoders, so that the same steps, adapters and shards work."""

from torch import Tensor

from quire_engine.models.base import CausalLM
from quire_engine.models.forward_batch import ForwardBatch


class Encoder(CausalLM):
    """Computes the last hidden states of whole sequences. Nothing is cached."""

    def final_norm(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See CausalLM.final_norm. The layers return `last_hidden_state` already."""
        return hidden

    def compute_logits(self, hidden: Tensor, batch: ForwardBatch) -> Tensor:
        """See CausalLM.compute_logits. Only warm-up steps of a GPU call it, because no request samples."""
        return self.lm_head(hidden, batch)
