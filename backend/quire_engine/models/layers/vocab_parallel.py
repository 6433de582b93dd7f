# SPDX-License-Identifier: Apache-2.0
"""Vocabulary-parallel embedding and output projection: each rank contains the rows for its part of the vocabulary."""

from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from quire_engine.distributed.communicator import Communicator
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import Linear, LinearShard, ParamFactory
from quire_engine.weights.param_shard import LoadTarget, ParamShard
from quire_kernels import HugePageArena, ModuleSlots, add_lora_embedding, embedding, pack_weight, pad_outputs
from quire_spec.model.model_config import ModelConfig


class LMHead(Linear):
    """Output projection on one rank. The number of tokens can be odd, for example if tokens were added to a
    vocabulary. Compiled kernels then compute more logits, which are removed."""

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """Compute the logits [num_rows, vocab_size]; see Linear."""
        return super().__call__(x, batch, residual)[:, : self.slices["lm_head"]]

    def pack(self, arena: HugePageArena) -> None:
        """See Linear."""
        weight = self.weight
        if isinstance(weight, Tensor) and not weight.is_meta and len(padded := pad_outputs(weight)) > len(weight):
            self.weight = pack_weight(padded, arena)
            if self.bias is not None:
                self.bias = F.pad(self.bias, (0, len(padded) - len(weight)))
        else:
            super().pack(arena)


class ParallelLMHead(Linear):
    """Output projection whose vocabulary is divided among the ranks. Rank 0 gets the logits of the whole vocabulary,
    and each of the other ranks gets the logits of its own shard.
    """

    def __init__(self, communicator: Communicator, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._communicator = communicator

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """Compute the logits [num_rows, vocab_size] from [num_rows, in_features]; see Linear."""
        logits = self._communicator.gather(super().__call__(x, batch, residual))
        # The last rows of the last rank can be padding. Their logits are removed.
        return logits[:, : self._communicator.shard.model_config.vocab_size]


def num_vocab_rows(shape: ModelConfig, factory: ParamFactory) -> int:
    """Return the number of embedding rows on this rank."""
    return shape.vocab_size if factory.communicator is None else factory.communicator.shard.vocab_rows_per_rank


def build_lm_head(shape: ModelConfig, factory: ParamFactory, tied_embedding: Tensor | None) -> Linear:
    """Build the output projection; its weight is loaded later.

    If the output projection shares its weight with the embedding, `tied_embedding` is the embedding table.
    """
    d_in, slices = shape.embedding_size, {"lm_head": num_vocab_rows(shape, factory)}
    bias = shape.architecture_info.has_lm_head_bias
    if factory.quantization == "int4":
        # Rounding errors of the output projection change the logits directly. So its weight gets 8 bits, as in other
        # engines.
        factory = replace(factory, quantization="int8_weight_only")
    if factory.communicator is None:
        return LMHead(d_in, slices, factory, bias, weight=tied_embedding)
    shard = LinearShard((shape.vocab_size, d_in), (factory.communicator.shard.vocab_range,), range(d_in))
    shards = {"lm_head": shard}
    return ParallelLMHead(factory.communicator, d_in, slices, factory, bias, weight=tied_embedding, shards=shards)


def embedding_shard(table: Tensor, communicator: Communicator | None) -> LoadTarget:
    """Return the part of this rank's embedding that the checkpoint fills; the other rows are padding."""
    if communicator is None:
        return table
    tokens = communicator.shard.vocab_range
    return ParamShard(table[: len(tokens)], (communicator.shard.model_config.vocab_size, table.shape[1]), (tokens,))


def parallel_embedding(
    batch: ForwardBatch, table: Tensor, adapters: ModuleSlots | None, communicator: Communicator | None
) -> Tensor:
    """Return the embeddings of the tokens of a batch as a new tensor [num_tokens, embedding_size].

    If adapters change the embedding, the result contains their changes. If there are several ranks, each rank looks up
    the tokens of its part of the vocabulary, and the result is the sum over all ranks.
    """
    ids = batch.token_ids
    if communicator is not None:
        tokens = communicator.shard.vocab_range
        is_foreign = (ids < tokens.start) | (ids >= tokens.stop)
        ids = (ids - tokens.start).masked_fill_(is_foreign, 0)
    embeddings = embedding(ids, table)
    if batch.adapters is not None and adapters is not None and adapters.applies_to(batch.adapters):
        add_lora_embedding(embeddings, ids, adapters, batch.adapters)
    return (
        embeddings if communicator is None else communicator.all_reduce(embeddings.masked_fill_(is_foreign[:, None], 0))
    )
