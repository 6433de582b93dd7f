# SPDX-License-Identifier: Apache-2.0
"""Work: a step's plan as whoever computes it takes it: numbers, and no sequences. Every rank gets the same.

As bytes it is a row of int64: a head of counts, then the lists in the order of the fields. Rank 0 writes it straight
into memory that the others map (ring.py); nothing is pickled. 64 decoding sequences of 1,024 tokens (4,425 numbers) are
written in 13 us and read in 21 us (a Zen 5 core), when the step that they are of takes tens of milliseconds.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from quire_engine.request import BlockId
from quire_engine.step import BlockCopy, HostCopy, Span, StepPlan

_HEAD = 10


@dataclass(frozen=True, slots=True)
class Work:
    """Spans, flattened in the order in which `order_spans` put them, and what is to be copied before they run."""

    starts: list[int]
    """Of each span: the tokens of its sequence before it."""
    lengths: list[int]
    """Of each span: its tokens."""
    slots: list[int]
    """Of each span: the device slot of its adapter; -1 runs the base model."""
    token_ids: Tensor
    """[num_tokens] int64 on the CPU."""
    blocks: Tensor
    """[num_blocks] int64 on the CPU: the blocks that hold each span's tokens and those before them, in turn."""
    logit_rows: list[int]
    """Tokens whose logits are wanted: first those that choose the next token of a span, then those that tell how likely
    prompt tokens are."""
    num_sampled: int
    """How many of them choose a token."""
    pending: bool = False
    """Some tokens are those that the step before chooses: only rank 0's device has them, and shares them."""
    beyond_switch: list[int] = field(default_factory=list)
    """Of each span: 1 where keys are rotated as those of long sequences; empty when there are none."""
    swap_outs: list[HostCopy] = field(default_factory=list)
    """See StepPlan; so the next ones."""
    swap_ins: list[HostCopy] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)


def order_spans(spans: Sequence[Span]) -> list[int]:
    """Indices of spans in the order in which they are computed: tokens of one adapter side by side and base tokens
    first; within that, decoding sequences of similar context are neighbours."""

    def key(i: int) -> tuple[int, bool, int]:
        span = spans[i]
        return (-1 if span.slot is None else span.slot, span.length > 1, -span.start)

    return sorted(range(len(spans)), key=key)


def work_of(
    spans: Sequence[Span], block_size: int, rope_switch: int | None = None, plan: StepPlan | None = None
) -> Work:
    """Flatten ordered spans; `plan`: the step that they are of, `rope_switch`: the model's, see ModelShape."""
    token_ids: list[int] = []
    blocks: list[int] = []
    for span in spans:
        token_ids += span.sequence.tokens(span.start, span.end)
        blocks += span.sequence.block_table[: -(-span.end // block_size)]
    sampled, scored, end = [], [], 0
    for span in spans:
        end += span.length
        if span.samples:
            sampled.append(end - 1)
        scored += [end - span.end + position for position in span.scored]
    long = [] if rope_switch is None else [int(span.sequence.num_tokens > rope_switch) for span in spans]
    return Work(
        starts=[span.start for span in spans],
        lengths=[span.length for span in spans],
        slots=[-1 if span.slot is None else span.slot for span in spans],
        token_ids=_tensor(token_ids),
        blocks=_tensor(blocks),
        logit_rows=sampled + scored,
        num_sampled=len(sampled),
        pending=any(span.pending for span in spans),
        beyond_switch=long if any(long) else [],
        swap_outs=plan.swap_outs if plan is not None else [],
        swap_ins=plan.swap_ins if plan is not None else [],
        copies=plan.copies if plan is not None else [],
    )


def max_elements(max_num_seqs: int, max_num_tokens: int, max_blocks_per_seq: int, num_moves: int) -> int:
    """Elements of the largest row: `num_moves` blocks at most are swapped, and as many as there are spans copied."""
    return _HEAD + max_num_seqs * (7 + max_blocks_per_seq) + 2 * max_num_tokens + 2 * num_moves


def encode(work: Work, row: Tensor) -> None:
    """Write into the first elements of `row`, int64 on the CPU."""
    moves = [number for copy in (*work.swap_outs, *work.swap_ins) for number in (copy.block, copy.host)]
    moves += [number for copy in work.copies for number in (copy.source, copy.destination)]
    counts = [len(work.starts), len(work.token_ids), len(work.blocks), len(work.logit_rows), work.num_sampled]
    counts += [work.pending, len(work.beyond_switch), len(work.swap_outs), len(work.swap_ins), len(work.copies)]
    lists = [*counts, *work.starts, *work.lengths, *work.slots, *work.logit_rows, *work.beyond_switch, *moves]
    parts = (_tensor(lists), work.token_ids, work.blocks)
    torch.cat(parts, out=row[: sum(map(len, parts))])


def decode(row: Tensor) -> Work:
    """What `encode` wrote, and no reference to the row."""
    counts = row[:_HEAD].tolist()
    num_spans, num_tokens, num_blocks, num_logits, num_sampled, pending, *rest = counts
    num_long, num_outs, num_ins, num_copies = rest
    num_listed = 3 * num_spans + num_logits + num_long + 2 * (num_outs + num_ins + num_copies)
    numbers = iter(row[_HEAD : _HEAD + num_listed].tolist())

    def listed(num: int) -> list[int]:
        return list(islice(numbers, num))

    tensors = row[_HEAD + num_listed : _HEAD + num_listed + num_tokens + num_blocks].clone()
    starts, lengths, slots = (listed(num_spans) for _ in range(3))
    logit_rows, beyond_switch = listed(num_logits), listed(num_long)
    outs, ins, copies = (_pairs(listed(2 * num)) for num in (num_outs, num_ins, num_copies))
    return Work(
        starts=starts,
        lengths=lengths,
        slots=slots,
        token_ids=tensors[:num_tokens],
        blocks=tensors[num_tokens:],
        logit_rows=logit_rows,
        num_sampled=num_sampled,
        pending=bool(pending),
        beyond_switch=beyond_switch,
        swap_outs=[HostCopy(*pair) for pair in outs],
        swap_ins=[HostCopy(*pair) for pair in ins],
        copies=[BlockCopy(*pair) for pair in copies],
    )


def _tensor(numbers: list[int]) -> Tensor:
    """[len(numbers)] int64; there is one at least. 4,096 of them: 80 us, and 620 us by torch.tensor (a Zen 5 core)."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


def _pairs(numbers: list[int]) -> list[tuple[BlockId, BlockId]]:
    ids = map(BlockId, numbers)
    return list(zip(ids, ids, strict=True))
