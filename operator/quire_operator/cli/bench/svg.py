# SPDX-License-Identifier: Apache-2.0
"""The chart of a benchmark: throughput and latencies by load, as SVG. Pure functions."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from quire_operator.cli.bench.report import TITLES

_WIDTH, _HEIGHT = 300, 200
"""Size of a plot without its labels."""
_LEFT, _TOP, _GAP = 64, 72, 76
_NUM_TICKS = 4
_COLOURS = {"p50": "#0b6e66", "p90": "#c8741a", "p99": "#b0437a", "mean": "#0b6e66"}
_STYLE = (
    "text{font:12px system-ui,sans-serif;fill:#1d1d1b}.dim{fill:#6a6a64}.title{font-weight:600}"
    ".grid{stroke:#e2e2dc}.limit{stroke:#b3261e;stroke-dasharray:5 4}polyline{fill:none;stroke-width:2}"
)

_Series = Mapping[str, Sequence[float | None]]


def chart(title: str, loads: Sequence[Mapping[str, Any]], limits_ms: Mapping[str, float]) -> str:
    """Return an SVG document with three plots.

    Args:
        loads: the figures of each load, at least one.
        limits_ms: limits of --goodput, which are drawn as lines.
    """
    is_rate = loads[0]["request_rate"] is not None
    x_labels = [f"{load['request_rate']:g}" if is_rate else str(load["concurrency"]) for load in loads]
    x_title = "requests per second" if is_rate else "concurrency"
    plots: list[tuple[str, _Series, float | None]] = [
        ("output tokens/s", {"mean": [load["output_tokens_per_s"] for load in loads]}, None)
    ]
    for name in ("ttft", "tpot"):
        distributions = [load[f"{name}_ms"] or {} for load in loads]
        series: _Series = {p: [values.get(p) for values in distributions] for p in ("p50", "p90", "p99")}
        plots.append((f"{TITLES[name]}, ms", series, limits_ms.get(name)))
    width, height = _LEFT + len(plots) * (_WIDTH + _GAP) - _GAP // 2, _TOP + _HEIGHT + 60
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f'<style>{_STYLE}</style><rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="{_LEFT}" y="26" style="font-size:15px" class="title">{escape(title)}</text>',
    ]
    for i, (name, series, limit) in enumerate(plots):
        parts.append(f'<g transform="translate({_LEFT + i * (_WIDTH + _GAP)},{_TOP})">')
        parts += _plot(name, series, limit, x_labels, x_title)
        parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _plot(name: str, series: _Series, limit: float | None, x_labels: Sequence[str], x_title: str) -> Iterator[str]:
    step = _tick_step(max([value for values in series.values() for value in values if value is not None], default=0.0))
    top = step * _NUM_TICKS
    yield f'<text y="-14" class="title">{escape(name)}</text>'
    for i in range(_NUM_TICKS + 1):
        y = _HEIGHT - _HEIGHT * i / _NUM_TICKS
        yield f'<line class="grid" x2="{_WIDTH}" y1="{y:g}" y2="{y:g}"/>'
        yield f'<text class="dim" x="-8" y="{y + 4:g}" text-anchor="end">{step * i:,g}</text>'
    xs = [_WIDTH * (i + 0.5) / len(x_labels) for i in range(len(x_labels))]
    for x, label in zip(xs, x_labels, strict=True):
        yield f'<text class="dim" x="{x:g}" y="{_HEIGHT + 18}" text-anchor="middle">{escape(label)}</text>'
    yield f'<text class="dim" x="{_WIDTH / 2:g}" y="{_HEIGHT + 38}" text-anchor="middle">{escape(x_title)}</text>'
    if limit is not None and limit <= top:
        y = _HEIGHT * (1 - limit / top)
        yield f'<line class="limit" x2="{_WIDTH}" y1="{y:g}" y2="{y:g}"><title>limit {limit:g} ms</title></line>'
    for i, (label, values) in enumerate(series.items()):
        colour = _COLOURS[label]
        points = [(x, _HEIGHT * (1 - value / top)) for x, value in zip(xs, values, strict=True) if value is not None]
        yield f'<polyline stroke="{colour}" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in points)}"/>'
        for (x, y), value in zip(points, (value for value in values if value is not None), strict=True):
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"><title>{value:,.1f}</title></circle>'
        if len(series) > 1:
            x = _WIDTH - 42 * (len(series) - i)
            yield f'<circle cx="{x}" cy="-18" r="4" fill="{colour}"/><text x="{x + 8}" y="-14">{label}</text>'


def _tick_step(largest: float) -> float:
    """Return a round distance of ticks, so that the largest value is below the last one."""
    if largest <= 0:
        return 1.0
    wanted = largest / _NUM_TICKS
    power: float = 10.0 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= wanted * (1 - 1e-9))
