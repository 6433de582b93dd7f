# SPDX-License-Identifier: Apache-2.0
"""Sampler: selects a token for each row of logits, with the sampling parameters of the row's sequence.

The rejection sampler calls it in synchronous steps, once in each round of drafts. The span sampler calls it in
asynchronous steps. The beam candidates use only its token counts. A row is one position of one sequence. Sampling
parameters are copied to the device once, and stay there until the batch changes. A parameter that no request uses does
not slow down a step. A random draw depends only on the row's logits, the sequence's seed and the position. It does not
depend on the batch, on the row's index in the batch, or on earlier preemptions.
"""

from collections import abc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from quire_engine.sequence import Logprob, Sequence
from quire_engine.step.plan import SpanOutput
from quire_engine.worker.profiling import annotate
from quire_engine.worker.sampling.grammar_bitmask import TokenBitmask
from quire_engine.worker.sampling.logits_processors import LogitsProcessors
from quire_engine.worker.sampling.logprobs import (
    LogprobTensors,
    RequestedLogprobs,
    compute_logprob_lists,
    compute_logprobs,
)
from quire_engine.worker.sampling.penalty_state import TokenCounts
from quire_kernels import argmax_first, sample, to_device_async

# Size of the float32 logits of a chunk on a CPU. A chunk fits into a core's share of the cache. It is also smaller than
# the blocks of memory that the C library returns to the system after each use. If 64 rows of 151,936 logits are
# computed at once, the softmax takes 18 ms instead of 4 ms on one Zen 5 core.
CPU_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """One position that needs a token."""

    sequence: Sequence
    position: int
    """Position of the token in its sequence; the prompt's first token has position 0."""
    draft_token_ids: tuple[int, ...] = ()
    """Accepted draft tokens between the last token of the sequence and this position."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """The sampled tokens of a step and their log probabilities, on the device."""

    token_ids: Tensor
    """[num_rows] int64."""
    logprob_chunks: list[tuple[list[int], LogprobTensors]] = field(default_factory=list)
    """Each item is a list of rows and the log probabilities of these rows. It contains only rows whose requests set
    `logprobs`."""

    @property
    def logprob_tensors(self) -> list[Tensor]:
        """All tensors that contain the log probabilities, in the order that `to_outputs` expects."""
        return [tensor for _, logprobs in self.logprob_chunks for tensor in logprobs.tensors]

    def to_outputs(self, host_tensors: abc.Sequence[Tensor]) -> list[SpanOutput]:
        """Return one output for each row.

        `host_tensors` contains a copy of `token_ids`, and then copies of `logprob_tensors`.
        """
        token_ids, *logprob_tensors = host_tensors
        outputs = [SpanOutput([token]) for token in token_ids.tolist()]
        for row_indices, logprobs in self.logprob_chunks:
            entries = logprobs.to_lists([logprob_tensors.pop(0) for _ in logprobs.tensors])
            for row, row_logprobs in zip(row_indices, entries, strict=True):
                outputs[row] = replace(outputs[row], logprobs=[row_logprobs])
        return outputs


class Sampler:
    """Samples tokens. The sampler keeps the tensors of the last batch, and the token counts of penalized sequences."""

    def __init__(self, max_rows: int) -> None:
        """`max_rows` is the maximum number of rows in a step."""
        self._max_rows = max_rows
        self._sampling_tensors: dict[int, SamplingTensors] = {}
        """Maps the first row of each chunk of the batch to the chunk's tensors."""
        self._token_counts: TokenCounts | None = None

    def __call__(
        self, logits: Tensor, rows: abc.Sequence[SamplingRow], bitmask: TokenBitmask | None = None
    ) -> list[SpanOutput]:
        """Sample one token per row.

        Args:
            logits: [num_rows, vocab_size], any float dtype; modified only in rows of the bitmask.
            rows: position and sequence of each row.
            bitmask: the tokens that grammars allow; None allows all tokens.
        """
        outputs: list[SpanOutput] = []
        for chunk, tensors, token_ids in self._sample_chunks(logits, rows, bitmask):
            logprobs = tensors.gather_logprobs(logits[chunk], token_ids)
            outputs += [SpanOutput([token], logprobs.get(i)) for i, token in enumerate(token_ids.tolist())]
        return outputs

    def sample_async(
        self, logits: Tensor, rows: abc.Sequence[SamplingRow], bitmask: TokenBitmask | None = None
    ) -> "SampledTokens":
        """Sample one token per row without waiting for the device. `__call__` describes the arguments."""
        token_chunks, logprob_chunks = [], []
        for chunk, tensors, token_ids in self._sample_chunks(logits, rows, bitmask):
            token_chunks.append(token_ids)
            if (logprobs := tensors.compute_logprobs(logits[chunk], token_ids)) is not None:
                logprob_chunks.append(([chunk.start + i for i in tensors.logprobs], logprobs))
        return SampledTokens(token_chunks[0] if len(token_chunks) == 1 else torch.cat(token_chunks), logprob_chunks)

    def token_counts(self, logits: Tensor) -> TokenCounts:
        """Return the token counts of sequences with penalties.

        `logits` [any, vocab_size] determines their vocabulary size and their device.
        """
        if self._token_counts is None:
            self._token_counts = TokenCounts(self._max_rows, logits.shape[1], logits.device)
        return self._token_counts

    def _sample_chunks(
        self, logits: Tensor, rows: abc.Sequence[SamplingRow], bitmask: TokenBitmask | None
    ) -> Iterator[tuple[slice, "SamplingTensors", Tensor]]:
        """Sample one chunk at a time, and yield its rows, its tensors and the sampled token ids."""
        # Chunks are only useful on a CPU, because they improve the use of its caches.
        on_cpu = logits.device.type == "cpu"
        chunk_size = max(1, CPU_CHUNK_BYTES // (4 * logits.shape[1]) if on_cpu else len(rows))
        for start in range(0, len(rows), chunk_size):
            chunk = slice(start, start + chunk_size)
            tensors = self._tensors_for(start, logits, rows[chunk], rows)
            with annotate("sampler"):
                chunk_bitmask = None if bitmask is None else bitmask.for_rows(chunk)
                yield chunk, tensors, tensors(logits[chunk], rows[chunk], chunk_bitmask)
        # If an earlier batch was larger, drop its other tensors, which refer to its sequences.
        self._sampling_tensors = {
            start: tensors for start, tensors in self._sampling_tensors.items() if start < len(rows)
        }

    def _tensors_for(
        self, start: int, logits: Tensor, chunk_rows: abc.Sequence[SamplingRow], rows: abc.Sequence[SamplingRow]
    ) -> "SamplingTensors":
        """Return the tensors of a chunk. They are created again if the sequences of the chunk have changed."""
        sequences = [row.sequence for row in chunk_rows]
        tensors = self._sampling_tensors.get(start)
        if tensors is None or tensors.sequences != sequences:
            # The old tensors are freed before new ones are created, because they can contain a mask of all rows and
            # tokens.
            self._sampling_tensors.pop(start, None)
            tensors = None
            vocab_size, device = logits.shape[1], logits.device
            running = [row.sequence for row in rows]
            logits_processors = LogitsProcessors.from_sequences(
                sequences, vocab_size, device, self.token_counts(logits), running
            )
            tensors = self._sampling_tensors[start] = SamplingTensors(sequences, logits_processors, device)
        return tensors


class SamplingTensors:
    """The sampling parameters of a chunk, on the device. Each sequence has one row."""

    def __init__(
        self, sequences: list[Sequence], logits_processors: LogitsProcessors | None, device: torch.device
    ) -> None:
        params = [sequence.params for sequence in sequences]
        self.sequences = sequences
        self._logits_processors = logits_processors
        self._device = device
        self.logprobs: dict[int, RequestedLogprobs] = {
            i: p.logprob_token_ids or p.logprobs for i, p in enumerate(params) if p.logprobs is not None
        }
        """Maps the number of a row to the log probabilities that its request asks for. Rows without log probabilities
        have no entry."""
        self._all_greedy, self._any_greedy = all(p.greedy for p in params), any(p.greedy for p in params)
        if self._all_greedy:
            return
        # The kernel treats temperature 0 as greedy, so small temperatures must not be rounded to 0 in float32.
        temperatures = [0.0 if p.greedy else max(p.temperature, 1e-6) for p in params]
        self._temperatures = to_device_async(temperatures, device)
        self._seeds = to_device_async([sequence.seed for sequence in sequences], device)
        self._needs_filtering = any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params if not p.greedy)
        self._top_k = to_device_async([max(p.top_k, 0) for p in params], device)
        self._top_p = to_device_async([p.top_p for p in params], device)
        self._min_p = to_device_async([p.min_p for p in params], device)

    def __call__(self, logits: Tensor, rows: abc.Sequence[SamplingRow], bitmask: TokenBitmask | None) -> Tensor:
        """Return the sampled tokens as [num_rows] int64 on the device."""
        processed_logits = logits
        if bitmask is not None:
            # Log probabilities refer to the logits before the grammar's mask.
            processed_logits = logits.clone() if self.logprobs else logits
            bitmask.apply(processed_logits)
        if self._logits_processors is not None:
            processed_logits = self._logits_processors(
                processed_logits, [row.position for row in rows], [row.draft_token_ids for row in rows]
            )
        token_ids = argmax_first(processed_logits) if self._all_greedy else self._sample(processed_logits, rows)
        if self._logits_processors is not None:
            self._logits_processors.count_tokens(token_ids)
        return token_ids

    def gather_logprobs(self, logits: Tensor, token_ids: Tensor) -> dict[int, list[list[Logprob]]]:
        """Return the log probabilities of the unprocessed logits, by row.

        Only rows whose requests ask for log probabilities are included.
        """
        if not self.logprobs:
            return {}
        index = to_device_async(list(self.logprobs), self._device)
        logprob_lists = compute_logprob_lists(logits, token_ids[index], list(self.logprobs.values()), index)
        return {i: [entries] for i, entries in zip(self.logprobs, logprob_lists, strict=True)}

    def compute_logprobs(self, logits: Tensor, token_ids: Tensor) -> LogprobTensors | None:
        """Return the log probabilities on the device, without waiting, or None if no row needs them."""
        if not self.logprobs:
            return None
        index = to_device_async(list(self.logprobs), self._device)
        return compute_logprobs(logits, token_ids[index], list(self.logprobs.values()), index)

    def _sample(self, logits: Tensor, rows: abc.Sequence[SamplingRow]) -> Tensor:
        """Return the sampled tokens as [num_rows] int64. A greedy row gets its most likely token."""
        positions = to_device_async([row.position for row in rows], self._device)
        limits = self._top_k, self._top_p, self._min_p
        return sample(
            logits, self._temperatures, *limits, self._seeds, positions, self._needs_filtering, self._any_greedy
        )
