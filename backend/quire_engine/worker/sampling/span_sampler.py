# SPDX-License-Identifier: Apache-2.0
"""Span sampler: samples the spans of a step from the logits of the step.

The tokens are sampled immediately, or the sampling is queued on the device after the forward pass. If sampling needs
the tokens of the previous step, it is postponed until they are known. The span sampler owns the sampler, the bitmask of
the grammars and the postponed sampling. The model runner calls it on tensor-parallel rank 0.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from quire_engine.step.plan import ScheduledSpan, SpanOutput
from quire_engine.worker.future_tokens import FutureTokens
from quire_engine.worker.sampling.beam_candidates import BeamCandidates
from quire_engine.worker.sampling.grammar_bitmask import BitmaskFuture, GrammarBitmask
from quire_engine.worker.sampling.rejection_sampler import RejectionSampler
from quire_engine.worker.sampling.sampler import SampledTokens, Sampler, SamplingRow
from quire_kernels import to_device_async


class PostponedSampling:
    """Sampling that was postponed until the tokens of the previous step are known. The step to which it belongs has
    already started."""

    def __init__(self, start: Callable[[], Callable[[], list[SpanOutput]]]) -> None:
        """`start` queues the sampling and returns a function that waits for its outputs."""
        self._start = start
        self._get_outputs: Callable[[], list[SpanOutput]] | None = None

    def run(self) -> None:
        """Queue the sampling."""
        self._get_outputs = self._start()

    def get_outputs(self) -> list[SpanOutput]:
        """Wait for the outputs."""
        if self._get_outputs is None:
            # The previous step failed. This step must complete, but nothing uses its tokens.
            self.run()
            assert self._get_outputs is not None
        return self._get_outputs()


class SpanSampler:
    """Samples the spans of steps."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device, future_tokens: FutureTokens) -> None:
        """`max_num_seqs` is the maximum number of sequences in a step. The tokens of asynchronous steps are stored in
        `future_tokens`."""
        self.grammar_bitmask = GrammarBitmask(vocab_size, device)
        self._sampler = Sampler(max_num_seqs)
        self._rejection_sampler = RejectionSampler(self._sampler)
        self._beam_candidates = BeamCandidates(self._sampler)
        self._device = device
        self._future_tokens = future_tokens
        self._postponed: PostponedSampling | None = None

    def sample(
        self, spans: Sequence[ScheduledSpan], logit_chunks: Iterator[Tensor], bitmask: BitmaskFuture
    ) -> list[SpanOutput]:
        """Sample the spans that reach the end of their sequences, and return one output for each span.

        The first chunk of logits contains the rows of these spans. A beam gets candidates instead of a token, and the
        bitmask does not have a row for it.
        """
        sampling_spans = [span for span in spans if span.samples]
        if not sampling_spans:
            return [SpanOutput([]) for _ in spans]
        logits = next(logit_chunks)
        if all(span.sequence.beam_group is None for span in sampling_spans):
            sampled_outputs = iter(self._rejection_sampler.sample(sampling_spans, logits, bitmask()))
        else:
            sampled_outputs = iter(self._sample_with_beams(sampling_spans, logits, bitmask))
        return [next(sampled_outputs) if span.samples else SpanOutput([]) for span in spans]

    def _sample_with_beams(
        self, spans: Sequence[ScheduledSpan], logits: Tensor, bitmask: BitmaskFuture
    ) -> list[SpanOutput]:
        """Sample spans from logits [num_rows, vocab_size]. Some of the spans are beams, and each beam has one row."""
        beam_rows: list[int] = []
        other_rows: list[int] = []
        num_rows = 0
        for span in spans:
            rows = beam_rows if span.sequence.beam_group is not None else other_rows
            rows += range(num_rows, num_rows + span.num_sampled_rows)
            num_rows += span.num_sampled_rows
        beams = [span.sequence for span in spans if span.sequence.beam_group is not None]
        others = [span for span in spans if span.sequence.beam_group is None]
        beam_outputs = iter(self._beam_candidates.choose(_select_rows(logits, beam_rows), beams))
        other_outputs = iter(
            self._rejection_sampler.sample(others, _select_rows(logits, other_rows), bitmask()) if others else ()
        )
        return [next(other_outputs if span.sequence.beam_group is None else beam_outputs) for span in spans]

    def sample_async(
        self, spans: Sequence[ScheduledSpan], logits: Tensor | None, sampling_indices: list[int]
    ) -> Callable[[], list[SpanOutput]]:
        """Sample the spans at `sampling_indices`, and return a function that waits for the outputs.

        Each of these spans has one row of `logits`. If a span has a grammar, sampling is postponed until
        `run_postponed` is called.
        """
        rows = [SamplingRow(spans[i].sequence, spans[i].end) for i in sampling_indices]
        if any(spans[i].sequence.grammar is not None for i in sampling_indices):
            self._postponed = PostponedSampling(lambda: self._sample_now(spans, rows, logits, sampling_indices))
            return self._postponed.get_outputs
        return self._sample_now(spans, rows, logits, sampling_indices)

    @torch.inference_mode()
    def run_postponed(self) -> None:
        """Queue the postponed sampling, if there is one. Before this call, the grammars must have accepted the tokens
        of the previous step."""
        sampling, self._postponed = self._postponed, None
        if sampling is not None:
            sampling.run()

    def _sample_now(
        self,
        spans: Sequence[ScheduledSpan],
        rows: Sequence[SamplingRow],
        logits: Tensor | None,
        sampling_indices: list[int],
    ) -> Callable[[], list[SpanOutput]]:
        """Queue the sampling of `rows`, which are the rows of the spans at `sampling_indices`."""
        if logits is not None and rows:
            bitmask = self.grammar_bitmask.fill([spans[i] for i in sampling_indices])
            sampled = self._sampler.sample_async(logits, rows, bitmask)
        else:
            # The runner waits even for a step that samples nothing, so that at most two steps are queued.
            sampled = SampledTokens(torch.empty(0, dtype=torch.int64, device=self._device))
        wait_for_copies = self._future_tokens.store(
            [row.sequence for row in rows], sampled.token_ids, sampled.logprob_tensors
        )

        def get_outputs() -> list[SpanOutput]:
            outputs = dict(zip(sampling_indices, sampled.to_outputs(wait_for_copies()), strict=True))
            return [outputs.get(i, SpanOutput([])) for i in range(len(spans))]

        return get_outputs


def _select_rows(logits: Tensor, rows: list[int]) -> Tensor:
    """Return some rows of logits. If all rows are selected, nothing is copied."""
    if len(rows) == len(logits):
        return logits
    return torch.index_select(logits, 0, to_device_async(rows, logits.device))
