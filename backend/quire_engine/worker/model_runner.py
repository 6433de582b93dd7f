# SPDX-License-Identifier: Apache-2.0
"""Model runner of one device: it executes step plans.

To execute a plan, it copies KV blocks, computes the forward pass and samples tokens. The runner owns the weights, the
KV cache and the adapter slots of this process. It does not make scheduling decisions: the plan contains the sequences,
their KV blocks and their adapter slots. The engine core calls the runner from one thread. Other threads can only read
and load adapters.
"""

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quire_engine.distributed.pipeline_link import PipelineLink
from quire_engine.distributed.rank_links import RankLinks
from quire_engine.distributed.worker_group import WorkerGroup
from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.kv_cache.host_swap import HostSwap, row_part
from quire_engine.kv_cache.layout_choice import choose_layout
from quire_engine.kv_cache.row_file import RowFile
from quire_engine.kv_transfer.store import HostRows
from quire_engine.lora.adapter_info import AdapterInfo
from quire_engine.lora.adapter_source import AdapterSource
from quire_engine.models.base import select_logit_rows
from quire_engine.models.forward_batch import ForwardBatch, ImageFeatures, build_forward_batch
from quire_engine.step.input import (
    GraphStepInput,
    StepCompletion,
    StepInput,
    StepMessage,
    build_step_input,
    sort_spans,
)
from quire_engine.step.plan import ScheduledSpan, SlotLoad, SpanOutput, StepPlan, SwapCopy
from quire_engine.worker.adapter_store import AdapterStore, StoredAdapter
from quire_engine.worker.cuda_graphs import CudaGraphRunner
from quire_engine.worker.device import init_device, log_batch_invariance, resolve_cache_dtype
from quire_engine.worker.drafting.builder import build_drafter
from quire_engine.worker.future_tokens import FutureTokens
from quire_engine.worker.image_encoder import broadcast_features, build_image_encoder
from quire_engine.worker.interface import ModelRunner
from quire_engine.worker.model_builder import build_model
from quire_engine.worker.pooler import Pooler
from quire_engine.worker.profiling import annotate
from quire_engine.worker.sampling.grammar_bitmask import BitmaskFuture
from quire_engine.worker.sampling.logprobs import compute_prompt_logprobs, logit_row_chunks
from quire_engine.worker.sampling.span_sampler import SpanSampler
from quire_engine.worker.startup import RunnerStartup
from quire_spec.constants import AdapterDigest
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.pooler_config import PoolerConfig


class DeviceModelRunner(ModelRunner):
    """Executes step plans on this process's device. See worker/interface.py for the protocol ModelRunner.

    Raises:
        ConfigError: the device, the weights or the memory do not fit the configuration; the message names the setting
            to change.
    """

    def __init__(
        self,
        config: EngineConfig,
        shape: ModelConfig,
        folder: Path,
        *,
        links: RankLinks | None = None,
        worker_group: WorkerGroup | None = None,
        progress: bool = False,
        row_file: RowFile | None = None,
    ) -> None:
        """Load the model in `folder`, and allocate everything that steps use.

        `shape` is the configuration of the whole model. `links` connects this rank to the others. It is None if there
        is only one rank. `worker_group` contains the processes of the other ranks. Only rank 0 has a worker group.
        `row_file` will contain the rows of host memory, if other processes use them.
        """
        self._worker_group = worker_group
        links = links or RankLinks(shape)
        communicator, pipeline, is_first = links.communicator, links.pipeline, links.is_first
        self._device = init_device(config, links.rank)
        device_wait = None if worker_group is None else worker_group.wait_until
        self._future_tokens = FutureTokens(self._device, communicator, device_wait)
        self._sampler = SpanSampler(config.max_num_seqs, shape.vocab_size, self._device, self._future_tokens)
        built = build_model(config, links.shape, folder, communicator, self._device)
        self._model, factory = built.model, built.factory
        self._dtype = factory.dtype
        if is_first:
            log_batch_invariance(config, shape, factory.dtype)
        self.adapter_store = AdapterStore.from_model(self._model, config, shape, folder, factory)
        pooler = PoolerConfig.load(folder, shape, config.convert, config.pooling_type)
        if pooler is not None and config.has_drafter:
            raise ConfigError(
                "speculative_config: a model that is pooled cannot have a draft model; remove it, or set convert none"
            )
        self._pooler = None
        if pooler is not None and is_first:
            self._pooler = Pooler(pooler, folder, shape, self.adapter_store.score, self._device)
        self._drafter = build_drafter(config, self._model, folder, factory, progress)
        self._communicator = communicator
        self._image_encoder = None
        if is_first:
            self._image_encoder = build_image_encoder(config, shape, folder, factory.dtype, self._device)
        tower_bytes = 0 if self._image_encoder is None else self._image_encoder.num_bytes
        # Dummy steps run during startup, before these attributes exist.
        self._graphs: CudaGraphRunner | None = None
        self._host_swap: HostSwap | None = None
        slot_bytes = self.adapter_store.slot_bytes
        self._pipeline: PipelineLink | None = None
        self._sent_steps: deque[tuple[StepInput, ForwardBatch]] = deque()
        """On the other ranks of pipeline stage 0: the steps whose logits are not computed."""
        layout, stage = choose_layout(config, shape), links.shape.stage
        if stage is not None:
            layout = layout.for_stage(range(stage.first_layer, stage.first_layer + links.shape.num_layers))
        part = None
        if row_file is not None:
            cache_dtype = resolve_cache_dtype(config, factory.dtype)
            part = row_part(config, shape, cache_dtype, row_file, links.rank, factory.dtype)
        run_step = self._run_eager if links.shape.has_outer_parts else self._run_dummy_layers
        startup = RunnerStartup(
            config, self._model, factory, slot_bytes, run_step, self._drafter, tower_bytes, pipeline, layout, part
        )
        startup.load_model(folder, built.checkpoint, progress=progress)
        memory = startup.allocate()
        self._kv_cache, self._graphs, self._host_swap = memory.kv_cache, memory.graphs, memory.host_swap
        self.swap_costs, self.memory, self.host_rows = memory.swap_costs, memory.measured, memory.host_swap
        states = self._kv_cache.states
        self.host_state_rows: HostRows | None = None if states is None else states.host_rows
        self._pipeline = pipeline
        self.background_image_encoder = None
        if self._image_encoder is not None and self._device.type == "cpu":
            self._image_encoder.allow_background()
            self.background_image_encoder = self._image_encoder

    def read_adapter(self, source: AdapterSource) -> StoredAdapter:
        """See ModelRunner."""
        return self.adapter_store.read(source)

    def adapter_info(self, packed_adapter: object) -> AdapterInfo:
        """See ModelRunner."""
        assert isinstance(packed_adapter, StoredAdapter)
        return packed_adapter.info

    def store_adapter(self, adapter_digest: AdapterDigest, packed_adapter: object) -> None:
        """See ModelRunner."""
        assert isinstance(packed_adapter, StoredAdapter)
        self.adapter_store.store(adapter_digest, packed_adapter)

    def discard_adapter(self, adapter_digest: AdapterDigest) -> None:
        """See ModelRunner."""
        self.adapter_store.discard(adapter_digest)

    def load_adapter_slot(self, slot_load: SlotLoad) -> Callable[[], None]:
        """See ModelRunner."""
        return self.adapter_store.load_slot(slot_load)

    def close(self) -> None:
        """Release the captured CUDA graphs. After this, no graph can run."""
        if self._graphs is not None:
            self._graphs.close()

    def copy_rows(self, swap_outs: Sequence[SwapCopy], swap_ins: Sequence[SwapCopy]) -> None:
        """On a rank other than 0, start copies of its parts of blocks that are not part of a step; see HostRows.

        Any thread can call this. The steps that were started before come first on the device."""
        assert self._host_swap is not None
        with nullcontext() if self._device.type == "cpu" else torch.cuda.device(self._device):
            self._host_swap.copy(swap_outs, swap_ins)

    def copy_states(self, swap_outs: Sequence[SwapCopy], swap_ins: Sequence[SwapCopy]) -> None:
        """The same for states; the numbers of rows of host memory begin with 0."""
        assert self.host_state_rows is not None
        with nullcontext() if self._device.type == "cpu" else torch.cuda.device(self._device):
            self.host_state_rows.copy(swap_outs, swap_ins)

    def synchronize_rows(self) -> None:
        """Wait for these copies. Any thread can call this."""
        assert self._host_swap is not None
        self._host_swap.synchronize()
        if self.host_state_rows is not None:
            self.host_state_rows.synchronize()

    def zero_kv_cache(self) -> None:
        """See ModelRunner."""
        self._kv_cache.zero()

    def execute(self, plan: StepPlan) -> list[SpanOutput]:
        """See ModelRunner."""
        if self._pipeline is not None:
            return self.execute_async(plan)()
        with annotate(f"step of {sum(s.length for s in plan.spans)} tokens of {len(plan.spans)} sequences"):
            step_input, order = self._build_input(plan)
            spans = [plan.spans[i] for i in order]
            # Another thread fills the mask while the forward pass runs.
            bitmask = self._sampler.grammar_bitmask.fill_async(
                [span for span in spans if span.samples and span.sequence.beam_group is None]
            )
            with self._broadcast_step(step_input):
                outputs = (
                    self._run_graph(step_input, spans, bitmask)
                    if isinstance(step_input, GraphStepInput)
                    else self._run_eager(step_input, spans, self._kv_cache, bitmask)
                )
            if self._drafter is not None:
                aux_hidden_states, self._model.aux_hidden_states = self._model.aux_hidden_states, None
                outputs = self._drafter.propose(spans, outputs, step_input.copies, aux_hidden_states)
        output_by_index = dict(zip(order, outputs, strict=True))
        return [output_by_index[i] for i in range(len(order))]

    def execute_async(self, plan: StepPlan) -> Callable[[], list[SpanOutput]]:
        """See ModelRunner."""
        if self._pipeline is not None:
            return self._execute_staged(plan)
        if any(span.sequence.requires_host_tokens for span in plan.spans):
            outputs = self.execute(plan)
            return lambda: outputs
        with annotate(f"begin of {sum(s.length for s in plan.spans)} tokens of {len(plan.spans)} sequences"):
            return self._execute_async(plan)

    def sample_tokens(self) -> None:
        """See ModelRunner."""
        self._sampler.run_postponed()

    @torch.inference_mode()
    def execute_as_worker(self, step_input: StepMessage) -> None:
        """On a rank other than 0, compute this rank's part of a step while rank 0 executes the same step."""
        if isinstance(step_input, GraphStepInput):
            self._graph_logits(step_input, None)
            return
        if isinstance(step_input, StepCompletion):
            if not self._sent_steps:  # a later pipeline stage
                return
            step_input, batch = self._sent_steps.popleft()
            hidden = self._receive_logit_rows(batch)
        elif self._pipeline is not None:
            batch = self._run_stage(step_input)
            if self._pipeline.is_first:
                self._sent_steps.append((step_input, batch))
            return
        else:
            batch, hidden = self._forward(step_input, self._kv_cache, None)
        if hidden is not None:
            for rows in logit_row_chunks(step_input, self._model.shape.vocab_size):
                self._model.compute_logits(hidden[rows], batch.for_logit_rows(rows))

    def _execute_staged(self, plan: StepPlan) -> Callable[[], list[SpanOutput]]:
        """Compute the layers of pipeline stage 0, and return a function that waits for those of the others, and then
        samples."""
        step_input, order = self._build_input(plan)
        assert isinstance(step_input, StepInput)
        spans = [plan.spans[i] for i in order]
        with self._broadcast_step(step_input), torch.inference_mode():
            batch = self._run_stage(step_input)

        def get_outputs() -> list[SpanOutput]:
            bitmask = self._sampler.grammar_bitmask.fill_async(
                [span for span in spans if span.samples and span.sequence.beam_group is None]
            )
            has_peers = self._communicator is not None
            with self._broadcast_step(StepCompletion()) if has_peers else nullcontext(), torch.inference_mode():
                hidden = self._receive_logit_rows(batch)
                outputs = self._sample(step_input, spans, batch, hidden, bitmask)
            output_by_index = dict(zip(order, outputs, strict=True))
            return [output_by_index[i] for i in range(len(order))]

        return get_outputs

    def _run_stage(self, step_input: StepInput) -> ForwardBatch:
        """Compute the layers of this pipeline stage, and send what they return to the next one. The last stage sends
        the rows that need logits."""
        assert self._pipeline is not None
        self._copy_blocks(step_input, self._kv_cache)
        batch = build_forward_batch(step_input, self._kv_cache, self._device)
        inputs = None if self._pipeline.is_first else self._pipeline.receive(len(step_input.token_ids))
        hidden = self._model.forward_layers(replace(batch, hidden=inputs), self._kv_cache)
        if self._pipeline.is_last:
            # Without such rows, one row tells stage 0 that the step is complete.
            hidden = select_logit_rows(hidden, batch) if batch.num_logits else hidden[:1]
        self._pipeline.send(hidden)
        return batch

    def _receive_logit_rows(self, batch: ForwardBatch) -> Tensor | None:
        """On pipeline stage 0, wait for the hidden states of the rows that need logits; return None if there are
        none."""
        assert self._pipeline is not None
        hidden = self._pipeline.receive(max(batch.num_logits, 1))
        return hidden if batch.num_logits else None

    @torch.inference_mode()
    def _run_dummy_layers(self, step_input: StepInput, spans: list[ScheduledSpan], kv_cache: KVCache) -> None:
        """Compute the layers of a later pipeline stage in a warm-up step, without the other stages."""
        batch = build_forward_batch(step_input, kv_cache, self._device)
        size = len(step_input.token_ids), self._model.shape.hidden_size
        hidden = torch.zeros(size, dtype=self._dtype, device=self._device)
        self._model.forward_layers(replace(batch, hidden=hidden), kv_cache)

    @torch.inference_mode()
    def _execute_async(self, plan: StepPlan) -> Callable[[], list[SpanOutput]]:
        """Queue a step on the device without waiting."""
        step_input, order = self._build_input(plan)
        spans = [plan.spans[i] for i in order]
        with self._broadcast_step(step_input):
            if isinstance(step_input, GraphStepInput):
                logits = self._graph_logits(step_input, spans)
            else:
                batch, hidden = self._forward(step_input, self._kv_cache, spans)
                all_rows = slice(batch.num_logits)
                logits = None if hidden is None else self._model.compute_logits(hidden, batch.for_logit_rows(all_rows))
            return self._sampler.sample_async(plan.spans, logits, [i for i in order if plan.spans[i].samples])

    def _build_input(self, plan: StepPlan) -> tuple[StepInput | GraphStepInput, list[int]]:
        """Return the plan as tensors, and the indices of its spans in the order in which they are computed."""
        if self._graphs is not None and (graph_input := self._graphs.build_input(plan)) is not None:
            return graph_input, list(range(len(plan.spans)))
        order = sort_spans(plan.spans)
        spans = [plan.spans[i] for i in order]
        num_groups, threshold = self._kv_cache.layout.num_groups, self._model.shape.long_rope_threshold
        return build_step_input(spans, self._kv_cache.block_size, threshold, plan, num_groups), order

    def _broadcast_step(self, step_input: StepMessage) -> AbstractContextManager[None]:
        """Send the step to the other ranks, if there are any. They compute the step while the context is active."""
        return nullcontext() if self._worker_group is None else self._worker_group.broadcast_step(step_input)

    @torch.inference_mode()
    def _run_eager(
        self,
        step_input: StepInput,
        spans: list[ScheduledSpan],
        kv_cache: KVCache,
        bitmask: BitmaskFuture | None = None,
    ) -> list[SpanOutput]:
        """Compute a step without a CUDA graph. Return one output for each span, in the order of the spans.

        If `bitmask` is None, the step is a warm-up step, and a bitmask that allows all tokens is applied to its logits.
        """
        if bitmask is None:
            bitmask = partial(self._sampler.grammar_bitmask.allow_all, sum(span.samples for span in spans))
        batch, hidden = self._forward(step_input, kv_cache, spans)
        return self._sample(step_input, spans, batch, hidden, bitmask)

    def _sample(
        self,
        step_input: StepInput,
        spans: list[ScheduledSpan],
        batch: ForwardBatch,
        hidden: Tensor | None,
        bitmask: BitmaskFuture,
    ) -> list[SpanOutput]:
        """Return one output for each span, from the hidden states of the rows that need logits."""
        if hidden is None:
            return [SpanOutput([]) for _ in spans]
        logit_chunks = (
            self._wait_on_device(self._model.compute_logits(hidden[rows], batch.for_logit_rows(rows)))
            for rows in logit_row_chunks(step_input, self._model.shape.vocab_size)
        )
        outputs = self._sampler.sample(spans, logit_chunks, bitmask)
        num_with_logits = batch.num_logits - step_input.num_pooled
        if step_input.num_pooled:
            rows = slice(num_with_logits, batch.num_logits)
            assert self._pooler is not None, "the text process rejects requests that need a pooler"
            hidden_rows = self._model.final_norm(hidden[rows], batch.for_logit_rows(rows))
            pooled = self._pooler.pool(spans, self._wait_on_device(hidden_rows))
            outputs = [replace(o, pooled=p) for o, p in zip(outputs, pooled, strict=True)]
        if step_input.num_sampled < num_with_logits:
            prompt_logprobs = compute_prompt_logprobs(spans, logit_chunks, self._device)
            outputs = [replace(o, prompt_logprobs=p) for o, p in zip(outputs, prompt_logprobs, strict=True)]
        return outputs

    @torch.inference_mode()
    def _run_graph(
        self, graph_input: GraphStepInput, spans: list[ScheduledSpan], bitmask: BitmaskFuture
    ) -> list[SpanOutput]:
        """Compute a step with a CUDA graph. Return one output for each span, in the order of the spans."""
        logits = self._graph_logits(graph_input, spans)
        return self._sampler.sample(spans, iter([] if logits is None else [self._wait_on_device(logits)]), bitmask)

    def _graph_logits(self, graph_input: GraphStepInput, spans: list[ScheduledSpan] | None) -> Tensor | None:
        """Return the logits from which tokens are sampled, or None if the step does not sample. Only rank 0 passes
        `spans`."""
        assert self._graphs is not None, "rank 0 has CUDA graphs, and this rank has none"
        self._copy_blocks(graph_input, self._kv_cache)
        with annotate("graph"):
            return self._graphs.run(graph_input, partial(self._future_tokens.resolve, spans=spans))

    def _forward(
        self, step_input: StepInput, kv_cache: KVCache, spans: list[ScheduledSpan] | None
    ) -> tuple[ForwardBatch, Tensor | None]:
        """Copy KV blocks, run the model, and return the hidden states that need logits. Only rank 0 passes `spans`."""
        self._copy_blocks(step_input, kv_cache)
        with annotate("inputs"):
            images = self._image_features(step_input, spans) if step_input.image_rows else None
            batch = build_forward_batch(step_input, kv_cache, self._device, images)
            if step_input.awaits_tokens:
                self._future_tokens.resolve(batch.token_ids, spans)
        with annotate("model"):
            return batch, self._model(batch, kv_cache)

    def _image_features(self, step_input: StepInput, spans: list[ScheduledSpan] | None) -> ImageFeatures:
        """Return the embeddings of the tokens of images. Only rank 0 passes `spans`, and computes them."""
        features = None
        if spans is not None:
            assert self._image_encoder is not None, "the text process rejects images without a vision tower"
            features = self._image_encoder.encode(spans)
        if self._communicator is not None:
            images, embedding = self._model.shape.images, self._model.embed_tokens
            assert images is not None
            shape = 1 + images.num_deepstack, len(step_input.image_rows), embedding.shape[-1]
            like = torch.empty(shape, dtype=self._dtype, device=self._device)
            return broadcast_features(features, self._communicator, like)
        assert features is not None
        return features

    def _copy_blocks(self, step_input: StepInput | GraphStepInput, kv_cache: KVCache) -> None:
        if self._host_swap is not None:
            self._host_swap.copy(step_input.swap_outs, step_input.swap_ins)
        if step_input.copies:
            kv_cache.copy_blocks(
                [copy.source for copy in step_input.copies], [copy.destination for copy in step_input.copies]
            )
        if isinstance(step_input, StepInput) and step_input.state_copies:
            assert kv_cache.states is not None
            copies = step_input.state_copies
            kv_cache.states.copy([copy.source for copy in copies], [copy.destination for copy in copies])

    def _wait_on_device(self, tensor: Tensor) -> Tensor:
        """Wait until the device has computed a tensor.

        The device is polled, so that the wait ends with an error if a tensor-parallel worker has died. Returns the
        tensor.
        """
        if self._worker_group is not None and tensor.is_cuda:
            self._worker_group.wait_until(torch.cuda.current_stream().record_event().query)
        return tensor
