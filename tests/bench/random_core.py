# SPDX-License-Identifier: Apache-2.0
"""The engine core with random weights: quire_engine.core.process with its arguments, but without loading weights."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "backend"), str(ROOT / "kernels")]

import random_weights  # noqa: E402

from quire_engine.core import process as engine_process  # noqa: E402
from quire_engine.ipc import process  # noqa: E402

if __name__ == "__main__":
    with random_weights.patch_weight_loading():
        process.run_process("quire_engine.core", engine_process.main)
