# SPDX-License-Identifier: Apache-2.0
"""Text and JSON output of `quire simulate`. Pure functions."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from quire_engine.api.timeline import PERCENTILES, Latencies
from quire_engine.simulation.recording import Recording
from quire_engine.simulation.resource_costs import ResourceCosts, parse_seconds
from quire_engine.simulation.simulator import SimulationResult
from quire_engine.simulation.step_model import StepModel
from quire_engine.simulation.trace import TraceRequest
from quire_spec.dataclass_json import to_json
from quire_spec.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a good request keeps, in seconds."""

    ttft_s: float = 0.5
    """Time to the first token."""
    itl_s: float = 0.05
    """Mean time between two tokens of the request."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse ttft=500ms,itl=50ms; raises argparse.ArgumentTypeError."""
        return cls(**{f"{name}_s": seconds for name, seconds in parse_seconds(text, ("ttft", "itl")).items()})


@dataclass(frozen=True, slots=True)
class Summary:
    """The result of `quire simulate run`."""

    replicas: int
    cores_per_replica: int
    requests: int
    requests_per_s: float | None
    """Arrivals per second. None: all requests arrive at once."""
    output_tokens_per_s: float
    latencies_ms: Latencies
    slo: Slo
    goodput: float
    """Share of the requests within the SLO."""
    prefix_hit_share: float
    host_hit_share: float
    folder_read_blocks: int
    adapter_evictions: int
    busy_share: float
    outside_share: float
    preemptions: int
    steps: int
    simulated_steps_per_s: float
    dollars_per_hour: float | None
    dollars_per_million_output_tokens: float | None
    origins: dict[str, str]
    """Where each number that the simulation needs comes from."""

    @classmethod
    def create(
        cls,
        result: SimulationResult,
        trace: Sequence[TraceRequest],
        num_replicas: int,
        cores_per_replica: int,
        slo: Slo,
        price: float | None,
        origins: dict[str, str],
    ) -> Self:
        """Create a summary. `price` is in dollars for a replica and hour."""
        timeline = result.timeline
        tokens_per_s = timeline.num_output_tokens / timeline.duration_s
        span_s = trace[-1].arrival_s - trace[0].arrival_s
        dollars = None if price is None else price * num_replicas
        return cls(
            num_replicas,
            cores_per_replica,
            len(trace),
            (len(trace) - 1) / span_s if span_s else None,
            tokens_per_s,
            timeline.latencies(),
            slo,
            timeline.goodput(slo.ttft_s, slo.itl_s),
            result.prefix_hit_share,
            result.host_hit_share,
            result.num_folder_read_blocks,
            result.num_adapter_evictions,
            result.busy_share,
            result.outside_share,
            result.num_preemptions,
            result.num_steps,
            result.num_steps / result.wall_s,
            dollars,
            None if dollars is None else dollars / 3600 / tokens_per_s * 1e6,
            origins,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the summary as a JSON object."""
        data: dict[str, Any] = to_json(self)
        return data

    def text(self) -> str:
        """Return the summary as a table."""
        rate = "all at once" if self.requests_per_s is None else f"{self.requests_per_s:.2f} a second"
        rows = [
            ("replicas", f"{self.replicas} of {self.cores_per_replica} cores"),
            ("requests", f"{self.requests}, {rate}"),
            ("output tokens/s", f"{self.output_tokens_per_s:.0f}"),
            ("goodput", f"{self.goodput:.1%} (ttft {self.slo.ttft_s * 1000:g} ms, itl {self.slo.itl_s * 1000:g} ms)"),
            ("prefix cache", f"{self.prefix_hit_share:.1%} of the prompt tokens"),
            ("cores busy", f"{self.busy_share:.1%} of the time, {self.preemptions} preemptions"),
            ("extrapolated", f"{self.outside_share:.1%} of the computing time"),
        ]
        if self.host_hit_share or self.folder_read_blocks:
            read = f"; {self.folder_read_blocks} blocks were read from the folder" if self.folder_read_blocks else ""
            rows.append(("host memory", f"{self.host_hit_share:.1%} of the other prompt tokens{read}"))
        if self.adapter_evictions:
            rows.append(("adapters", f"{self.adapter_evictions} evictions from slots"))
        if self.dollars_per_hour is not None and self.dollars_per_million_output_tokens is not None:
            per_million = self.dollars_per_million_output_tokens
            rows.append(("cost", f"${self.dollars_per_hour:.2f} an hour, ${per_million:.2f} a million output tokens"))
        lines = [f"{name:<18}{value}" for name, value in rows]
        lines += ["", latency_table(self.latencies_ms), "", "from"]
        return "\n".join([*lines, *(f"{name:<18}{origin}" for name, origin in self.origins.items())])


def latency_table(latencies: Latencies) -> str:
    """Return the percentiles as a table."""
    lines = [f"{'latency (ms)':<18}" + "".join(f"{f'p{p}':>10}" for p in PERCENTILES)]
    for name, values in (("first token", latencies.ttft), ("between tokens", latencies.itl)):
        if values:
            lines.append(f"{name:<18}" + "".join(f"{value:>10.2f}" for value in values.values()))
    return "\n".join(lines)


def recorded(recording: Recording, path: Path) -> str:
    """Return the text that follows a recording."""
    seconds = sum(step.seconds for step in recording.steps)
    table = latency_table(recording.timeline.latencies())
    return f"{path}: {len(recording.steps)} steps, {seconds:.1f} s of computing\n\n{table}"


def fitted(model: StepModel, path: Path) -> str:
    """Return the weights of a step model, and how well they fit."""
    lines = [f"{path}: {model.num_steps} steps", ""]
    lines += [f"{'feature':<18}{'microseconds':>14}{'recorded up to':>18}"]
    for name, seconds in model.seconds_per.items():
        lines.append(f"{name:<18}{seconds * 1e6:>14.3f}{model.recorded_maximum[name]:>18}")
    for name, cost_s in asdict(model.info.costs).items():
        if cost_s is not None:
            lines.append(f"{name:<18}{cost_s * 1e6:>14.3f}")
    errors = model.relative_error
    lines += ["", f"error of a step: {errors['p50']:.1%} (median), {errors['p90']:.1%} (p90)"]
    return "\n".join(lines)


def origins(
    model: StepModel, costs: ResourceCosts, trace: Sequence[TraceRequest], config: EngineConfig, is_planned: bool
) -> dict[str, str]:
    """Return where the numbers of a simulation come from. `costs` are the given ones."""
    plan = "plan of -f" if is_planned else "recording"
    result = {"step times": f"fit of {model.num_steps} recorded steps", "KV cache, limits": plan}
    used = ["adapter_copy", "adapter_read"] if any(request.adapter is not None for request in trace) else []
    used += ["block_copy"] if config.swap_space or config.kv_offloading_size else []
    used += ["folder_block"] if config.kv_offloading_folder is not None else []
    for name in used:
        if (seconds := getattr(model.info.costs, name)) is not None:
            is_given = getattr(costs, name) is not None
            result[name.replace("_", " ")] = f"{seconds * 1000:.4g} ms, {'--costs' if is_given else 'recording'}"
    return result
