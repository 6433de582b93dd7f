# SPDX-License-Identifier: Apache-2.0
"""The folder of a run: rows and outcome of every attempt of a phase, each file replaced as a whole.

`PHASE.N.rows.json` is written by the phase's process after each row, `PHASE.N.attempt.json` by the supervisor before
and after that process, so that neither loses what the other wrote. `PHASE.N.log` is the output of the process.
"""

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Row = dict[str, Any]
"""`what` was measured, its `value` and `unit`; `key`, if a bar refers to it; and details."""

COMPLETE, RUNNING = "complete", "running"


@dataclass(slots=True)
class Attempt:
    """One process of a phase."""

    phase: str
    number: int
    rung: str
    env: dict[str, str]
    outcome: str = RUNNING
    """`complete`, `running`, or how it failed."""
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return self.outcome == COMPLETE


def write_json(path: Path, data: Any) -> None:
    """Replace a file as a whole."""
    part = path.with_name(f"{path.name}.part")
    with part.open("w") as file:
        json.dump(data, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def rows_path(folder: Path, phase: str, number: int) -> Path:
    """Return the file of an attempt's rows."""
    return folder / f"{phase}.{number}.rows.json"


def log_path(folder: Path, phase: str, number: int) -> Path:
    """Return the file of an attempt's output."""
    return folder / f"{phase}.{number}.log"


def save(folder: Path, attempt: Attempt) -> None:
    """Write an attempt, without its rows."""
    fields = {name: value for name, value in asdict(attempt).items() if name != "rows"}
    write_json(folder / f"{attempt.phase}.{attempt.number}.attempt.json", fields)


def load(folder: Path, phase: str) -> list[Attempt]:
    """Return the attempts of a phase with their rows, in order."""
    paths = folder.glob(f"{phase}.*.attempt.json")
    attempts = sorted((Attempt(**json.loads(path.read_text())) for path in paths), key=lambda each: each.number)
    for attempt in attempts:
        path = rows_path(folder, phase, attempt.number)
        attempt.rows = json.loads(path.read_text()) if path.exists() else []
    return attempts


def best(attempts: list[Attempt]) -> Attempt | None:
    """Return the attempt to report: a complete one, otherwise the one with the most rows."""
    return max(attempts, key=lambda each: (each.is_complete, len(each.rows)), default=None)
