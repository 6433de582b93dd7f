# SPDX-License-Identifier: Apache-2.0
"""Writes profiler traces of an engine's steps to files for chrome://tracing or https://ui.perfetto.dev.

The commands `python -m quire_engine generate|bench --profile FILE` call this module.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from quire_engine.core.engine import Engine
from quire_engine.worker.profiling import set_annotations_enabled
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.messages import StepResult

MAX_PROFILED_STEPS = 100
"""Maximum number of steps in a trace. A trace of this many steps of an 8B model has about 30 MB. Trace viewers cannot
open files of some hundreds of MB."""

logger = logging.getLogger(__name__)


@contextmanager
def profile_steps(engine: Engine, path: Path | None) -> Iterator[None]:
    """Trace the next steps of the engine, at most MAX_PROFILED_STEPS, and write them to `path`. With None, do nothing.

    Raises:
        InvalidArgument: the file cannot be written; raised before the first step.
    """
    if path is None:
        yield
        return
    try:
        path.touch()
    except OSError as error:
        raise InvalidArgument(f"--profile: cannot write {path}: {error}; use another path") from error
    device_activities = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler = profile(activities=[ProfilerActivity.CPU, *device_activities])
    num_steps, original_step = 0, engine.step

    def step() -> StepResult:
        nonlocal num_steps
        if num_steps == MAX_PROFILED_STEPS:
            profiler.stop()
        num_steps += 1
        return original_step()

    engine.step = step  # type: ignore[method-assign]
    profiler.start()
    set_annotations_enabled(True)
    try:
        yield
    finally:
        set_annotations_enabled(False)
        del engine.step
        if num_steps <= MAX_PROFILED_STEPS:
            profiler.stop()
        profiler.export_chrome_trace(str(path))
        logger.info("trace written path=%s num_steps=%d", path, min(num_steps, MAX_PROFILED_STEPS))
