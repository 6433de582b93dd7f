# SPDX-License-Identifier: Apache-2.0
"""CUDA graphs of steps.

There is one graph for each shape (`graph_shapes.py`). Steps with adapters and steps without adapters have separate
graphs. On CUDA devices only.

A graph contains memory addresses. Therefore, everything that a step reads is in persistent tensors. These tensors
contain the block tables, and a few numbers for each sequence and each token. The block tables have one row for each
sequence in `SequenceState`. Only new entries of the block tables are sent to the device in a step. A graph outputs the
hidden states of all tokens. The logits are computed after the graph has run, and only for tokens after which a new
token is sampled.

If a step is smaller than its graph, it is padded with a dummy sequence. The keys and values of this sequence are
written to the spare block of the KV cache. In a graph of single tokens, each row after the rows of the batch is one
padding token. In a mixed graph, the last span contains all padding tokens, and unused spans are empty.

Because steps with adapters have their own graphs, other steps do not launch LoRA kernels. The LoRA kernels read the
adapter slot of each token on the device. The addresses of a slot do not change when another adapter is copied into it.

Tensor-parallel ranks capture the same graphs in the same order, and the graphs include the collective operations. Rank
0 keeps the block tables (`DeviceBlockTables`) and chooses the graph of each step. All ranks run the graph that
`GraphStepInput` names.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.models.base import CausalLM
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.step.input import GraphStepInput, int64_tensor
from quire_engine.step.plan import ScheduledSpan, StepPlan
from quire_engine.worker.device_block_tables import DeviceBlockTables
from quire_engine.worker.graph_capture import CapturedFunction, GraphCapture
from quire_engine.worker.graph_shapes import GraphShape, GraphShapes
from quire_kernels import (
    AttentionGroup,
    AttentionMetadata,
    LoRABatch,
    SequenceState,
    StepInputs,
    TokenRouting,
    build_routed_lora_batch,
    prepare_inputs,
    to_device_async,
)
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

logger = logging.getLogger(__name__)

_ROWS, _STARTS, _TOKENS, _SLOTS, _QUERY_STARTS = range(5)
"""Row numbers in the input tensor of a graph. `GraphStepInput.inputs` describes the rows."""


_SEGMENT_BYTES = 20 << 20
"""Size of a segment of PyTorch's allocator in bytes. Graphs never share a segment with other memory. Therefore, the
hidden states that graphs write need one more segment.
"""


class CudaGraphRunner:
    """Computes steps that have few tokens, with or without adapters. `capture_all` must be called before the first
    step."""

    def __init__(
        self, model: CausalLM, kv_cache: KVCache, config: EngineConfig, max_model_len: int, capture: GraphCapture
    ) -> None:
        """Allocate the persistent tensors.

        Args:
            model: a model with loaded weights.
            kv_cache: KV cache of the model. It must have one spare block, which padding uses.
            config: configuration of the engine. It contains the number of adapter slots, and the maximum numbers of
                sequences and tokens in a step.
            max_model_len: longest sequence, in tokens.
            capture: captures graphs on this device. All graph runners of a process use the same object.
        """
        self._model, self._kv_cache, self._capture = model, kv_cache, capture
        self._device = kv_cache.layers[0].device
        self._reserved_before, self._free_before = self._reserved_bytes(), self._free_bytes()
        self._max_num_seqs = max_num_seqs = config.max_num_seqs
        self._num_adapter_slots = config.max_loras if config.enable_lora else 0
        self.shapes = GraphShapes(max_num_seqs, config.max_num_batched_tokens, self._num_adapter_slots > 0)
        all_shapes = [shape for shapes in self.shapes.kinds for shape in shapes]
        max_tokens = max(shape.num_tokens for shape in all_shapes)
        max_spans = max(shape.num_spans(max_num_seqs) for shape in all_shapes)
        # The padding of a step can be longer than the longest sequence.
        max_blocks = -(-max(max_model_len, max_tokens) // kv_cache.block_size)
        # There are twice as many rows as a step needs. Finished and preempted sequences can keep their rows, so rows
        # are rarely assigned again.
        self._num_rows = 2 * max_num_seqs
        self._block_tables = DeviceBlockTables(self._num_rows)
        # A row contains the block tables of all groups of layers, one after the other.
        self._table_widths = [max_blocks * group.num_entries for group in kv_cache.groups]
        self._table_columns = _TableColumns(kv_cache, max_blocks)
        self._state = SequenceState.empty(self._num_rows + 1, sum(self._table_widths), self._device)
        self._state.tables[self._num_rows] = kv_cache.num_blocks
        self._inputs = torch.zeros((5, max_tokens), dtype=torch.int64, device=self._device)
        """[5, max_tokens] int64, see `GraphStepInput.inputs`."""
        self._inputs[_ROWS], self._inputs[_SLOTS] = self._num_rows, -1
        # These tensors have the size that the largest step needs. Smaller steps use their first rows. The steps can
        # share the tensors, because only one step runs at a time.
        self._step_inputs = [
            StepInputs.empty(max_tokens, max_spans, width, self._device) for width in self._table_widths
        ]
        """By group of layers."""
        self._decode_starts = torch.arange(max_num_seqs + 1, dtype=torch.int32, device=self._device)
        self._hidden: Tensor | None = None
        """Hidden states of the last step, as [max_tokens, hidden_size]. The first step allocates this tensor."""
        self._max_tokens = max_tokens
        self.num_bytes = 0
        """Device memory of the graphs and of their persistent tensors, in bytes. It is 0 before the capture, or if the
        memory is not known."""
        # A graph contains only the addresses of its tensors. The functions are stored here, because they keep these
        # tensors from being freed.
        self._functions: dict[GraphShape, CapturedFunction] = {}
        self._graphs: dict[GraphShape, CapturedFunction] = {}

    @torch.inference_mode()
    def measure_memory(self) -> int:
        """Return the number of bytes of device memory that the graphs of all shapes need.

        To measure this, the largest step of each kind is run. All graphs share one memory pool, which is as large as
        the largest graph requires. The driver also needs memory for the graphs. This memory is not included, and
        `gpu_memory_utilization` must leave it free. If the device does not count memory, return 0.
        """
        for shapes in self.shapes.kinds:
            self._capture.warm_up(self._build_step_function(shapes[-1]))
        if self._device.type != "cuda":
            return 0
        return torch.cuda.max_memory_reserved(self._device) - self._reserved_before + _SEGMENT_BYTES

    @torch.inference_mode()
    def capture_all(self, planned_bytes: int = 0) -> None:
        """Capture the graphs of all shapes.

        `planned_bytes` is the number that `measure_memory` returned. It is only logged.
        """
        start = time.perf_counter()
        for shapes in self.shapes.kinds:
            # The largest graph is captured first, so that the other graphs fit into the memory that it allocated.
            for shape in reversed(shapes):
                function = self._functions[shape] = self._build_step_function(shape)
                self._capture.warm_up(function)
                self._graphs[shape] = self._capture(function)
        self.num_bytes = self._free_before - self._free_bytes()
        logger.info(
            "graphs captured num=%d mixed=%d with_adapters=%d bytes=%d planned_bytes=%d seconds=%.1f",
            len(self._graphs),
            sum(shape.is_mixed for shape in self._graphs),
            sum(shape.has_adapters for shape in self._graphs),
            self.num_bytes,
            planned_bytes,
            time.perf_counter() - start,
        )

    def close(self) -> None:
        """Release the graphs and their memory. After this, `run` is not allowed."""
        self._graphs.clear()
        self._functions.clear()
        self._hidden = None

    def build_input(self, plan: StepPlan) -> GraphStepInput | None:
        """Return the input for a graph, or None if no graph can compute the step.

        Each returned input must be passed to `run` exactly once. The inputs must be passed in the order in which they
        were returned.
        """
        spans = plan.spans
        # The graphs have no input for the rotary positions of sequences with images.
        shape = None if any(span.sequence.images for span in spans) else self._select_shape(spans)
        if shape is None:
            return None
        rows, entries = self._block_tables.assign_rows(spans)
        tokens: list[int] = []
        slots: list[int] = []
        query_starts: list[int] = []
        logit_rows: list[int] = []
        for span in spans:
            query_starts.append(len(tokens))
            tokens += span.sequence.tokens(span.start, span.end - len(span.draft_token_ids))
            tokens += span.draft_token_ids
            slot, num_base = -1 if span.active_slot is None else span.active_slot, span.num_base_tokens
            slots += [-1] * num_base + [slot] * (span.length - num_base)
            logit_rows += range(len(tokens) - span.num_sampled_rows, len(tokens))
        size, num_padding = shape.num_tokens, shape.num_tokens - len(tokens)
        values = rows + [self._num_rows] * (size - len(spans))
        values += [span.start for span in spans] + [0] * (size - len(spans))
        values += tokens + [0] * num_padding + slots + [-1] * num_padding
        if shape.is_mixed:
            # All unused spans begin where the padding begins. Therefore, they are empty, except for the last one, which
            # contains the padding.
            values += query_starts + [len(tokens)] * (size - len(spans))
        return GraphStepInput(
            has_adapters=shape.has_adapters,
            inputs=int64_tensor(values).view(-1, size),
            table_updates=torch.tensor(entries, dtype=torch.int64).view(len(entries), 3).T,
            logit_rows=logit_rows,
            awaits_tokens=any(span.awaits_token for span in spans),
            swap_outs=plan.swap_outs,
            swap_ins=plan.swap_ins,
            copies=plan.copies,
        )

    @torch.inference_mode()
    def run(self, graph_input: GraphStepInput, resolve_tokens: Callable[[Tensor], None] | None = None) -> Tensor | None:
        """Replay a graph.

        Args:
            graph_input: the input that `build_input` returned, on this rank or on rank 0.
            resolve_tokens: a function that replaces placeholder tokens (see FutureTokens). It is required if
                `graph_input.awaits_tokens` is true.

        Returns:
            Logits of the tokens that sample, [num_logits, vocab_size]; None if no token samples.
        """
        if graph_input.table_updates.numel():
            row, entry, block = to_device_async(graph_input.table_updates, self._device)
            self._state.tables.index_put_((row, self._table_columns(entry)), block)
        num_inputs, size = graph_input.inputs.shape
        self._inputs[:num_inputs, :size].copy_(to_device_async(graph_input.inputs, self._device))
        if graph_input.awaits_tokens:
            assert resolve_tokens is not None
            resolve_tokens(self._inputs[_TOKENS, :size])
        self._graphs[GraphShape(size, graph_input.is_mixed, graph_input.has_adapters)]()
        return self._compute_logits(graph_input)

    def _select_shape(self, spans: Sequence[ScheduledSpan]) -> GraphShape | None:
        if len(spans) > self._max_num_seqs or self._model.shape.long_rope_threshold is not None:
            return None
        if any(span.prompt_logprob_positions or span.pooled_positions for span in spans):
            return None
        # The graphs were captured without transforms, which take as long as the linears that they transform, and
        # without changes of absorbed modules, whose slots must be known on the host.
        if any(span.active_slot in self._model.eager_slots for span in spans):
            return None
        num_tokens = sum(span.length for span in spans)
        has_adapters = any(span.active_slot is not None for span in spans)
        return self.shapes.select(num_tokens, is_mixed=num_tokens > len(spans), has_adapters=has_adapters)

    def _compute_logits(self, graph_input: GraphStepInput) -> Tensor | None:
        rows = graph_input.logit_rows
        if not rows:
            return None
        assert self._hidden is not None, "the graph has run"
        index = slice(len(rows)) if rows[-1] == len(rows) - 1 else to_device_async(rows, self._device)
        hidden, adapters = self._hidden[index], None
        if graph_input.has_adapters:
            routing = TokenRouting.empty(len(rows), self._num_adapter_slots, self._device)
            adapters = build_routed_lora_batch(self._inputs[_SLOTS][index], routing)
        batch = self._build_batch(len(rows), self._decode_starts[: len(rows) + 1], (1,), adapters)
        return self._model.compute_logits(hidden, batch)

    def _build_step_function(self, shape: GraphShape) -> CapturedFunction:
        size, num_spans = shape.num_tokens, shape.num_spans(self._max_num_seqs)
        rows, starts = self._inputs[_ROWS, :num_spans], self._inputs[_STARTS, :num_spans]
        slots = self._inputs[_SLOTS, :size]
        query_starts: Tensor = self._decode_starts[: num_spans + 1]
        lengths: tuple[int, ...] = (1,)
        if shape.is_mixed:
            # The last entry always stays `size`, because the last span ends at the last token.
            query_starts = torch.full((num_spans + 1,), size, dtype=torch.int32, device=self._device)
            # Only the device knows the lengths of the spans. Therefore, the graph must be able to compute both short
            # and long spans.
            lengths = (1, size)
        inputs = [each.first(size, num_spans) for each in self._step_inputs]
        tables = torch.split(self._state.tables, self._table_widths, dim=1)
        sizes = [group.block_size for group in self._kv_cache.groups]
        states = [SequenceState(self._state.lengths, table) for table in tables]
        routing = TokenRouting.empty(size, self._num_adapter_slots, self._device) if shape.has_adapters else None

        def step() -> None:
            self._state.lengths.index_copy_(0, rows, starts.to(torch.int32))
            if shape.is_mixed:
                query_starts[:num_spans].copy_(self._inputs[_QUERY_STARTS, :num_spans])
            for state, size_of_block, out in zip(states, sizes, inputs, strict=True):
                prepare_inputs(rows, query_starts, state, size_of_block, out)
            adapters = None if routing is None else build_routed_lora_batch(slots, routing)
            # Each run creates a new batch, because a batch caches the attention plan, which is valid for one run only.
            batch = self._build_batch(size, query_starts, lengths, adapters)
            hidden = self._model(batch, self._kv_cache)
            assert hidden is not None
            if self._hidden is None:
                self._hidden = hidden.new_zeros(self._max_tokens, hidden.shape[1])
            self._hidden[:size].copy_(hidden)

        return step

    def _build_batch(
        self, num_tokens: int, query_starts: Tensor, lengths: tuple[int, ...], adapters: LoRABatch | None
    ) -> ForwardBatch:
        batches = []
        for group_inputs in self._step_inputs:
            inputs = group_inputs.first(num_tokens, len(query_starts) - 1)
            tables = inputs.context_lengths, inputs.block_tables
            batches.append(
                ForwardBatch(
                    token_ids=self._inputs[_TOKENS, :num_tokens],
                    positions=inputs.positions,
                    long_rope=None,
                    addresses=inputs.addresses,
                    attention=AttentionMetadata(query_starts, *tables, _reject_uncapturable_attention, lengths=lengths),
                    adapters=adapters,
                    logit_rows=None,
                    num_logits=num_tokens,
                )
            )
        return batches[0] if len(batches) == 1 else replace(batches[0], groups=tuple(batches))

    def _reserved_bytes(self) -> int:
        """Return the number of bytes that PyTorch has reserved, and reset its peak memory statistics."""
        if self._device.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        return torch.cuda.memory_reserved(self._device)

    def _free_bytes(self) -> int:
        """Return the number of free bytes on the device.

        Memory that the driver uses for graphs does not count as free.
        """
        if self._device.type != "cuda":
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]


class _TableColumns:
    """Converts indices of entries of a block table to columns of the tables on the device."""

    def __init__(self, kv_cache: KVCache, max_blocks: int) -> None:
        """`max_blocks` is the number of columns of a group with one block for every `block_size` tokens."""
        groups, device = kv_cache.groups, kv_cache.layers[0].device
        # One element for each entry for the first `block_size` tokens: its column, and the distance to the column of
        # the entry for the next tokens.
        firsts = [g.first_entry * max_blocks + i for g in groups for i in range(g.num_entries)]
        self._firsts = torch.tensor(firsts, device=device)
        self._steps = torch.tensor([g.num_entries for g in groups for _ in range(g.num_entries)], device=device)

    def __call__(self, entries: Tensor) -> Tensor:
        """Return the columns of entries, both [num_entries] int64 on the device."""
        if len(self._firsts) == 1:
            return entries
        first = entries % len(self._firsts)
        return self._firsts[first] + entries // len(self._firsts) * self._steps[first]


def _reject_uncapturable_attention() -> tuple[AttentionGroup, ...]:
    """Raise an error, because the attention kernel needs spans that the host has grouped.

    A graph does not have such groups. Without the error, the kernel would compute nothing and report nothing.
    """
    raise ConfigError(
        "paged_attention: the selected kernel cannot be captured in a CUDA graph; remove it from QUIRE_KERNELS, or set "
        "QUIRE_GRAPHS=0"
    )
