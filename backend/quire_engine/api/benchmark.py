# SPDX-License-Identifier: Apache-2.0
"""Benchmark that runs an engine with random prompts, and measures its throughput and its latencies.

The benchmark measures only the engine. It does not use the tokenizer, the text process or the server. The command
`python -m quire_engine bench` calls this module.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire_engine.api.replay import replay
from quire_engine.api.timeline import Timeline
from quire_engine.core.engine import Engine
from quire_spec.constants import AdapterDigest
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.messages import SequenceRequest

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of a benchmark run.

    Raises:
        InvalidArgument: a count or the rate is not above 0.
    """

    num_prompts: int
    input_len: int
    """Tokens per prompt. The tokens are random, so that prompts share no prefix."""
    output_len: int
    """Tokens per output. Every output has this length, because the end-of-sequence token is ignored."""
    rate: float | None = None
    """Average number of requests that arrive per second; the times between them are exponentially distributed. If None,
    all requests arrive at once."""
    params: Mapping[str, Any] = field(default_factory=lambda: {"temperature": 0.0})
    """Sampling parameters of each request, by name."""
    seed: int = 0
    adapters: tuple[AdapterDigest, ...] = ()
    """Digests of the loaded adapters that the requests use in turn. If it is empty, all requests use the base model."""

    def __post_init__(self) -> None:
        for name in ("num_prompts", "input_len", "output_len"):
            if getattr(self, name) < 1:
                raise InvalidArgument(f"bench: {name} must be at least 1, got {getattr(self, name)}")
        if self.rate is not None and not 0.0 < self.rate < math.inf:
            raise InvalidArgument(f"bench: rate must be a finite number above 0, got {self.rate}")


@dataclass(frozen=True, slots=True)
class LatencyStats:
    """Mean and percentiles of a latency, in milliseconds."""

    mean: float
    percentiles: dict[str, float]
    """Percentiles by name: p50, p90, p99."""

    @classmethod
    def from_seconds(cls, seconds: Sequence[float]) -> "LatencyStats | None":
        """Return the statistics of these values; None if there are no values. For example, requests with one output
        token have no times between tokens.
        """
        if not seconds:
            return None
        sorted_seconds = sorted(seconds)
        percentiles = {
            f"p{p}": 1e3 * sorted_seconds[min(len(sorted_seconds) - 1, len(sorted_seconds) * p // 100)]
            for p in PERCENTILES
        }
        return cls(1e3 * sum(sorted_seconds) / len(sorted_seconds), percentiles)


@dataclass(frozen=True, slots=True)
class BenchmarkReport:
    """Results of a benchmark run."""

    num_prompts: int
    num_input_tokens: int
    num_output_tokens: int
    duration_s: float
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_ms: LatencyStats | None
    """Time from arrival to the first token."""
    itl_ms: LatencyStats | None
    """Time between two consecutive tokens of a request."""
    num_steps: int
    num_preemptions: int


def run_benchmark(engine: Engine, workload: Workload, *, progress: bool = False) -> BenchmarkReport:
    """Run a workload on an idle engine until all requests have finished.

    Raises:
        InvalidArgument: prompt and output together exceed max_model_len.
        QuireError: the engine failed.
    """
    if workload.input_len + workload.output_len > engine.max_model_len:
        raise InvalidArgument(
            f"bench: {workload.input_len} input and {workload.output_len} output tokens exceed max_model_len "
            f"{engine.max_model_len}"
        )
    stats_before = engine.stats()
    timeline = replay(engine, _build_requests(engine, workload), _arrival_offsets(workload), progress=progress)
    stats_after = engine.stats()
    num_preemptions = stats_after.num_preemptions - stats_before.num_preemptions
    return _build_report(workload, timeline, stats_after.num_steps - stats_before.num_steps, num_preemptions)


def format_report(report: BenchmarkReport) -> str:
    """Format a report as a table with two columns, followed by a table of latencies with five columns."""
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


def _build_requests(engine: Engine, workload: Workload) -> list[SequenceRequest]:
    rng = random.Random(workload.seed)
    params = SamplingParams.from_mapping({"max_tokens": workload.output_len, "ignore_eos": True, **workload.params})
    if params.num_sequences > 1 or params.bad_words or params.structured_outputs is not None:
        raise InvalidArgument(
            "bench: n, best_of, bad_words and structured_outputs are not supported, because the engine itself does not "
            "implement them; leave them out"
        )
    adapter_digests = workload.adapters or (None,)
    token_ids = range(engine.shape.vocab_size)
    prompts = [rng.choices(token_ids, k=workload.input_len) for _ in range(workload.num_prompts)]
    return [
        SequenceRequest(i, prompt, params, adapter_digests[i % len(adapter_digests)])
        for i, prompt in enumerate(prompts)
    ]


def _arrival_offsets(workload: Workload) -> list[float]:
    """Return the arrival time of each request, in seconds from the start."""
    rng, offset, offsets = random.Random(workload.seed + 1), 0.0, []
    for _ in range(workload.num_prompts):
        offsets.append(offset)
        offset += rng.expovariate(workload.rate) if workload.rate is not None else 0.0
    return offsets


def _build_report(workload: Workload, timeline: Timeline, num_steps: int, num_preemptions: int) -> BenchmarkReport:
    num_input_tokens, num_output_tokens = workload.num_prompts * workload.input_len, timeline.num_output_tokens
    duration_s = timeline.duration_s
    return BenchmarkReport(
        num_prompts=workload.num_prompts,
        num_input_tokens=num_input_tokens,
        num_output_tokens=num_output_tokens,
        duration_s=duration_s,
        requests_per_s=workload.num_prompts / duration_s,
        output_tokens_per_s=num_output_tokens / duration_s,
        total_tokens_per_s=(num_input_tokens + num_output_tokens) / duration_s,
        ttft_ms=LatencyStats.from_seconds(timeline.ttft_s()),
        itl_ms=LatencyStats.from_seconds(timeline.itl_s()),
        num_steps=num_steps,
        num_preemptions=num_preemptions,
    )
