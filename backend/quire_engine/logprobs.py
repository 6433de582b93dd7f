# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of tokens taken and of the likeliest ones, of the model's own distribution. The sampler and the
runner call it, with as many rows as should be worked on at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.request import Logprob


@dataclass(frozen=True, slots=True)
class Scores:
    """Log probabilities as they were computed."""

    tensors: tuple[Tensor, ...]
    """[num_rows]: the tokens taken, their log probabilities and ranks; [num_rows, most]: the likeliest tokens and their
    log probabilities."""
    counts: list[int]
    """How many of the likeliest a row asks for."""

    def entries(self, tensors: Sequence[Tensor]) -> list[list[Logprob]]:
        """Per row, the token taken, then the likeliest ones; `tensors`: the same, or copies of them."""
        found = []
        columns = (tensor.tolist() for tensor in tensors)
        for count, token, logprob, rank, tokens, logprobs in zip(self.counts, *columns, strict=True):
            likely = zip(tokens[:count], logprobs[:count], strict=True)
            found.append([Logprob(token, logprob, rank), *(Logprob(*entry, at) for at, entry in enumerate(likely, 1))])
        return found


def logprobs_of(logits: Tensor, taken: Tensor, counts: Sequence[int]) -> list[list[Logprob]]:
    """Per row, the token taken, then the likeliest ones; as `score` takes them."""
    scores = score(logits, taken, counts)
    return scores.entries(scores.tensors)


def score(logits: Tensor, taken: Tensor, counts: Sequence[int]) -> Scores:
    """Compute log probabilities; nothing waits for them.

    Args:
        logits: [num_rows, vocab_size], any float dtype.
        taken: [num_rows] int64.
        counts: how many of the likeliest, by row; -1 for all.
    """
    vocab_size = logits.shape[1]
    counts = [vocab_size if count == -1 else min(count, vocab_size) for count in counts]
    values = logits.to(torch.float32)
    # Taken off the few that are wanted, not off the whole vocabulary.
    total = values.logsumexp(dim=-1, keepdim=True)
    own = values.gather(-1, taken[:, None])
    ranks = (values > own).sum(dim=-1) + 1
    best = values.topk(max(counts), dim=-1)
    return Scores((taken, (own - total)[:, 0], ranks, best.indices, best.values - total), counts)
