# SPDX-License-Identifier: Apache-2.0
"""Recordings: runs a real engine on a trace, and writes what each step and each request took.

The first line of a recording describes the engine. Each further line is a step or a request.
"""

import json
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire_engine.api.replay import replay
from quire_engine.api.timeline import Timeline
from quire_engine.core.engine import Engine
from quire_engine.simulation.step_features import StepFeatures
from quire_engine.simulation.trace import TraceRequest
from quire_engine.step.plan import SpanOutput, StepPlan
from quire_engine.worker.interface import ModelRunner
from quire_spec.dataclass_json import from_json, to_json
from quire_spec.documents.pod_status import MeasuredMemory
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError, InvalidArgument
from quire_spec.model.model_config import ModelConfig
from quire_spec.protocol.messages import SequenceRequest

FORMAT = 1


@dataclass(frozen=True, slots=True)
class RecordingInfo:
    """The engine of a recording."""

    engine: dict[str, Any]
    """EngineConfig, with the values that the engine used."""
    shape: ModelConfig
    memory: MeasuredMemory
    num_cores: int
    """Processor cores of the machine."""
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


def record(
    create_engine: Callable[[Callable[[ModelRunner], ModelRunner]], Engine],
    trace: list[TraceRequest],
    block_tokens: int,
    path: Path,
    *,
    progress: bool = False,
) -> Recording:
    """Run a trace in real time, and write the recording to `path`. The outputs have the lengths of the trace.

    `create_engine` creates the engine; it must pass its runner through the given function.
    """
    runners: list[RecordingRunner] = []

    def wrap(runner: ModelRunner) -> ModelRunner:
        runners.append(RecordingRunner(runner))
        return runners[0]

    engine = create_engine(wrap)
    (runner,) = runners
    effective = engine.config.to_json() | {"max_model_len": engine.max_model_len}
    info = RecordingInfo(effective, engine.shape, engine.memory, os.cpu_count() or 1)
    requests = sequence_requests(trace, engine.shape.vocab_size, block_tokens, engine.max_model_len)
    _warm_up(engine)
    runner.started.clear()
    steps: list[RecordedStep] = []

    def add_step(seconds: float) -> None:
        if runner.started:
            steps.append(RecordedStep(runner.started.popleft(), seconds))

    arrivals_s = [request.arrival_s for request in trace]
    recording = Recording(info, steps, replay(engine, requests, arrivals_s, progress=progress, on_step=add_step))
    with path.open("w", encoding="utf-8") as file:
        for line in _lines(recording):
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    return recording


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
    """Return the requests of a trace; their ids are their positions.

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
        requests.append(SequenceRequest(index, request.prompt(vocab_size, block_tokens), params))
    return requests


def _warm_up(engine: Engine) -> None:
    """Run a prompt and a few steps, so that the first recorded steps take the usual time."""
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=0.0)
    num_tokens = min(512, engine.max_model_len - 8)
    engine.add(SequenceRequest(0, [1] * num_tokens, params))
    while engine.has_work:
        engine.step()


def _lines(recording: Recording) -> Iterator[dict[str, Any]]:
    yield to_json(recording.info)
    for step in recording.steps:
        yield {"step": step.features.values(), "seconds": round(step.seconds, 7)}
    for arrival_s, token_times in recording.timeline.requests():
        yield {"arrival": round(arrival_s, 6), "tokens": [round(t, 6) for t in token_times]}
