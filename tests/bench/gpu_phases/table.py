# SPDX-License-Identifier: Apache-2.0
"""Merges the attempts of a folder into results.json and table.md. A value that was not measured is a dash."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_phases import store
from gpu_phases.bars import BARS, PREDICTIONS, Prediction
from gpu_phases.plan import PHASES
from gpu_phases.store import Attempt, Row


def write(folder: Path) -> str:
    """Write both files and return the table."""
    settings = json.loads((folder / "settings.json").read_text())
    attempts = {name: store.load(folder, name) for name in PHASES}
    merged = merge(settings, attempts)
    store.write_json(folder / "results.json", merged)
    text = markdown(merged)
    (folder / "table.md").write_text(text)
    return text


def merge(settings: dict[str, Any], attempts: dict[str, list[Attempt]]) -> dict[str, Any]:
    """Return settings, the reported attempt of each phase, how the others ended, and the bars."""
    phases, all_rows = {}, []
    for name, tried in attempts.items():
        if (reported := store.best(tried)) is None:
            continue
        all_rows += reported.rows
        others = [f"{each.rung}: {each.outcome}" for each in tried if each is not reported]
        fields = {
            "outcome": reported.outcome,
            "rung": reported.rung,
            "seconds": reported.seconds,
            "rows": reported.rows,
        }
        phases[name] = fields | {"other_attempts": others}
    bars = [_judged(each, all_rows, settings["tiny"]) for each in (*BARS, *PREDICTIONS)]
    return {"settings": settings, "bars": bars, "phases": phases}


def _judged(prediction: Prediction, rows: Sequence[Row], is_rehearsal: bool) -> dict[str, Any]:
    outcome = prediction.outcome(rows)
    names = ("what", "floor", "predicted", "why", "bar", "aim")
    fields = {name: getattr(prediction, name) for name in names}
    can_judge = outcome is not None and prediction.bar is not None and not is_rehearsal
    return fields | {"outcome": outcome, "holds": prediction.holds(outcome or 0.0) if can_judge else None}


def markdown(merged: dict[str, Any]) -> str:
    """Return all tables."""
    bars = [each for each in merged["bars"] if each["bar"] is not None]
    held, missed = ([each["what"] for each in bars if each["holds"] is is_held] for is_held in (True, False))
    open_bars = [each["what"] for each in bars if each["holds"] is None]
    rehearsal = "A rehearsal: times and rates mean nothing.\n\n" if merged["settings"]["tiny"] else ""
    parts = [
        f"## Bars\n\n{rehearsal}{len(held)} hold, {len(missed)} are missed, {len(open_bars)} were not measured.",
        *(f"{label}: {'; '.join(names)}." for label, names in (("Hold", held), ("Missed", missed)) if names),
        _table(
            ("what", "floor", "prediction", "bar", "aim", "measured", "holds", "why prediction and floor differ"),
            [
                (b["what"], b["floor"], b["predicted"], _number(b["bar"]), _number(b["aim"]), _number(b["outcome"]),
                 {True: "yes", False: "NO", None: "-"}[b["holds"]], b["why"])
                for b in merged["bars"]
            ],
        ),
        "## Phases",
        _table(
            ("phase", "outcome", "rung", "seconds", "rows", "other attempts"),
            [
                (name, p["outcome"], p["rung"], f"{p['seconds']:.0f}", str(len(p["rows"])),
                 "; ".join(p["other_attempts"]) or "-")
                for name, p in merged["phases"].items()
            ],
        ),
    ]  # fmt: skip
    for name, phase in merged["phases"].items():
        rows = phase["rows"]
        if name.startswith("gate"):
            bad = [row for row in rows if row.get("wrong") or row.get("differs")]
            parts += [f"## {name}\n\n{len(rows) - len(bad)} of {len(rows)} comparisons are within their limits."]
            rows = bad
        elif rows:
            parts.append(f"## {name}: {PHASES[name].what}, {phase['rung']}")
        if rows:
            cells = [
                (
                    row["what"],
                    _number(row["value"]),
                    row["unit"],
                    *(_number(row.get(k)) for k in ("gb_per_s", "tflops", "fraction")),
                )
                for row in rows
            ]
            parts.append(_table(("what", "value", "unit", "GB/s", "TFLOP/s", "of the limit"), cells))
    return "\n\n".join(parts) + "\n"


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "-" if value is None else str(value)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|---|" + "--:|" * (len(header) - 1)]
    return "\n".join(lines + ["| " + " | ".join(cell.replace("|", "/") for cell in row) + " |" for row in rows])
