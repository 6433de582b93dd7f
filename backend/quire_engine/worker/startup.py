# SPDX-License-Identifier: Apache-2.0
"""Startup of a model runner.

It loads the weights, runs warm-up steps, measures memory, captures CUDA graphs and allocates the KV cache. The model
runner creates a `RunnerStartup` in its constructor, and keeps only the `RunnerMemory` that this object returns. To run
dummy steps, the startup calls a function of the runner. This module depends on neither sampling nor requests.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import torch

from quire_engine.distributed.pipeline_link import PipelineLink
from quire_engine.kv_cache import layout_choice
from quire_engine.kv_cache.device_cache import KVCache, block_bytes
from quire_engine.kv_cache.host_swap import HostSwap
from quire_engine.kv_cache.row_file import RowPart
from quire_engine.kv_cache.state_cache import StateCache
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.models.base import CausalLM
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.sequence import BlockId
from quire_engine.step.input import StepInput, build_step_input
from quire_engine.step.plan import BlockCopy, ScheduledSpan, StepPlan
from quire_engine.weights.model_streamer import can_stream
from quire_engine.weights.param_shard import unsharded
from quire_engine.weights.quantized.quantized_tensors import QuantizedTensors
from quire_engine.worker import attention_plans, graph_capture
from quire_engine.worker.cuda_graphs import CudaGraphRunner
from quire_engine.worker.device import resolve_cache_dtype, set_num_threads, trim_heap
from quire_engine.worker.drafting.drafter import Drafter
from quire_engine.worker.memory_budget import (
    MemoryBudget,
    check_host_memory,
    naming_setting_on_oom,
    num_kv_blocks,
    step_too_large_error,
)
from quire_engine.worker.runner_memory import RunnerMemory
from quire_engine.worker.warmup import compile_steps, dummy_span, peak_memory_steps, set_block_tables
from quire_spec.documents.pod_status import MeasuredMemory
from quire_spec.engine.config import EngineConfig
from quire_spec.model.attention.state_config import num_state_rows, state_bytes
from quire_spec.model.host_memory import available_memory_bytes
from quire_spec.model.kv_layout import KVLayout

_CPU_MEASURED_TOKENS = 128
"""Number of prompt tokens in the step that measures the speed of a CPU. The swap policy uses this speed. On a GPU, the
largest step is measured instead."""

RunStep: TypeAlias = Callable[[StepInput, list[ScheduledSpan], KVCache], object]
"""A function that runs one step without CUDA graphs. It runs the model with the given KV cache, and then the
sampler."""

logger = logging.getLogger(__name__)


class RunnerStartup:
    """Prepares one model runner: loads weights, measures memory, and allocates the KV cache and the CUDA graphs."""

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        factory: ParamFactory,
        lora_bytes: int,
        run_step: RunStep,
        drafter: Drafter | None = None,
        tower_bytes: int = 0,
        pipeline: PipelineLink | None = None,
        layout: KVLayout | None = None,
        part: RowPart | None = None,
    ) -> None:
        """Prepare the startup of `model`.

        `factory` has allocated the parameters of the model. `lora_bytes` is the size of all adapter slots. `run_step`
        is also called from the thread that compiles kernels. Rank 0 can have a `drafter`. The drafter's KV cache has as
        many blocks as the model's KV cache. If there is a drafter, no rank runs steps as CUDA graphs. `tower_bytes` is
        the size of the vision tower's weights on this rank. `pipeline` connects the pipeline stages, of which none runs
        steps as CUDA graphs, and `layout` is that of this stage; None if there is one stage. `part` is this rank's part
        of rows of host memory that other processes can read.
        """
        self._drafter = drafter
        self._config = config
        self._model = model
        self._device = factory.device
        self._dtype = factory.dtype
        self._communicator = factory.communicator
        self._lora_bytes = lora_bytes
        self._tower_bytes = tower_bytes
        self._run_step = run_step
        self._state_dtype: torch.dtype = getattr(torch, config.state_dtype)
        self._cache_dtype = resolve_cache_dtype(config, factory.dtype)
        self._max_model_len = config.max_model_len or model.shape.max_length
        should_capture = graph_capture.should_capture(factory.device) and not config.has_drafter
        should_capture &= model.shape.states is None and model.shape.is_native and model.shape.encoder is None
        should_capture &= pipeline is None and not any(model.shape.attention_chunk_sizes)
        self._layout = layout or layout_choice.choose_layout(config, model.shape)
        self._pipeline = pipeline
        self._part = part
        self._num_spare_blocks = 1 if should_capture else 0
        self._capture = graph_capture.GraphCapture(factory.device) if should_capture else None
        self._has_compiled = False

    def load_model(self, folder: Path, checkpoint: QuantizedTensors | None, *, progress: bool) -> None:
        """Load and pack the weights, and connect the tensor-parallel ranks. `ParamFactory` describes `checkpoint`."""
        needs_compilation = _compiles_kernels(self._device) and self._communicator is None and self._pipeline is None
        needs_compilation &= self._model.shape.is_native  # other models have no modules before they are loaded
        with self._compile_while_loading() if needs_compilation else nullcontext():
            stream = can_stream(folder, self._config.load_format, self._config.ranks_per_core)
            self._model.load(folder, checkpoint, progress=progress, stream=stream)
        loaded_bytes = self._model.num_bytes
        self._model.pack()
        if self._drafter is not None:
            self._drafter.load()
        if self._device.type == "cpu":
            trim_heap()
            set_num_threads(loaded_bytes, self._config.num_ranks)
        if self._communicator is not None:
            self._communicator.connect(self._device)
        if self._pipeline is not None:
            self._pipeline.connect(self._device, self._dtype)

    def allocate(self) -> RunnerMemory:
        """Measure the free memory, then allocate the KV cache, the CUDA graphs and the host memory for KV blocks."""
        config, shape = self._config, self._model.shape
        bytes_per_block = block_bytes(shape, config.block_size, self._cache_dtype, self._layout)
        if self._drafter is not None:
            bytes_per_block += self._drafter.block_bytes
        budget = replace(self._measure_memory(), states=self._state_bytes)
        num_blocks = num_kv_blocks(config, self._max_model_len, bytes_per_block, budget, self._layout.num_groups)
        num_blocks = self._smallest(num_blocks)
        with naming_setting_on_oom("kv_cache_memory_bytes"):
            kv_cache = self._create_cache(num_blocks, self._num_state_rows)
            draft_cache = None if self._drafter is None else self._drafter.allocate(num_blocks)
            kv_caches = [kv_cache, *([] if draft_cache is None else [draft_cache])]
        attention_plans.prepare_for_chunks(config, self._model, self._max_model_len, self._dtype, kv_cache)
        graphs = self._build_graphs(kv_cache)
        if graphs is not None:
            graphs.capture_all(budget.graphs)
        state = state_bytes(shape.states, self._dtype.itemsize, self._state_dtype.itemsize, 0)
        num_host_states = self._smallest(layout_choice.num_host_states(config, state))
        host_sizes = bytes_per_block, num_host_states * state
        num_host_blocks = self._smallest(layout_choice.num_host_blocks(config, shape, self._layout, *host_sizes))
        setting = "kv_offloading_size" if config.kv_offloading_size else "swap_space"
        if config.kv_offloading_size:
            needed = num_host_blocks * bytes_per_block + num_host_states * state
            check_host_memory(config, needed, available_memory_bytes())
        with naming_setting_on_oom(setting):
            part, block_rows, state_rows = self._part, memoryview(b""), memoryview(b"")
            if part is not None:
                block_rows, state_rows = part.map(num_host_blocks, num_host_states)
            host_swap = HostSwap(kv_caches, num_host_blocks, part, block_rows) if num_host_blocks else None
            if kv_cache.states is not None:
                start = 0 if part is None else part.states_start(num_host_blocks)
                kv_cache.states.allocate_host(num_host_states, part, state_rows, start)
        swap_costs = SwapCosts() if host_swap is None else self._measure_swap_costs(host_swap)
        if num_host_states:
            blocks_per_state = -(-state // max(bytes_per_block, 1))
            swap_costs = replace(swap_costs, num_host_states=num_host_states, num_blocks_per_state=blocks_per_state)
        measured = MeasuredMemory(
            weights_bytes=budget.weights,
            lora_bytes=budget.lora,
            kv_bytes=sum(cache.num_bytes for cache in kv_caches),
            state_bytes=budget.states,
            num_blocks=num_blocks,
            block_size=config.block_size,
            max_model_len=self._max_model_len,
            dtype=str(self._dtype).removeprefix("torch."),
            device=config.device,
            swap_bytes=(host_swap.num_bytes if host_swap is not None else 0) + num_host_states * state,
            tensor_parallel_size=config.tensor_parallel_size,
            pipeline_parallel_size=config.pipeline_parallel_size,
            kv_tokens=self._layout.num_tokens(
                num_blocks // self._layout.num_groups * config.block_size, self._max_model_len, config.block_size
            ),
        )
        logger.info("memory plan %s", " ".join(f"{f}={getattr(measured, f)}" for f in MeasuredMemory.__slots__))
        return RunnerMemory(kv_cache, graphs, host_swap, swap_costs, measured)

    def _smallest(self, value: int) -> int:
        """Return the minimum of the values of all ranks, so that all of them have the same blocks."""
        if self._communicator is not None:
            value = self._communicator.all_reduce_min(value)
        return value if self._pipeline is None else self._pipeline.all_reduce_min(value)

    def run_dummy_steps(self, steps: Iterable[list[ScheduledSpan]]) -> None:
        """Run steps of dummy sequences.

        Before each step, the maximum number of blocks is copied, so that the temporary buffer for copies has its
        largest size.
        """
        kv_cache = self._create_cache(1)
        copies = [BlockCopy(BlockId(0), BlockId(0))] * kv_cache.max_blocks_per_copy
        for spans in steps:
            plan = StepPlan(spans, copies=copies)
            threshold, num_groups = self._model.shape.long_rope_threshold, self._layout.num_groups
            if self._model.shape.encoder is not None:
                spans = [dummy_span(0, max(span.length, 2), kv_cache.block_size, span.adapter_slot) for span in spans]
            set_block_tables(spans, kv_cache.block_size, num_groups)
            step_input = build_step_input(spans, kv_cache.block_size, threshold, plan, num_groups)
            self._run_step(step_input, spans, kv_cache)

    @property
    def _weights_bytes(self) -> int:
        """Size of all weights in bytes, including the weights of the draft model and of the vision tower."""
        draft_bytes = 0 if self._drafter is None else self._drafter.num_bytes
        return self._model.num_bytes + draft_bytes + self._tower_bytes

    def _measure_memory(self) -> MemoryBudget:
        """Measure how many bytes are in use. On a GPU, this includes the peak memory of the largest step."""
        weights, lora = self._weights_bytes, self._lora_bytes
        if self._device.type != "cpu":
            try:
                return self._measure_gpu_memory()
            except torch.OutOfMemoryError as error:
                total = torch.cuda.mem_get_info(self._device)[1]
                raise step_too_large_error(self._config, weights, lora, total) from error
        # All ranks share the memory of the machine. If the KV cache has a fixed size, a core that starts again finds
        # that the other cores already use theirs.
        config = self._config
        has_fixed_size = config.kv_cache_memory_bytes is not None
        num_starting = config.ranks_per_node if has_fixed_size else config.num_ranks
        available = available_memory_bytes() // num_starting
        return MemoryBudget(available + weights + lora, weights, lora, 0)

    def _measure_gpu_memory(self) -> MemoryBudget:
        weights, lora = self._weights_bytes, self._lora_bytes
        arguments = self._config, self._model, self._max_model_len, self._dtype
        attention_plans.select_for_prompts(*arguments, self._device)
        # The measurement includes the memory of these plans, of the kernels' modules and of their workspaces. Later,
        # plans for the real cache replace these plans.
        attention_plans.prepare_for_chunks(*arguments, self._create_cache(1))
        graph_bytes = self._measure_graph_memory()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self.run_dummy_steps(peak_memory_steps(self._config, self._max_model_len, self._model.shape.vocab_size))
        if not self._has_compiled:
            self.run_dummy_steps(compile_steps(self._config, self._max_model_len))
        # All bytes that PyTorch has reserved are counted, and not only those that are allocated. A tensor that stays
        # after a step keeps its whole segment reserved.
        peak = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        other_process_bytes = total - free - torch.cuda.memory_reserved(self._device)
        requested_bytes = int(total * self._config.gpu_memory_utilization)
        return MemoryBudget(requested_bytes, weights, lora, peak - weights - lora + other_process_bytes, graph_bytes)

    def _measure_graph_memory(self) -> int:
        """Return the number of bytes that all CUDA graphs need.

        A graph contains addresses of the KV cache, and the size of the KV cache depends on the memory of the graphs.
        Therefore, this memory must be measured before the KV cache exists. The steps are run without a capture, and
        with a KV cache of one block.
        """
        graphs = self._build_graphs(self._create_cache(1))
        return 0 if graphs is None else graphs.measure_memory()

    def _build_graphs(self, kv_cache: KVCache) -> CudaGraphRunner | None:
        """Return the graphs for `kv_cache`, or None if this device does not use graphs.

        The graphs are not captured yet.
        """
        if self._capture is None:
            return None
        return CudaGraphRunner(self._model, kv_cache, self._config, self._max_model_len, self._capture)

    def _measure_swap_costs(self, host_swap: HostSwap) -> SwapCosts:
        """Measure how long it takes to swap a block, and to compute a token again. The scheduler compares the two
        times."""
        max_tokens = self._config.max_num_batched_tokens if self._device.type == "cuda" else _CPU_MEASURED_TOKENS
        num_tokens = min(max_tokens, max(self._max_model_len - 1, 1))
        kv_cache, span = self._create_cache(1), dummy_span(0, num_tokens, self._config.block_size)
        step_input = build_step_input([span], kv_cache.block_size)

        def compute() -> int:
            self._run_step(step_input, [span], kv_cache)
            return num_tokens

        swap_costs = host_swap.measure(compute)
        logger.info(
            "swap space measured block_s=%.2e token_s=%.2e", swap_costs.seconds_per_block, swap_costs.seconds_per_token
        )
        return swap_costs

    @contextmanager
    def _compile_while_loading(self) -> Iterator[None]:
        """Compile kernels in a thread, while the body of the context loads the weights.

        To compile the kernels, the thread runs small dummy steps. It can use the CPU core that loading leaves free.
        During these steps, each weight is either loaded or zero, so all values are finite. Tensor-parallel ranks
        compile their kernels after loading, because they are not connected before.
        """
        for _, target in self._model.tensors():
            unsharded(target).tensor.zero_()
        with ThreadPoolExecutor(1, "compile") as pool:
            future = pool.submit(self.run_dummy_steps, compile_steps(self._config, self._max_model_len))
            yield
            # `_measure_memory` reports a step that does not fit into memory, with a table of all bytes.
            with suppress(torch.OutOfMemoryError):
                future.result()
                self._has_compiled = True

    @property
    def _num_state_rows(self) -> int:
        return num_state_rows(self._config.max_num_seqs, self._config.enable_prefix_caching)

    @property
    def _state_bytes(self) -> int:
        """Bytes of all states of sequences."""
        sizes = self._dtype.itemsize, self._state_dtype.itemsize
        state = state_bytes(self._model.shape.states, *sizes, self._config.max_drafts)
        return self._num_state_rows * state

    def _create_cache(self, num_blocks: int, num_state_rows: int = 1) -> KVCache:
        block_size, num_spare_blocks = self._config.block_size, self._num_spare_blocks
        dtype, device, shape = self._cache_dtype, self._device, self._model.shape
        states = None
        if shape.states is not None:
            dtypes, drafts = (self._dtype, self._state_dtype), self._config.max_drafts
            states = StateCache(shape.states, num_state_rows, *dtypes, device, drafts)
        return KVCache(shape, num_blocks, block_size, dtype, device, num_spare_blocks, self._layout, states)


def _compiles_kernels(device: torch.device) -> bool:
    """Return whether a kernel is compiled when it runs for the first time."""
    return device.type == "cuda"
