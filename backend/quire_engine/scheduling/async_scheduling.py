# SPDX-License-Identifier: Apache-2.0
"""Async scheduling: advance the sequences of a step in flight, so that the next step can be planned before it
completes.

The step will compute all tokens of its spans. A span that reaches the end of its sequence will also sample one token,
and only the value of that token is unknown. PLACEHOLDER_TOKEN stands for it. The scheduler calls this module. Only when
the step completes does it learn whether the sequence finished with that token.

Source: the placeholders of vLLM's async scheduling (v1/core/sched/async_scheduler.py). The overlap schedulers of
SGLang (managers/overlap_utils.py) and mini-sglang resolve the values on the device, too.
"""

from quire_engine.sequence import PLACEHOLDER_TOKEN, Sequence, SequenceStatus
from quire_engine.step.plan import StepPlan


def apply_placeholders(plan: StepPlan) -> None:
    """Advance the sequences of a step before it is complete: append a placeholder for each token that it will
    sample."""
    for span in plan.spans:
        sequence, samples = span.sequence, span.samples
        if sequence.status is SequenceStatus.FINISHED:
            continue
        sequence.num_computed_tokens = span.end
        if samples:
            sequence.output_token_ids.append(PLACEHOLDER_TOKEN)


def reaches_max_tokens(sequence: Sequence) -> bool:
    """Return whether a sequence has its maximum number of output tokens; placeholders are counted."""
    return len(sequence.output_token_ids) == sequence.max_output_tokens


def remove_placeholder(sequence: Sequence) -> None:
    """Remove the placeholder of a sequence, because its token is known now."""
    if sequence.output_token_ids and sequence.output_token_ids[-1] == PLACEHOLDER_TOKEN:
        sequence.output_token_ids.pop()
