# SPDX-License-Identifier: Apache-2.0
"""The vocabulary shared by ranks: each has the rows of some tokens of embedding and output projection."""

from typing import Any

from torch import Tensor

from quire_engine.distributed.communicator import Communicator
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import Linear, LinearShard, ParamFactory
from quire_engine.weights.param_shard import LoadTarget, ParamShard
from quire_kernels import ModuleSlots, add_lora_embedding, embedding
from quire_spec.model.model_config import ModelConfig


class ParallelLMHead(Linear):
    """An output projection of which each rank has some tokens' rows. Rank 0 gets the logits of all tokens, the others
    those of their own."""

    def __init__(self, communicator: Communicator, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._communicator = communicator

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """[num_rows, in_features] to [num_rows, vocab_size]; see Linear."""
        logits = self._communicator.gather(super().__call__(x, batch, residual))
        # The last rows of the last rank may be no tokens'.
        return logits[:, : self._communicator.shard.model_config.vocab_size]


def num_vocab_rows(shape: ModelConfig, factory: ParamFactory) -> int:
    """Rows of the embedding on this rank."""
    return shape.vocab_size if factory.communicator is None else factory.communicator.shard.vocab_rows_per_rank


def build_lm_head(shape: ModelConfig, factory: ParamFactory, tied_embedding: Tensor | None) -> Linear:
    """From the stream to logits, unfilled; `tied`: the embedding, where it is the same."""
    d_in, slices = shape.embedding_size, {"lm_head": num_vocab_rows(shape, factory)}
    if factory.communicator is None:
        return Linear(d_in, slices, factory, weight=tied_embedding)
    shard = LinearShard((shape.vocab_size, d_in), (factory.communicator.shard.vocab_range,), range(d_in))
    return ParallelLMHead(factory.communicator, d_in, slices, factory, weight=tied_embedding, shards={"lm_head": shard})


def embedding_shard(table: Tensor, communicator: Communicator | None) -> LoadTarget:
    """What the checkpoint's embedding fills of this rank's."""
    if communicator is None:
        return table
    tokens = communicator.shard.vocab_range
    return ParamShard(table[: len(tokens)], (communicator.shard.model_config.vocab_size, table.shape[1]), (tokens,))


def parallel_embedding(
    batch: ForwardBatch, table: Tensor, adapters: ModuleSlots | None, communicator: Communicator | None
) -> Tensor:
    """[num_tokens, embedding_size] of the table, a tensor of its own, adapters of the batch included; of this rank's
    table and the others'."""
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
