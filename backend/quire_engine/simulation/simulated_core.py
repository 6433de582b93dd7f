# SPDX-License-Identifier: Apache-2.0
"""One simulated engine core: the real engine, whose steps take the time of a step model."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.block_events import block_changes
from quire_engine.simulation.event_queue import EventQueue
from quire_engine.simulation.simulated_runner import SimulatedRunner
from quire_engine.simulation.step_model import StepModel
from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.engine.config import EngineConfig
from quire_spec.protocol.messages import SequenceRequest, StepResult


class SimulatedCore:
    """An engine that runs a step whenever it has work. The engine plans a step and applies its results when the step
    starts. Nobody sees the results before the step ends."""

    def __init__(
        self, model: StepModel, config: EngineConfig, num_blocks: int, queue: EventQueue, *, report_blocks: bool
    ) -> None:
        """Create a core.

        Args:
            model: predicts the seconds of a step.
            config: engine configuration without what is not simulated.
            num_blocks: size of the KV cache.
            queue: the events of the simulation.
            report_blocks: whether results contain the changes of the prefix cache.
        """
        info = model.info
        self.runner = SimulatedRunner(model)
        self.on_step: Callable[[StepResult], None] = lambda result: None
        """Called with the results of each step when it ends."""
        checkpoint = Checkpoint(Path(config.model), info.shape, frozenset(), "simulated")
        memory = replace(info.memory, num_blocks=num_blocks, block_size=config.block_size)
        self.engine = Engine(config, checkpoint, self.runner, memory, queue)
        self._report_blocks = report_blocks
        if report_blocks:
            self.engine.observe_blocks()
        self._queue = queue
        self._has_step = False
        """True while a step runs, and while one is about to start."""

    def add(self, request: SequenceRequest) -> None:
        """Queue a request. The step that runs now does not contain it."""
        self.engine.add(request)
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
            if self._report_blocks:
                result = msgspec.structs.replace(result, block_changes=block_changes(self.engine.pop_block_events()))
            self._queue.at(self._queue.now + self.runner.pop_seconds(), lambda: self._end_step(result))

    def _end_step(self, result: StepResult) -> None:
        self.on_step(result)
        self._start_step()
