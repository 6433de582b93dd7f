# SPDX-License-Identifier: Apache-2.0
"""Results of gpu.py as tables for docs/benchmarks.md. What was not measured is left out."""

from typing import Any


def markdown(results: dict[str, Any]) -> str:
    """All tables that the results have."""
    about = results["about"]
    parts = ["### " + about["card"], ", ".join(f"{k} {v}" for k, v in about.items() if k not in ("card", "command"))]
    parts.append(f"`{about['command']}`")
    if limits := results.get("limits"):
        copy, matrix = limits["copy_bytes_per_s"] / 1e12, limits["matrix_flops_per_s"] / 1e12
        parts.append(
            f"Measured limits: copy {copy:.2f} TB/s (read and written bytes), bf16 product {matrix:.0f} TFLOP/s."
        )
    if gate := results.get("gate"):
        parts.append(_gate(gate))
    for name in ("kernels", "tune"):
        if rows := results.get(name):
            parts.append(_kernels(_best(rows) if name == "tune" else rows))
    parts += [_start(row) for row in results.get("start", [])]
    if engine := results.get("engine"):
        parts += _engine(engine)
    if lora := results.get("lora"):
        parts += _rates(lora, "decoding")
    if "ratio" in (itl := results.get("itl") or {}):
        parts += _itl(itl)
    if vllm := results.get("vllm"):
        parts += _vllm(vllm)
    if peers := results.get("peers"):
        parts += _peers(peers)
    parts += [f"{phase} failed: {why}" for phase, why in results.get("failed", {}).items()]
    if late := results.get("not_started"):
        parts.append(f"Not started, as time was over: {', '.join(late)}.")
    if cut := results.get("cut_short"):
        parts.append(f"Cut short, as time was over: {', '.join(cut)}.")
    return "\n\n".join(parts) + "\n"


def _gate(gate: dict[str, Any]) -> str:
    error = gate.get("eight_bit_error") or {}
    text = f"Gate: {gate['num'] - len(gate['bad'])} of {gate['num']} comparisons good"
    text += f" (`{gate['of']}`)." if "of" in gate else "."
    if gate.get("left_out"):
        text += f" Wrong, of forms that run only where QUIRE_KERNELS asks for them, and left out: {gate['left_out']}."
    if error:
        text += (
            f" Attention over an e4m3 cache: relative error {error['own']:.4f} (reference {error['reference']:.4f})."
        )
    return text


def _best(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each kind of kernel, the ten fastest sizes."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda r: -r["fraction"]):
        kinds.setdefault(row["what"].partition(":")[0], []).append(row)
    return [row for kind in kinds.values() for row in kind[:10]]


def _kernels(rows: list[dict[str, Any]]) -> str:
    cells = [
        (
            row["what"],
            f"{row['seconds'] * 1e6:,.1f}",
            f"{row['bytes'] / row['seconds'] / 1e9:,.0f}",
            f"{row['flops'] / row['seconds'] / 1e12:,.0f}" if row["flops"] else "-",
            f"{row['fraction']:.1%}",
        )
        for row in rows
    ]
    return _table(("kernel", "us", "GB/s", "TFLOP/s", "of the limit"), cells)


def _start(row: dict[str, Any]) -> str:
    bar = f", bar {row['bar']:g} s" if row["bar"] else ""
    size = row["weights_bytes"] / 1e9
    return f"A core process, {row['what']}: {row['seconds']:.1f} s ({size:.1f} GB of weights in the page cache{bar})."


def _engine(engine: dict[str, Any]) -> list[str]:
    parts = []
    if "start_s" in engine:
        parts.append(f"Start: {engine['start_s']:.1f} s, graphs {engine.get('graph_bytes', 0) / 2**20:,.0f} MiB.")
    cells = [
        (
            found["what"],
            _number(found["output_tokens_per_s"]),
            f"{found['fraction']:.1%}" if "fraction" in found else "-",
        )
        for found in (engine.get("single"), engine.get("decode"))
        if found
    ]
    if cells:
        parts.append(_table(("decoding", "output tokens/s", "of the bandwidth"), cells))
    parts += [
        f"Device per step, {idle['what']}, traced ({idle['works_per_step']:.0f} kernels and copies): busy "
        f"{_ms(idle['busy_ms'])}, idle {_ms(idle['idle_ms'])}, of that {_ms(idle['gaps_ms'])} in gaps longer "
        f"than within a graph. Untraced: a step {idle['step_ms']:.2f} ms, its graph {_ms(idle['graph_ms'])}. The host "
        f"waits for the device {idle['syncs_per_step']:.1f} times on the way of a step."
        for idle in engine.get("idle", [])
    ]
    rows = [
        (
            load["what"],
            _number(load["output_tokens_per_s"]),
            *(f"{load[k][p]:.1f}" if load[k] else "-" for k in ("ttft_ms", "itl_ms") for p in ("p50", "p99")),
            f"{load['kv_waste']:.1%}" if load["kv_waste"] is not None else "-",
        )
        for load in engine.get("loads", [])
    ]
    if rows:
        header = ("load", "output tokens/s", "TTFT p50, ms", "p99", "ITL p50, ms", "p99", "KV not filled")
        parts.append(_table(header, rows))
    return parts


def _itl(itl: dict[str, Any]) -> list[str]:
    files = "" if itl["files"] == itl["adapters"] else f", of {itl['files']} different files,"
    source = f"{itl['on']} ({itl['read_from']})"
    text = (
        f"Time between tokens of requests on {itl['resident']} resident adapters at 80 % of saturation "
        f"({itl['saturation_tokens_per_s']:,.0f} tokens/s), while {itl['loads_per_run']} of {itl['adapters']} cold "
        f"adapters of {itl['file_bytes'] / 1e6:.1f} MB{files} load in {itl['seconds']:g} s from {source}, and while "
        f"none does; {len(itl['runs'])} alternating rounds."
    )
    if itl["read_s"] is not None and itl["copy_s"] is not None:
        text += f" To host memory {itl['read_s']:.2f} s, from there to a slot {itl['copy_s']:.2f} s (medians)."
    rows = [
        (
            f"ITL p{p}, ms",
            *(_spread(itl[f"{kind}_p{p}_ms"], 2) for kind in ("with", "without")),
            _spread(itl[f"p{p}_ratio"], 3),
            *((f"{itl['bar']:.2f}", f"{itl['aim']:.2f}") if p == 99 else ("-", "-")),
        )
        for p in (50, 99)
    ]
    return [text, _table(("median (least-most)", "loading", "not loading", "ratio", "bar", "aim"), rows)]


def _spread(found: dict[str, float], digits: int) -> str:
    return f"{found['median']:.{digits}f} ({found['min']:.{digits}f}-{found['max']:.{digits}f})"


def _vllm(vllm: dict[str, Any]) -> list[str]:
    if "left_out" in vllm:
        return [vllm["left_out"]]
    gaps = vllm["gaps"]
    text = (
        f"Adapters against vLLM, each engine alone: by this engine's logits its tokens are within {gaps['quire']:.2f} "
    )
    return [
        f"{text}deviations of the likeliest ones, the other's within {gaps['vllm']:.2f}.",
        *_rates(vllm, "whole runs"),
    ]


def _peers(peers: dict[str, Any]) -> list[str]:
    cells = [
        (row["engine"], row.get("what", "-"), _number(row.get("output_tokens_per_s"), row.get("left_out")))
        for row in peers["rows"]
    ]
    bars = [
        (
            f"{r['of']} / {r['to']}, {r['what']}",
            f"{r['ratio']:.2f}",
            *(f"{r[k]:g}" if r[k] else "-" for k in ("bar", "aim")),
        )
        for r in peers["ratios"]
    ]
    parts = [_table(("engine", "load", "output tokens/s"), cells)]
    return parts + ([_table(("ratio", "measured", "bar", "aim"), bars)] if bars else [])


def _rates(lora: dict[str, Any], what: str) -> list[str]:
    rates = [
        (row["row"], row["what"], _number(row["output_tokens_per_s"]), " ".join(map(_number, row["all"])))
        for row in lora.get("rows", [])
    ]
    bars = [
        (f"{r['of']} / {r['to']}", f"{r['ratio']:.3f}", f"{r['bar']:.2f}", f"{r['aim']:.2f}")
        for r in lora.get("ratios", [])
    ]
    parts = [_table((what, "load", "output tokens/s, median", "rounds"), rates)] if rates else []
    return parts + ([_table(("ratio", "measured", "bar", "aim"), bars)] if bars else [])


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def _number(value: float | None, otherwise: str | None = None) -> str:
    return otherwise or "-" if value is None else f"{value:,.0f}"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---|" + "--:|" * (len(header) - 1)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
