# SPDX-License-Identifier: Apache-2.0
"""The process of one attempt: `python -m gpu_phases.process FOLDER PHASE NUMBER LIMIT_S`.

Every row is written as soon as it is measured, and printed on one line.
"""

import faulthandler
import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_phases import store
from gpu_phases.plan import PHASES
from gpu_phases.supervisor import EXIT_WRONG, die_with_parent

TELL_S = 3.0
"""So many seconds before the limit, the process prints where each of its threads is."""
FAULTS = ("crash", "hang", "poison", "memory")


@dataclass(frozen=True, slots=True)
class Context:
    """The arguments of a phase."""

    card: Any
    """A card.Card."""
    folder: Path
    vllm_python: str
    deadline: float
    """In time.monotonic's seconds: the process is killed then."""

    def limits(self) -> Any:
        """Return the card's limits, from the phase `limits` or measured now."""
        from gpu_phases import limits

        attempt = store.best(store.load(self.folder, "limits"))
        rates = {row["key"]: row["value"] for row in attempt.rows} if attempt else {}
        return limits.Limits.from_rows(rates) or limits.measure(self.card)

    def rows_of(self, phase: str) -> list[store.Row]:
        """Return what another phase has measured in this run."""
        attempt = store.best(store.load(self.folder, phase))
        return attempt.rows if attempt else []


def inject(fault: str, device: Any) -> None:
    """Fail as told: for rehearsals of the supervisor."""
    import torch

    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif fault == "hang":
        time.sleep(1e6)
    elif fault == "memory":
        torch.empty(1 << 50, dtype=torch.uint8, device=device)
    elif fault == "poison":
        # On the emulated device; every later wait for it fails in this process, as after an illegal access.
        sys.modules["emulator.device"].enqueue(lambda: 1 // 0)


def main() -> int:
    """Run the phase; the exit code is EXIT_WRONG if a row says that a result is wrong."""
    folder, name, number, limit_s = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4])
    die_with_parent()
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(1.0, limit_s - TELL_S))
    settings = json.loads((folder / "settings.json").read_text())
    if settings["tiny"]:
        # The kernel language reads it when it is imported.
        os.environ["TRITON_INTERPRET"] = "1"
    import torch
    from card import Card

    torch.set_float32_matmul_precision("highest")
    card = Card(torch.device(settings["device"]), settings["tiny"])
    context = Context(card, folder, settings["vllm_python"], time.monotonic() + limit_s)
    module, _, function = PHASES[name].function.partition(":")
    rows: list[store.Row] = []
    fault = settings["faults"].get(name) if number == 0 else None
    with torch.inference_mode():
        measured: Iterator[store.Row] = getattr(importlib.import_module(f"gpu_phases.{module}"), function)(context)
        for row in measured:
            rows.append(row)
            store.write_json(store.rows_path(folder, name, number), rows)
            print(f"  {row['what']}: {row['value']} {row['unit']}", flush=True)
            if fault is not None:
                inject(fault, card.device)
    return EXIT_WRONG if any(row.get("wrong") for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
