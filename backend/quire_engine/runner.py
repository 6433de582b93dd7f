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

from quire_engine import graphs
from quire_engine.batch import Batch, build_batch
from quire_engine.device import (
    available_memory,
    free_memory,
    give_back_memory,
    open_device,
    resolve_cache_dtype,
    resolve_dtype,
    set_threads,
)
from quire_engine.graphs import DecodeGraphs
from quire_engine.group import Group
from quire_engine.handover import Handover
from quire_engine.kv import KVCache, block_bytes
from quire_engine.layers import Placement
from quire_engine.logprobs import Scores, logprobs_of, rows_at_once
from quire_engine.lora import make_slots
from quire_engine.memory import Budget, allocating, check_room, num_blocks, step_refusal
from quire_engine.models import model_class
from quire_engine.part import whole
from quire_engine.peft import HostAdapter, read_adapter
from quire_engine.ranks import Ranks
from quire_engine.rehearsal import largest_steps, small_steps, spare_span
from quire_engine.request import BlockId, Logprob
from quire_engine.sampler import Row, Sampler
from quire_engine.step import BlockCopy, Runner, Sampled, SlotLoad, Span, StepPlan
from quire_engine.swap import SwapSpace
from quire_engine.swapper import Swapper
from quire_engine.trace import stretch
from quire_engine.weights import load_weights
from quire_engine.work import GraphWork, Work, order_spans, work_of
from quire_kernels import PackedAdapter, to_device_async
from quire_spec.documents.pod_status import MeasuredMemory
from quire_spec.engine.config import EngineConfig
from quire_spec.model.memory_sizing import lora_slot_bytes, weights_bytes
from quire_spec.model.model_config import ModelConfig

_CPU_MEASURED_TOKENS = 128

logger = logging.getLogger(__name__)


class TorchRunner(Runner):
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
        ranks: Ranks | None = None,
        group: Group | None = None,
        progress: bool = False,
    ) -> None:
        """`ranks`: those that share the layers, this one among them; None: there is one. `group`: the others, for
        rank 0 to tell them what to do."""
        self._group = group
        self._device = open_device(config, 0 if ranks is None else ranks.shard.rank)
        self._dtype = resolve_dtype(config, shape.dtype)
        self._cache_dtype = resolve_cache_dtype(config, self._dtype)
        self._sampler = Sampler(config.max_num_seqs)
        self._handover = Handover(self._device, ranks, None if group is None else group.until)
        shard = None if ranks is None else ranks.shard
        read = partial(read_adapter, shape=shape, max_rank=config.max_lora_rank, dtype=self._dtype)
        self._read = partial(read, shard=shard, checkpoint=folder)
        if ranks is not None:
            shape = ranks.shard.local_config
        self._check_room(config, shape)
        self._model = model_class(shape.architecture)(shape, Placement(self._dtype, self._device, ranks))
        self._slots = make_slots(self._model, config, self._dtype, self._device) if config.enable_lora else None
        max_model_len = config.max_model_len or shape.max_position_embeddings
        self._num_spare = 1 if graphs.are_wanted(self._device) else 0
        # Steps run before there are any: beside the weights' loading, and to be measured.
        self._graphs: DecodeGraphs | None = None
        self._swapper: Swapper | None = None
        compiles = _compiles(self._device) and ranks is None
        with self._compiling(config, max_model_len) if compiles else nullcontext():
            load_weights(folder, self._model.tensors(), tied=shape.tied_embedding_name, progress=progress)
        self._model.pack()
        if self._device.type == "cpu":
            give_back_memory()
            set_threads(self._model.num_bytes, config.tensor_parallel_size)
        if ranks is not None:
            ranks.connect(self._device)
        self._take_memory(config, max_model_len, ranks)

    def read(self, path: Path) -> PackedAdapter:
        """Read an adapter's folder; see step.Runner."""
        return self.pack(self._read(path))

    def pack(self, adapter: HostAdapter) -> PackedAdapter:
        """An adapter, as it was read, as `hold` keeps it."""
        assert self._slots is not None
        return self._slots.pack(adapter)

    def host_bytes(self, packed: object) -> int:
        """Bytes of what `read` made; see step.Runner."""
        assert isinstance(packed, PackedAdapter)
        return packed.num_bytes

    def hold(self, digest: str, packed: object) -> None:
        """Keep an adapter in host memory; see step.Runner."""
        assert self._slots is not None and isinstance(packed, PackedAdapter)
        self._slots.hold(digest, packed)

    def drop(self, digest: str) -> None:
        """Forget the host copy of an adapter; see step.Runner."""
        if self._slots is not None:
            self._slots.drop(digest)

    def load(self, load: SlotLoad) -> Callable[[], None]:
        """The work of filling a slot; see step.Runner."""
        assert self._slots is not None
        return self._slots.load(load.digest, load.slot)

    def close(self) -> None:
        """Let go of captured steps; none can be run any more."""
        if self._graphs is not None:
            self._graphs.close()

    def execute(self, plan: StepPlan) -> list[Sampled]:
        """Run a step; see step.Runner."""
        with stretch(f"step of {sum(s.length for s in plan.spans)} tokens of {len(plan.spans)} sequences"):
            return self._execute(plan)

    def _execute(self, plan: StepPlan) -> list[Sampled]:
        work, order = self._work(plan)
        spans = [plan.spans[i] for i in order]
        with self._handed_out(work):
            found = self._replay(work, spans) if isinstance(work, GraphWork) else self._run(work, spans, self._kv)
        results = dict(zip(order, found, strict=True))
        return [results[i] for i in range(len(order))]

    def begin(self, plan: StepPlan) -> Callable[[], list[Sampled]]:
        """Have a step run after those begun before; see step.Runner."""
        if any(span.sequence.needs_tokens for span in plan.spans):
            sampled = self.execute(plan)
            return lambda: sampled
        with stretch(f"begin of {sum(s.length for s in plan.spans)} tokens of {len(plan.spans)} sequences"):
            return self._begin(plan)

    @torch.inference_mode()
    def _begin(self, plan: StepPlan) -> Callable[[], list[Sampled]]:
        """Queue a step, and wait for nothing."""
        work, order = self._work(plan)
        spans = [plan.spans[i] for i in order]
        with self._handed_out(work):
            logits: Tensor | None
            if isinstance(work, GraphWork):
                logits = self._chosen(self._graph_logits(work, spans), spans)
            else:
                batch, hidden = self._forward(work, self._kv, spans)
                whole = slice(batch.num_logits)
                logits = None if hidden is None else self._model.project(hidden, batch.of_logits(whole))
            return self._choose(plan.spans, logits, [i for i in order if plan.spans[i].samples])

    def _work(self, plan: StepPlan) -> tuple[Work | GraphWork, list[int]]:
        """A step as numbers, and the order in which its spans are computed."""
        if self._graphs is not None and (work := self._graphs.work(plan)) is not None:
            return work, list(range(len(plan.spans)))
        order = order_spans(plan.spans)
        spans = [plan.spans[i] for i in order]
        return work_of(spans, self._kv.block_size, self._model.shape.long_rope_threshold, plan), order

    def _handed_out(self, work: Work | GraphWork) -> AbstractContextManager[None]:
        """The other ranks, if there are any, do the step that is done within."""
        return nullcontext() if self._group is None else self._group.step(work)

    def _choose(self, spans: list[Span], logits: Tensor | None, choosing: list[int]) -> Callable[[], list[Sampled]]:
        """Choose the tokens of some spans, which `logits` are of in their order; returns as `begin`."""
        rows = [Row(spans[i].sequence, spans[i].end) for i in choosing]
        # A step that chooses nothing is waited for as well, so that no more than two are ever queued.
        tokens = torch.empty(0, dtype=torch.int64, device=self._device)
        scored: list[tuple[list[int], Scores]] = []
        if logits is not None and rows:
            tokens, scored = self._sampler.begin(logits, rows)
        others = [tensor for _, scores in scored for tensor in scores.tensors]
        wait = self._handover.take([row.sequence for row in rows], tokens, others)

        def outcome() -> list[Sampled]:
            chosen, *rest = wait()
            sampled = [Sampled([token]) for token in chosen.tolist()]
            for asked, scores in scored:
                entries = scores.entries([rest.pop(0) for _ in scores.tensors])
                for row, of_row in zip(asked, entries, strict=True):
                    sampled[row] = replace(sampled[row], logprobs=[of_row])
            found = dict(zip(choosing, sampled, strict=True))
            return [found.get(i, Sampled([])) for i in range(len(spans))]

        return outcome

    @torch.inference_mode()
    def follow(self, work: Work | GraphWork) -> None:
        """Do what another rank than the first does of a step, which the first one runs at the same time."""
        if isinstance(work, GraphWork):
            self._graph_logits(work, None)
            return
        batch, hidden = self._forward(work, self._kv, None)
        if hidden is not None:
            for rows in self._parts(work):
                self._model.project(hidden[rows], batch.of_logits(rows))

    @torch.inference_mode()
    def _run(self, work: Work, spans: list[Span], kv: KVCache) -> list[Sampled]:
        """Compute ordered spans; one result each, in that order."""
        batch, hidden = self._forward(work, kv, spans)
        if hidden is None:
            return [Sampled([]) for _ in spans]
        parts = (self._over(self._model.project(hidden[rows], batch.of_logits(rows))) for rows in self._parts(work))
        rows = [Row(span.sequence, span.end) for span in spans if span.samples]
        sampled = iter(self._sampler(next(parts), rows) if rows else [])
        results = [next(sampled) if span.samples else Sampled([]) for span in spans]
        if len(rows) < batch.num_logits:
            scored = iter(self._score(spans, parts))
            per_span = [list(islice(scored, len(span.scored))) for span in spans]
            results = [replace(r, prompt_logprobs=own) for r, own in zip(results, per_span, strict=True)]
        return results

    def _over(self, logits: Tensor) -> Tensor:
        """The same, computed where other ranks have a part in it: whoever waited otherwise would wait for one that is
        gone."""
        if self._group is not None and logits.is_cuda:
            self._group.until(torch.cuda.current_stream().record_event().query)
        return logits

    def _parts(self, work: Work) -> Iterator[slice]:
        """Rows of hidden states whose logits are made at a time: those that choose tokens, then those of prompts, a few
        each, because the logits of a prompt are gigabytes."""
        num_rows, start = len(work.logit_rows), work.num_sampled
        if start:
            yield slice(start)
        size = rows_at_once(self._model.shape.vocab_size)
        yield from (slice(begin, min(begin + size, num_rows)) for begin in range(start, num_rows, size))

    @torch.inference_mode()
    def _replay(self, work: GraphWork, spans: list[Span]) -> list[Sampled]:
        """A decoding step by its graph; one result a span, in order."""
        logits = self._over(self._chosen(self._graph_logits(work, spans), spans))
        rows = [Row(span.sequence, span.end) for span in spans if span.samples]
        sampled = iter(self._sampler(logits, rows) if rows else [])
        return [next(sampled) if span.samples else Sampled([]) for span in spans]

    def _graph_logits(self, work: GraphWork, spans: list[Span] | None) -> Tensor:
        """Logits of each span of a decoding step, by its graph; `spans` as `_forward`."""
        assert self._graphs is not None, "the first rank has graphs, and this one has none"
        self._copy(work, self._kv)
        with stretch("graph"):
            return self._graphs.run(work, partial(self._handover.fill, spans=spans))

    def _chosen(self, logits: Tensor, spans: list[Span]) -> Tensor:
        """Of logits of each span, those of spans that choose a token."""
        choosing = [i for i, span in enumerate(spans) if span.samples]
        if len(choosing) == len(spans):
            return logits
        # With its type said: an empty list has none, and steps of a prompt's single tokens choose nothing.
        return logits[to_device_async(torch.tensor(choosing, dtype=torch.int64), self._device)]

    def _capture(self, kv: KVCache, config: EngineConfig, max_model_len: int) -> DecodeGraphs | None:
        """Graphs of decoding steps over `kv`, if this runner has any."""
        if not self._num_spare:
            return None
        with torch.inference_mode():
            num_slots = config.max_loras if self._slots is not None else 0
            return DecodeGraphs(self._model, kv, config.max_num_seqs, max_model_len, num_slots)

    def _forward(self, work: Work, kv: KVCache, spans: list[Span] | None) -> tuple[Batch, Tensor | None]:
        """Copy what is to be copied, then compute; hidden states of the tokens whose logits are wanted. `spans`: None
        on another rank than the first."""
        self._copy(work, kv)
        with stretch("inputs"):
            batch = build_batch(work, kv, self._device)
            if work.pending:
                self._handover.fill(batch.token_ids, spans)
        with stretch("model"):
            return batch, self._model(batch, kv)

    def _copy(self, work: Work | GraphWork, kv: KVCache) -> None:
        if self._swapper is not None:
            self._swapper.carry(work.swap_outs, work.swap_ins)
        if work.copies:
            kv.copy([copy.source for copy in work.copies], [copy.destination for copy in work.copies])

    def _score(self, spans: list[Span], parts: Iterator[Tensor]) -> list[list[Logprob]]:
        """Log probabilities of prompt tokens, a part of the rows at a time."""
        wanted = ((span.sequence, position) for span in spans for position in span.scored)
        found: list[list[Logprob]] = []
        for logits in parts:
            part = list(islice(wanted, len(logits)))
            tokens = to_device_async([s.prompt_token_ids[position + 1] for s, position in part], self._device)
            counts = [s.params.prompt_logprobs or 0 for s, _ in part]
            found += logprobs_of(logits, tokens, counts)
        return found

    def _take_memory(self, config: EngineConfig, max_model_len: int, ranks: Ranks | None) -> None:
        """Measure what there is beside the weights, and have cache, graphs and swap space in it."""
        shape = self._model.shape
        one_block = block_bytes(shape, config.block_size, self._cache_dtype)
        budget = self._measure(config, max_model_len)
        self.num_blocks = num_blocks(config, max_model_len, one_block, budget)
        if ranks is not None:
            self.num_blocks = ranks.least(self.num_blocks)
        with allocating("kv_cache_memory_bytes"):
            self._kv = KVCache(
                shape, self.num_blocks, config.block_size, self._cache_dtype, self._device, self._num_spare
            )
        self._graphs = self._capture(self._kv, config, max_model_len)
        num_host_blocks = int(config.swap_space * 2**30) // one_block
        with allocating("swap_space"):
            self._swapper = Swapper(self._kv, num_host_blocks) if num_host_blocks else None
        self.swap_space = self._measure_swap(config, max_model_len)
        self.memory = MeasuredMemory(
            weights_bytes=budget.weights,
            lora_bytes=budget.lora,
            kv_bytes=self._kv.num_bytes,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            dtype=str(self._dtype).removeprefix("torch."),
            device=config.device,
            swap_bytes=self._swapper.num_bytes if self._swapper is not None else 0,
            tensor_parallel_size=config.tensor_parallel_size,
        )
        logger.info("memory plan %s", " ".join(f"{f}={getattr(self.memory, f)}" for f in MeasuredMemory.__slots__))

    def _measure(self, config: EngineConfig, max_model_len: int) -> Budget:
        """Bytes in use, and on a GPU the peak of the largest step."""
        weights = self._model.num_bytes
        lora = 0 if self._slots is None else self._slots.num_bytes
        if self._device.type != "cpu":
            try:
                return self._measure_gpu(config, max_model_len, weights, lora)
            except torch.OutOfMemoryError as error:
                total = torch.cuda.mem_get_info(self._device)[1]
                raise step_refusal(config, weights, lora, total) from error
        # Ranks take theirs of the same memory.
        return Budget(available_memory() // config.tensor_parallel_size + weights + lora, weights, lora, 0)

    def _check_room(self, config: EngineConfig, shape: ModelConfig) -> None:
        """Before anything is loaded: a refusal that tells the bytes is better than what a device says."""
        if self._device.type != "cpu":
            # Of an engine that this process had before, whose memory nobody has collected.
            gc.collect()
            torch.cuda.empty_cache()
        size = self._dtype.itemsize
        lora = config.max_loras * lora_slot_bytes(shape, config.max_lora_rank, size) if config.enable_lora else 0
        # Ranks of a CPU load side by side: of what they share, any of them may have taken its part already.
        check_room(config, weights_bytes(shape, size), lora, free_memory(self._device))

    def _measure_gpu(self, config: EngineConfig, max_model_len: int, weights: int, lora: int) -> Budget:
        # On a cache of one block: graphs have the cache's address in them, so these are captured again on the real one,
        # in as much memory.
        tiny = self._one_block(config)
        trial = self._capture(tiny, config, max_model_len)
        graph_bytes = 0 if trial is None else trial.num_bytes
        if trial is not None:
            trial.close()
        del trial, tiny
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)
        self._rehearse(config, largest_steps(config, max_model_len, self._model.shape.vocab_size))
        self._rehearse(config, small_steps(config, max_model_len))
        # What torch took for its tensors, and not their bytes: what stays of a step keeps the rest of its segment.
        peak = torch.cuda.max_memory_reserved(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        foreign = total - free - torch.cuda.memory_reserved(self._device)
        share = int(total * config.gpu_memory_utilization)
        return Budget(share, weights, lora, peak - weights - lora + foreign, graph_bytes)

    def _measure_swap(self, config: EngineConfig, max_model_len: int) -> SwapSpace:
        """What the scheduler weighs swapping by; a CPU computes a shorter prompt for it than a GPU."""
        if self._swapper is None:
            return SwapSpace()
        most = config.max_num_batched_tokens if self._device.type == "cuda" else _CPU_MEASURED_TOKENS
        num_tokens = min(most, max(max_model_len - 1, 1))
        kv, span = self._one_block(config), spare_span(0, num_tokens, config.block_size)
        work = work_of([span], kv.block_size)

        def compute() -> int:
            self._run(work, [span], kv)
            return num_tokens

        space = self._swapper.measure(compute)
        logger.info("swap space measured block_s=%.2e token_s=%.2e", space.block_s, space.token_s)
        return space

    @contextmanager
    def _compiling(self, config: EngineConfig, max_model_len: int) -> Iterator[None]:
        """Have small steps run beside what is done within, so that kernels are compiled meanwhile: reading weights
        leaves a core to that. The model is all zeros, or some of its weights: numbers stay finite.

        Ranks come to their calls together, and meet only after loading: theirs are compiled then.
        """
        for _, target in self._model.tensors():
            whole(target).tensor.zero_()
        with ThreadPoolExecutor(1, "compile") as pool:
            done = pool.submit(self._rehearse, config, small_steps(config, max_model_len))
            yield
            # A step that has no room is refused where it is measured, with the bytes of everything.
            with suppress(torch.OutOfMemoryError):
                done.result()

    def _rehearse(self, config: EngineConfig, steps: Iterable[list[Span]]) -> None:
        """Run steps of nobody's sequences, each after copies of as many blocks as are copied at a time."""
        kv = self._one_block(config)
        copies = [BlockCopy(BlockId(0), BlockId(0))] * kv.blocks_at_once
        for spans in steps:
            plan = StepPlan(spans, copies=copies)
            self._run(work_of(spans, kv.block_size, self._model.shape.long_rope_threshold, plan), spans, kv)

    def _one_block(self, config: EngineConfig) -> KVCache:
        return KVCache(self._model.shape, 1, config.block_size, self._cache_dtype, self._device, self._num_spare)


def _compiles(device: torch.device) -> bool:
    """Whether kernels are compiled when they first run."""
    return device.type == "cuda"
