# SPDX-License-Identifier: Apache-2.0
"""TorchRunner: carries out steps on this process's device. Owns weights, KV cache, adapter slots and sampler.

It decides nothing: which sequences run, on which blocks and in which slots, comes with the plan. The engine calls it
from one thread.
"""

import logging
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

from quire_engine.batch import Batch, build_batch, order_spans
from quire_engine.device import available_memory, give_back_memory, open_device, resolve_dtype, set_threads
from quire_engine.kv import KVCache, block_bytes
from quire_engine.layers import Placement
from quire_engine.logprobs import logprobs_of
from quire_engine.lora import AdapterSlots, SlotWeights
from quire_engine.memory import Budget, allocating, num_blocks
from quire_engine.models import model_class
from quire_engine.models.causal import CausalLM
from quire_engine.peft import HostAdapter
from quire_engine.request import BlockId, Logprob, Sequence
from quire_engine.sampler import Row, Sampler
from quire_engine.step import Runner, Sampled, SlotLoad, Span, StepPlan
from quire_engine.swap import SwapSpace
from quire_engine.swapper import Swapper
from quire_engine.weights import load_weights
from quire_spec.config import EngineConfig
from quire_spec.sampling import SamplingParams
from quire_spec.shape import ModelShape
from quire_spec.status import MemoryPlan

_SCORED_BYTES = 64 << 20
"""float32 logits of prompt tokens at a time: enough rows for a matrix product, little beside the weights."""

_CPU_MEASURED_TOKENS = 128

logger = logging.getLogger(__name__)


class TorchRunner(Runner):
    """Runs the model with plain torch operations.

    Raises:
        ConfigError: the device, the weights or the memory do not allow what the configuration asks; the message says
            what to change.
    """

    def __init__(self, config: EngineConfig, shape: ModelShape, folder: Path, *, progress: bool = False) -> None:
        self._device = open_device(config)
        self._dtype = resolve_dtype(config, shape.dtype)
        self._sampler = Sampler()
        self._num_slots = config.max_loras if config.enable_lora else 0
        self._model = model_class(shape.architecture)(shape, Placement(self._dtype, self._device))
        load_weights(folder, self._model.tensors(), tied=shape.tie_word_embeddings, progress=progress)
        self._slots = _make_slots(self._model, config, self._dtype, self._device) if config.enable_lora else None
        self._model.pack()
        if self._device.type == "cpu":
            give_back_memory()
            set_threads(self._model.num_bytes)
        max_model_len = config.max_model_len or shape.max_position_embeddings
        one_block = block_bytes(shape, config.block_size, self._dtype)
        budget = self._measure(config, max_model_len)
        self.num_blocks = num_blocks(config, max_model_len, one_block, budget)
        with allocating("kv_cache_memory_bytes"):
            self._kv = KVCache(shape, self.num_blocks, config.block_size, self._dtype, self._device)
        num_host_blocks = int(config.swap_space * 2**30) // one_block
        with allocating("swap_space"):
            self._swapper = Swapper(self._kv, num_host_blocks) if num_host_blocks else None
        self.swap_space = self._measure_swap(config, max_model_len)
        self.memory = MemoryPlan(
            weights_bytes=budget.weights,
            lora_bytes=budget.lora,
            kv_bytes=self._kv.num_bytes,
            num_blocks=self.num_blocks,
            block_size=config.block_size,
            max_model_len=max_model_len,
            dtype=str(self._dtype).removeprefix("torch."),
            device=config.device,
            swap_bytes=self._swapper.num_bytes if self._swapper is not None else 0,
        )
        logger.info("memory plan %s", " ".join(f"{f}={getattr(self.memory, f)}" for f in MemoryPlan.__slots__))

    def pack(self, adapter: object) -> HostAdapter:
        """An adapter as `hold` keeps it; see step.Runner."""
        assert self._slots is not None and isinstance(adapter, HostAdapter)
        return self._slots.pack(adapter)

    def hold(self, digest: str, packed: object) -> None:
        """Keep an adapter in host memory; see step.Runner."""
        assert self._slots is not None and isinstance(packed, HostAdapter)
        self._slots.hold(digest, packed)

    def drop(self, digest: str) -> None:
        """Forget the host copy of an adapter; see step.Runner."""
        if self._slots is not None:
            self._slots.drop(digest)

    def load(self, load: SlotLoad) -> Callable[[], None]:
        """The work of filling a slot; see step.Runner."""
        assert self._slots is not None
        return self._slots.load(load.digest, load.slot)

    def execute(self, plan: StepPlan) -> list[Sampled]:
        """Run a step; see step.Runner."""
        if self._swapper is not None:
            self._swapper.carry(plan.swap_outs, plan.swap_ins)
        if plan.copies:
            self._kv.copy([copy.source for copy in plan.copies], [copy.destination for copy in plan.copies])
        order = order_spans(plan.spans)
        results = dict(zip(order, self._run([plan.spans[i] for i in order], self._kv), strict=True))
        return [results[i] for i in range(len(plan.spans))]

    @torch.inference_mode()
    def _run(self, spans: list[Span], kv: KVCache) -> list[Sampled]:
        """Compute ordered spans; one result each, in that order."""
        batch = build_batch(spans, kv, self._num_slots, self._device, self._model.shape.rope_switch)
        hidden = self._model(batch, kv)
        if hidden is None:
            return [Sampled([]) for _ in spans]
        rows = [Row(span.sequence, span.end) for span in spans if span.samples]
        sampled = iter(self._sampler(self._model.project(hidden[: len(rows)], batch), rows) if rows else [])
        results = [next(sampled) if span.samples else Sampled([]) for span in spans]
        if len(rows) < batch.num_logits:
            scored = iter(self._score(spans, hidden[len(rows) :], batch))
            per_span = [list(islice(scored, len(span.scored))) for span in spans]
            results = [replace(r, prompt_logprobs=own) for r, own in zip(results, per_span, strict=True)]
        return results

    def _score(self, spans: list[Span], hidden: Tensor, batch: Batch) -> list[list[Logprob]]:
        """Log probabilities of prompt tokens, a part of the rows at a time: the logits of a prompt are gigabytes."""
        wanted = [(span.sequence, position) for span in spans for position in span.scored]
        size = max(1, _SCORED_BYTES // (4 * self._model.shape.vocab_size))
        found: list[list[Logprob]] = []
        for start in range(0, len(wanted), size):
            part = wanted[start : start + size]
            tokens = torch.tensor([s.prompt_token_ids[position + 1] for s, position in part], device=self._device)
            counts = [s.params.prompt_logprobs or 0 for s, _ in part]
            found += logprobs_of(self._model.project(hidden[start : start + size], batch), tokens, counts)
        return found

    def _measure(self, config: EngineConfig, max_model_len: int) -> Budget:
        """Bytes in use, and on a GPU the peak of the largest step."""
        weights = self._model.num_bytes
        lora = 0 if self._slots is None else self._slots.num_bytes
        if self._device.type == "cpu":
            return Budget(available_memory() + weights + lora, weights, lora, 0)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._run_largest_steps(config, max_model_len)
        peak = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        foreign = total - free - torch.cuda.memory_reserved(self._device)
        share = int(total * config.gpu_memory_utilization)
        return Budget(share, weights, lora, peak - weights - lora + foreign)

    def _measure_swap(self, config: EngineConfig, max_model_len: int) -> SwapSpace:
        """What the scheduler weighs swapping by; a CPU computes a shorter prompt for it than a GPU."""
        if self._swapper is None:
            return SwapSpace()
        most = config.max_num_batched_tokens if self._device.type == "cuda" else _CPU_MEASURED_TOKENS
        num_tokens = min(most, max(max_model_len - 1, 1))
        kv = KVCache(self._model.shape, 1, config.block_size, self._dtype, self._device)
        span = _dummy_span(0, num_tokens, kv)

        def compute() -> int:
            self._run([span], kv)
            return num_tokens

        space = self._swapper.measure(compute)
        logger.info("swap space measured block_s=%.2e token_s=%.2e", space.block_s, space.token_s)
        return space

    def _run_largest_steps(self, config: EngineConfig, max_model_len: int) -> None:
        """A step of as many prompts as may be, all sampled, and one of a chunk at the end of the longest context.

        Their KV cache is one block that stands in for all: what is computed is of no interest.
        """
        kv = KVCache(self._model.shape, 1, config.block_size, self._dtype, self._device)
        room = max(max_model_len - 1, 1)
        even, more = divmod(config.max_num_batched_tokens, config.max_num_seqs)
        many = [_dummy_span(0, min(even + (i < more), room), kv) for i in range(config.max_num_seqs)]
        chunk = min(config.max_num_batched_tokens, room)
        for spans in (many, [_dummy_span(room - chunk, chunk, kv)]):
            self._run(spans, kv)


def _dummy_span(start: int, length: int, kv: KVCache) -> Span:
    """A span that samples, of a sequence whose blocks are all block 0."""
    params = SamplingParams(temperature=1.0, top_p=0.9, prompt_logprobs=1)
    sequence = Sequence(0, [0] * (start + length), params, seed=0, max_output_tokens=1)
    sequence.block_table = [BlockId(0)] * -(-(start + length) // kv.block_size)
    return Span(sequence, start, length, None)


def _make_slots(model: CausalLM, config: EngineConfig, dtype: torch.dtype, device: torch.device) -> AdapterSlots:
    weights = {}
    like = torch.empty(0, dtype=dtype, device=device)
    for layer, linear in model.linears():
        slots = SlotWeights(linear.in_features, linear.slices, config.max_loras, config.max_lora_rank, like)
        linear.adapters = weights[layer, slots.names[0]] = slots
    return AdapterSlots(weights, pin=device.type == "cuda")
