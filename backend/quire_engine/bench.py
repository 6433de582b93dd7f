# SPDX-License-Identifier: Apache-2.0
"""Throughput and latency of an engine under random prompts, measured around its steps. `python -m quire_engine bench`.

The engine alone: no text, no sockets. What the server adds on top is measured with the server.
"""

import math
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from quire_engine.engine import Engine
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument, error_from_code
from quire_spec.protocol.messages import SequenceDelta, SequenceRequest

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Load:
    """What to ask of the engine.

    Raises:
        InvalidArgument: a count or the rate is not above 0.
    """

    num_prompts: int
    input_len: int
    """Tokens per prompt, drawn at random, so that no prefix is shared."""
    output_len: int
    """Tokens per output, all of them: end-of-sequence is ignored."""
    rate: float | None = None
    """Arrivals per second, at exponentially distributed intervals; None lets all arrive at once."""
    params: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    """Sampling parameters of each request, by name."""
    seed: int = 0
    adapters: tuple[str, ...] = ()
    """Digests of loaded adapters, taken in turn; empty is the base model."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"bench: {name} {getattr(self, name)} is less than 1")
        if self.rate is not None and not 0.0 < self.rate < math.inf:
            raise InvalidArgument(f"bench: rate {self.rate} is no number of arrivals a second; use one above 0")


@dataclass(frozen=True, slots=True)
class Latency:
    """A distribution, in milliseconds."""

    mean: float
    percentiles: dict[str, float]
    """p50, p90, p99."""

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Latency | None":
        """None without a value: one output token has no next one."""
        if not seconds:
            return None
        ordered = sorted(seconds)
        at = {f"p{p}": 1e3 * ordered[min(len(ordered) - 1, len(ordered) * p // 100)] for p in PERCENTILES}
        return cls(1e3 * sum(ordered) / len(ordered), at)


@dataclass(frozen=True, slots=True)
class Report:
    """What came of it."""

    num_prompts: int
    num_input_tokens: int
    num_output_tokens: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: Latency | None
    """From arrival to the first token."""
    itl_ms: Latency | None
    """Between two tokens of a request."""
    num_steps: int
    num_preemptions: int


class _Timeline:
    """When each request arrived and got its tokens."""

    def __init__(self) -> None:
        self.last: dict[int, float] = {}
        self.waiting: set[int] = set()
        self.ttft: list[float] = []
        self.itl: list[float] = []

    def arrive(self, id: int, at: float) -> None:
        self.last[id] = at
        self.waiting.add(id)

    def take(self, result: SequenceDelta, now: float) -> None:
        if result.error_code is not None:
            raise error_from_code(result.error_code, result.error)
        for _ in result.token_ids:
            (self.ttft if result.id in self.waiting else self.itl).append(now - self.last[result.id])
            self.waiting.discard(result.id)
            self.last[result.id] = now


def run(engine: Engine, load: Load, *, progress: bool = False) -> Report:
    """Put `load` on an idle engine until everything is answered.

    Raises:
        InvalidArgument: prompts and outputs do not fit into max_model_len.
        QuireError: the engine failed.
    """
    if load.input_len + load.output_len > engine.max_model_len:
        raise InvalidArgument(
            f"bench: {load.input_len} input and {load.output_len} output tokens exceed max_model_len "
            f"{engine.max_model_len}"
        )
    requests = _requests(engine, load)
    offsets = _offsets(load)
    before, timeline, num_added = engine.stats(), _Timeline(), 0
    start = now = time.perf_counter()
    with tqdm(total=load.num_prompts, desc="requests", disable=not progress, dynamic_ncols=True) as bar:
        while num_added < len(requests) or engine.has_work:
            while num_added < len(requests) and start + offsets[num_added] <= now:
                engine.add(requests[num_added])
                timeline.arrive(requests[num_added].id, start + offsets[num_added])
                num_added += 1
            engine.fetch()
            if engine.has_work:
                results = engine.step().results
            else:
                results = []
                time.sleep(max(0.0, start + offsets[num_added] - time.perf_counter()))
            now = time.perf_counter()
            for result in results:
                timeline.take(result, now)
                bar.update(result.finish_reason is not None)
    after = engine.stats()
    num_preemptions = after.num_preemptions - before.num_preemptions
    return _report(load, timeline, now - start, after.num_steps - before.num_steps, num_preemptions)


def format_report(report: Report) -> str:
    """`report` as a table of two columns, latencies of five."""
    rows = [
        ("requests", f"{report.num_prompts}"),
        ("input tokens", f"{report.num_input_tokens}"),
        ("output tokens", f"{report.num_output_tokens}"),
        ("duration", f"{report.duration_s:.2f} s"),
        ("requests/s", f"{report.requests_per_s:.2f}"),
        ("output tokens/s", f"{report.output_tokens_per_s:.1f}"),
        ("total tokens/s", f"{report.total_tokens_per_s:.1f}"),
        ("steps", f"{report.num_steps}"),
        ("preemptions", f"{report.num_preemptions}"),
    ]
    lines = [f"{name:<18}{value:>12}" for name, value in rows]
    lines += ["", f"{'latency (ms)':<18}{'mean':>12}" + "".join(f"{f'p{p}':>12}" for p in PERCENTILES)]
    for name, latency in (("first token", report.ttft_ms), ("between tokens", report.itl_ms)):
        if latency is not None:
            values = [latency.mean, *latency.percentiles.values()]
            lines.append(f"{name:<18}" + "".join(f"{value:>12.2f}" for value in values))
    return "\n".join(lines)


def _requests(engine: Engine, load: Load) -> list[SequenceRequest]:
    draw = random.Random(load.seed)
    params = SamplingParams.from_mapping({"max_tokens": load.output_len, "ignore_eos": True, **load.params})
    if params.num_sequences > 1 or params.bad_words:
        raise InvalidArgument(
            "bench: n, best_of and bad_words are the work of what is around the engine; leave them out"
        )
    adapters = load.adapters or (None,)
    vocab = range(engine.shape.vocab_size)
    return [
        SequenceRequest(i, draw.choices(vocab, k=load.input_len), params.to_mapping(), adapters[i % len(adapters)])
        for i in range(load.num_prompts)
    ]


def _offsets(load: Load) -> list[float]:
    """Seconds from the start at which each request arrives."""
    draw, at, offsets = random.Random(load.seed + 1), 0.0, []
    for _ in range(load.num_prompts):
        offsets.append(at)
        at += draw.expovariate(load.rate) if load.rate is not None else 0.0
    return offsets


def _report(load: Load, timeline: _Timeline, duration: float, num_steps: int, num_preemptions: int) -> Report:
    num_input, num_output = load.num_prompts * load.input_len, len(timeline.ttft) + len(timeline.itl)
    return Report(
        num_prompts=load.num_prompts,
        num_input_tokens=num_input,
        num_output_tokens=num_output,
        duration_s=duration,
        requests_per_s=load.num_prompts / duration,
        output_tokens_per_s=num_output / duration,
        total_tokens_per_s=(num_input + num_output) / duration,
        ttft_ms=Latency.of(timeline.ttft),
        itl_ms=Latency.of(timeline.itl),
        num_steps=num_steps,
        num_preemptions=num_preemptions,
    )
