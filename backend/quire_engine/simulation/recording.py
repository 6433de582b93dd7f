# SPDX-License-Identifier: Apache-2.0
"""Recordings: runs a real engine on a trace, and writes what each step and each request took.

The first line of a recording describes the engine. Each further line is a step or a request.
"""

import gc
import json
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, TypeVar

from quire_engine.api.replay import replay
from quire_engine.api.timeline import Timeline
from quire_engine.core.engine import Engine
from quire_engine.kv_transfer.folder_store import FolderStore
from quire_engine.lora.adapter_source import AdapterSource
from quire_engine.simulation.resource_costs import ResourceCosts
from quire_engine.simulation.step_features import StepFeatures
from quire_engine.simulation.trace import TraceRequest
from quire_engine.step.plan import SlotLoad, SpanOutput, StepPlan
from quire_engine.worker.interface import ModelRunner
from quire_spec.constants import AdapterDigest
from quire_spec.dataclass_json import from_json, to_json
from quire_spec.documents.pod_status import MeasuredMemory
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError, InvalidArgument
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import SequenceRequest

FORMAT = 2
_MEASURED_BLOCKS = 32

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RecordingInfo:
    """The engine of a recording."""

    engine: dict[str, Any]
    """EngineConfig, with the values that the engine used."""
    shape: ModelConfig
    memory: MeasuredMemory
    num_cores: int
    """Processor cores of the machine."""
    costs: ResourceCosts = field(default_factory=ResourceCosts)
    """Means over the recording, or over the measurement at the start of the engine."""
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class RecordedStep:
    """One step of a recording."""

    features: StepFeatures
    seconds: float


@dataclass(frozen=True, slots=True)
class Recording:
    """A recording that was read."""

    info: RecordingInfo
    steps: list[RecordedStep] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)


class RecordingRunner:
    """A model runner that remembers the features of the steps that it starts."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.started: deque[StepFeatures] = deque()
        """Steps that `record` has not taken yet, the oldest first."""
        self.adapter_reads: list[float] = []
        self.adapter_copies: list[float] = []
        """Seconds of each read and of each copy into a slot. They happen between the steps, in the same thread."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(self, plan: StepPlan) -> list[SpanOutput]:
        """Run a step."""
        self.started.append(StepFeatures.from_plan(plan))
        return self._runner.execute(plan)

    def execute_async(self, plan: StepPlan) -> Callable[[], list[SpanOutput]]:
        """Start a step."""
        self.started.append(StepFeatures.from_plan(plan))
        return self._runner.execute_async(plan)

    def read_adapter(self, source: AdapterSource) -> object:
        """Read an adapter."""
        return _timed(self.adapter_reads, partial(self._runner.read_adapter, source))

    def load_adapter_slot(self, slot_load: SlotLoad) -> Callable[[], None]:
        """Return a function that copies an adapter into a slot."""
        return partial(_timed, self.adapter_copies, self._runner.load_adapter_slot(slot_load))


def record(
    create_engine: Callable[[Callable[[ModelRunner], ModelRunner]], Engine],
    trace: list[TraceRequest],
    block_tokens: int,
    path: Path,
    *,
    adapters: Mapping[str, Path] = MappingProxyType({}),
    progress: bool = False,
) -> Recording:
    """Run a trace in real time, and write the recording to `path`. The outputs have the lengths of the trace.

    Args:
        create_engine: creates the engine; it must pass its runner through the given function.
        trace: the requests.
        block_tokens: tokens of a block of the trace.
        path: the file of the recording.
        adapters: folders of the adapters that the trace names.
        progress: show a progress bar on stderr.

    Raises:
        InvalidArgument: a request is too long, or its adapter is not among `adapters`.
    """
    runners: list[RecordingRunner] = []

    def wrap(runner: ModelRunner) -> ModelRunner:
        runners.append(RecordingRunner(runner))
        return runners[0]

    engine = create_engine(wrap)
    (runner,) = runners
    effective = engine.config.to_json() | {"max_model_len": engine.max_model_len}
    requests = sequence_requests(trace, engine.shape.vocab_size, block_tokens, engine.max_model_len)
    _add_adapters(engine, trace, adapters)
    # A pod that has run for a while has used all its KV memory.
    runner.zero_kv_cache()
    # As in the core process: a collection would scan all objects of PyTorch, which takes as long as several steps.
    gc.collect()
    gc.freeze()
    _warm_up(engine, [None, *map(AdapterDigest, adapters)])
    runner.started.clear()
    num_before = len(runner.adapter_reads), len(runner.adapter_copies)
    steps: list[RecordedStep] = []

    def add_step(seconds: float) -> None:
        nonlocal num_before
        seconds -= sum(runner.adapter_reads[num_before[0] :]) + sum(runner.adapter_copies[num_before[1] :])
        num_before = len(runner.adapter_reads), len(runner.adapter_copies)
        if runner.started:
            steps.append(RecordedStep(runner.started.popleft(), seconds))

    arrivals_s = [request.arrival_s for request in trace]
    timeline = replay(engine, requests, arrivals_s, progress=progress, on_step=add_step)
    swap_costs = runner.swap_costs
    costs = ResourceCosts(
        _mean(runner.adapter_reads),
        _mean(runner.adapter_copies),
        swap_costs.seconds_per_block / 2 if swap_costs.num_host_blocks else None,
        _folder_block_s(engine.config, runner),
    )
    info = RecordingInfo(effective, engine.shape, engine.memory, os.cpu_count() or 1, costs)
    recording = Recording(info, steps, timeline)
    with path.open("w", encoding="utf-8") as file:
        for line in _lines(recording):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    return recording


def _add_adapters(engine: Engine, trace: Iterable[TraceRequest], adapters: Mapping[str, Path]) -> None:
    for request in trace:
        if request.adapter is not None and request.adapter not in adapters:
            raise InvalidArgument(
                f"line {request.line} of the trace: adapter {request.adapter!r} is not one of the service "
                f"({', '.join(adapters) or 'none'}); record a service that has it in a folder"
            )
    for name, folder in adapters.items():
        engine.add_adapter(AdapterDigest(name), folder, engine.read_adapter(folder), False)


def read_recording(path: Path) -> Recording:
    """Read a recording.

    Raises:
        InvalidArgument: the file is not a recording of this release.
    """
    try:
        header, *lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        info = from_json(RecordingInfo, header)
        EngineConfig.from_json(info.engine)
        recording = Recording(info)
        for line in lines:
            if "step" in line:
                recording.steps.append(RecordedStep(StepFeatures(*map(int, line["step"])), float(line["seconds"])))
            else:
                recording.timeline.restore(line["arrival"], line["tokens"])
    except (OSError, ValueError, KeyError, TypeError, IndexError, ConfigError) as error:
        raise InvalidArgument(f"{path} is not a recording of `quire simulate record`: {error}") from error
    if info.format != FORMAT:
        raise InvalidArgument(f"{path} has format {info.format}, but this release reads {FORMAT}; record again")
    return recording


def sequence_requests(
    trace: Sequence[TraceRequest], vocab_size: int, block_tokens: int, max_model_len: int
) -> list[SequenceRequest]:
    """Return the requests of a trace; their ids are their positions. The name of an adapter stands for its digest.

    Raises:
        InvalidArgument: a request is longer than max_model_len.
    """
    requests = []
    for index, request in enumerate(trace):
        if request.num_input_tokens + request.num_output_tokens > max_model_len:
            raise InvalidArgument(
                f"line {request.line} of the trace: {request.num_input_tokens} input and {request.num_output_tokens} "
                f"output tokens exceed max_model_len {max_model_len}; raise it, or remove the request"
            )
        params = SamplingParams(max_tokens=request.num_output_tokens, ignore_eos=True, temperature=0.0)
        adapter_digest = None if request.adapter is None else AdapterDigest(request.adapter)
        requests.append(SequenceRequest(index, request.prompt(vocab_size, block_tokens), params, adapter_digest))
    return requests


def _warm_up(engine: Engine, adapters: Iterable[AdapterDigest | None]) -> None:
    """Run a prompt and a few steps for each adapter, so that the first recorded steps take the usual time."""
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    num_tokens = min(512, engine.max_model_len - 8)
    for adapter_digest in adapters:
        engine.add(SequenceRequest(0, [1] * num_tokens, params, adapter_digest))
        while engine.has_work:
            engine.read_pending_adapters()
            engine.step()


def _timed(seconds: list[float], function: Callable[[], T]) -> T:
    started_at = time.perf_counter()
    result = function()
    seconds.append(time.perf_counter() - started_at)
    return result


def _mean(seconds: Sequence[float]) -> float | None:
    return sum(seconds) / len(seconds) if seconds else None


def _folder_block_s(config: EngineConfig, runner: RecordingRunner) -> float | None:
    """Write and read some blocks in the folder of the engine; return the mean seconds of reading one."""
    if config.kv_offloading_folder is None or runner.host_rows is None:
        return None
    with TemporaryDirectory(dir=config.kv_offloading_folder) as folder:
        store = FolderStore(Path(folder), runner.host_rows, "0/1")
        keys, done = [bytes([number]) * 32 for number in range(_MEASURED_BLOCKS)], SimpleQueue[int]()
        rows = [0] * len(keys)
        store.write(keys, rows, done.put)
        num_written = done.get()
        started_at = time.perf_counter()
        store.read(keys[:num_written], rows[:num_written], done.put)
        num_read = done.get()
        return (time.perf_counter() - started_at) / num_read if num_read else None


def _lines(recording: Recording) -> Iterator[dict[str, Any]]:
    yield to_json(recording.info)
    for step in recording.steps:
        yield {"step": step.features.values(), "seconds": round(step.seconds, 7)}
    for arrival_s, token_times in recording.timeline.requests():
        yield {"arrival": round(arrival_s, 6), "tokens": [round(t, 6) for t in token_times]}
