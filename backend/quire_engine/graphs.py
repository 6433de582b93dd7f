# SPDX-License-Identifier: Apache-2.0
"""DecodeGraphs: decoding steps as CUDA graphs, by size of batch, with adapters and without. On CUDA devices only.

This has never run on a GPU. Captures and replays run on an emulated one (make emulated). Tested without: which sizes
there are, what the host sends, and, with a recording that runs the step again instead of replaying it, the tokens.

A graph has its memory's addresses built in, so everything that a step reads lies in tensors that stay: block tables by
row of `SequenceState`, of which a step sends only what is new, and four numbers per sequence. Rows beyond the batch
are filled with a sequence of nobody's, whose token goes to the cache's spare block.

Steps in which a sequence has an adapter have graphs of their own, so that the others launch nothing for it. Their
kernels find each token's adapter on the device, in slots whose addresses stay when another adapter is copied into one.

Ranks that share the layers capture the same graphs in the same order, what they do together included. Rank 0 keeps the
books, here `ResidentTables`, and chooses the graph: all run what its `GraphWork` says.
"""

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire_engine import request
from quire_engine.batch import Batch
from quire_engine.kv import KVCache
from quire_engine.models.causal import CausalLM
from quire_engine.request import BlockId
from quire_engine.step import Span, StepPlan
from quire_engine.work import GraphWork, tensor_of
from quire_kernels import (
    AttentionGroup,
    AttentionMetadata,
    SequenceState,
    StepInputs,
    TokenRouting,
    build_routed_lora_batch,
    prepare_inputs,
    to_device_async,
)
from quire_spec.errors import ConfigError

logger = logging.getLogger(__name__)

Step = Callable[[], Tensor]
"""Computes a step from tensors that stay; returns logits, [size, vocab_size], which the next run may overwrite."""


NUM_PARTS = 4
NUM_ADAPTED_PARTS = 2
"""Fewer sizes with adapters, so that they add no more than 60 % to the time that capturing takes. A row of padding
reads no weights, next to no keys and no adapter, so it costs little where memory is the limit."""


def are_wanted(device: torch.device) -> bool:
    """Whether a runner on this device captures graphs."""
    return device.type == "cuda" and os.environ.get("QUIRE_GRAPHS") != "0"


def graph_sizes(max_num_seqs: int, num_parts: int = NUM_PARTS) -> tuple[int, ...]:
    """Sizes of batch that get a graph: 1, 2, 4, 8, then parts of a doubling.

    With 4 parts at most a fifth is padding, and there are 24 sizes up to 256; with 2 at most a third, and 14 sizes.
    """
    sizes = [1, 2, 4, 8]
    base = 8
    while base < max_num_seqs:
        # Multiples of 2 at least: below 16 a quarter of a doubling would be.
        sizes += [base + base * part // num_parts for part in range(1, num_parts + 1)]
        base *= 2
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


@dataclass(slots=True)
class _Resident:
    """What the device has of a sequence."""

    row: int
    table: list[BlockId] = field(default_factory=list)
    """The sequence's own list, which grows in place and is another one after each preemption."""
    num_sent: int = 0
    """Blocks of it that are on the device."""


class ResidentTables:
    """Which rows of the device's block tables belong to whom, and what they lack. Pure bookkeeping."""

    def __init__(self, num_rows: int) -> None:
        """`num_rows`: no step has more sequences."""
        self._num_rows = num_rows
        self._free = list(range(num_rows - 1, -1, -1))
        self._residents: weakref.WeakKeyDictionary[request.Sequence, _Resident] = weakref.WeakKeyDictionary()

    def rows(self, spans: Sequence[Span]) -> tuple[list[int], list[tuple[int, int, int]]]:
        """The row of each span's sequence, and the (row, column, block) entries to write first."""
        rows: list[int] = []
        entries: list[tuple[int, int, int]] = []
        for span in spans:
            resident = self._residents.get(span.sequence) or self._admit(span.sequence, spans)
            table = span.sequence.block_table
            if resident.table is not table:
                resident.table, resident.num_sent = table, 0
            new = range(resident.num_sent, len(table))
            entries += [(resident.row, column, table[column]) for column in new]
            resident.num_sent = len(table)
            rows.append(resident.row)
        return rows, entries

    def _admit(self, sequence: request.Sequence, spans: Sequence[Span]) -> _Resident:
        if not self._free:
            # Rows of sequences that are over, and of those that do not run now.
            running = {span.sequence for span in spans}
            kept = {s: resident for s, resident in self._residents.items() if s in running}
            taken = {resident.row for resident in kept.values()}
            self._free = [row for row in range(self._num_rows - 1, -1, -1) if row not in taken]
            self._residents = weakref.WeakKeyDictionary(kept)
        resident = self._residents[sequence] = _Resident(self._free.pop())
        return resident


class DecodeGraphs:
    """Runs steps in which every sequence has one token, with any adapters."""

    def __init__(
        self,
        model: CausalLM,
        kv: KVCache,
        max_num_seqs: int,
        max_model_len: int,
        num_slots: int = 0,
        record: Callable[[Step], Step] | None = None,
    ) -> None:
        """`kv` has a spare block; `num_slots`: the model's for adapters; `record` makes a step that can be run again,
        None: by a CUDA graph."""
        self._model, self._kv = model, kv
        self._device = kv.layers[0].device
        start, before = time.perf_counter(), self._reserved()
        max_blocks = -(-max_model_len // kv.block_size)
        # Room for sequences that are over, or wait after a preemption, so that rows are seldom looked for.
        self._num_rows = 2 * max_num_seqs
        self._tables = ResidentTables(self._num_rows)
        self._state = SequenceState.empty(self._num_rows + 1, max_blocks, self._device)
        self._state.tables[self._num_rows] = kv.num_blocks
        self._inputs = torch.zeros((4, max_num_seqs), dtype=torch.int64, device=self._device)
        """Rows, positions, tokens and slots, as the host sends them."""
        self._inputs[0], self._inputs[3] = self._num_rows, -1
        self._num_slots = num_slots
        self.sizes = graph_sizes(max_num_seqs)
        self.adapted_sizes = graph_sizes(max_num_seqs, NUM_ADAPTED_PARTS) if num_slots else ()
        """Sizes of graphs for steps with adapters."""
        # Of the largest step; the others use the first rows, as no two run at once.
        self._step_inputs = StepInputs.empty(max_num_seqs, max_num_seqs, max_blocks, self._device)
        self._query_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=self._device)
        record = record or GraphRecorder(self._device)
        # Kept, because a graph knows addresses only: what a step has allocated before must not be freed.
        # The largest first, and with adapters: the others then find room in the memory that it has taken.
        self._adapted = {n: self._step(n, num_slots) for n in reversed(self.adapted_sizes)}
        self._plain = {n: self._step(n, 0) for n in reversed(self.sizes)}
        self._adapted_steps = {size: record(step) for size, step in self._adapted.items()}
        self._steps = {size: record(step) for size, step in self._plain.items()}
        self.num_bytes = self._reserved() - before
        """Of the device's memory that the graphs keep, with what they read; 0 where that is not known."""
        logger.info(
            "graphs captured num=%d adapted=%d bytes=%d seconds=%.1f",
            len(self.sizes),
            len(self.adapted_sizes),
            self.num_bytes,
            time.perf_counter() - start,
        )

    def close(self) -> None:
        """Let go of what was captured, and of its memory; nothing can be run any more."""
        for steps in (self._adapted_steps, self._steps, self._adapted, self._plain):
            steps.clear()

    def takes(self, spans: Sequence[Span]) -> bool:
        """Whether a graph can compute this step."""
        if len(spans) > self.sizes[-1] or self._model.shape.long_rope_threshold is not None:
            return False
        return all(span.length == 1 and not span.scored and (span.slot is None or self._num_slots) for span in spans)

    def work(self, plan: StepPlan) -> GraphWork | None:
        """A step as a graph takes it, to be run once and in turn; None: there is no graph for it."""
        spans = plan.spans
        if not self.takes(spans):
            return None
        adapted = any(span.slot is not None for span in spans)
        size = next(size for size in (self.adapted_sizes if adapted else self.sizes) if size >= len(spans))
        rows, entries = self._tables.rows(spans)
        padding = size - len(spans)
        numbers = rows + [self._num_rows] * padding
        numbers += [span.start for span in spans] + [0] * padding
        numbers += [span.sequence.tokens(span.start, span.end)[0] for span in spans] + [0] * padding
        numbers += [-1 if span.slot is None else span.slot for span in spans] + [-1] * padding
        return GraphWork(
            num_spans=len(spans),
            adapted=adapted,
            inputs=tensor_of(numbers).view(4, size),
            entries=torch.tensor(entries, dtype=torch.int64).view(len(entries), 3).T,
            pending=any(span.pending for span in spans),
            swap_outs=plan.swap_outs,
            swap_ins=plan.swap_ins,
            copies=plan.copies,
        )

    def run(self, work: GraphWork, fill: Callable[[Tensor], None] | None = None) -> Tensor:
        """Logits of each span's token, [num_spans, vocab_size]; the next run overwrites them. `fill` puts in tokens of
        which only the device knows, see Handover."""
        if work.entries.numel():
            row, column, block = to_device_async(work.entries, self._device)
            self._state.tables.index_put_((row, column), block)
        self._inputs[:, : work.size].copy_(to_device_async(work.inputs, self._device))
        if work.pending:
            assert fill is not None
            fill(self._inputs[2, : work.size])
        steps = self._adapted_steps if work.adapted else self._steps
        return steps[work.size]()[: work.num_spans]

    def _step(self, size: int, num_slots: int) -> Step:
        """`num_slots`: of adapters, 0: without."""
        rows, positions, tokens, slots = (row[:size] for row in self._inputs)
        query_starts = self._query_starts[: size + 1]
        inputs = StepInputs(*(getattr(self._step_inputs, name)[:size] for name in StepInputs.__slots__))
        routing = TokenRouting.empty(size, num_slots, self._device) if num_slots else None

        def step() -> Tensor:
            self._state.lengths.index_copy_(0, rows, positions.to(torch.int32))
            prepare_inputs(rows, query_starts, self._state, self._kv.block_size, inputs)
            # Made in each run: what it plans for its layers belongs to this run.
            attention = AttentionMetadata(
                query_starts, inputs.context_lengths, inputs.block_tables, _no_groups, lengths=[1] * size
            )
            batch = Batch(
                token_ids=tokens,
                positions=inputs.positions,
                beyond_switch=None,
                addresses=inputs.addresses,
                attention=attention,
                adapters=None if routing is None else build_routed_lora_batch(slots, routing),
                logit_rows=None,
                num_logits=size,
            )
            hidden = self._model(batch, self._kv)
            assert hidden is not None
            return self._model.project(hidden, batch)

        return step

    def _reserved(self) -> int:
        if self._device.type != "cuda":
            return 0
        # What is kept for the next one who asks would be given back in a capture, and make graphs look smaller.
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)


def _no_groups() -> tuple[AttentionGroup, ...]:
    """What a form of attention gets that wants spans as the host has grouped them: without it, it would compute nothing
    and say nothing."""
    raise ConfigError(
        "paged_attention: the form that runs here cannot be captured in a graph; leave it out of QUIRE_KERNELS, or set "
        "QUIRE_GRAPHS=0 as well"
    )


class GraphRecorder:
    """Captures steps in CUDA graphs that share one pool of memory: no two of them run at once."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: Step) -> Step:
        """Run the step until its kernels are compiled and its libraries have their workspaces, and the ranks their
        connections; then capture it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # What other threads ask the device does not spoil it: NCCL's ask whether what came before is over.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = step()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
