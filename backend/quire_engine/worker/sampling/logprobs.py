# SPDX-License-Identifier: Apache-2.0
"""Log probabilities of sampled tokens, prompt tokens and the most likely tokens.

They are computed for a few rows at a time. They refer to the model's distribution before any logits processor changed
it. The sampler and the model runner call this module.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quire_engine.sequence import Logprob
from quire_engine.step.input import StepInput
from quire_engine.step.plan import ScheduledSpan
from quire_kernels import logsumexp, to_device_async

_MAX_CHUNK_BYTES = 64 << 20
"""Maximum size of a chunk in bytes. A chunk contains float32 logits and their top log probabilities."""
_MAX_COLUMNS_TO_LIST = 128
_NUM_TOP = 20
"""Default of `max_logprobs`."""


RequestedLogprobs: TypeAlias = int | tuple[int, ...]
"""Describes for which tokens a row needs log probabilities, in addition to its own token. It is a number of most likely
tokens (-1 means all tokens), or a tuple of token ids."""


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log probabilities of some rows, on the device."""

    tensors: tuple[Tensor, ...]
    """The first three tensors have the shape [num_rows]. They contain the tokens, their log probabilities and their
    ranks. The next two tensors have the shape [num_rows, max_logprobs]. The first of them contains the most likely
    tokens, or the tokens that the request names. The second contains the log probabilities of these tokens. If a
    request names tokens, a tensor with the ranks of these tokens follows.
    """
    num_logprobs: list[int]
    """For each row, the number of log probabilities that its request needs."""

    def to_lists(self, tensors: Sequence[Tensor]) -> list[list[Logprob]]:
        """Return a list for each row: it contains the row's token, and then the requested tokens.

        `tensors` contains the tensors of `self.tensors`, or copies of them.
        """
        logprob_lists = []
        columns = *(tensor.tolist() for tensor in tensors[:3]), *map(self._top_entries, tensors[3:])
        for token, logprob, rank, *top_columns in zip(*columns, strict=True):
            if len(top_columns) == 2:
                top_columns.append(range(1, len(top_columns[0]) + 1))
            top_entries = zip(*top_columns, strict=True)
            logprob_lists.append([Logprob(token, logprob, rank), *(Logprob(*entry) for entry in top_entries)])
        return logprob_lists

    def _top_entries(self, tensor: Tensor) -> list[list[Any]]:
        """Return the first entries of each row. The request of the row determines their number."""
        # It would take seconds to convert rows as wide as the vocabulary to lists. Therefore, wide rows stay tensors
        # until they are cut.
        rows: Any = tensor.cpu() if tensor.shape[1] > _MAX_COLUMNS_TO_LIST else tensor.tolist()
        truncated_rows = (row[:count] for row, count in zip(rows, self.num_logprobs, strict=True))
        return [row if isinstance(row, list) else row.tolist() for row in truncated_rows]


def max_rows(vocab_size: int, max_logprobs: int = 0) -> int:
    """Return the number of rows of logits in a chunk.

    It is large enough for a fast matrix product, but a chunk is still much smaller than the weights. `max_logprobs` is
    the number of top log probabilities of each row.
    """
    return max(1, _MAX_CHUNK_BYTES // (4 * vocab_size + 12 * max_logprobs))


def logit_row_chunks(step_input: StepInput, vocab_size: int) -> Iterator[slice]:
    """Yield the rows of hidden states in chunks. The logits of one chunk are computed together.

    All rows that sample a token come first, in one chunk. The rows of prompt log probabilities follow in several
    chunks, because the logits of a whole prompt need gigabytes. Rows that are pooled have no logits.
    """
    num_rows, num_sampled = len(step_input.logit_rows) - step_input.num_pooled, step_input.num_sampled
    if num_sampled:
        yield slice(num_sampled)
    size = max_rows(vocab_size)
    yield from (slice(start, min(start + size, num_rows)) for start in range(num_sampled, num_rows, size))


def compute_logprob_lists(
    logits: Tensor, token_ids: Tensor, requested: Sequence[RequestedLogprobs], rows: Tensor | None = None
) -> list[list[Logprob]]:
    """Return a list for each row: it contains the row's token, and then the requested tokens.

    `compute_logprobs` describes the arguments.
    """
    return [
        entries
        for chunk in _compute_chunks(logits, token_ids, requested, rows)
        for entries in chunk.to_lists(chunk.tensors)
    ]


def compute_prompt_logprobs(
    spans: Sequence[ScheduledSpan], logit_chunks: Iterator[Tensor], device: torch.device
) -> list[list[list[Logprob]]]:
    """Return the log probabilities of prompt tokens, one list for each span.

    The list has one item for each position in the span's `prompt_logprob_positions`. The item contains the log
    probabilities for the prompt token after this position.

    Args:
        spans: spans in the order of the rows of logits.
        logit_chunks: [num_rows, vocab_size] each; computed one at a time, because all chunks together need gigabytes.
        device: device of the logits.
    """
    positions = ((span.sequence, position) for span in spans for position in span.prompt_logprob_positions)
    prompt_logprobs: list[list[Logprob]] = []
    for logits in logit_chunks:
        chunk = list(islice(positions, len(logits)))
        token_ids = to_device_async([s.prompt_token_ids[position + 1] for s, position in chunk], device)
        num_logprobs = [s.params.prompt_logprobs or 0 for s, _ in chunk]
        prompt_logprobs += compute_logprob_lists(logits, token_ids, num_logprobs)
    remaining = iter(prompt_logprobs)
    return [list(islice(remaining, len(span.prompt_logprob_positions))) for span in spans]


def compute_logprobs(
    logits: Tensor, token_ids: Tensor, requested: Sequence[RequestedLogprobs], rows: Tensor | None = None
) -> LogprobTensors:
    """Compute log probabilities without waiting for the device.

    Args:
        logits: [num_logits, vocab_size], any float dtype.
        token_ids: [num_rows] int64.
        requested: for each row, the further tokens whose log probabilities are returned.
        rows: [num_rows] int64, the rows of `logits` to use; None for all.
    """
    chunks = list(_compute_chunks(logits, token_ids, requested, rows))
    if len(chunks) == 1:
        return chunks[0]
    tensors = tuple(
        torch.cat(chunk_tensors) for chunk_tensors in zip(*(chunk.tensors for chunk in chunks), strict=True)
    )
    return LogprobTensors(tensors, [count for chunk in chunks for count in chunk.num_logprobs])


def _compute_chunks(
    logits: Tensor, token_ids: Tensor, requested: Sequence[RequestedLogprobs], rows: Tensor | None
) -> Iterator[LogprobTensors]:
    vocab_size = logits.shape[1]
    counts = [request if isinstance(request, int) else len(request) for request in requested]
    num_logprobs = [vocab_size if count == -1 else min(count, vocab_size) for count in counts]
    # Which of several equal logits are among the top depends on the number of top logits. It is the same for nearly all
    # requests, so that it does not depend on the other requests of the step.
    max_logprobs = max(*num_logprobs, min(_NUM_TOP if any(num_logprobs) else 0, vocab_size))
    chunk_size = max_rows(vocab_size, max_logprobs)
    # The tensors of the chunks are concatenated. Therefore, if one chunk has tensors for named tokens, all chunks must
    # have them.
    has_names = not all(isinstance(request, int) for request in requested)
    for start in range(0, len(num_logprobs), chunk_size):
        chunk = slice(start, start + chunk_size)
        values = (logits[chunk] if rows is None else logits[rows[chunk]]).to(torch.float32)
        named = {i: names for i, names in enumerate(requested[chunk]) if not isinstance(names, int)}
        tensors = _compute_chunk(values, token_ids[chunk], max_logprobs, named if has_names else None)
        yield LogprobTensors(tensors, num_logprobs[chunk])


def _compute_chunk(
    values: Tensor, token_ids: Tensor, max_logprobs: int, named: Mapping[int, Sequence[int]] | None
) -> tuple[Tensor, ...]:
    """Return the tensors that `LogprobTensors.tensors` describes.

    `values` contains float32 logits [num_rows, vocab_size]. `named` maps rows to the token ids that their requests
    name.
    """
    # The normalizer is subtracted only from a few values per row, not from the whole vocabulary.
    total = logsumexp(values)[:, None]
    token_logits = values.gather(-1, token_ids[:, None])
    ranks = (values > token_logits).sum(dim=-1) + 1
    top_values, top_ids = values.topk(max_logprobs, dim=-1)
    tensors = token_ids, (token_logits - total)[:, 0], ranks
    if named is None:
        return *tensors, top_ids, top_values - total
    top_ranks = torch.arange(1, max_logprobs + 1, device=values.device).repeat(len(values), 1)
    for row, names in named.items():
        columns, ids = slice(len(names)), to_device_async(list(names), values.device)
        top_ids[row, columns], top_values[row, columns] = ids, values[row, ids]
        top_ranks[row, columns] = (values[row] > values[row, ids, None]).sum(dim=-1) + 1
    return *tensors, top_ids, top_values - total, top_ranks
