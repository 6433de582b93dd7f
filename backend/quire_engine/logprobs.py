# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of tokens taken and of the likeliest ones, of the model's own distribution, some rows at a time.
The sampler and the runner call it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire_engine.request import Logprob

_AT_ONCE_BYTES = 64 << 20
"""float32 logits, and what is the likeliest among them."""
_MOST_TOGETHER = 128


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
        columns = *(tensor.tolist() for tensor in tensors[:3]), *map(self._likely, tensors[3:])
        for token, logprob, rank, tokens, logprobs in zip(*columns, strict=True):
            likely = zip(tokens, logprobs, strict=True)
            found.append([Logprob(token, logprob, rank), *(Logprob(*entry, at) for at, entry in enumerate(likely, 1))])
        return found

    def _likely(self, tensor: Tensor) -> list[list[Any]]:
        """Of each row, as many as it asks for."""
        # One may ask for all of a vocabulary, which would take seconds for everyone.
        rows: Any = tensor.cpu() if tensor.shape[1] > _MOST_TOGETHER else tensor.tolist()
        cut = (row[:count] for row, count in zip(rows, self.counts, strict=True))
        return [row if isinstance(row, list) else row.tolist() for row in cut]


def rows_at_once(vocab_size: int, most: int = 0) -> int:
    """Rows of logits that are worked on at a time: enough for a matrix product, little beside the weights; `most`: of
    the likeliest tokens, which are kept beside the logits."""
    return max(1, _AT_ONCE_BYTES // (4 * vocab_size + 12 * most))


def logprobs_of(
    logits: Tensor, taken: Tensor, counts: Sequence[int], rows: Tensor | None = None
) -> list[list[Logprob]]:
    """Per row, the token taken, then the likeliest ones; as `score` takes them."""
    return [entries for scores in _parts(logits, taken, counts, rows) for entries in scores.entries(scores.tensors)]


def score(logits: Tensor, taken: Tensor, counts: Sequence[int], rows: Tensor | None = None) -> Scores:
    """Compute log probabilities; nothing waits for them.

    Args:
        logits: [num_logits, vocab_size], any float dtype.
        taken: [num_rows] int64.
        counts: how many of the likeliest, by row; -1 for all.
        rows: [num_rows] int64, those of the logits; None: all.
    """
    parts = list(_parts(logits, taken, counts, rows))
    if len(parts) == 1:
        return parts[0]
    tensors = tuple(torch.cat(some) for some in zip(*(part.tensors for part in parts), strict=True))
    return Scores(tensors, [count for part in parts for count in part.counts])


def _parts(logits: Tensor, taken: Tensor, counts: Sequence[int], rows: Tensor | None) -> Iterator[Scores]:
    vocab_size = logits.shape[1]
    counts = [vocab_size if count == -1 else min(count, vocab_size) for count in counts]
    most = max(counts)
    size = rows_at_once(vocab_size, most)
    for start in range(0, len(counts), size):
        part = slice(start, start + size)
        yield _score(logits[part] if rows is None else logits[rows[part]], taken[part], counts[part], most)


def _score(logits: Tensor, taken: Tensor, counts: list[int], most: int) -> Scores:
    values = logits.to(torch.float32)
    # Taken off the few that are wanted, not off the whole vocabulary.
    total = values.logsumexp(dim=-1, keepdim=True)
    own = values.gather(-1, taken[:, None])
    ranks = (values > own).sum(dim=-1) + 1
    best = values.topk(most, dim=-1)
    return Scores((taken, (own - total)[:, 0], ranks, best.indices, best.values - total), counts)
