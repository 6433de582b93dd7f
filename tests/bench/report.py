# SPDX-License-Identifier: Apache-2.0
"""Formats the results as Markdown tables that are also readable on a terminal."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from measure import summarize_spread

ENGINE_RATIOS = (
    ("offline", "vllm"),
    ("offline", "openvino"),
    ("http", "offline"),
    ("grpc", "offline"),
    ("openai", "grpc"),
    ("openai", "vllm-serve"),
    ("offline", "transformers"),
)
"""Ratios of tokens/s, with all requests at once."""

Rows = list[list[str]]


def summarize(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians and spread by engine and rate, and ratios of runs of the same round."""
    groups: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault((run["engine"], run["rate"]), []).append(run)
    summary = []
    for (engine, rate), group in groups.items():
        speed = summarize_spread([run["output_tokens_per_s"] for run in group])
        latencies: dict[str, Any] = {}
        for name in ("ttft_ms", "itl_ms"):
            measured = [run[name] for run in group if run[name]]
            latencies[name] = (
                {p: summarize_spread([result[p] for result in measured]) for p in ("p50", "p99")} if measured else None
            )
        summary.append({"engine": engine, "rate": rate, "output_tokens_per_s": speed, **latencies})
    ratios = []
    for numerator, denominator in ENGINE_RATIOS:
        pairs = list(zip(groups.get((numerator, None), []), groups.get((denominator, None), []), strict=False))
        values = [a["output_tokens_per_s"] / b["output_tokens_per_s"] for a, b in pairs]
        ratios += [{"of": numerator, "to": denominator, **summarize_spread(values)}] if values else []
    return {"summary": summary, "ratios": ratios}


def format_report(results: dict[str, Any]) -> str:
    """Everything that is worth reading."""
    parts = [_heading(results)]
    for head, rows in _report_tables(results):
        parts += ["", format_table(head, rows)]
    return "\n".join(parts)


def format_table(head: list[str], rows: Rows) -> str:
    """One table, its first column to the left."""
    lines = [head, *rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    parts = []
    for first_cell, *other_cells in (head, rule, *rows):
        cells = [first_cell.ljust(widths[0]), *(c.rjust(w) for c, w in zip(other_cells, widths[1:], strict=True))]
        parts.append("| " + " | ".join(cells) + " |")
    return "\n".join(parts)


def replace_marked(path: Path, script: str, content: str) -> None:
    """Replace the text between the marks of a script in `path`; a file that does not exist is made."""
    begin, end = (f"<!-- results of tests/bench/{script}: {mark} -->" for mark in ("begin", "end"))
    content_before = path.read_text() if path.exists() else f"{begin}\n{end}\n"
    before, found_begin, rest = content_before.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end):
        raise SystemExit(f"--markdown: {path} has no lines {begin!r} and {end!r}; add them where the tables belong")
    path.write_text(f"{before}{begin}\n\n{content}\n\n{end}{after}")


def environment_line(results: dict[str, Any]) -> str:
    """Return what environment_info() found, in two lines."""
    machine = results["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    return (
        f"{machine['cpu']}, {machine['num_cpus']} CPUs ({', '.join(machine['flags'])}), load {machine['load'][0]:.1f} "
        f"before and {machine['load'][-1]:.1f} after; {versions}; {results['when']};\ncommit {results['commit']}.\n"
    )


def lengths(workload: dict[str, Any]) -> str:
    """Return the lengths of prompts and outputs."""
    prompt, output = ("-".join(map(str, workload[f"{kind}_tokens"])) for kind in ("prompt", "output"))
    return f"prompts of {prompt} and outputs of {output} tokens, greedy"


def _heading(results: dict[str, Any]) -> str:
    workload, check = results["workload"], results["check"]
    compared = f"in float32, {check['requests']} outputs equal those of transformers. " if check["requests"] else ""
    weights = ", with the same weights of 4 bits" if results["settings"].get("quantization") == "int4" else ""
    gaps = (
        f"In the measured dtype, the logit of each checked token is at most {max(check['gaps'].values()):.2f} standard "
        f"deviations\nbelow the highest logit of transformers in float32{weights}."
        if check["gaps"]
        else "no output, only the number of tokens."
    )
    return (
        f"{environment_line(results)}"
        f"{workload['requests']} requests, {lengths(workload)}; medians of {workload['runs']} alternating runs.\n"
        f"Checked: {compared}{gaps}"
    )


def _report_tables(results: dict[str, Any]) -> Iterator[tuple[list[str], Rows]]:
    head = ["engine", "requests/s", "output tokens/s", "least-most", "TTFT p50 ms", "p99 ms", "ITL p50 ms", "p99 ms"]
    yield head, [_speed_row(entry) for entry in results["summary"]]
    if ratios := results["ratios"]:
        rows = [[f"{r['of']} / {r['to']}", f"{r['median']:.2f}", f"{r['min']:.2f}-{r['max']:.2f}"] for r in ratios]
        yield ["output tokens/s, all at once", "ratio", "least-most"], rows
    if pairs := results["prefix"]:
        title = f"TTFT with {results['workload']['prefix_tokens']} shared tokens"
        rows = [
            [p["engine"], *(f"{p[name]:.1f}" for name in ("first_ms", "second_ms")), f"{p['ratio']:.3f}"] for p in pairs
        ]
        yield [title, "first ms", "second ms", "ratio"], rows
    if account := results["memory"]["offline"]:
        yield ["offline engine's process, MB", *account], [["", *(f"{size / 1e6:.0f}" for size in account.values())]]
    pss = results["memory"]["pss"]
    yield ["all processes, MB", *pss], [["", *(f"{size / 1e6:.0f}" for size in pss.values())]]
    if samples := results["kv"]:
        yield ["KV cache, offline, all at once", "value"], _kv_rows(samples, results["settings"]["block_size"])


def _speed_row(entry: dict[str, Any]) -> list[str]:
    speed = entry["output_tokens_per_s"]
    latencies = [entry[name] and entry[name][p]["median"] for name in ("ttft_ms", "itl_ms") for p in ("p50", "p99")]
    return [
        entry["engine"],
        "all at once" if entry["rate"] is None else f"{entry['rate']:g}",
        f"{speed['median']:.1f}",
        f"{speed['min']:.1f}-{speed['max']:.1f}",
        *("-" if value is None else f"{value:.1f}" for value in latencies),
    ]


def _kv_rows(samples: list[dict[str, float]], block_size: int) -> Rows:
    allocated, num_tokens = (
        [s[name] * k for s in samples] for name, k in (("num_blocks", block_size), ("num_tokens", 1))
    )
    unused_per_sequence = [(a - b) / s["num_running"] for a, b, s in zip(allocated, num_tokens, samples, strict=True)]
    return [
        ["tokens, at most", f"{max(num_tokens):.0f}"],
        ["allocated for them", f"{max(allocated):.0f}"],
        ["allocated and not filled, over the run", f"{1 - sum(num_tokens) / sum(allocated):.1%}"],
        [f"the same by sequence, at most, in tokens (a block has {block_size})", f"{max(unused_per_sequence):.1f}"],
    ]
