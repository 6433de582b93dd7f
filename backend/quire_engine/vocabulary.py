# SPDX-License-Identifier: Apache-2.0
"""The vocabulary shared by ranks: each has the rows of some tokens of embedding and output projection."""

from typing import Any

from torch import Tensor

from quire_engine.batch import Batch
from quire_engine.layers import Linear, Placement, Split
from quire_engine.part import Part, Target
from quire_engine.ranks import Ranks
from quire_kernels import ModuleSlots, add_lora_embedding, embedding
from quire_spec.model.model_config import ModelConfig


class GatheredLinear(Linear):
    """An output projection of which each rank has some tokens' rows. Rank 0 gets the logits of all tokens, the others
    those of their own."""

    def __init__(self, ranks: Ranks, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks

    def __call__(self, x: Tensor, batch: Batch, residual: Tensor | None = None) -> Tensor:
        """[num_rows, in_features] to [num_rows, vocab_size]; see Linear."""
        logits = self._ranks.gather(super().__call__(x, batch, residual))
        # The last rows of the last rank may be no tokens'.
        return logits[:, : self._ranks.shard.model_config.vocab_size]


def num_rows(shape: ModelConfig, place: Placement) -> int:
    """Rows of the embedding on this rank."""
    return shape.vocab_size if place.ranks is None else place.ranks.shard.vocab_rows_per_rank


def output_projection(shape: ModelConfig, place: Placement, tied: Tensor | None) -> Linear:
    """From the stream to logits, unfilled; `tied`: the embedding, where it is the same."""
    d_in, slices = shape.embedding_size, {"lm_head": num_rows(shape, place)}
    if place.ranks is None:
        return Linear(d_in, slices, place, weight=tied)
    split = Split((shape.vocab_size, d_in), (place.ranks.shard.vocab_range,), range(d_in))
    return GatheredLinear(place.ranks, d_in, slices, place, weight=tied, splits={"lm_head": split})


def embedding_target(table: Tensor, ranks: Ranks | None) -> Target:
    """What the checkpoint's embedding fills of this rank's."""
    if ranks is None:
        return table
    tokens = ranks.shard.vocab_range
    return Part(table[: len(tokens)], (ranks.shard.model_config.vocab_size, table.shape[1]), (tokens,))


def embed(batch: Batch, table: Tensor, adapters: ModuleSlots | None, ranks: Ranks | None) -> Tensor:
    """[num_tokens, embedding_size] of the table, a tensor of its own, adapters of the batch included; of this rank's
    table and the others'."""
    ids = batch.token_ids
    if ranks is not None:
        tokens = ranks.shard.vocab_range
        foreign = (ids < tokens.start) | (ids >= tokens.stop)
        ids = (ids - tokens.start).masked_fill_(foreign, 0)
    found = embedding(ids, table)
    if batch.adapters is not None and adapters is not None and adapters.applies_to(batch.adapters):
        add_lora_embedding(found, ids, adapters, batch.adapters)
    return found if ranks is None else ranks.sum(found.masked_fill_(foreign[:, None], 0))
