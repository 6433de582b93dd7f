# SPDX-License-Identifier: Apache-2.0
"""The measuring driver on an emulated device: with faults at tiny shapes, and its engine phase at the real shapes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.requirements_of_machine import requires_emulated_gpu

pytestmark = [requires_emulated_gpu, pytest.mark.timeout(3600)]

BENCH = Path(__file__).resolve().parents[1] / "bench"
FAILED = {
    "crash": "failed: signal SIGSEGV",
    "poison": "failed: ",
    "memory": "failed: torch.OutOfMemoryError: CUDA out of memory.",
    "hang": "ended at its limit of 60 s",
}
"""How an attempt ends after its first row, by the injected fault."""
FAULTS = {
    "facts": "memory", "limits": "crash", "attention": "poison", "engine": "memory", "cudnn": "crash",
    "products": "hang", "kernels": "poison", "tune": "memory", "vllm": "crash", "ncu": "memory", "sanitizer": "crash",
}  # fmt: skip
TOOLS = {"vllm": "vLLM", "ncu": "ncu", "sanitizer": "compute-sanitizer"}
"""What phases need that a machine without a GPU lacks."""


def test_no_fault_loses_a_result(tmp_path, monkeypatch):
    """All phases. Those that crash, poison their device, exhaust its memory, or hang are retried; each has its rows,
    or states which tool is missing."""
    monkeypatch.syspath_prepend(str(BENCH))
    from gpu_phases.plan import PHASES

    argv = [sys.executable, str(BENCH / "gpu.py"), "--tiny", "-o", str(tmp_path), "--limits-s", "all=900,products=60"]
    argv += ["--faults", ",".join(f"{name}={kind}" for name, kind in FAULTS.items())]
    try:
        result = subprocess.run(argv, capture_output=True, text=True, timeout=3500, check=False)
    except subprocess.TimeoutExpired:
        # The supervisor has a session of its own, and its processes end with it.
        os.kill(int((tmp_path / "lock").read_text()), signal.SIGKILL)
        raise
    found = json.loads((tmp_path / "results.json").read_text())["phases"]
    assert list(found) == list(PHASES)
    assert {name: phase["outcome"] for name, phase in found.items()} == dict.fromkeys(PHASES, "complete"), result.stdout
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    for name, phase in found.items():
        stated = [row["what"] for row in phase["rows"] if row.get("left_out")]
        measured = [row for row in phase["rows"] if not row.get("left_out")]
        assert measured or (name in TOOLS and all(what.startswith(TOOLS[name]) for what in stated)), (name, stated)
        if (kind := FAULTS.get(name)) is None:
            assert (phase["rung"], phase["other_attempts"]) == ("as is", [])
            continue
        [failed] = phase["other_attempts"]
        assert failed.startswith(f"as is: {FAILED[kind]}")
        assert phase["rung"] == "QUIRE_EARLY_LAUNCH=0"
        assert len(json.loads((tmp_path / f"{name}.0.rows.json").read_text())) >= 1


def test_engine_runs_at_real_shapes(tmp_path):
    """Shapes of an 8B model on an H200 with 141 GB and 256 sequences: kernels are compiled, and nothing is computed."""
    settings = {"tiny": False, "device": "cuda", "vllm_python": "", "faults": {}}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    environment = os.environ | {"EMULATOR_DRY": "1", "EMULATOR_MIB": "143771", "EMULATOR_SMS": "132"}
    del environment["TRITON_INTERPRET"]
    root = BENCH.parents[1]
    paths = [root / "backend", root / "kernels", BENCH, root / "tests", environment["PYTHONPATH"]]
    environment["PYTHONPATH"] = os.pathsep.join(map(str, paths))
    argv = [sys.executable, "-m", "gpu_phases.process", str(tmp_path), "engine", "0", "400"]
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    rows = {row["what"]: row for row in json.loads((tmp_path / "engine.0.rows.json").read_text())}
    # 8.03 billion weights in bf16; the KV cache gets the rest of 0.9 of the device memory.
    assert rows["KV cache"]["weights"] == pytest.approx(16.06e9, rel=0.01)
    assert 100 < rows["KV cache"]["value"] < (0.9 * (143771 << 20) - rows["KV cache"]["weights"]) / 1e9
    assert any(row.get("key") == "step_256" for row in rows.values())


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
