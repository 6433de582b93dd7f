# SPDX-License-Identifier: Apache-2.0
"""This engine with random weights made on the device, in a process of its own; settings: device, tiny, and `engine`,
fields of EngineConfig."""

import json
import sys
from pathlib import Path
from typing import Any

import child

answers = child.reserve_stdout()

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "backend"), str(ROOT / "kernels")]

import torch  # noqa: E402
from card import Card  # noqa: E402
from gpu_phases import random_engine as engines  # noqa: E402
from workload import Request  # noqa: E402


class OfflineEngine:
    """One engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._engine = engines.make_engine(
            Card(torch.device(settings["device"]), settings["tiny"]), **settings["engine"]
        )

    def run(self, requests: list[tuple[list[int], int]], offsets: list[float] | None) -> dict[str, Any]:
        """See measure.py."""
        results = engines.feed(self._engine, [Request(*request) for request in requests], offsets)
        return {name: results[name] for name in ("seconds", "token_ids", "events")}


if __name__ == "__main__":
    with torch.inference_mode():
        child.serve_commands(answers, run=OfflineEngine(json.loads(sys.argv[1])).run)
