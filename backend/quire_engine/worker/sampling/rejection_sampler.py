# SPDX-License-Identifier: Apache-2.0
"""Rejection sampler: samples the rows of a span in order, until a sampled token differs from the draft token.

In a synchronous step, span_sampler.py passes all spans to this module, except beams. This includes spans without
drafts.

The method is rejection sampling. It treats a draft as a distribution in which the draft token has the probability 1.
Therefore, it is exact for every sampling parameter. A draft token is accepted with the probability that the model gives
it. If a draft token is rejected, it is replaced by the token that was sampled in its row. Each row is sampled with the
seed of its sequence and with its own position. As a result, a seed gives the same tokens whether drafts are used or
not. An exception is possible if steps of different sizes round differently.

Source: Leviathan et al. 2023 (Fast Inference from Transformers via Speculative Decoding). Here, the distribution of the
draft is one-hot.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire_engine.step.plan import ScheduledSpan, SpanOutput
from quire_engine.worker.sampling.grammar_bitmask import TokenBitmask
from quire_engine.worker.sampling.sampler import Sampler, SamplingRow
from quire_kernels import to_device_async


class RejectionSampler:
    """Samples spans and verifies their drafts. The class has the same name in vLLM."""

    def __init__(self, sampler: Sampler) -> None:
        """`sampler` is the sampler of the model runner."""
        self._sampler = sampler

    def sample(self, spans: Sequence[ScheduledSpan], logits: Tensor, bitmask: TokenBitmask | None) -> list[SpanOutput]:
        """Sample spans that reach the end of their sequences, and verify their drafts.

        The result contains one output for each span. Round i samples row i of all spans whose drafts were accepted so
        far. Therefore, penalties count the accepted tokens before the next row is sampled. Rows after a rejected token
        are not sampled.

        Args:
            spans: spans in the order of the rows of logits.
            logits: [num_rows, vocab_size]. Each span has `num_sampled_rows` rows. The sampler can modify this tensor.
            bitmask: for each row of `logits`, the tokens that the grammar allows. None allows all tokens.
        """
        if not any(span.draft_token_ids for span in spans):
            return self._sampler(logits, [_sampling_row(span, 0) for span in spans], bitmask)
        first_rows, num_rows = [], 0
        for span in spans:
            first_rows.append(num_rows)
            num_rows += span.num_sampled_rows
        outputs = [SpanOutput([]) for _ in spans]
        active, round_index = list(range(len(spans))), 0
        while active:
            row_indices = [first_rows[i] + round_index for i in active]
            rows = [_sampling_row(spans[i], round_index) for i in active]
            round_bitmask = None if bitmask is None else bitmask.select(row_indices)
            selected = torch.index_select(logits, 0, to_device_async(row_indices, logits.device))
            sampled = self._sampler(selected, rows, round_bitmask)
            for i, output in zip(active, sampled, strict=True):
                outputs[i] = _join(outputs[i], output)
            active = [
                i for i in active if outputs[i].token_ids[-1:] == list(spans[i].draft_token_ids[round_index:][:1])
            ]
            round_index += 1
        return outputs


def _sampling_row(span: ScheduledSpan, index: int) -> SamplingRow:
    """Return row `index` of a span.

    Row 0 samples the token after the sequence's last token. Row i samples the token after draft token i - 1.
    """
    draft = span.draft_token_ids
    return SamplingRow(span.sequence, span.end - len(draft) + index, draft[:index])


def _join(first: SpanOutput, second: SpanOutput) -> SpanOutput:
    """Join two successive outputs of a span into one."""
    logprobs = None if second.logprobs is None else [*(first.logprobs or []), *second.logprobs]
    return replace(first, token_ids=first.token_ids + second.token_ids, logprobs=logprobs)
