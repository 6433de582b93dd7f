# SPDX-License-Identifier: Apache-2.0
"""Plots the results: throughput, latencies by rate, KV blocks allocated and filled over a run."""

from pathlib import Path
from typing import Any


def draw_plot(results: dict[str, Any], path: Path) -> None:
    """Write the picture; the suffix of `path` decides its format."""
    import matplotlib  # here, because only a picture needs it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (speed, *latencies, kv_samples) = pyplot.subplots(1, 4, figsize=(19, 4.5), layout="constrained")
    figure.suptitle(f"{results['machine']['cpu']}, {results['machine']['num_cpus']} CPUs, {results['when']}")
    at_once = [entry for entry in results["summary"] if entry["rate"] is None]
    values = [entry["output_tokens_per_s"] for entry in at_once]
    errors = [[v["median"] - v["min"] for v in values], [v["max"] - v["median"] for v in values]]
    bars = speed.bar([entry["engine"] for entry in at_once], [v["median"] for v in values], yerr=errors, capsize=4)
    speed.bar_label(bars, fmt="%.0f")
    speed.set(title="all requests at once", ylabel="output tokens/s")
    for axes, name in zip(latencies, ("ttft_ms", "itl_ms"), strict=True):
        _latency(axes, [entry for entry in results["summary"] if entry["rate"] is not None and entry[name]], name)
    seconds = [sample["seconds"] for sample in results["kv"]]
    kv_samples.plot(
        seconds, [s["num_blocks"] * results["settings"]["block_size"] for s in results["kv"]], label="allocated"
    )
    kv_samples.plot(seconds, [s["num_tokens"] for s in results["kv"]], label="filled")
    kv_samples.legend()
    kv_samples.set(title="KV cache, offline, all at once", xlabel="seconds", ylabel="tokens", ylim=(0, None))
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _latency(axes: Any, entries: list[dict[str, Any]], name: str) -> None:
    for number, engine in enumerate(dict.fromkeys(entry["engine"] for entry in entries)):
        mine = [entry for entry in entries if entry["engine"] == engine]
        for p, style in (("p50", "-o"), ("p99", "--^")):
            values = [entry[name][p]["median"] for entry in mine]
            axes.plot([entry["rate"] for entry in mine], values, style, color=f"C{number}", label=f"{engine} {p}")
    if entries:
        axes.legend(fontsize="small")
    axes.set(title={"ttft_ms": "first token", "itl_ms": "between tokens"}[name], xlabel="requests/s", ylabel="ms")
