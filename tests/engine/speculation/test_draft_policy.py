# SPDX-License-Identifier: Apache-2.0
"""Lengths of drafts follow acceptance and the size of the step."""

import pytest

from quire_engine.sequence import Sequence
from quire_engine.speculation.draft_policy import DraftPolicy
from quire_spec.engine.sampling_params import SamplingParams


def _drafts(accepts: int, num_steps: int, num_rows: int = 1) -> tuple[DraftPolicy, list[int]]:
    """Run steps in which at most `accepts` draft tokens are accepted; return the lengths of the drafts."""
    policy, sequence, lengths = DraftPolicy("cpu", 3), Sequence(0, [1], SamplingParams(), 0, 10_000), []
    for _ in range(num_steps):
        length = policy.draft_length(sequence, num_rows)
        lengths.append(length)
        if length:
            policy.record(sequence, length, min(accepts, length))
        sequence.output_token_ids += [0] * (1 + min(accepts, length))
    return policy, lengths


def test_drafts_stop_when_nothing_is_accepted_and_are_tried_again() -> None:
    _, lengths = _drafts(accepts=0, num_steps=400)
    first_zero = lengths.index(0)
    assert first_zero <= 10
    # Later a single token is tried at most every 64 tokens.
    assert 4 <= sum(lengths[first_zero:]) <= 7 and max(lengths[first_zero:]) == 1


def test_drafts_are_longest_when_all_are_accepted() -> None:
    policy, lengths = _drafts(accepts=3, num_steps=20)
    assert lengths[1:] == [3] * 19
    counts = policy.counts
    assert (counts.num_drafts, counts.num_accepted_tokens) == (20, counts.num_draft_tokens)
    assert sum(counts.accepted_per_position) == counts.num_accepted_tokens


@pytest.mark.parametrize("num_rows", [8, 64])
def test_large_steps_have_no_drafts(num_rows: int) -> None:
    assert not any(_drafts(accepts=3, num_steps=20, num_rows=num_rows)[1])
