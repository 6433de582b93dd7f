# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark at its real shapes, on an emulated device that computes nothing.

Kernels are compiled for sm_90 and launched by Triton's own launcher, and every call is made, but the numbers are
meaningless. The gates would fail, so they are replaced by ones that pass.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.requirements_of_machine import requires_emulated_gpu

pytestmark = requires_emulated_gpu

BENCH = Path(__file__).resolve().parents[1] / "bench"
SCRIPT = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
import gpu, gpu_engine, gpu_gate, gpu_verdict
gpu_verdict.findings = lambda *_: ([], True)
gpu_gate.eight_bit_error = lambda _: 0.0
gpu_engine.check_graphs = lambda *_: (0, 1)
sys.exit(gpu.main())
"""


@pytest.mark.parametrize("phases", ["limits,kernels", "limits,engine"])  # lora and tune take minutes
def test_every_phase_runs_at_real_shapes(phases, tmp_path):
    """Shapes of an 8B model on an H200 with 141 GB and 256 sequences."""
    results = tmp_path / "results.json"
    environment = os.environ | {"EMULATOR_DRY": "1", "EMULATOR_MIB": "143771", "EMULATOR_SMS": "132"}
    del environment["TRITON_INTERPRET"]
    argv = [sys.executable, "-c", SCRIPT, "--quick", "--phases", phases, "-o", str(results)]
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=170, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    phases_results = json.loads(results.read_text())
    assert "failed" not in phases_results
    if "engine" in phases:
        memory = phases_results["engine"]["memory"]
        # 8.03 billion weights in bf16; the KV cache gets the rest of 0.9 of the device memory.
        assert memory["weights_bytes"] == pytest.approx(16.06e9, rel=0.01)
        assert 100e9 < memory["kv_bytes"] < 0.9 * (143771 << 20) - memory["weights_bytes"]


CAPTURE = f"""
import sys
sys.path.insert(0, {str(BENCH)!r})
import torch
from card import Card
x = torch.zeros(2, device="cuda")
def forks():
    # Rejected at the end of the capture.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
try:
    Card(torch.device("cuda")).seconds([forks])
except RuntimeError:
    sys.exit(torch.cuda.current_stream() != torch.cuda.default_stream())
sys.exit("it was captured")
"""


def test_failed_capture_restores_the_current_stream():
    result = subprocess.run([sys.executable, "-c", CAPTURE], capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
