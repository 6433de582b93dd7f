# SPDX-License-Identifier: Apache-2.0
"""Foresight: what a step in flight will have done to its sequences, so that the next one is planned before it is over.

Every span's tokens will be computed, and a span that reaches its sequence's end will yield one token, whose value alone
is not known: PENDING stands for it. The scheduler calls this, and finds out later whether the sequence ended with it.

Source: vLLM's async scheduling (v1/core/sched/async_scheduler.py) has placeholders likewise; SGLang's overlap scheduler
(managers/overlap_utils.py) and mini-sglang's take the values on the device.
"""

from quire_engine.sequence import PLACEHOLDER_TOKEN, Sequence, SequenceStatus
from quire_engine.step.plan import StepPlan


def apply_placeholders(plan: StepPlan) -> None:
    """Have the sequences of a step as they will be after it."""
    for span in plan.spans:
        sequence, samples = span.sequence, span.samples
        if sequence.status is SequenceStatus.FINISHED:
            continue
        sequence.num_computed_tokens = span.end
        if samples:
            sequence.output_token_ids.append(PLACEHOLDER_TOKEN)


def reaches_max_tokens(sequence: Sequence) -> bool:
    """Whether a sequence, as it was foreseen, has all the tokens that it may have."""
    return len(sequence.output_token_ids) == sequence.max_output_tokens


def remove_placeholder(sequence: Sequence) -> None:
    """Take away what stands for the token that is known now."""
    if sequence.output_token_ids and sequence.output_token_ids[-1] == PLACEHOLDER_TOKEN:
        sequence.output_token_ids.pop()
