# SPDX-License-Identifier: Apache-2.0
"""MTP head: the layer of a checkpoint that predicts a further token.

The row at position i reads the last hidden state of token i and the embedding of token i + 1. The output projection of
the model computes token i + 2 from its output. A later pass reads this output as the hidden state.

Source: DeepSeek-AI 2024 (DeepSeek-V3); `MtpLayer` in transformers; vLLM, which gives hidden states to the first pass
after the last norm of the model.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import Linear, ParamFactory
from quire_engine.models.layers.module import Module
from quire_engine.models.layers.rotary import RotaryEmbedding
from quire_engine.models.llama import LlamaDecoderLayer
from quire_engine.weights.param_shard import LoadTarget
from quire_spec.model.mtp_config import MTPConfig


class MTPHead(Module):
    """Two norms, a projection of both inputs together, a decoder layer, and a norm."""

    def __init__(self, config: MTPConfig, layer: type[LlamaDecoderLayer], factory: ParamFactory) -> None:
        """Allocate the parameters. `layer` is the class of the model's layers."""
        size, eps = config.layer.hidden_size, config.layer.norm_eps
        self.embedding_norm, self.hidden_norm = layer.NORM(size, eps, factory), layer.NORM(size, eps, factory)
        self.projection = Linear(2 * size, {config.names.projection: size}, factory)
        self.layer = layer(config.layer, 0, factory)
        self.output_norm = layer.NORM(size, eps, factory)
        self._rotary = RotaryEmbedding(config.layer.ropes[0], factory.device)
        self._config = config

    def __call__(self, embeddings: Tensor, hidden: Tensor, batch: ForwardBatch, kv_cache: Tensor) -> Tensor:
        """Return hidden states [num_tokens, hidden_size].

        Args:
            embeddings: for each position of the batch, the embedding of the next token; [num_tokens, hidden_size].
            hidden: in the first pass, the model's hidden states after its last norm; later, those that this method
                returned.
            batch: positions, and where to write keys and values.
            kv_cache: KV cache of the layer.
        """
        rope = self._rotary(batch.positions, batch.long_rope, hidden.dtype)
        inputs = torch.cat((self.embedding_norm(embeddings, batch), self.hidden_norm(hidden, batch)), dim=-1)
        return self.output_norm(self.layer(self.projection(inputs, batch), rope, kv_cache, batch), batch)

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See Module.tensors."""
        names, path = self._config.names, f"{prefix}{self._config.path}."
        yield from self.embedding_norm.tensors(f"{path}{names.embedding_norm}.")
        yield from self.hidden_norm.tensors(f"{path}{names.hidden_norm}.")
        yield from self.projection.tensors(path)
        yield from self.layer.tensors(f"{prefix}{self._config.layer_path}.")
        yield from self.output_norm.tensors(f"{path}{names.output_norm}.")
