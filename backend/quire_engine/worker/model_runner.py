# SPDX-License-Identifier: Apache-2.0
"""TorchRunner: carries out steps on this process's device. Owns weights, KV cache, adapter slots and sampler.

It decides nothing: which sequences run, on which blocks and in which slots, comes with the plan. The engine calls it
from one thread.
"""

import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from quire_engine.distributed.communicator import Communicator
from quire_engine.distributed.worker_group import WorkerGroup
from quire_engine.kv_cache.device_cache import KVCache, block_bytes
from quire_engine.kv_cache.host_swap import HostSwap
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.lora.device_slots import create_slots
from quire_engine.lora.peft.adapter import HostAdapter, read_adapter
from quire_engine.models.forward_batch import ForwardBatch, build_forward_batch
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.registry import get_model_class
from quire_engine.sequence import BlockId, Logprob
from quire_engine.step.input import GraphStepInput, StepInput, build_step_input, sort_spans
from quire_engine.step.plan import BlockCopy, ScheduledSpan, SlotLoad, SpanOutput, StepPlan
from quire_engine.weights.loader import load_weights
from quire_engine.weights.param_shard import unsharded
from quire_engine.worker import cuda_graphs
from quire_engine.worker.cuda_graphs import CudaGraphRunner
from quire_engine.worker.device import (
    available_memory_bytes,
    free_memory_bytes,
    init_device,
    resolve_cache_dtype,
    resolve_dtype,
    set_num_threads,
    trim_heap,
)
from quire_engine.worker.future_tokens import FutureTokens
from quire_engine.worker.interface import ModelRunner
from quire_engine.worker.memory_budget import (
    MemoryBudget,
    check_model_fits,
    naming_setting_on_oom,
    num_kv_blocks,
    step_too_large_error,
)
from quire_engine.worker.profiling import annotate
from quire_engine.worker.sampling.logprobs import LogprobTensors, compute_logprob_lists, max_rows
from quire_engine.worker.sampling.sampler import Sampler, SamplingRow
from quire_engine.worker.warmup import compile_steps, dummy_span, peak_memory_steps
from quire_kernels import PackedAdapter, to_device_async
from quire_spec.documents.pod_status import MeasuredMemory
from quire_spec.engine.config import EngineConfig
from quire_spec.model.memory_sizing import lora_slot_bytes, weights_bytes
from quire_spec.model.model_config import ModelConfig

_CPU_MEASURED_TOKENS = 128

logger = logging.getLogger(__name__)


class DeviceModelRunner(ModelRunner):
    """Runs the model with plain torch operations.

    Raises:
        ConfigError: the device, the weights or the memory do not allow what the configuration asks; the message says
            what to change.
    """

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelConfig,
        folder: Path,
        *,
        communicator: Communicator | None = None,
        worker_group: WorkerGroup | None = None,
        progress: bool = False,
    ) -> None:
        """`ranks`: those that share the layers, this one among them; None: there is one. `group`: the others, for
        rank 0 to tell them what to do."""
        self._worker_group = worker_group
        self._device = init_device(config, 0 if communicator is None else communicator.shard.rank)
        self._dtype = resolve_dtype(config, shape.dtype)
        self._cache_dtype = resolve_cache_dtype(config, self._dtype)
        self._sampler = Sampler(config.max_num_seqs)
        self._future_tokens = FutureTokens(
            self._device, communicator, None if worker_group is None else worker_group.wait_until
        )
        shard = None if communicator is None else communicator.shard
        reader = partial(read_adapter, shape=shape, max_rank=config.max_lora_rank, dtype=self._dtype)
        self._read_host_adapter = partial(reader, shard=shard, checkpoint=folder)
        if communicator is not None:
            shape = communicator.shard.local_config
        self._check_model_fits(config, shape)
        self._model = get_model_class(shape.architecture)(shape, ParamFactory(self._dtype, self._device, communicator))
        self._slots = create_slots(self._model, config, self._dtype, self._device) if config.enable_lora else None
        max_model_len = config.max_model_len or shape.max_position_embeddings
        self._num_extra_blocks = 1 if cuda_graphs.should_capture(self._device) else 0
        # Steps run before there are any: beside the weights' loading, and to be measured.
        self._graphs: CudaGraphRunner | None = None
        self._host_swap: HostSwap | None = None
        needs_compilation = _compiles_kernels(self._device) and communicator is None
        with self._compile_while_loading(config, max_model_len) if needs_compilation else nullcontext():
            load_weights(folder, self._model.tensors(), tied_to=shape.tied_embedding_name, progress=progress)
        self._model.pack()
        if self._device.type == "cpu":
            trim_heap()
            set_num_threads(self._model.num_bytes, config.tensor_parallel_size)
        if communicator is not None:
            communicator.connect(self._device)
        self._allocate_memory(config, max_model_len, communicator)

    def read_adapter(self, path: Path) -> PackedAdapter:
        """Read an adapter's folder; see step.Runner."""
        return self.pack_adapter(self._read_host_adapter(path))

    def pack_adapter(self, adapter: HostAdapter) -> PackedAdapter:
        """An adapter, as it was read, as `hold` keeps it."""
        assert self._slots is not None
        return self._slots.pack(adapter)

    def host_bytes(self, packed_adapter: object) -> int:
        """Bytes of what `read` made; see step.Runner."""
        assert isinstance(packed_adapter, PackedAdapter)
        return packed_adapter.num_bytes

    def store_adapter(self, adapter_digest: str, packed_adapter: object) -> None:
        """Keep an adapter in host memory; see step.Runner."""
        assert self._slots is not None and isinstance(packed_adapter, PackedAdapter)
        self._slots.store(adapter_digest, packed_adapter)

    def discard_adapter(self, adapter_digest: str) -> None:
        """Forget the host copy of an adapter; see step.Runner."""
        if self._slots is not None:
            self._slots.discard(adapter_digest)

    def load_adapter_slot(self, slot_load: SlotLoad) -> Callable[[], None]:
        """The work of filling a slot; see step.Runner."""
        assert self._slots is not None
        return self._slots.copy_to_slot(slot_load.adapter_digest, slot_load.adapter_slot)

    def close(self) -> None:
        """Let go of captured steps; none can be run any more."""
        if self._graphs is not None:
            self._graphs.close()

    def execute(self, plan: StepPlan) -> list[SpanOutput]:
        """Run a step; see step.Runner."""
        with annotate(f"step of {sum(s.length for s in plan.spans)} tokens of {len(plan.spans)} sequences"):
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> list[SpanOutput]:
        step_input, order = self._build_input(plan)
        spans = [plan.spans[i] for i in order]
        with self._broadcast_step(step_input):
            outputs = (
                self._replay_graph(step_input, spans)
                if isinstance(step_input, GraphStepInput)
                else self._run_eager(step_input, spans, self._kv_cache)
            )
        output_by_index = dict(zip(order, outputs, strict=True))
        return [output_by_index[i] for i in range(len(order))]

    def execute_async(self, plan: StepPlan) -> Callable[[], list[SpanOutput]]:
        """Have a step run after those begun before; see step.Runner."""
        if any(span.sequence.requires_host_tokens for span in plan.spans):
            outputs = self.execute(plan)
            return lambda: outputs
        with annotate(f"begin of {sum(s.length for s in plan.spans)} tokens of {len(plan.spans)} sequences"):
            return self._execute_async(plan)

    @torch.inference_mode()
    def _execute_async(self, plan: StepPlan) -> Callable[[], list[SpanOutput]]:
        """Queue a step, and wait for nothing."""
        step_input, order = self._build_input(plan)
        spans = [plan.spans[i] for i in order]
        with self._broadcast_step(step_input):
            logits: Tensor | None
            if isinstance(step_input, GraphStepInput):
                logits = self._rows_that_sample(self._graph_logits(step_input, spans), spans)
            else:
                batch, hidden = self._forward(step_input, self._kv_cache, spans)
                all_rows = slice(batch.num_logits)
                logits = None if hidden is None else self._model.compute_logits(hidden, batch.for_logit_rows(all_rows))
            return self._sample_async(plan.spans, logits, [i for i in order if plan.spans[i].samples])

    def _build_input(self, plan: StepPlan) -> tuple[StepInput | GraphStepInput, list[int]]:
        """A step as numbers, and the order in which its spans are computed."""
        if self._graphs is not None and (graph_input := self._graphs.build_input(plan)) is not None:
            return graph_input, list(range(len(plan.spans)))
        order = sort_spans(plan.spans)
        spans = [plan.spans[i] for i in order]
        return build_step_input(spans, self._kv_cache.block_size, self._model.shape.long_rope_threshold, plan), order

    def _broadcast_step(self, step_input: StepInput | GraphStepInput) -> AbstractContextManager[None]:
        """The other ranks, if there are any, do the step that is done within."""
        return nullcontext() if self._worker_group is None else self._worker_group.broadcast_step(step_input)

    def _sample_async(
        self, spans: list[ScheduledSpan], logits: Tensor | None, sampling_indices: list[int]
    ) -> Callable[[], list[SpanOutput]]:
        """Choose the tokens of some spans, which `logits` are of in their order; returns as `begin`."""
        rows = [SamplingRow(spans[i].sequence, spans[i].end) for i in sampling_indices]
        # A step that chooses nothing is waited for as well, so that no more than two are ever queued.
        tokens = torch.empty(0, dtype=torch.int64, device=self._device)
        logprob_chunks: list[tuple[list[int], LogprobTensors]] = []
        if logits is not None and rows:
            tokens, logprob_chunks = self._sampler.sample_async(logits, rows)
        logprob_tensors = [tensor for _, logprobs in logprob_chunks for tensor in logprobs.tensors]
        wait_for_copies = self._future_tokens.store([row.sequence for row in rows], tokens, logprob_tensors)

        def get_outputs() -> list[SpanOutput]:
            token_ids, *copied_tensors = wait_for_copies()
            outputs = [SpanOutput([token]) for token in token_ids.tolist()]
            for row_indices, logprobs in logprob_chunks:
                entries = logprobs.to_lists([copied_tensors.pop(0) for _ in logprobs.tensors])
                for row, row_logprobs in zip(row_indices, entries, strict=True):
                    outputs[row] = replace(outputs[row], logprobs=[row_logprobs])
            output_by_index = dict(zip(sampling_indices, outputs, strict=True))
            return [output_by_index.get(i, SpanOutput([])) for i in range(len(spans))]

        return get_outputs

    @torch.inference_mode()
    def execute_as_worker(self, step_input: StepInput | GraphStepInput) -> None:
        """Do what another rank than the first does of a step, which the first one runs at the same time."""
        if isinstance(step_input, GraphStepInput):
            self._graph_logits(step_input, None)
            return
        batch, hidden = self._forward(step_input, self._kv_cache, None)
        if hidden is not None:
            for rows in self._logit_row_chunks(step_input):
                self._model.compute_logits(hidden[rows], batch.for_logit_rows(rows))

    @torch.inference_mode()
    def _run_eager(self, step_input: StepInput, spans: list[ScheduledSpan], kv_cache: KVCache) -> list[SpanOutput]:
        """Compute ordered spans; one result each, in that order."""
        batch, hidden = self._forward(step_input, kv_cache, spans)
        if hidden is None:
            return [SpanOutput([]) for _ in spans]
        logit_chunks = (
            self._wait_on_device(self._model.compute_logits(hidden[rows], batch.for_logit_rows(rows)))
            for rows in self._logit_row_chunks(step_input)
        )
        rows = [SamplingRow(span.sequence, span.end) for span in spans if span.samples]
        sampled_outputs = iter(self._sampler(next(logit_chunks), rows) if rows else [])
        results = [next(sampled_outputs) if span.samples else SpanOutput([]) for span in spans]
        if len(rows) < batch.num_logits:
            prompt_logprobs = iter(self._compute_prompt_logprobs(spans, logit_chunks))
            logprobs_by_span = [list(islice(prompt_logprobs, len(span.prompt_logprob_positions))) for span in spans]
            results = [
                replace(r, prompt_logprobs=span_logprobs)
                for r, span_logprobs in zip(results, logprobs_by_span, strict=True)
            ]
        return results

    def _wait_on_device(self, logits: Tensor) -> Tensor:
        """The same, computed where other ranks have a part in it: whoever waited otherwise would wait for one that is
        gone."""
        if self._worker_group is not None and logits.is_cuda:
            self._worker_group.wait_until(torch.cuda.current_stream().record_event().query)
        return logits

    def _logit_row_chunks(self, step_input: StepInput) -> Iterator[slice]:
        """Rows of hidden states whose logits are made at a time: those that choose tokens, then those of prompts, a few
        each, because the logits of a prompt are gigabytes."""
        num_rows, start = len(step_input.logit_rows), step_input.num_sampled
        if start:
            yield slice(start)
        size = max_rows(self._model.shape.vocab_size)
        yield from (
            slice(chunk_start, min(chunk_start + size, num_rows)) for chunk_start in range(start, num_rows, size)
        )

    @torch.inference_mode()
    def _replay_graph(self, graph_input: GraphStepInput, spans: list[ScheduledSpan]) -> list[SpanOutput]:
        """A decoding step by its graph; one result a span, in order."""
        logits = self._wait_on_device(self._rows_that_sample(self._graph_logits(graph_input, spans), spans))
        rows = [SamplingRow(span.sequence, span.end) for span in spans if span.samples]
        sampled_outputs = iter(self._sampler(logits, rows) if rows else [])
        return [next(sampled_outputs) if span.samples else SpanOutput([]) for span in spans]

    def _graph_logits(self, graph_input: GraphStepInput, spans: list[ScheduledSpan] | None) -> Tensor:
        """Logits of each span of a decoding step, by its graph; `spans` as `_forward`."""
        assert self._graphs is not None, "the first rank has graphs, and this one has none"
        self._copy_blocks(graph_input, self._kv_cache)
        with annotate("graph"):
            return self._graphs.run(graph_input, partial(self._future_tokens.resolve, spans=spans))

    def _rows_that_sample(self, logits: Tensor, spans: list[ScheduledSpan]) -> Tensor:
        """Of logits of each span, those of spans that choose a token."""
        sampling_indices = [i for i, span in enumerate(spans) if span.samples]
        if len(sampling_indices) == len(spans):
            return logits
        # With its type said: an empty list has none, and steps of a prompt's single tokens choose nothing.
        return logits[to_device_async(torch.tensor(sampling_indices, dtype=torch.int64), self._device)]

    def _capture_graphs(self, kv_cache: KVCache, config: EngineConfig, max_model_len: int) -> CudaGraphRunner | None:
        """Graphs of decoding steps over `kv`, if this runner has any."""
        if not self._num_extra_blocks:
            return None
        with torch.inference_mode():
            num_slots = config.max_loras if self._slots is not None else 0
            return CudaGraphRunner(self._model, kv_cache, config.max_num_seqs, max_model_len, num_slots)

    def _forward(
        self, step_input: StepInput, kv_cache: KVCache, spans: list[ScheduledSpan] | None
    ) -> tuple[ForwardBatch, Tensor | None]:
        """Copy what is to be copied, then compute; hidden states of the tokens whose logits are wanted. `spans`: None
        on another rank than the first."""
        self._copy_blocks(step_input, kv_cache)
        with annotate("inputs"):
            batch = build_forward_batch(step_input, kv_cache, self._device)
            if step_input.awaits_tokens:
                self._future_tokens.resolve(batch.token_ids, spans)
        with annotate("model"):
            return batch, self._model(batch, kv_cache)

    def _copy_blocks(self, step_input: StepInput | GraphStepInput, kv_cache: KVCache) -> None:
        if self._host_swap is not None:
            self._host_swap.copy(step_input.swap_outs, step_input.swap_ins)
        if step_input.copies:
            kv_cache.copy_blocks(
                [copy.source for copy in step_input.copies], [copy.destination for copy in step_input.copies]
            )

    def _compute_prompt_logprobs(
        self, spans: list[ScheduledSpan], logit_chunks: Iterator[Tensor]
    ) -> list[list[Logprob]]:
        """Log probabilities of prompt tokens, a part of the rows at a time."""
        scored_positions = ((span.sequence, position) for span in spans for position in span.prompt_logprob_positions)
        prompt_logprobs: list[list[Logprob]] = []
        for logits in logit_chunks:
            chunk = list(islice(scored_positions, len(logits)))
            tokens = to_device_async([s.prompt_token_ids[position + 1] for s, position in chunk], self._device)
            counts = [s.params.prompt_logprobs or 0 for s, _ in chunk]
            prompt_logprobs += compute_logprob_lists(logits, tokens, counts)
        return prompt_logprobs

    def _allocate_memory(self, config: EngineConfig, max_model_len: int, communicator: Communicator | None) -> None:
        """Measure what there is beside the weights, and have cache, graphs and swap space in it."""
        shape = self._model.shape
        bytes_per_block = block_bytes(shape, config.block_size, self._cache_dtype)
        budget = self._measure_memory(config, max_model_len)
        self.num_blocks = num_kv_blocks(config, max_model_len, bytes_per_block, budget)
        if communicator is not None:
            self.num_blocks = communicator.all_reduce_min(self.num_blocks)
        with naming_setting_on_oom("kv_cache_memory_bytes"):
            self._kv_cache = KVCache(
                shape, self.num_blocks, config.block_size, self._cache_dtype, self._device, self._num_extra_blocks
            )
        self._graphs = self._capture_graphs(self._kv_cache, config, max_model_len)
        num_host_blocks = int(config.swap_space * 2**30) // bytes_per_block
        with naming_setting_on_oom("swap_space"):
            self._host_swap = HostSwap(self._kv_cache, num_host_blocks) if num_host_blocks else None
        self.swap_costs = self._measure_swap_costs(config, max_model_len)
        self.memory = MeasuredMemory(
            weights_bytes=budget.weights,
            lora_bytes=budget.lora,
            kv_bytes=self._kv_cache.num_bytes,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            dtype=str(self._dtype).removeprefix("torch."),
            device=config.device,
            swap_bytes=self._host_swap.num_bytes if self._host_swap is not None else 0,
            tensor_parallel_size=config.tensor_parallel_size,
        )
        logger.info("memory plan %s", " ".join(f"{f}={getattr(self.memory, f)}" for f in MeasuredMemory.__slots__))

    def _measure_memory(self, config: EngineConfig, max_model_len: int) -> MemoryBudget:
        """Bytes in use, and on a GPU the peak of the largest step."""
        weights = self._model.num_bytes
        lora = 0 if self._slots is None else self._slots.num_bytes
        if self._device.type != "cpu":
            try:
                return self._measure_gpu_memory(config, max_model_len, weights, lora)
            except torch.OutOfMemoryError as error:
                total = torch.cuda.mem_get_info(self._device)[1]
                raise step_too_large_error(config, weights, lora, total) from error
        # Ranks take theirs of the same memory.
        return MemoryBudget(available_memory_bytes() // config.tensor_parallel_size + weights + lora, weights, lora, 0)

    def _check_model_fits(self, config: EngineConfig, shape: ModelConfig) -> None:
        """Before anything is loaded: a refusal that tells the bytes is better than what a device says."""
        if self._device.type != "cpu":
            # Of an engine that this process had before, whose memory nobody has collected.
            gc.collect()
            torch.cuda.empty_cache()
        size = self._dtype.itemsize
        lora = config.max_loras * lora_slot_bytes(shape, config.max_lora_rank, size) if config.enable_lora else 0
        # Ranks of a CPU load side by side: of what they share, any of them may have taken its part already.
        check_model_fits(config, weights_bytes(shape, size), lora, free_memory_bytes(self._device))

    def _measure_gpu_memory(self, config: EngineConfig, max_model_len: int, weights: int, lora: int) -> MemoryBudget:
        # On a cache of one block: graphs have the cache's address in them, so these are captured again on the real one,
        # in as much memory.
        single_block_cache = self._create_single_block_cache(config)
        trial_graphs = self._capture_graphs(single_block_cache, config, max_model_len)
        graph_bytes = 0 if trial_graphs is None else trial_graphs.num_bytes
        if trial_graphs is not None:
            trial_graphs.close()
        del trial_graphs, single_block_cache
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._run_dummy_steps(config, peak_memory_steps(config, max_model_len, self._model.shape.vocab_size))
        self._run_dummy_steps(config, compile_steps(config, max_model_len))
        # What torch took for its tensors, and not their bytes: what stays of a step keeps the rest of its segment.
        peak = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        other_process_bytes = total - free - torch.cuda.memory_reserved(self._device)
        requested_bytes = int(total * config.gpu_memory_utilization)
        return MemoryBudget(requested_bytes, weights, lora, peak - weights - lora + other_process_bytes, graph_bytes)

    def _measure_swap_costs(self, config: EngineConfig, max_model_len: int) -> SwapCosts:
        """What the scheduler weighs swapping by; a CPU computes a shorter prompt for it than a GPU."""
        if self._host_swap is None:
            return SwapCosts()
        max_tokens = config.max_num_batched_tokens if self._device.type == "cuda" else _CPU_MEASURED_TOKENS
        num_tokens = min(max_tokens, max(max_model_len - 1, 1))
        kv_cache, span = self._create_single_block_cache(config), dummy_span(0, num_tokens, config.block_size)
        step_input = build_step_input([span], kv_cache.block_size)

        def compute() -> int:
            self._run_eager(step_input, [span], kv_cache)
            return num_tokens

        swap_costs = self._host_swap.measure(compute)
        logger.info(
            "swap space measured block_s=%.2e token_s=%.2e", swap_costs.seconds_per_block, swap_costs.seconds_per_token
        )
        return swap_costs

    @contextmanager
    def _compile_while_loading(self, config: EngineConfig, max_model_len: int) -> Iterator[None]:
        """Have small steps run beside what is done within, so that kernels are compiled meanwhile: reading weights
        leaves a core to that. The model is all zeros, or some of its weights: numbers stay finite.

        Ranks come to their calls together, and meet only after loading: theirs are compiled then.
        """
        for _, target in self._model.tensors():
            unsharded(target).tensor.zero_()
        with ThreadPoolExecutor(1, "compile") as pool:
            future = pool.submit(self._run_dummy_steps, config, compile_steps(config, max_model_len))
            yield
            # A step that has no room is refused where it is measured, with the bytes of everything.
            with suppress(torch.OutOfMemoryError):
                future.result()

    def _run_dummy_steps(self, config: EngineConfig, steps: Iterable[list[ScheduledSpan]]) -> None:
        """Run steps of nobody's sequences, each after copies of as many blocks as are copied at a time."""
        kv_cache = self._create_single_block_cache(config)
        copies = [BlockCopy(BlockId(0), BlockId(0))] * kv_cache.max_blocks_per_copy
        for spans in steps:
            plan = StepPlan(spans, copies=copies)
            self._run_eager(
                build_step_input(spans, kv_cache.block_size, self._model.shape.long_rope_threshold, plan),
                spans,
                kv_cache,
            )

    def _create_single_block_cache(self, config: EngineConfig) -> KVCache:
        return KVCache(self._model.shape, 1, config.block_size, self._cache_dtype, self._device, self._num_extra_blocks)


def _compiles_kernels(device: torch.device) -> bool:
    """Whether kernels are compiled when they first run."""
    return device.type == "cuda"
