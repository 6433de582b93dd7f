# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark's code runs: all phases but the peers, with tiny shapes on this CPU, kernels interpreted."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"
PHASES = "gate,limits,kernels,engine,lora,tune"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    command = [sys.executable, str(BENCH / "gpu.py"), "--cpu-rehearsal", "--phases", PHASES]
    command += ["-o", str(folder / "results.json"), "--markdown", str(folder / "results.md")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads((folder / "results.json").read_text()), (folder / "results.md").read_text()


def test_every_phase_leaves_results(run):
    results, _ = run
    assert set(results["seconds"]) == set(PHASES.split(","))
    assert results["gate"]["num"] > 50
    assert results["gate"]["bad"] == []
    assert results["engine"]["check"] == {"other_tokens": 0, "tokens": 7}
    assert {row["what"] for row in results["engine"]["loads"]} == {"12 in, 6 out", "at 20 a second"}
    assert results["lora"]["check"] == {"other_tokens": 0, "tokens": 7}
    assert [row["row"] for row in results["lora"]["rows"]] == ["base, LoRA disabled", "base, LoRA enabled", "adapters"]
    assert {(r["of"], r["bar"]) for r in results["lora"]["ratios"]} == {
        ("adapters", 0.88),
        ("base, LoRA enabled", 0.98),
    }
    waiting, ahead = (idle["what"] for idle in results["engine"]["idle"])
    assert (waiting, ahead) == ("3 sequences at 12, waiting for each other", "3 sequences at 12, begun ahead")


def test_an_eight_bit_cache_costs_little(run):
    """Rounding to 3 bits after the point is wrong by 2^-4 at most, half of that on average, in keys and values."""
    error = run[0]["gate"]["eight_bit_error"]
    assert error["own"] == pytest.approx(error["reference"], rel=1e-2)
    assert 0.01 < error["own"] < 0.05


def test_the_report_says_that_it_is_a_rehearsal(run):
    assert run[1].startswith("### none: a rehearsal on a CPU, whose times mean nothing")
    assert "| decode, 2 x 40 |" in run[1]


def test_without_a_gpu_it_says_what_to_do():
    done = subprocess.run([sys.executable, str(BENCH / "gpu.py")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--cpu-rehearsal" in done.stderr


def test_a_red_gate_times_nothing(tmp_path):
    """A form that computes wrongly ends the run before anything is timed."""
    script = tmp_path / "wrong.py"
    script.write_text(
        "import runpy, sys\n"
        f"sys.path[:0] = [{str(BENCH)!r}]\n"
        f"sys.argv = [{str(BENCH / 'gpu.py')!r}, '--cpu-rehearsal', '--phases', 'limits']\n"
        "import gpu_gate\n"
        "wrong = gpu_gate.Finding('rms_norm', 1.0, 1e-5)\n"
        "gpu_gate.check_all = lambda *_: iter([wrong])\n"
        "gpu_gate.eight_bit_error = lambda card: None\n"
        f"runpy.run_path({str(BENCH / 'gpu.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 1
    assert "WRONG rms_norm" in done.stdout
    assert "== limits" not in done.stdout
    assert "nothing is timed" in done.stderr


def test_idle_time_is_what_no_kernel_covers():
    sys.path.insert(0, str(BENCH))
    try:
        from gpu_engine import busy_and_idle
    finally:
        sys.path.remove(str(BENCH))
    events = [
        {"cat": "kernel", "ts": 10, "dur": 5},
        {"cat": "cpu_op", "ts": 0, "dur": 100},
        {"cat": "kernel", "ts": 12, "dur": 6},
        {"cat": "gpu_memcpy", "ts": 25, "dur": 5},
        {"cat": "kernel"},
    ]
    assert busy_and_idle(events) == (13, 7)
    assert busy_and_idle([]) == (0, 0)
