# SPDX-License-Identifier: Apache-2.0
"""Traces of decoding steps: idle time of the device, kernels by name, host time by function, and waits of the host.

A trace leaves a process slower (https://github.com/pytorch/pytorch/issues/144455), so traces come last in it.
"""

import contextlib
import cProfile
import json
import pstats
import random
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from gpu_phases.store import Row
from quire_engine.core.engine import Engine
from quire_engine.worker.graph_shapes import GraphShape
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import SequenceRequest

GRAPH_GAP_US = 5.0
"""Longest time between a kernel of a graph and the next one that depends on it, with some more under a profiler."""
NUM_KERNELS = 16
NUM_GAPS = 6
HOST_PARTS = {
    "scheduler": "scheduling/",
    "step input and graphs": ("step/", "worker/cuda_graphs.py", "worker/device_block_tables.py"),
    "sampler": "worker/sampling/",
    "KV cache": "kv_cache/",
    "results": ("core/", "sequence.py"),
    "model runner": "worker/",
    "kernels": "quire_kernels/",
    "PyTorch and others": "",
}
"""Parts of a step by the files of its Python functions; the first that matches counts."""


def step_rows(engine: Engine, num_seqs: int, prompt: int, num_steps: int) -> Iterator[Row]:
    """Times of decoding steps, untraced, and then from a profile of the host and a trace of the device."""
    label = f"{num_seqs} sequences at {prompt}"
    with _decoding(engine, num_seqs, prompt, 6 * num_steps):
        yield {"what": f"step, {label}", "key": f"step_{num_seqs}", "value": step_ms(engine, num_steps), "unit": "ms"}
        if (graph := graph_ms(engine, num_seqs, num_steps)) is not None:
            yield {"what": f"its graph alone, {label}", "value": graph, "unit": "ms"}
        waits = count_syncs(engine, num_steps) / num_steps
        yield {"what": f"waits of the host for the device, {label}", "value": waits, "unit": "per step"}
        yield from host_rows(engine, num_steps, label)
        events = _traced(engine, num_steps)
    found = busy_and_idle(events)
    for name in ("busy", "idle", "gaps") if found["num"] else ():
        value = found[name] / num_steps / 1e3
        yield {
            "what": f"device {name} (traced), {label}",
            "key": f"{name}_{num_seqs}",
            "value": value,
            "unit": "ms per step",
        }
    yield from gap_rows(events, num_steps, label)
    yield from kernel_rows(events, num_steps, label)


def mixed_rows(engine: Engine, num_seqs: int, prompt: int, new_prompt: int) -> Iterator[Row]:
    """Time of a step in which a prompt starts beside decoding sequences, and its kernels."""
    label = f"{num_seqs} sequences at {prompt} and a prompt of {new_prompt}"
    with _decoding(engine, num_seqs, prompt, 20):
        params = {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True}
        decode_ms = step_ms(engine, 4)
        engine.add(SequenceRequest(num_seqs, [5] * new_prompt, SamplingParams.from_mapping(params)))
        # The prompt's step and three decoding steps, so that steps that were launched ahead count once.
        yield {"what": f"mixed step, {label}", "value": 4 * step_ms(engine, 4) - 3 * decode_ms, "unit": "ms"}
        engine.add(SequenceRequest(num_seqs + 1, [6] * new_prompt, SamplingParams.from_mapping(params)))
        events = _traced(engine, 2)
    yield from kernel_rows(events, 1, f"mixed step, {label}, then a decoding step")


@contextlib.contextmanager
def _decoding(engine: Engine, num_seqs: int, prompt: int, num_tokens: int) -> Iterator[None]:
    """Have so many sequences decode, each at least `num_tokens` tokens, and remove them."""
    draw = random.Random(9)
    for i in range(num_seqs):
        # Prompts start in at most `num_seqs` steps, so no sequence ends before the last one has decoded its tokens.
        params = {"temperature": 0.0, "max_tokens": num_tokens + num_seqs + 20, "ignore_eos": True}
        engine.add(
            SequenceRequest(
                i, draw.choices(range(engine.shape.vocab_size), k=prompt), SamplingParams.from_mapping(params)
            )
        )
    seen: set[int] = set()
    while len(seen) < num_seqs:
        seen |= {result.id for result in engine.step().results}
    yield
    engine.abort(range(num_seqs))
    while engine.has_work:
        engine.step()


def step_ms(engine: Engine, num_steps: int) -> float:
    """Return the time of a step by the host's clock."""
    _synchronize()
    start = time.perf_counter()
    for _ in range(num_steps):
        engine.step()
    _synchronize()
    return 1e3 * (time.perf_counter() - start) / num_steps


def graph_ms(engine: Engine, num_seqs: int, num_replays: int) -> float | None:
    """Return the time of the graph of the last decoding step, replayed alone, without output projection; None without
    graphs."""
    graphs: Any = engine._runner._graphs  # type: ignore[attr-defined]
    shape = GraphShape(num_seqs, False, False)
    if graphs is None or shape not in graphs._graphs:
        return None
    replay, start, end = graphs._graphs[shape], *(torch.cuda.Event(enable_timing=True) for _ in range(2))
    replay()
    start.record()
    for _ in range(num_replays):
        replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / num_replays


def count_syncs(engine: Engine, num_steps: int) -> int:
    """Return how often PyTorch makes the host wait for the device, except for the event at the end of each step."""
    if not torch.cuda.is_available():
        for _ in range(num_steps):
            engine.step()
        return 0
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            for _ in range(num_steps):
                engine.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(warning.message) for warning in seen)


def host_rows(engine: Engine, num_steps: int, label: str) -> Iterator[Row]:
    """Time of the host per step by part; the profiler about doubles it."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(num_steps):
        engine.step()
    profile.disable()
    seconds: dict[str, float] = defaultdict(float)
    for (file, _, _), (_, _, own_time, _, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        path = file.rpartition("quire_engine/")[2] if "quire_engine/" in file else file
        is_ours = "quire_" in file
        for part, prefixes in HOST_PARTS.items():
            names = (prefixes,) if isinstance(prefixes, str) else prefixes
            if any((is_ours and (path.startswith(n) or n in file)) if n else True for n in names):
                seconds[part] += own_time
                break
    for part, total in sorted(seconds.items(), key=lambda item: -item[1]):
        yield {"what": f"host, {part} (profiled), {label}", "value": 1e3 * total / num_steps, "unit": "ms per step"}


def kernel_rows(events: Iterable[dict[str, Any]], num_steps: int, label: str) -> Iterator[Row]:
    """The kernels that take longest, by name."""
    durations: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event.get("cat") == "kernel" and "dur" in event:
            durations[event["name"]].append(event["dur"])
    for name, each in sorted(durations.items(), key=lambda item: -sum(item[1]))[:NUM_KERNELS]:
        calls = len(each) / num_steps
        yield {
            "what": f"kernel {name[:80]}, {label}",
            "value": sum(each) / num_steps,
            "unit": "us per step",
            "calls": calls,
        }


def busy_and_idle(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return microseconds of work (busy), of waiting between the first and the last work (idle), of waiting in gaps
    longer than between two kernels of a graph (gaps), and `num`, the works."""
    work = _work(events)
    busy, gaps, end = 0.0, 0.0, work[0][0] if work else 0.0
    for start, stop, _ in work:
        busy += max(0.0, stop - max(start, end))
        gaps += start - end if start - end > GRAPH_GAP_US else 0.0
        end = max(end, stop)
    return {"num": len(work), "busy": busy, "idle": end - work[0][0] - busy if work else 0.0, "gaps": gaps}


def gap_rows(events: Iterable[dict[str, Any]], num_steps: int, label: str) -> Iterator[Row]:
    """The longest gaps, by the works before and after them."""
    work, gaps = _work(events), defaultdict[str, list[float]](list)
    end, before = (work[0][0], "") if work else (0.0, "")
    for start, stop, name in work:
        if start - end > GRAPH_GAP_US:
            gaps[f"{before[:40]} and {name[:40]}"].append(start - end)
        if stop > end:
            end, before = stop, name
    for place, each in sorted(gaps.items(), key=lambda item: -sum(item[1]))[:NUM_GAPS]:
        row = {"what": f"gap between {place}, {label}", "value": sum(each) / num_steps, "unit": "us per step"}
        yield row | {"calls": len(each) / num_steps}


def _work(events: Iterable[dict[str, Any]]) -> list[tuple[float, float, str]]:
    """Return the begin, end and name of each work of the device, in order."""
    return sorted(
        (event["ts"], event["ts"] + event["dur"], event.get("name", ""))
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in event
    )


def _traced(engine: Engine, num_steps: int) -> list[dict[str, Any]]:
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities) as trace:
        for _ in range(num_steps):
            engine.step()
        _synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        trace.export_chrome_trace(str(path))
        events: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return events


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
