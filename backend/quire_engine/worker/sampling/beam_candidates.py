# SPDX-License-Identifier: Apache-2.0
"""Chooses the candidates of beam searches on the device.

The candidates of a group are the best continuations of all its beams. Only these few continuations are copied to the
host. The span sampler calls this module in each step that has beams. Allowed tokens, biases and penalties change the
log probabilities of a beam, as in transformers.
"""

from collections import abc, defaultdict

import torch
from torch import Tensor

from quire_engine.sequence import BeamGroup, Sequence
from quire_engine.step.plan import BeamCandidate, SpanOutput
from quire_engine.worker.profiling import annotate
from quire_engine.worker.sampling.logits_processors import LogitsProcessors
from quire_engine.worker.sampling.logprobs import compute_logprob_lists, max_rows
from quire_engine.worker.sampling.sampler import CPU_CHUNK_BYTES, Sampler
from quire_kernels import to_device_async

_BLOCK_TOKENS = 64
"""Number of tokens in a block. The first top-k compares only the maxima of the blocks, and not all values. This is
faster, because vector instructions are used to compute a maximum, but not to compute a top-k."""


class BeamCandidates:
    """Chooses the candidates of all groups of a step."""

    def __init__(self, sampler: Sampler) -> None:
        """The `sampler` provides the token counts of beams with penalties."""
        self._sampler = sampler

    def choose(self, logits: Tensor, beams: abc.Sequence[Sequence]) -> list[SpanOutput]:
        """Return the candidates of each beam, one list per row of `logits`.

        Args:
            logits: [len(beams), vocab_size], any float dtype; not modified.
            beams: all beams of one or several groups, in any order.
        """
        groups = list(dict.fromkeys(beam.beam_group for beam in beams if beam.beam_group is not None))
        max_candidates = min(max(group.num_candidates for group in groups), logits.shape[1])
        with annotate("beams"):
            logprobs, token_ids = self._top_tokens(logits, beams, max_candidates)
            row_by_beam = {beam: row for row, beam in enumerate(beams)}
            # If groups have the same number of beams and the same number of candidates, their candidates are computed
            # together.
            batches: defaultdict[tuple[int, int], list[BeamGroup]] = defaultdict(list)
            for group in groups:
                batches[len(group.sequences), group.num_candidates].append(group)
            candidates: list[list[BeamCandidate]] = [[] for _ in beams]
            for batch in batches.values():
                rows = [[row_by_beam[beam] for beam in group.sequences] for group in batch]
                self._add_candidates(candidates, batch, rows, logprobs, token_ids, logits)
        return [SpanOutput([], candidates=entries) for entries in candidates]

    def _top_tokens(self, logits: Tensor, beams: abc.Sequence[Sequence], num_tokens: int) -> tuple[Tensor, Tensor]:
        """Return the log probabilities (float32) and the ids of the best tokens of each beam.

        Both tensors are [len(beams), num_tokens]. `num_tokens` is the number of candidates of a whole group, because
        all of them can come from one beam.
        """
        # The logits are copied to float32 in chunks. On a GPU, a chunk needs only a small part of the memory that the
        # warm-up measured.
        vocab_size = logits.shape[1]
        on_cpu = logits.device.type == "cpu"
        chunk_size = max(1, CPU_CHUNK_BYTES // (4 * vocab_size)) if on_cpu else max_rows(vocab_size)
        chunks = []
        for start in range(0, len(beams), chunk_size):
            rows = slice(start, start + chunk_size)
            chunks.append(_top_k(self._compute_logprobs(logits[rows], beams[rows], beams), num_tokens))
        values, token_ids = zip(*chunks, strict=True)
        return torch.cat(values), torch.cat(token_ids)

    def _compute_logprobs(
        self, logits: Tensor, beams: abc.Sequence[Sequence], running: abc.Sequence[Sequence]
    ) -> Tensor:
        """Return the log probabilities of all tokens that can follow each beam, in float32."""
        # If the temperature is 0, the distribution of the model is not scaled.
        temperatures = [beam.params.temperature or 1.0 for beam in beams]
        if any(temperature != 1.0 for temperature in temperatures):
            divisors = to_device_async(torch.tensor(temperatures, dtype=torch.float32), logits.device)
            logits = logits.float() / divisors[:, None]
        logprobs = torch.log_softmax(logits, dim=-1, dtype=torch.float32)
        token_counts = self._sampler.token_counts(logits)
        processors = LogitsProcessors.from_sequences(beams, logits.shape[1], logits.device, token_counts, running)
        if processors is not None:
            logprobs = processors(logprobs, [beam.num_tokens for beam in beams])
            # In the next step, a beam can continue another beam. Therefore, its tokens must be counted again.
            token_counts.forget(beams)
        return logprobs

    def _add_candidates(
        self,
        candidates: list[list[BeamCandidate]],
        groups: abc.Sequence[BeamGroup],
        rows: list[list[int]],
        logprobs: Tensor,
        token_ids: Tensor,
        logits: Tensor,
    ) -> None:
        """Add the best continuations of groups that have the same number of beams and the same number of candidates.

        Args:
            candidates: candidates of each row; this function appends to the lists.
            groups: the groups.
            rows: rows of the beams of each group, best beam first.
            logprobs: [num_rows, k] float32, log probabilities of the best tokens of each row.
            token_ids: [num_rows, k] int64, these tokens.
            logits: [num_rows, vocab_size].
        """
        row_index = to_device_async(torch.tensor(rows), logits.device)
        scores = to_device_async(torch.tensor([group.scores for group in groups], dtype=torch.float32), logits.device)
        totals = (logprobs[row_index] + scores[:, :, None]).flatten(1)
        best_totals, best = totals.topk(min(groups[0].num_candidates, totals.shape[1]))
        best_tokens = token_ids[row_index].flatten(1).gather(1, best)
        best_rows = row_index.gather(1, best // logprobs.shape[1])
        # float64 represents rows, tokens and scores exactly. As one tensor, they need only one copy to the host.
        on_host = torch.stack([tensor.to(torch.float64) for tensor in (best_totals, best_tokens, best_rows)], -1)
        for group, entries, tokens, token_rows in zip(groups, on_host.tolist(), best_tokens, best_rows, strict=True):
            params = group.sequences[0].params
            logprob_lists = (
                [None] * len(entries)
                if params.logprobs is None
                else compute_logprob_lists(
                    logits, tokens, [params.logprob_token_ids or params.logprobs] * len(entries), token_rows
                )
            )
            for (score, token_id, row), token_logprobs in zip(entries, logprob_lists, strict=True):
                # A candidate whose score is not finite is a forbidden token.
                if score > float("-inf"):
                    candidates[int(row)].append(BeamCandidate(int(token_id), score, token_logprobs))


def _top_k(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest values of each row, and their indices.

    `values` has the shape [num_rows, num_values], and the result is the same as that of `values.topk(k)`. It is
    computed in blocks: the k largest values are always in the k blocks with the largest maxima.
    """
    num_rows, num_values = values.shape
    if num_values <= 4 * k * _BLOCK_TOKENS:
        top = values.topk(k)
        return top.values, top.indices
    padding = -num_values % _BLOCK_TOKENS
    if padding:
        values = torch.nn.functional.pad(values, (0, padding), value=float("-inf"))
    blocks = values.view(num_rows, -1, _BLOCK_TOKENS)
    block_index = blocks.amax(dim=-1).topk(k).indices
    top_blocks = blocks.gather(1, block_index[:, :, None].expand(-1, -1, _BLOCK_TOKENS)).flatten(1)
    top = top_blocks.topk(k)
    indices = block_index.gather(1, top.indices // _BLOCK_TOKENS) * _BLOCK_TOKENS + top.indices % _BLOCK_TOKENS
    return top.values, indices
