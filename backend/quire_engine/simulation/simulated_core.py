# SPDX-License-Identifier: Apache-2.0
"""One simulated engine core: the real engine, whose steps take the time of a step model."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.block_events import block_changes
from quire_engine.kv_cache.layout_choice import choose_layout, num_host_blocks, num_host_states
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.lora.adapter_info import AdapterInfo
from quire_engine.lora.adapter_source import AdapterSource
from quire_engine.simulation.event_queue import Channel, EventQueue
from quire_engine.simulation.simulated_runner import SimulatedRunner
from quire_engine.simulation.simulated_store import SimulatedStore
from quire_engine.simulation.step_features import StepFeatures
from quire_engine.simulation.step_model import StepModel
from quire_engine.step.plan import SlotLoad
from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.constants import AdapterDigest
from quire_spec.engine.config import EngineConfig
from quire_spec.model.attention.state_config import state_bytes
from quire_spec.model.capabilities import DTYPE_BYTES
from quire_spec.model.memory_sizing import lora_bytes, lora_pages
from quire_spec.protocol.messages import SequenceRequest, StepResult

_MIN_WAIT_S = 1e-6
"""A deadline minus a time, plus this time, can be less than the deadline."""


class SimulatedCore:
    """An engine that runs a step whenever it has work. The engine plans a step and applies its results when the step
    starts. Nobody sees the results before the step ends."""

    def __init__(
        self,
        model: StepModel,
        config: EngineConfig,
        num_blocks: int,
        queue: EventQueue,
        store: SimulatedStore | None,
        *,
        report_blocks: bool,
    ) -> None:
        """Create a core.

        Args:
            model: predicts the seconds of a step. Its costs are those of adapters and copies.
            config: engine configuration without what is not simulated.
            num_blocks: size of the KV cache.
            queue: the events of the simulation.
            store: the folder of the pod.
            report_blocks: whether results contain the changes of the prefix cache.
        """
        info = model.info
        # The ranks of the adapters are not known.
        num_pages = lora_pages(info.shape, 1, config.max_lora_rank, config.lora_experts, config.lora_modules_to_save)
        adapter_bytes = lora_bytes(info.shape, num_pages, DTYPE_BYTES[info.memory.dtype], config.lora_experts)
        adapter_info = AdapterInfo(adapter_bytes, num_pages=num_pages)
        self.runner = SimulatedRunner(model, _swap_costs(model, config), adapter_info)
        self.on_step: Callable[[StepResult], None] = lambda result: None
        """Called with the results of each step when it ends."""
        checkpoint = Checkpoint(Path(config.model), info.shape, frozenset(), "simulated")
        memory = replace(info.memory, num_blocks=num_blocks, block_size=config.block_size)
        self.engine = Engine(config, checkpoint, self.runner, memory, queue, store)
        self.engine.delegate_slot_copies(self._copy_adapter)
        self.engine.delegate_store_waits(self._on_store_ready)
        self._report_blocks = report_blocks
        if report_blocks:
            self.engine.observe_blocks()
        self._queue = queue
        self._costs = info.costs
        # As in AdapterIOThreads.
        self._reads, self._copies = Channel(queue, 2), Channel(queue, 1)
        self._has_step = False
        """True while a step runs, and while one is about to start."""

    def add_adapter(self, digest: AdapterDigest) -> None:
        """Register an adapter and keep it in host memory, as a pod does when it starts."""
        self.engine.add_adapter(digest, Path(digest), None, False)

    def state(self) -> StepResult:
        """Return the state that a core sends when a text process connects."""
        return StepResult([], [], self.engine.stats(), adapter_changes=self.engine.pop_adapter_changes())

    def add(self, request: SequenceRequest) -> None:
        """Queue a request. The step that runs now does not contain it."""
        self.engine.add(request)
        self._read_adapters()
        self._start_soon()

    def _start_soon(self) -> None:
        """Start a step after all requests that arrive at this time."""
        if not self._has_step:
            self._has_step = True
            self._queue.at(self._queue.now, self._start_step)

    def _start_step(self) -> None:
        self._has_step = self.engine.has_runnable
        if self._has_step:
            result = self.engine.step()
            result = msgspec.structs.replace(result, adapter_changes=self.engine.pop_adapter_changes())
            if self._report_blocks:
                result = msgspec.structs.replace(result, block_changes=block_changes(self.engine.pop_block_events()))
            self._queue.at(self._queue.now + self.runner.pop_seconds(), lambda: self._end_step(result))
            self._read_adapters()
        elif (wait_s := self.engine.store_wait_s) is not None:
            self._queue.at(self._queue.now + max(wait_s, _MIN_WAIT_S), self._on_store_ready)

    def _end_step(self, result: StepResult) -> None:
        self.on_step(result)
        self._start_step()

    def _on_store_ready(self) -> None:
        self.engine.on_store_ready()
        self._start_soon()

    def _read_adapters(self) -> None:
        """Read the adapters that are in no host memory, and for which sequences wait."""
        for digest, source in self.engine.pop_adapter_reads():
            self._reads.run(self._costs.require("adapter_read"), partial(self._end_read, digest, source))

    def _end_read(self, digest: AdapterDigest, source: AdapterSource) -> None:
        self.engine.add_adapter(digest, source, None)
        self._read_adapters()
        self._start_soon()

    def _copy_adapter(self, slot_load: SlotLoad, copy: Callable[[], None]) -> None:
        self._copies.run(self._costs.require("adapter_copy"), partial(self._end_copy, slot_load))

    def _end_copy(self, slot_load: SlotLoad) -> None:
        self.engine.on_slot_loaded(slot_load)
        self._start_soon()


def _swap_costs(model: StepModel, config: EngineConfig) -> SwapCosts:
    """Return the host memory of a core, and the costs that its engine would measure when it starts."""
    info = model.info
    size_ratio = config.block_size / info.memory.block_size
    block_bytes = info.memory.kv_bytes / info.memory.num_blocks * size_ratio
    element_sizes = DTYPE_BYTES[info.memory.dtype], DTYPE_BYTES[config.state_dtype]
    state = state_bytes(info.shape.states, *element_sizes, 0)
    num_states, layout = num_host_states(config, state), choose_layout(config, info.shape)
    num_blocks = num_host_blocks(config, info.shape, layout, max(1, int(block_bytes)), num_states * state)
    if not num_blocks:
        return SwapCosts()
    num_tokens = min(config.max_num_batched_tokens, config.max_model_len or info.shape.max_length)
    step_s = model.seconds(StepFeatures(1, num_tokens, 0, 0, num_tokens * (num_tokens + 1) // 2, prompts=1))
    block_s = 2 * info.costs.require("block_copy") * size_ratio
    return SwapCosts(num_blocks, block_s, step_s / num_tokens, num_states, -(-state // max(1, int(block_bytes))))
