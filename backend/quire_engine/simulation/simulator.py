# SPDX-License-Identifier: Apache-2.0
"""Simulates replicas of a service: the engine's own scheduler, prefix cache and dispatch on a virtual clock.

This is a simulation of discrete events: arrivals of requests, and the ends of the steps of each core.

    arrival -> router -> replica -> Dispatcher -> SimulatedCore (an Engine whose steps take the time of a step model)
"""

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from tqdm import tqdm

from quire_engine.api.timeline import Timeline
from quire_engine.simulation.event_queue import EventQueue
from quire_engine.simulation.recording import sequence_requests
from quire_engine.simulation.simulated_core import SimulatedCore
from quire_engine.simulation.simulated_store import SimulatedStore
from quire_engine.simulation.step_model import StepModel
from quire_engine.simulation.trace import TraceRequest
from quire_engine.text.cores.dispatcher import Dispatcher
from quire_spec.constants import AdapterDigest
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.messages import SequenceRequest, StepResult

Router = Literal["least-requests", "round-robin", "prefix-aware"]
ROUTERS: tuple[Router, ...] = ("least-requests", "round-robin", "prefix-aware")
_NOT_SIMULATED: dict[str, Any] = {"async_scheduling": False, "kv_events_config": None}
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
    """Part of the prompt tokens that were found in a prefix cache or in host memory."""
    host_hit_share: float
    """Part of the looked-up prompt tokens that were found in host memory, and not in the prefix cache."""
    num_folder_read_blocks: int
    """Blocks that were read from a folder into host memory."""
    num_adapter_evictions: int
    num_preemptions: int
    wall_s: float
    """Seconds that the simulation took."""


class _Replica:
    """The cores of one pod. With several cores, the dispatcher of the text process chooses among them."""

    def __init__(self, cores: Sequence[SimulatedCore], config: EngineConfig, queue: EventQueue) -> None:
        self._cores = cores
        self.num_requests = self.num_open_requests = 0
        self._dispatcher = Dispatcher(len(cores), config, queue)
        if config.enable_prefix_caching:
            self._dispatcher.prefix_index.hasher = cores[0].engine.block_hasher
        for number, core in enumerate(cores):
            self._dispatcher.on_step(number, core.state())
            core.on_step = partial(self._on_step, number, core.on_step)

    def add(self, request: SequenceRequest) -> None:
        """Send a request to a core."""
        self.num_requests += 1
        self.num_open_requests += 1
        number = 0
        if len(self._cores) > 1:
            dispatched = self._dispatcher.create_request([request], [request.id])
            number = self._dispatcher.choose(dispatched, range(len(self._cores)))
            self._dispatcher.add(number, dispatched)
        self._cores[number].add(request)

    def _on_step(self, number: int, on_step: Callable[[StepResult], None], step: StepResult) -> None:
        self.num_open_requests -= sum(result.finish_reason is not None for result in step.results)
        if len(self._cores) > 1:
            self._dispatcher.on_step(number, step)
        on_step(step)


def simulate(
    model: StepModel,
    config: EngineConfig,
    trace: Sequence[TraceRequest],
    *,
    num_blocks: int,
    block_tokens: int,
    num_replicas: int = 1,
    router: Router = "least-requests",
    progress: bool = False,
) -> SimulationResult:
    """Simulate a trace on replicas whose cores have `num_blocks` KV blocks each.

    Args:
        model: predicts the seconds of a step.
        config: the engine of each replica. It has `data_parallel_size` cores.
        trace: the requests, in the order of their arrival.
        num_blocks: size of the KV cache of each core.
        block_tokens: tokens of a block of the trace.
        num_replicas: number of replicas.
        router: chooses the replica of a request: in turn, the one with the fewest open requests (of those, the one
            that got the fewest), or as if one text process had the cores of all replicas.
        progress: show a progress bar on stderr.

    Raises:
        InvalidArgument: the configuration has a feature that is not simulated, a request is too long, the service has
            no adapters, or the recording does not contain a time that the simulation needs.
    """
    if config.speculative_config is not None:
        raise InvalidArgument("simulate: speculative_config is not simulated; omit it")
    started_at = time.perf_counter()
    num_cores = num_replicas * config.data_parallel_size
    cores_per_replica = num_cores if router == "prefix-aware" else config.data_parallel_size
    config = replace(config, **_NOT_SIMULATED)
    queue, timeline = EventQueue(), Timeline()
    create_core = partial(SimulatedCore, model, config, num_blocks, queue, report_blocks=cores_per_replica > 1)
    cores: list[SimulatedCore] = []
    for _ in range(num_replicas):
        store = _create_store(model, config, queue)
        cores += [create_core(store) for _ in range(config.data_parallel_size)]
    for core, adapter in itertools.product(cores, _adapters(config, trace)):
        core.add_adapter(adapter)
    requests = sequence_requests(trace, model.info.shape.vocab_size, block_tokens, cores[0].engine.max_model_len)
    with tqdm(total=len(trace), desc="requests", disable=not progress, dynamic_ncols=True) as bar:

        def on_step(step: StepResult) -> None:
            for result in step.results:
                timeline.add(result, queue.now)
                bar.update(result.finish_reason is not None)

        for core in cores:
            core.on_step = on_step
        replicas = [
            _Replica(cores[first : first + cores_per_replica], config, queue)
            for first in range(0, num_cores, cores_per_replica)
        ]

        def arrive(index: int) -> None:
            timeline.arrive(requests[index].id, queue.now)
            _choose(replicas, index, router).add(requests[index])

        for index, request in enumerate(trace):
            queue.at(request.arrival_s, partial(arrive, index))
        queue.run()
    return _create_result(cores, timeline, time.perf_counter() - started_at)


def _create_result(cores: Sequence[SimulatedCore], timeline: Timeline, wall_s: float) -> SimulationResult:
    """Return the result of cores that have served all requests. `wall_s` is the time that the simulation took."""
    stats = [core.engine.stats() for core in cores]
    busy_s = sum(core.runner.busy_s for core in cores)
    return SimulationResult(
        timeline,
        sum(core.runner.num_steps for core in cores),
        busy_s / (timeline.duration_s * len(cores)),
        sum(core.runner.outside_s for core in cores) / busy_s,
        sum(s.prefix_cache_hits for s in stats) / max(1, sum(s.prefix_cache_queries for s in stats)),
        sum(s.host_cache_hits for s in stats) / max(1, sum(s.host_cache_queries for s in stats)),
        sum(s.num_folder_read_blocks for s in stats),
        sum(s.num_adapter_evictions for s in stats),
        sum(s.num_preemptions for s in stats),
        wall_s,
    )


def _adapters(config: EngineConfig, trace: Sequence[TraceRequest]) -> list[AdapterDigest]:
    """Return the adapters of a trace, in the order of their first request."""
    first_lines = {r.adapter: r.line for r in reversed(trace) if r.adapter is not None}
    if first_lines and not config.enable_lora:
        adapter, line = min(first_lines.items(), key=lambda item: item[1])
        raise InvalidArgument(
            f"line {line} of the trace: adapter {adapter!r}: the service has no adapters; add spec.adapters, or remove "
            "the adapters from the trace"
        )
    return [AdapterDigest(adapter) for adapter in sorted(first_lines, key=first_lines.__getitem__)]


def _create_store(model: StepModel, config: EngineConfig, queue: EventQueue) -> SimulatedStore | None:
    """Return the folder of a pod. Without kv_offloading_folder_size, it is never full. The folder of a model whose
    layers have states is not simulated."""
    if config.kv_offloading_folder is None or model.info.shape.states is not None:
        return None
    memory, size_gib = model.info.memory, config.kv_offloading_folder_size
    size_ratio = config.block_size / memory.block_size
    block_bytes = memory.kv_bytes / memory.num_blocks * size_ratio
    max_blocks = None if size_gib is None else int(size_gib * 2**30 / block_bytes)
    return SimulatedStore(queue, model.info.costs.require("folder_block") * size_ratio, max_blocks)


def _choose(replicas: Sequence[_Replica], request_index: int, router: Router) -> _Replica:
    if router == "round-robin":
        return replicas[request_index % len(replicas)]
    return min(replicas, key=lambda replica: (replica.num_open_requests, replica.num_requests))
