# SPDX-License-Identifier: Apache-2.0
"""Inputs of a step from the device state: the reference equals the formulas, the kernel equals the reference."""

import torch
from support.requirements_of_machine import interpreted_kernel, requires_interpreter

from quire_kernels import SequenceState, StepInputs, prepare_inputs

pytestmark = requires_interpreter

CPU = torch.device("cpu")
BLOCK_SIZE = 8


def _state():
    """Return a state of five rows with 0, 7, 8, 20 and 90 computed tokens, each with its own blocks."""
    state = SequenceState.empty(5, 30, CPU)
    state.lengths.copy_(torch.tensor([0, 7, 8, 20, 90]))
    state.tables.copy_(torch.arange(1, 151).view(5, 30).flip(1))
    return state


def _run(form, rows, lengths):
    state, out = _state(), StepInputs.empty(sum(lengths), len(rows), 14, CPU)
    out.block_tables.fill_(-1)
    query_starts = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    form(torch.tensor(rows), query_starts, state, BLOCK_SIZE, out)
    return out


def test_reference():
    out = _run(prepare_inputs.reference, [3, 1], [1, 3])
    assert out.positions.tolist() == [20, 7, 8, 9]
    # The tables count down: row 3 from 120, row 1 from 60.
    assert out.addresses.tolist() == [118 * 8 + 4, 60 * 8 + 7, 59 * 8, 59 * 8 + 1]
    assert out.context_lengths.tolist() == [21, 10]
    assert out.block_tables.tolist() == [[120, 119, 118] + [-1] * 11, [60, 59] + [-1] * 12]


def test_kernel_equals_reference():
    # More tokens than one iteration of a program, and rows in any order.
    lengths = [1, 300 - 190, 1, 16]
    found, expected = (
        _run(form, [4, 0, 3, 2], lengths) for form in (interpreted_kernel(prepare_inputs), prepare_inputs.reference)
    )
    for name in StepInputs.__slots__:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
