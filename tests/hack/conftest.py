# SPDX-License-Identifier: Apache-2.0
"""The modules of the benchmarks."""

from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture
def bench_modules(monkeypatch):
    """They are run by path, and import their neighbours by bare name."""
    monkeypatch.syspath_prepend(str(BENCH))
