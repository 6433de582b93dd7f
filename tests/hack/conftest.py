# SPDX-License-Identifier: Apache-2.0
"""The modules of the GPU benchmark, and runs of it."""

import json
from functools import partial
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def bench_modules(monkeypatch):
    """They are run by path, and import their neighbours by bare name."""
    monkeypatch.syspath_prepend(str(BENCH))


@pytest.fixture
def bench(bench_modules, tmp_path):
    """A run whose phases are as told: functions of the run, by name; gives the exit code and what was written."""
    import torch
    from card import Card
    from gpu_bench import Bench, Options

    def run(phases, **options):
        made = Bench(Card(torch.device("cpu")), Options(out=tmp_path / "results.json", **options))
        for name, function in phases.items():
            setattr(made, f"_{name}", partial(function, made))
        code = made.run(phases)
        return code, json.loads((tmp_path / "results.json").read_text())

    return run
