# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of tokens taken and of the likeliest ones, of the model's own distribution. The sampler and the
runner call it, with as many rows as should be worked on at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_engine.request import Logprob


def logprobs_of(logits: Tensor, taken: Tensor, counts: Sequence[int]) -> list[list[Logprob]]:
    """Per row, the token taken, then the likeliest ones.

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
    likely_logprobs = (best.values - total).tolist()
    columns = (taken.tolist(), (own - total)[:, 0].tolist(), ranks.tolist(), best.indices.tolist(), likely_logprobs)
    found = []
    for count, token, logprob, rank, tokens, best_of_row in zip(counts, *columns, strict=True):
        likely = zip(tokens[:count], best_of_row[:count], strict=True)
        found.append([Logprob(token, logprob, rank), *(Logprob(*entry, at) for at, entry in enumerate(likely, 1))])
    return found
