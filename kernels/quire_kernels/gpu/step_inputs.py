# SPDX-License-Identifier: Apache-2.0
"""Kernel that computes the inputs of a step from the state of the sequences, in one launch before the step."""

import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.step_inputs import SequenceState, StepInputs


def prepare_inputs(rows: Tensor, query_starts: Tensor, state: SequenceState, block_size: int, out: StepInputs) -> None:
    """See step_inputs.prepare_inputs.

    Moves 16 bytes for each KV block of a context, and 16 bytes for each token. The launch has one program for each
    span. This is efficient for decoding. For a prompt of 2,048 tokens, however, the program needs 16 iterations.
    """
    width = out.block_tables.shape[1]
    assert width <= state.tables.shape[1]
    _prepare[(len(rows),)](
        rows,
        query_starts,
        state.lengths,
        state.tables,
        out.positions,
        out.addresses,
        out.context_lengths,
        out.block_tables,
        state.tables.stride(0),
        out.block_tables.stride(0),
        width,
        BLOCK_SIZE=block_size,
        BLOCK=128,
        num_warps=4,
    )


# The width of a block table depends on max_model_len. A kernel that is compiled into an image must work for all widths.
@triton.jit(do_not_specialize=["table_stride", "out_stride", "width"])
def _prepare(
    rows,
    query_starts,
    lengths,
    tables,
    positions,
    addresses,
    context_lengths,
    block_tables,
    table_stride,
    out_stride,
    width,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    span = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + span)
    start = tl.load(query_starts + span)
    length = tl.load(query_starts + span + 1) - start
    computed = tl.load(lengths + row)
    table = tables + row * table_stride
    tl.store(context_lengths + span, computed + length)
    for first in range(0, length, BLOCK):
        token_offsets = first + tl.arange(0, BLOCK)
        mask = token_offsets < length
        position = (computed + token_offsets).to(tl.int64)
        tl.store(positions + start + token_offsets, position, mask=mask)
        block = tl.load(table + position // BLOCK_SIZE, mask=mask, other=0)
        tl.store(addresses + start + token_offsets, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)
    num_blocks = tl.minimum((computed + length + BLOCK_SIZE - 1) // BLOCK_SIZE, width)
    for first in range(0, num_blocks, BLOCK):
        column = first + tl.arange(0, BLOCK)
        block = tl.load(table + column, mask=column < num_blocks, other=0)
        tl.store(block_tables + span * out_stride + column, block, mask=column < num_blocks)
