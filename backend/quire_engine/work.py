# SPDX-License-Identifier: Apache-2.0
"""Work: a step's plan as whoever computes it takes it: numbers, and no sequences. Every rank gets the same.

There is one form for any step, and one for those that a captured graph computes. As bytes it is a row of int64: a head
of counts, then lists, then tensors. Rank 0 writes it straight into memory that the others map (ring.py); nothing is
pickled. 64 decoding sequences of 1,024 tokens (4,425 numbers) are written in 13 us and read in 21 us (a Zen 5 core),
when the step that they are of takes tens of milliseconds.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from quire_engine.request import BlockId
from quire_engine.step import BlockCopy, HostCopy, Span, StepPlan

_HEAD = 11


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


@dataclass(frozen=True, slots=True)
class GraphWork:
    """A decoding step as a graph takes it, and which graph: rank 0 chooses, and no other decides anything."""

    num_spans: int
    adapted: bool
    """Whether it is a graph with adapters."""
    inputs: Tensor
    """[4, size] int64 on the CPU, `size` the graph's: of each span its sequence's row of the device's block tables,
    position, token, and slot; then padding."""
    entries: Tensor
    """[3, num_entries] int64 on the CPU: rows, columns and blocks to write into those tables first."""
    pending: bool = False
    """See Work; so the next ones."""
    swap_outs: list[HostCopy] = field(default_factory=list)
    swap_ins: list[HostCopy] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Of the graph."""
        return self.inputs.shape[1]


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
        token_ids=tensor_of(token_ids),
        blocks=tensor_of(blocks),
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
    most = max_num_seqs * (7 + max_blocks_per_seq) + 2 * max_num_tokens
    most_of_graph = max_num_seqs * (6 + 3 * max_blocks_per_seq)
    return _HEAD + max(most, most_of_graph) + 2 * num_moves


def encode(work: Work | GraphWork, row: Tensor) -> None:
    """Write into the first elements of `row`, int64 on the CPU."""
    moves = [number for copy in (*work.swap_outs, *work.swap_ins) for number in (copy.block, copy.host)]
    moves += [number for copy in work.copies for number in (copy.source, copy.destination)]
    head = [work.pending, len(work.swap_outs), len(work.swap_ins), len(work.copies)]
    if isinstance(work, GraphWork):
        head = [work.size, *head, work.num_spans, work.adapted, work.entries.shape[1], 0, 0, 0]
        lists, tensors = [*head, *moves], (work.inputs.flatten(), work.entries.flatten())
    else:
        head = [0, *head, len(work.starts), len(work.token_ids), len(work.blocks)]
        head += [len(work.logit_rows), work.num_sampled, len(work.beyond_switch)]
        lists = [*head, *moves, *work.starts, *work.lengths, *work.slots, *work.logit_rows, *work.beyond_switch]
        tensors = work.token_ids, work.blocks
    parts = (tensor_of(lists), *tensors)
    torch.cat(parts, out=row[: sum(map(len, parts))])


def decode(row: Tensor) -> Work | GraphWork:
    """What `encode` wrote, and no reference to the row."""
    size, pending, num_outs, num_ins, num_copies, *own = row[:_HEAD].tolist()
    end = _HEAD + 2 * (num_outs + num_ins + num_copies)
    pairs = iter(_pairs(row[_HEAD:end].tolist()))
    outs, ins = ([HostCopy(*pair) for pair in islice(pairs, num)] for num in (num_outs, num_ins))
    copies = [BlockCopy(*pair) for pair in pairs]
    if size:
        num_spans, adapted, num_entries, *_ = own
        inputs, entries = _split(row[end:], 4 * size, 3 * num_entries)
        inputs, entries = inputs.view(4, size), entries.view(3, num_entries)
        return GraphWork(num_spans, bool(adapted), inputs, entries, bool(pending), outs, ins, copies)
    num_spans, num_tokens, num_blocks, num_logits, num_sampled, num_long = own
    num_listed = 3 * num_spans + num_logits + num_long
    numbers = iter(row[end : end + num_listed].tolist())

    def listed(num: int) -> list[int]:
        return list(islice(numbers, num))

    token_ids, blocks = _split(row[end + num_listed :], num_tokens, num_blocks)
    starts, lengths, slots = (listed(num_spans) for _ in range(3))
    logit_rows, beyond_switch = listed(num_logits), listed(num_long)
    return Work(
        starts=starts,
        lengths=lengths,
        slots=slots,
        token_ids=token_ids,
        blocks=blocks,
        logit_rows=logit_rows,
        num_sampled=num_sampled,
        pending=bool(pending),
        beyond_switch=beyond_switch,
        swap_outs=outs,
        swap_ins=ins,
        copies=copies,
    )


def tensor_of(numbers: list[int]) -> Tensor:
    """[len(numbers)] int64; there is one at least. 4,096 of them: 80 us, and 620 us by torch.tensor (a Zen 5 core)."""
    return torch.frombuffer(array("q", numbers), dtype=torch.int64)


def _split(row: Tensor, first: int, second: int) -> tuple[Tensor, Tensor]:
    """The first elements of a row, which others will be written into, and those after them: a copy."""
    copy = row[: first + second].clone()
    return copy[:first], copy[first:]


def _pairs(numbers: list[int]) -> list[tuple[BlockId, BlockId]]:
    ids = map(BlockId, numbers)
    return list(zip(ids, ids, strict=True))
