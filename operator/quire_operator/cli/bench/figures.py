# SPDX-License-Identifier: Apache-2.0
"""The figures of one load, from the outcomes of its requests. Pure functions."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from quire_operator.cli.bench.client import Outcome
from quire_operator.cli.bench.workload import Load

PERCENTILES = (50, 90, 95, 99)
METRICS = ("ttft", "tpot", "itl", "e2el")


def percentile(ordered: Sequence[float], p: float) -> float:
    """Return the smallest value that `p` percent of the values do not exceed (nearest rank).

    Args:
        ordered: at least one value, in ascending order.
    """
    return ordered[max(0, math.ceil(p / 100 * len(ordered)) - 1)]


def latencies_s(outcome: Outcome) -> dict[str, float]:
    """Return ttft, e2el and, if there are at least two tokens, tpot of a request, in seconds."""
    ttft, e2el = outcome.arrivals[0] - outcome.started_at, outcome.ended_at - outcome.started_at
    latencies = {"ttft": ttft, "e2el": e2el}
    if outcome.num_output_tokens > 1:
        latencies["tpot"] = (outcome.arrivals[-1] - outcome.arrivals[0]) / (outcome.num_output_tokens - 1)
    return latencies


def summarize(
    load: Load,
    outcomes: Sequence[Outcome],
    checked: Sequence[Outcome],
    seconds: float,
    limits_ms: Mapping[str, float],
) -> dict[str, Any]:
    """Return the figures of a load.

    Args:
        outcomes: of the requests of the load.
        checked: of the requests whose outputs are compared. They count for the throughput, and not for latencies.
        seconds: from the first request to the end of the last one.
        limits_ms: limits of --goodput.
    """
    good = [outcome for outcome in outcomes if outcome.error is None]
    done = [*good, *(outcome for outcome in checked if outcome.error is None)]
    num_input, num_output = (
        sum(getattr(outcome, name) for outcome in done) for name in ("num_input_tokens", "num_output_tokens")
    )
    errors = Counter(o.error for o in (*outcomes, *checked) if o.error is not None)
    figures: dict[str, Any] = {
        "concurrency": load.concurrency,
        "request_rate": load.request_rate,
        "seconds": seconds,
        "requests": len(done),
        "failed_requests": errors.total(),
        "errors": dict(errors.most_common()),
        "input_tokens": num_input,
        "output_tokens": num_output,
        "requests_per_s": len(done) / seconds,
        "output_tokens_per_s": num_output / seconds,
        "total_tokens_per_s": (num_input + num_output) / seconds,
        **_distributions(good),
    }
    if limits_ms:
        num_good = sum(_is_within(outcome, limits_ms) for outcome in good)
        share = num_good / len(good) if good else 0.0
        figures["goodput"] = {"share": share, "requests_per_s": share * len(done) / seconds}
    by_model: dict[str, list[Outcome]] = {}
    for outcome in good:
        by_model.setdefault(outcome.request.model, []).append(outcome)
    figures["models"] = {
        name: {"requests": len(of_model), **_distributions(of_model)} for name, of_model in sorted(by_model.items())
    }
    return figures


def _distributions(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return mean and percentiles of each metric, in milliseconds; None for a metric without values."""
    values: dict[str, list[float]] = {name: [] for name in METRICS}
    for outcome in outcomes:
        for name, seconds in latencies_s(outcome).items():
            values[name].append(seconds)
        values["itl"] += [after - before for before, after in pairwise(outcome.arrivals)]
    return {f"{name}_ms": _distribution(values[name]) for name in METRICS}


def _distribution(seconds: Iterable[float]) -> dict[str, float] | None:
    ordered = sorted(1e3 * value for value in seconds)
    if not ordered:
        return None
    return {"mean": sum(ordered) / len(ordered), **{f"p{p}": percentile(ordered, p) for p in PERCENTILES}}


def _is_within(outcome: Outcome, limits_ms: Mapping[str, float]) -> bool:
    latencies = latencies_s(outcome)
    return all(1e3 * latencies.get(name, 0.0) <= limit for name, limit in limits_ms.items())
