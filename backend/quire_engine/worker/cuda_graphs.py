# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of decoding steps, one per batch size, with adapters and without. On CUDA devices only.

A graph contains memory addresses, so everything that a step reads is in persistent tensors: block tables by row of
`SequenceState`, of which a step sends only the new entries, and four numbers per sequence. Rows beyond the batch
contain a dummy sequence, which writes its keys and values to the spare block of the KV cache.

Steps with adapters have graphs of their own, so that other steps launch no LoRA kernels. Their kernels read the adapter
slot of each token on the device. The addresses of a slot do not change when another adapter is copied into it.

Tensor-parallel ranks capture the same graphs in the same order, including the collective operations. Rank 0 keeps the
block tables (`DeviceBlockTables`) and chooses the graph; all ranks run the graph that `GraphStepInput` names.
"""

import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire_engine import sequence as engine_sequence
from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.base import CausalLM
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.sequence import BlockId
from quire_engine.step.input import GraphStepInput, int64_tensor
from quire_engine.step.plan import ScheduledSpan, StepPlan
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

StepFunction = Callable[[], Tensor]
"""Computes a step from persistent tensors; returns logits [size, vocab_size], which the next run overwrites."""


SIZES_PER_DOUBLING = 4
ADAPTER_SIZES_PER_DOUBLING = 2
"""Fewer sizes with adapters, so that they add at most 60 % to the capture time. A row of padding reads no weights, no
adapter and almost no keys, so it costs little where memory bandwidth is the limit."""


def should_capture(device: torch.device) -> bool:
    """Return whether a runner on this device captures graphs."""
    return device.type == "cuda" and os.environ.get("QUIRE_GRAPHS") != "0"


def graph_sizes(max_num_seqs: int, sizes_per_doubling: int = SIZES_PER_DOUBLING) -> tuple[int, ...]:
    """Return the batch sizes that get a graph: 1, 2, 4, 8, then `sizes_per_doubling` sizes per doubling.

    With 4 per doubling, at most a fifth of a batch is padding and there are 24 sizes up to 256. With 2, at most a third
    is padding and there are 14 sizes.
    """
    sizes = [1, 2, 4, 8]
    base = 8
    while base < max_num_seqs:
        # A quarter of a doubling is at least 2, because the smallest base is 8.
        sizes += [base + base * step // sizes_per_doubling for step in range(1, sizes_per_doubling + 1)]
        base *= 2
    return (*(size for size in sizes if size < max_num_seqs), max_num_seqs)


@dataclass(slots=True)
class _DeviceRow:
    """The part of a sequence's block table that is on the device."""

    row: int
    table: list[BlockId] = field(default_factory=list)
    """The sequence's own list; it grows in place and is replaced by a new list after each preemption."""
    num_sent: int = 0
    """Number of its blocks that were sent to the device."""


class DeviceBlockTables:
    """Assigns rows of the device's block tables to sequences and tracks the entries to send. Pure bookkeeping."""

    def __init__(self, num_rows: int) -> None:
        """`num_rows` must be at least the number of sequences of any step."""
        self._num_rows = num_rows
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._device_rows: weakref.WeakKeyDictionary[engine_sequence.Sequence, _DeviceRow] = weakref.WeakKeyDictionary()

    def assign_rows(self, spans: Sequence[ScheduledSpan]) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Return the row of each span's sequence, and the (row, column, block) entries to write first."""
        rows: list[int] = []
        entries: list[tuple[int, int, int]] = []
        for span in spans:
            device_row = self._device_rows.get(span.sequence) or self._assign_row(span.sequence, spans)
            table = span.sequence.block_table
            if device_row.table is not table:
                device_row.table, device_row.num_sent = table, 0
            new_columns = range(device_row.num_sent, len(table))
            entries += [(device_row.row, column, table[column]) for column in new_columns]
            device_row.num_sent = len(table)
            rows.append(device_row.row)
        return rows, entries

    def _assign_row(self, sequence: engine_sequence.Sequence, spans: Sequence[ScheduledSpan]) -> _DeviceRow:
        if not self._free_rows:
            # Reuse the rows of finished sequences and of those that do not run now.
            running = {span.sequence for span in spans}
            running_rows = {s: device_row for s, device_row in self._device_rows.items() if s in running}
            used_rows = {resident.row for resident in running_rows.values()}
            self._free_rows = [row for row in range(self._num_rows - 1, -1, -1) if row not in used_rows]
            self._device_rows = weakref.WeakKeyDictionary(running_rows)
        resident = self._device_rows[sequence] = _DeviceRow(self._free_rows.pop())
        return resident


class CudaGraphRunner:
    """Runs steps in which every sequence has one token, with any adapters."""

    def __init__(
        self,
        model: CausalLM,
        kv_cache: KVCache,
        max_num_seqs: int,
        max_model_len: int,
        num_adapter_slots: int = 0,
        capture: Callable[[StepFunction], StepFunction] | None = None,
    ) -> None:
        """Capture the graphs of all sizes.

        Args:
            model: with loaded weights.
            kv_cache: must have one spare block.
            max_num_seqs: largest number of sequences of a step.
            max_model_len: longest sequence, in tokens.
            num_adapter_slots: of the model; 0 captures no graphs with adapters.
            capture: turns a step into a function that repeats it; None captures a CUDA graph.
        """
        self._model, self._kv_cache = model, kv_cache
        self._device = kv_cache.layers[0].device
        start, reserved_before = time.perf_counter(), self._reserved_bytes()
        max_blocks = -(-max_model_len // kv_cache.block_size)
        # Twice as many rows as needed keep those of finished and preempted sequences, so rows are rarely reassigned.
        self._num_rows = 2 * max_num_seqs
        self._block_tables = DeviceBlockTables(self._num_rows)
        self._state = SequenceState.empty(self._num_rows + 1, max_blocks, self._device)
        self._state.tables[self._num_rows] = kv_cache.num_blocks
        self._inputs = torch.zeros((4, max_num_seqs), dtype=torch.int64, device=self._device)
        """[4, max_num_seqs] int64: rows, positions, tokens and adapter slots, as the host sends them."""
        self._inputs[0], self._inputs[3] = self._num_rows, -1
        self._num_adapter_slots = num_adapter_slots
        self.sizes = graph_sizes(max_num_seqs)
        self.adapter_sizes = graph_sizes(max_num_seqs, ADAPTER_SIZES_PER_DOUBLING) if num_adapter_slots else ()
        """Batch sizes of the graphs with adapters."""
        # Sized for the largest step. The others use the first rows, because no two steps run at the same time.
        self._step_inputs = StepInputs.empty(max_num_seqs, max_num_seqs, max_blocks, self._device)
        self._query_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=self._device)
        capture = capture or GraphCapture(self._device)
        # The functions are kept, because a graph contains only addresses: the tensors of a step must not be freed.
        # The largest step with adapters comes first, so that the others fit into the memory that it allocated.
        self._adapter_functions = {
            n: self._build_step_function(n, num_adapter_slots) for n in reversed(self.adapter_sizes)
        }
        self._base_functions = {n: self._build_step_function(n, 0) for n in reversed(self.sizes)}
        self._adapter_graphs = {size: capture(step) for size, step in self._adapter_functions.items()}
        self._base_graphs = {size: capture(step) for size, step in self._base_functions.items()}
        self.num_bytes = self._reserved_bytes() - reserved_before
        """Device memory of the graphs and of their persistent tensors; 0 if it is not known."""
        logger.info(
            "graphs captured num=%d with_adapters=%d bytes=%d seconds=%.1f",
            len(self.sizes),
            len(self.adapter_sizes),
            self.num_bytes,
            time.perf_counter() - start,
        )

    def close(self) -> None:
        """Release the graphs and their memory; `run` is not allowed afterwards."""
        for steps in (self._adapter_graphs, self._base_graphs, self._adapter_functions, self._base_functions):
            steps.clear()

    def can_run(self, spans: Sequence[ScheduledSpan]) -> bool:
        """Return whether a graph can compute this step."""
        if len(spans) > self.sizes[-1] or self._model.shape.long_rope_threshold is not None:
            return False
        return all(
            span.length == 1
            and not span.prompt_logprob_positions
            and (span.adapter_slot is None or self._num_adapter_slots)
            for span in spans
        )

    def build_input(self, plan: StepPlan) -> GraphStepInput | None:
        """Return the input of a graph, or None if no graph can compute the step. Run every input once, in order."""
        spans = plan.spans
        if not self.can_run(spans):
            return None
        has_adapters = any(span.adapter_slot is not None for span in spans)
        size = next(size for size in (self.adapter_sizes if has_adapters else self.sizes) if size >= len(spans))
        rows, entries = self._block_tables.assign_rows(spans)
        padding = size - len(spans)
        values = rows + [self._num_rows] * padding
        values += [span.start for span in spans] + [0] * padding
        values += [span.sequence.tokens(span.start, span.end)[0] for span in spans] + [0] * padding
        values += [-1 if span.adapter_slot is None else span.adapter_slot for span in spans] + [-1] * padding
        return GraphStepInput(
            num_spans=len(spans),
            has_adapters=has_adapters,
            inputs=int64_tensor(values).view(4, size),
            table_updates=torch.tensor(entries, dtype=torch.int64).view(len(entries), 3).T,
            awaits_tokens=any(span.awaits_token for span in spans),
            swap_outs=plan.swap_outs,
            swap_ins=plan.swap_ins,
            copies=plan.copies,
        )

    def run(self, graph_input: GraphStepInput, resolve_tokens: Callable[[Tensor], None] | None = None) -> Tensor:
        """Replay a graph.

        Args:
            graph_input: of `build_input`, perhaps of rank 0.
            resolve_tokens: replaces placeholder tokens, see FutureTokens; required if the input awaits tokens.

        Returns:
            Logits of each span's token, [num_spans, vocab_size]; the next run overwrites them.
        """
        if graph_input.table_updates.numel():
            row, column, block = to_device_async(graph_input.table_updates, self._device)
            self._state.tables.index_put_((row, column), block)
        self._inputs[:, : graph_input.size].copy_(to_device_async(graph_input.inputs, self._device))
        if graph_input.awaits_tokens:
            assert resolve_tokens is not None
            resolve_tokens(self._inputs[2, : graph_input.size])
        graphs = self._adapter_graphs if graph_input.has_adapters else self._base_graphs
        return graphs[graph_input.size]()[: graph_input.num_spans]

    def _build_step_function(self, size: int, num_slots: int) -> StepFunction:
        """Return the step of one size; `num_slots` is 0 for a step without adapters."""
        rows, positions, tokens, slots = (row[:size] for row in self._inputs)
        query_starts = self._query_starts[: size + 1]
        inputs = StepInputs(*(getattr(self._step_inputs, name)[:size] for name in StepInputs.__slots__))
        routing = TokenRouting.empty(size, num_slots, self._device) if num_slots else None

        def step() -> Tensor:
            self._state.lengths.index_copy_(0, rows, positions.to(torch.int32))
            prepare_inputs(rows, query_starts, self._state, self._kv_cache.block_size, inputs)
            # Created in each run, because the attention plan that it caches is valid for this run only.
            attention = AttentionMetadata(
                query_starts,
                inputs.context_lengths,
                inputs.block_tables,
                _reject_uncapturable_attention,
                lengths=[1] * size,
            )
            batch = ForwardBatch(
                token_ids=tokens,
                positions=inputs.positions,
                long_rope=None,
                addresses=inputs.addresses,
                attention=attention,
                adapters=None if routing is None else build_routed_lora_batch(slots, routing),
                logit_rows=None,
                num_logits=size,
            )
            hidden = self._model(batch, self._kv_cache)
            assert hidden is not None
            return self._model.compute_logits(hidden, batch)

        return step

    def _reserved_bytes(self) -> int:
        if self._device.type != "cuda":
            return 0
        # A capture frees cached memory, which would make the graphs look smaller than they are.
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)


def _reject_uncapturable_attention() -> tuple[AttentionGroup, ...]:
    """Raise for an attention kernel that needs spans grouped by the host. A graph has no groups, so such a kernel would
    silently compute nothing."""
    raise ConfigError(
        "paged_attention: the selected kernel cannot be captured in a CUDA graph; remove it from QUIRE_KERNELS, or set "
        "QUIRE_GRAPHS=0"
    )


class GraphCapture:
    """Captures steps as CUDA graphs that share one memory pool; no two of them run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, step: StepFunction) -> StepFunction:
        """Run the step twice to create kernels, library workspaces and connections of the ranks; then capture it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(self._stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        # With "thread_local", device calls of other threads do not invalidate the capture; NCCL's threads query events.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = step()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
