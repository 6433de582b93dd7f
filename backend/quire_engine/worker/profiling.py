# SPDX-License-Identifier: Apache-2.0
"""Traces of an engine's steps: what ran when, on the processor and on the device, as a file for chrome://tracing or
https://ui.perfetto.dev. `python -m quire_engine generate|bench --profile FILE` calls it."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from quire_spec.errors import InvalidArgument
from quire_spec.protocol.messages import StepResult

MAX_PROFILED_STEPS = 100
"""Of an 8B model these are about 30 MB; viewers give up at some hundreds."""

if TYPE_CHECKING:
    from quire_engine.core.engine import Engine  # whose runner imports this

logger = logging.getLogger(__name__)

_is_profiling = False


def annotate(name: str) -> AbstractContextManager[object]:
    """A stretch of a step, under its name in traces; nothing when there is none.

    torch's own mark costs 5 us or more at any time, and a step on a GPU has ten of them to spare.
    """
    return record_function(name) if _is_profiling else nullcontext()


@contextmanager
def profile_steps(engine: "Engine", path: Path | None) -> Iterator[None]:
    """Trace the engine's next steps, 100 at most, and write them to `path` at the end; None does nothing.

    Raises:
        InvalidArgument: the file cannot be written, which is found out first.
    """
    if path is None:
        yield
        return
    try:
        path.touch()
    except OSError as error:
        raise InvalidArgument(f"--profile: {path}: {error}; name a file that can be written") from error
    device_activities = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    profiler = profile(activities=[ProfilerActivity.CPU, *device_activities])
    global _is_profiling
    num_steps, original_step = 0, engine.step

    def step() -> StepResult:
        nonlocal num_steps
        if num_steps == MAX_PROFILED_STEPS:
            profiler.stop()
        num_steps += 1
        return original_step()

    engine.step = step  # type: ignore[method-assign]
    profiler.start()
    _is_profiling = True
    try:
        yield
    finally:
        _is_profiling = False
        del engine.step
        if num_steps <= MAX_PROFILED_STEPS:
            profiler.stop()
        profiler.export_chrome_trace(str(path))
        logger.info("trace written path=%s num_steps=%d", path, min(num_steps, MAX_PROFILED_STEPS))
