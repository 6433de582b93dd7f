# SPDX-License-Identifier: Apache-2.0
"""Simulates replicas of a service: the engine's own scheduler and prefix cache on a virtual clock.

This is a simulation of discrete events. Each core has a clock of its own. The event that comes first is handled next:
the arrival of a request, or the next step of a core.
"""

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from tqdm import tqdm

from quire_engine.core.engine import Engine
from quire_engine.simulation.recording import sequence_requests
from quire_engine.simulation.simulated_runner import SimulatedRunner, VirtualClock
from quire_engine.simulation.step_model import StepModel
from quire_engine.simulation.timeline import Timeline
from quire_engine.simulation.trace import TraceRequest
from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.messages import SequenceRequest

Dispatch = Literal["round-robin", "least-loaded"]
DISPATCHES: tuple[Dispatch, ...] = ("round-robin", "least-loaded")


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """What a simulated service did."""

    timeline: Timeline
    num_steps: int
    busy_share: float
    """Time in which cores computed, divided by the duration and the number of cores."""
    outside_share: float
    """Part of the computing time in steps that are larger than every recorded one. Their time is extrapolated."""
    prefix_hit_share: float
    """Part of the prompt tokens that were found in a prefix cache."""
    num_preemptions: int
    wall_s: float
    """Seconds that the simulation took."""


class _Core:
    """One simulated engine core."""

    def __init__(self, model: StepModel, config: EngineConfig, num_blocks: int) -> None:
        info, self.clock = model.info, VirtualClock()
        self.runner = SimulatedRunner(model, self.clock)
        checkpoint = Checkpoint(Path(config.model), info.shape, frozenset(), "simulated")
        memory = replace(info.memory, num_blocks=num_blocks, block_size=config.block_size)
        self.engine = Engine(config, checkpoint, self.runner, memory, self.clock)
        self.num_open_tokens = 0
        """Tokens of the prompts and outputs of all open requests."""
        self.is_scheduled = False

    def add(self, request: SequenceRequest, arrival_s: float) -> None:
        """Queue a request. Its arrival can be earlier than the end of the step that runs now."""
        now, self.clock.now = self.clock.now, arrival_s
        self.engine.add(request)
        self.clock.now = max(now, arrival_s)


def simulate(
    model: StepModel,
    config: EngineConfig,
    trace: Sequence[TraceRequest],
    *,
    num_blocks: int,
    num_cores: int = 1,
    block_tokens: int,
    dispatch: Dispatch = "least-loaded",
    progress: bool = False,
) -> SimulationResult:
    """Run a trace on `num_cores` cores with `num_blocks` KV blocks each.

    Raises:
        InvalidArgument: the configuration has a feature that is not simulated, or a request is too long.
    """
    for name in ("speculative_config", "pooling"):
        if getattr(config, name, None) is not None:
            raise InvalidArgument(f"simulate: {name} is not simulated; omit it")
    started_at = time.perf_counter()
    config = replace(
        config,
        async_scheduling=False,
        enable_lora=False,
        swap_space=0,
        kv_offloading_size=0,
        kv_offloading_folder=None,
        kv_offloading_folder_size=None,
    )
    cores = [_Core(model, config, num_blocks) for _ in range(num_cores)]
    requests = sequence_requests(list(trace), model.info.shape.vocab_size, block_tokens, cores[0].engine.max_model_len)
    sizes = [request.num_input_tokens + request.num_output_tokens for request in trace]
    core_of: dict[int, _Core] = {}
    timeline = Timeline()
    events: list[tuple[float, int]] = []
    """Next steps: their times and the indices of their cores."""
    num_arrived = 0
    with tqdm(total=len(trace), desc="requests", disable=not progress, dynamic_ncols=True) as bar:
        while events or num_arrived < len(requests):
            if num_arrived < len(requests) and (not events or trace[num_arrived].arrival_s <= events[0][0]):
                arrival_s = trace[num_arrived].arrival_s
                index = _choose(cores, num_arrived, dispatch)
                core = core_of[num_arrived] = cores[index]
                core.add(requests[num_arrived], arrival_s)
                core.num_open_tokens += sizes[num_arrived]
                timeline.arrive(num_arrived, arrival_s)
                num_arrived += 1
                if not core.is_scheduled:
                    core.is_scheduled = True
                    heapq.heappush(events, (core.clock.now, index))
                continue
            _, index = heapq.heappop(events)
            core = cores[index]
            for result in core.engine.step().results:
                timeline.add(result, core.clock.now)
                if result.finish_reason is not None:
                    core.num_open_tokens -= sizes[result.id]
                    bar.update()
            core.is_scheduled = core.engine.has_work
            if core.is_scheduled:
                heapq.heappush(events, (core.clock.now, index))
    stats = [core.engine.stats() for core in cores]
    busy_s = sum(core.runner.busy_s for core in cores)
    return SimulationResult(
        timeline,
        sum(core.runner.num_steps for core in cores),
        busy_s / (timeline.duration_s * num_cores),
        sum(core.runner.outside_s for core in cores) / busy_s,
        sum(s.prefix_cache_hits for s in stats) / max(1, sum(s.prefix_cache_queries for s in stats)),
        sum(s.num_preemptions for s in stats),
        time.perf_counter() - started_at,
    )


def _choose(cores: Sequence[_Core], request_index: int, dispatch: Dispatch) -> int:
    if dispatch == "round-robin":
        return request_index % len(cores)
    return min(range(len(cores)), key=lambda index: cores[index].num_open_tokens)
