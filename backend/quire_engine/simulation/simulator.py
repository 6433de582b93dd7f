# SPDX-License-Identifier: Apache-2.0
"""Simulates replicas of a service: the engine's own scheduler and prefix cache on a virtual clock.

This is a simulation of discrete events. Each core has a clock of its own. The event that comes first is handled next:
the arrival of a request, or the next step of a core.
"""

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from quire_engine.api.timeline import Timeline
from quire_engine.core.engine import Engine
from quire_engine.simulation.recording import sequence_requests
from quire_engine.simulation.simulated_runner import SimulatedRunner, VirtualClock
from quire_engine.simulation.step_model import StepModel
from quire_engine.simulation.trace import TraceRequest
from quire_engine.weights.checkpoint import Checkpoint
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.messages import SequenceDelta, SequenceRequest

Dispatch = Literal["round-robin", "least-loaded"]
DISPATCHES: tuple[Dispatch, ...] = ("round-robin", "least-loaded")
_NOT_SIMULATED: dict[str, Any] = {
    "async_scheduling": False,
    "data_parallel_size": 1,
    "enable_lora": False,
    "swap_space": 0.0,
    "kv_offloading_size": 0.0,
    "kv_offloading_folder": None,
    "kv_offloading_folder_size": None,
    "kv_events_config": None,
}
"""Fields of a simulated core. The recorded time of a step contains the effect of async_scheduling."""


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
        self._sizes: dict[int, int] = {}
        self.num_open_tokens = 0
        """Tokens of the prompts and outputs of all open requests."""

    def add(self, request: SequenceRequest, arrival_s: float) -> None:
        """Queue a request. Its arrival can be earlier than the end of the step that runs now."""
        now, self.clock.now = self.clock.now, arrival_s
        self.engine.add(request)
        self.clock.now = max(now, arrival_s)
        assert request.params.max_tokens is not None
        self._sizes[request.id] = len(request.prompt_token_ids) + request.params.max_tokens
        self.num_open_tokens += self._sizes[request.id]

    def step(self) -> list[SequenceDelta]:
        """Run a step, which moves the clock, and return its results."""
        results = self.engine.step().results
        for result in results:
            if result.finish_reason is not None:
                self.num_open_tokens -= self._sizes.pop(result.id)
        return results


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
    if config.speculative_config is not None:
        raise InvalidArgument("simulate: speculative_config is not simulated; omit it")
    started_at = time.perf_counter()
    config = replace(config, **_NOT_SIMULATED)
    cores = [_Core(model, config, num_blocks) for _ in range(num_cores)]
    requests = sequence_requests(trace, model.info.shape.vocab_size, block_tokens, cores[0].engine.max_model_len)
    with tqdm(total=len(trace), desc="requests", disable=not progress, dynamic_ncols=True) as bar:
        timeline = _run(cores, requests, [request.arrival_s for request in trace], dispatch, bar.update)
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


def _run(
    cores: Sequence[_Core],
    requests: Sequence[SequenceRequest],
    arrivals_s: Sequence[float],
    dispatch: Dispatch,
    on_finished: Callable[[], object],
) -> Timeline:
    """Handle all events in the order of their times, and return when the tokens were generated."""
    timeline, num_arrived = Timeline(), 0
    # The next step of each core that has work: its time, and the index of the core.
    next_steps: list[tuple[float, int]] = []
    while next_steps or num_arrived < len(requests):
        if num_arrived < len(requests) and (not next_steps or arrivals_s[num_arrived] <= next_steps[0][0]):
            index = _choose(cores, num_arrived, dispatch)
            core = cores[index]
            had_work = core.engine.has_work
            core.add(requests[num_arrived], arrivals_s[num_arrived])
            timeline.arrive(requests[num_arrived].id, arrivals_s[num_arrived])
            num_arrived += 1
            if not had_work:
                heapq.heappush(next_steps, (core.clock.now, index))
            continue
        _, index = heapq.heappop(next_steps)
        core = cores[index]
        for result in core.step():
            timeline.add(result, core.clock.now)
            if result.finish_reason is not None:
                on_finished()
        if core.engine.has_work:
            heapq.heappush(next_steps, (core.clock.now, index))
    return timeline


def _choose(cores: Sequence[_Core], request_index: int, dispatch: Dispatch) -> int:
    if dispatch == "round-robin":
        return request_index % len(cores)
    return min(range(len(cores)), key=lambda index: cores[index].num_open_tokens)
