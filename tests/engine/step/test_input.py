# SPDX-License-Identifier: Apache-2.0
"""Step inputs survive the shared memory through which rank 0 sends them to the other ranks."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire_engine.sequence import BlockId, Sequence, SlotId
from quire_engine.step.image_positions import rope_positions
from quire_engine.step.input import GraphStepInput, StepInput, build_step_input, decode, encode, max_elements
from quire_engine.step.plan import BlockCopy, ScheduledSpan, StateCopy, SwapCopy
from quire_kernels import BidirectionalTokens
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import ImageInput

ids = st.integers(0, 2**40)
pairs = st.lists(st.tuples(ids, ids), max_size=4)


@given(
    spans=st.lists(st.tuples(ids, ids, st.integers(-1, 9), st.booleans()), min_size=1, max_size=5),
    token_ids=st.lists(ids, max_size=20),
    blocks=st.lists(ids, max_size=20),
    logit_rows=st.lists(ids, max_size=9),
    swaps_and_copies=st.tuples(pairs, pairs, pairs, pairs),
    long=st.booleans(),
    awaits=st.booleans(),
)
def test_step_input_round_trips_through_a_ring_row(
    spans, token_ids, blocks, logit_rows, swaps_and_copies, long, awaits
):
    outs, ins, copies, state_copies = swaps_and_copies
    starts, lengths, slots, beyond = (list(column) for column in zip(*spans, strict=True))
    step_input = StepInput(
        starts=starts,
        lengths=lengths,
        adapter_slots=slots,
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        block_ids=torch.tensor(blocks, dtype=torch.int64),
        logit_rows=logit_rows,
        num_sampled=len(logit_rows) // 2,
        num_pooled=len(logit_rows) // 3,
        awaits_tokens=awaits,
        long_rope=[int(b) for b in beyond] if long else [],
        swap_outs=[SwapCopy(*pair) for pair in outs],
        swap_ins=[SwapCopy(*pair) for pair in ins],
        copies=[BlockCopy(*pair) for pair in copies],
        state_rows=lengths if long else [],
        num_drafts=starts if long else [],
        num_replayed=slots if awaits else [],
        state_copies=[StateCopy(*pair) for pair in state_copies],
        image_rows=logit_rows if long else [],
        bidirectional=[BidirectionalTokens(*pair, *pair, 5) for pair in outs],
        rope_positions=torch.tensor(token_ids * 3, dtype=torch.int64) if long else None,
    )
    inputs = torch.tensor([starts, lengths, slots, starts, lengths][: 4 + long], dtype=torch.int64)
    entries = torch.tensor(outs + ins, dtype=torch.int64).view(-1, 2).T.repeat(2, 1)[:3]
    copy_lists = {name: getattr(step_input, name) for name in ("swap_outs", "swap_ins", "copies")}
    graph_input = GraphStepInput(long, inputs, entries, logit_rows, awaits, **copy_lists)
    for original in (step_input, graph_input):
        row = torch.full((400,), 7, dtype=torch.int64)
        encode(original, row)
        decoded = decode(row)
        row.fill_(9)
        assert type(decoded) is type(original)
        for name in type(original).__slots__:
            expected, value = getattr(original, name), getattr(decoded, name)
            is_plain = expected is None or isinstance(expected, list | int)
            assert value == expected if is_plain else torch.equal(value, expected)


def test_largest_step_input_fits_its_row():
    sequence = Sequence(0, [1] * 64, SamplingParams(prompt_logprobs=0), seed=0, max_output_tokens=1)
    sequence.images = tuple(ImageInput(i, 1, b"", (1, 1)) for i in range(64))
    sequence.unsplit = tuple(range(i, i + 1) for i in range(64))
    sequence.block_table, sequence.state_row = [BlockId(i) for i in range(8)], 1
    step_input = build_step_input([ScheduledSpan(sequence, 0, 64, SlotId(0))] * 3, 8, long_rope_threshold=10)
    lists = {"copies": [BlockCopy(0, 1)] * 3, "state_copies": [StateCopy(0, 1)] * 6}
    step_input = dataclasses.replace(step_input, **lists, num_drafts=[3] * 3, num_replayed=[3] * 3)
    row = torch.zeros(max_elements(3, 3 * 64, 8, 0), dtype=torch.int64)
    encode(step_input, row)
    assert decode(row).copies == step_input.copies
    row = torch.zeros(max_elements(3, 9, 8, 0), dtype=torch.int64)
    inputs, entries = torch.ones((5, 9)).long(), torch.ones((3, 24)).long()
    graph_input = GraphStepInput(True, inputs, entries, list(range(9)), copies=step_input.copies)
    encode(graph_input, row)
    assert decode(row).copies == step_input.copies


@pytest.mark.parametrize("start", range(14))
def test_rotary_positions_of_any_part_are_those_of_the_whole_prompt(start):
    # Two text tokens, an image of 2 x 3 tokens, one text token, and an image of 1 x 2 tokens.
    images = [ImageInput(2, 6, b"", (2, 3)), ImageInput(9, 2, b"", (1, 2))]
    whole = [
        [0, 1, 2, 2, 2, 2, 2, 2, 5, 6, 6, 8, 9, 10],
        [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 8, 9, 10],
        [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 8, 9, 10],
    ]
    for end in range(start + 1, 15):
        assert rope_positions(images, start, end).tolist() == [axis[start:end] for axis in whole]
