# SPDX-License-Identifier: Apache-2.0
"""The report as text, with a plot in each row. Pure functions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from quire_operator.cli.bench.figures import METRICS, PERCENTILES
from quire_operator.cli.bench.outputs import OutputCheck

TITLES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2el": "E2E"}
_BAR_WIDTH = 30


def load_name(figures: Mapping[str, Any]) -> str:
    """Return the load of figures as text."""
    rate = figures["request_rate"]
    return f"concurrency {figures['concurrency']}" if rate is None else f"{rate:g} requests/s"


def format_report(loads: Sequence[Mapping[str, Any]], check: OutputCheck, encoding: str) -> str:
    """Return the report. The bars contain block characters if the encoding has them."""
    blocks = ("█", "░") if _can_encode("█░", encoding) else ("#", "-")
    width = max(len(load_name(figures)) for figures in loads)
    has_goodput = any("goodput" in figures for figures in loads)
    header = ["requests", "tokens in", "tokens out", "seconds", "requests/s", "output tokens/s"]
    header += ["good", "good/s"] if has_goodput else []
    lines = ["  ".join([" " * width, *header])]
    largest = max(figures["output_tokens_per_s"] for figures in loads)
    for figures in loads:
        cells = [f"{figures[name]:,}" for name in ("requests", "input_tokens", "output_tokens")]
        cells += [f"{figures[name]:,.1f}" for name in ("seconds", "requests_per_s", "output_tokens_per_s")]
        if "goodput" in figures:
            cells += [f"{figures['goodput']['share']:.0%}", f"{figures['goodput']['requests_per_s']:,.2f}"]
        row = "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, header, strict=True))
        bar = blocks[0] * round(_BAR_WIDTH * figures["output_tokens_per_s"] / (largest or 1))
        lines.append(f"{load_name(figures):<{width}}  {row}  {bar}".rstrip())
    for name in METRICS:
        lines += ["", *_metric_rows(name, loads, width, blocks)]
    return "\n".join([*lines, "", *_check_lines(check)])


def _metric_rows(name: str, loads: Sequence[Mapping[str, Any]], width: int, blocks: tuple[str, str]) -> Iterator[str]:
    values = [figures[f"{name}_ms"] for figures in loads]
    largest = max((value["p99"] for value in values if value), default=1.0) or 1.0
    columns = "".join(f"{f'p{p}':>10}" for p in PERCENTILES)
    yield f"{f'{TITLES[name]}, ms':<{width}}{columns}  {blocks[0]} p50 {blocks[1]} p99"
    for figures, value in zip(loads, values, strict=True):
        if value is None:
            yield f"{load_name(figures):<{width}}{'-':>10}"
            continue
        cells = "".join(f"{value[f'p{p}']:>10,.1f}" for p in PERCENTILES)
        to_p50, to_p99 = (round(_BAR_WIDTH * value[p] / largest) for p in ("p50", "p99"))
        bar = blocks[0] * to_p50 + blocks[1] * (to_p99 - to_p50)
        yield f"{load_name(figures):<{width}}{cells}  {bar}".rstrip()


def _check_lines(check: OutputCheck) -> Iterator[str]:
    yield f"outputs: {check.num_same} of {check.num_compared} are the same as alone"
    if check.num_near_ties:
        yield (
            f"  {check.num_near_ties} differ after two tokens that are almost equally likely. The server is not "
            "batch-invariant: the results of\n  a step depend on its batch by rounding. This is not an error."
        )
    if check.num_different:
        yield f"  {check.num_different} are different: the figures are those of a server that gives wrong outputs"
        yield from (f"  {example}" for example in check.examples[:5])


def _can_encode(text: str, encoding: str) -> bool:
    try:
        text.encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True
