# SPDX-License-Identifier: Apache-2.0
"""Async scheduling: the scheduler plans the next step while the current step is still in flight.

For this, the scheduler calls this module, which changes each sequence as if the step in flight were complete. It is
known in advance which tokens the step will compute. It is also known which spans will sample one more token: those that
reach the end of their sequence. Only the value of the sampled token is unknown, so PLACEHOLDER_TOKEN stands for it.
Whether a sequence finishes with that token is known only when the step is complete.

Source: the placeholders of vLLM's async scheduling (v1/core/sched/async_scheduler.py). The overlap schedulers of SGLang
(managers/overlap_utils.py) and mini-sglang also replace placeholders by values on the device.
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
