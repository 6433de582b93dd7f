# SPDX-License-Identifier: Apache-2.0
"""The measuring driver for GPUs: its rehearsal on a CPU with faults, kills and resumption, and its pure parts."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.timeout(1200)

BENCH = Path(__file__).parents[1] / "bench"
DRIVER = [sys.executable, str(BENCH / "gpu.py")]


def _run(folder, *options):
    argv = [*DRIVER, "-o", str(folder), *options]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done, json.loads((folder / "results.json").read_text())


def _outcomes(results):
    return {name: phase["outcome"] for name, phase in results["phases"].items()}


def test_rehearsal_with_faults_loses_no_result(bench_modules, tmp_path):
    """All phases. A crash and an exhausted memory in two of them: each is retried, and every phase has its rows.
    tests/emulated/test_bench.py has the other faults."""
    faults = "limits=crash,attention=memory"
    done, results = _run(tmp_path / "run", "--cpu-rehearsal", "--limits-s", "all=400", "--faults", faults)
    from gpu_phases.plan import PHASES

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    found = results["phases"]
    assert set(_outcomes(results).values()) == {"complete"}
    assert {name for name, phase in found.items() if phase["rows"]} == set(PHASES)
    assert found["limits"]["other_attempts"] == ["as is: failed: signal SIGSEGV"]
    assert found["attention"]["other_attempts"][0].startswith("as is: failed: RuntimeError: [enforce fail")
    assert {found[name]["rung"] for name in ("limits", "attention")} == {"QUIRE_EARLY_LAUNCH=0"}
    # The rows before a fault are in its own file, also of the first attempt.
    assert len(json.loads((tmp_path / "run/limits.0.rows.json").read_text())) == 1
    assert len(found["gate"]["rows"]) > 25 and not any(row.get("wrong") for row in found["gate"]["rows"])
    assert not any(row.get("differs") for row in found["gate_b"]["rows"])
    # No bar holds or is missed in a rehearsal, and every one of these phases measured its own.
    bars = {bar["what"]: bar for bar in results["bars"] if bar["bar"] is not None}
    assert {bar["holds"] for bar in bars.values()} == {None}
    # Neither vLLM nor a trace of a device exists here.
    unmeasured = {what.partition(",")[0] for what, bar in bars.items() if bar["outcome"] is None}
    assert unmeasured == {"against vLLM", "GPU idle per decoding step"}
    table = (tmp_path / "run/table.md").read_text()
    assert "A rehearsal: times and rates mean nothing." in table and table in done.stdout
    assert re.search(r"limits +complete, \d+ of 400 s, 4 rows, QUIRE_EARLY_LAUNCH=0", done.stdout)


def test_a_killed_run_is_resumed(tmp_path):
    """The supervisor, and then a phase's process with it, are killed; what was measured stays."""
    folder = tmp_path / "run"
    options = ["--cpu-rehearsal", "--phase", "limits", "--limits-s", "all=300"]
    first = subprocess.run([*DRIVER, "-o", str(folder), *options, "--wait-s", "1"], capture_output=True, text=True)
    assert first.returncode == 75 and "--resume follows it" in first.stdout
    while not (folder / "gate.0.rows.json").exists():
        time.sleep(0.1)
    facts = (folder / "facts.0.rows.json").read_bytes()
    supervisor = psutil.Process(int((folder / "lock").read_text()))
    children = supervisor.children(recursive=True)
    os.kill(supervisor.pid, signal.SIGKILL)
    assert not psutil.wait_procs(children, timeout=30)[1]
    done, results = _run(folder, "--resume")
    assert done.returncode == 0, done.stdout
    assert _outcomes(results) == {"facts": "complete", "gate": "complete", "limits": "complete"}
    assert (folder / "facts.0.rows.json").read_bytes() == facts
    assert results["phases"]["gate"]["other_attempts"] == []


def test_messages_without_a_gpu_or_a_run(tmp_path):
    done = subprocess.run(DRIVER, capture_output=True, text=True)
    assert done.returncode == 2 and "--cpu-rehearsal" in done.stderr
    done = subprocess.run([*DRIVER, "--resume", "-o", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "contains no run" in done.stderr
    (tmp_path / "mine").touch()
    done = subprocess.run([*DRIVER, "--cpu-rehearsal", "-o", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 2 and "contains other files" in done.stderr
    assert (tmp_path / "mine").exists()


def test_help_needs_no_torch_and_names_every_phase(bench_modules):
    from gpu_phases.plan import PHASES, first_phases

    program = "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['gpu.py', '--help']; "
    program += f"runpy.run_path({str(BENCH / 'gpu.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(phase.what in done.stdout for phase in PHASES.values())
    # The phases that fit into 13 minutes even if each takes all of its time.
    assert sum(phase.limit_s for phase in first_phases()) <= 13 * 60


def test_the_ladder_replaces_what_is_wrong(bench_modules):
    from gpu_phases import ladder

    import quire_kernels
    from quire_kernels.dispatch import collect_ops

    assert ladder.rungs({}, ()) == [{}, {"QUIRE_EARLY_LAUNCH": "0"}, {"QUIRE_EARLY_LAUNCH": "0", "QUIRE_GRAPHS": "0"}]
    early = {"QUIRE_EARLY_LAUNCH": "0"}
    norm = early | {"QUIRE_KERNELS": "add_rms_norm=reference,rms_norm=torch"}
    attention = early | {"QUIRE_KERNELS": "paged_attention=torch", "QUIRE_GRAPHS": "0"}
    assert ladder.rungs({}, ["rms_norm"])[2:] == [norm, norm | {"QUIRE_GRAPHS": "0"}]
    assert ladder.next_rung({}, [{}, early], ["paged_attention"]) == attention
    assert ladder.next_rung({}, [{}, early, attention], ["paged_attention"]) is None
    assert ladder.next_rung(norm, [norm], ["prepare_inputs"])["QUIRE_KERNELS"].endswith(",prepare_inputs=reference")
    cudnn = ladder.ops_in_traceback('File "/a/quire_kernels/gpu/fused_attention.py", line 3')
    assert ladder.rungs({}, cudnn)[2] == early | {"QUIRE_KERNELS": "paged_attention=own"}
    assert ladder.next_rung({}, [{}, early], {"paged_attention", *cudnn}) == attention
    assert ladder.ops_in_traceback('File "/a/quire_kernels/gpu/sampling.py", line 3') >= {"sample", "uniform"}
    # Every fallback exists.
    ops = {op.name: op.implementations("cuda") for op in collect_ops(vars(quire_kernels))}
    for env in (ladder.rungs({}, [op])[2] for names in ladder.OPS_BY_FILE.values() for op in names):
        forms = dict(item.split("=") for item in env["QUIRE_KERNELS"].split(","))
        assert all(form in ops[op] for op, form in forms.items())


@pytest.mark.parametrize("wrong", [("rms_norm",), ("graphs",), ()])
def test_a_red_gate_moves_the_phases_behind_it(bench_modules, tmp_path, monkeypatch, wrong):
    """They use the reference of the wrong operation, or no graphs, and do not time the replaced kernels."""
    from gpu_phases import store, supervisor

    envs = {}

    def run_process(self, phase, attempt, limit_s):
        envs.setdefault(phase.name, []).append(attempt.env)
        is_wrong = phase.is_gate and any(
            f"{op}=" not in attempt.env.get("QUIRE_KERNELS", "")
            and (op != "graphs" or attempt.env.get("QUIRE_GRAPHS") != "0")
            for op in wrong
        )
        rows = [{"what": "x", "value": 1.0, "unit": "", "op": op, "wrong": is_wrong} for op in wrong]
        store.write_json(store.rows_path(tmp_path, phase.name, attempt.number), rows)
        store.log_path(tmp_path, phase.name, attempt.number).touch()
        return "failed: wrong results" if is_wrong else store.COMPLETE

    monkeypatch.setattr(supervisor.Supervisor, "_run_process", run_process)
    settings = {"phases": ["gate", "attention", "engine"], "limits_s": {}, "tiny": False}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    assert supervisor.Supervisor(tmp_path).run() is (wrong != ("rms_norm",))
    assert envs["engine"] == [envs["gate"][-1]]
    assert ("attention" in envs) is (wrong != ("rms_norm",))
    expected = "add_rms_norm=reference,rms_norm=torch" if wrong == ("rms_norm",) else None
    assert envs["engine"][0].get("QUIRE_KERNELS") == expected
    assert (envs["engine"][0].get("QUIRE_GRAPHS") == "0") is (wrong == ("graphs",))


def test_a_wrong_case_of_the_gate_does_not_hide_the_others(bench_modules, monkeypatch):
    """One process crashes in a case and another one hangs: both cases are wrong, and all others are compared."""
    import torch
    from card import Card
    from gpu_phases import gate, gate_cases
    from gpu_phases.process import Context

    cases = [gate_cases.Case(op, "", True, lambda: iter(())) for op in ("rms_norm", "sample", "add_lora", "uniform")]
    script = (
        "import json, os, sys, time\n"
        "for i in map(int, sys.argv[3:]):\n"
        "    os.abort() if i == 1 else time.sleep(99) if i == 2 else None\n"
        "    print(json.dumps({'case': i, 'what': 'output', 'value': 0.0, 'limit': 0.1}), flush=True)\n"
        "    print(json.dumps({'done': i}), flush=True)\n"
    )
    popen = subprocess.Popen
    monkeypatch.setattr(gate.subprocess, "Popen", lambda argv, **k: popen([argv[0], "-c", script, *argv[3:]], **k))
    monkeypatch.setattr(gate.gate_cases, "cases", lambda _: iter(cases))
    monkeypatch.setattr(gate, "REHEARSED_CASE_LIMIT_S", 2.0)
    context = Context(Card(torch.device("cpu"), True), Path(), "", 0.0)
    rows = {row["op"]: row for row in gate.tier_a(context)}
    assert {op for op, row in rows.items() if row.get("wrong")} == {"sample", "add_lora"}
    assert "exit code -6" in rows["sample"]["what"] and "no answer in 2 s" in rows["add_lora"]["what"]
    assert rows["uniform"]["value"] == 0.0


def test_every_prediction_has_its_reasons(bench_modules):
    """And a floor, also each ratio to another engine. Each number is predicted once."""
    from gpu_phases.bars import BARS, PREDICTIONS

    assert all(each.floor and each.predicted and each.why for each in (*BARS, *PREDICTIONS))
    numbers = [(each.rows, each.field) for each in (*BARS, *PREDICTIONS)]
    assert len(set(numbers)) == len(numbers)
    assert all(bar.bar is not None and bar.aim is not None for bar in BARS)


def test_floors_of_experts_follow_from_their_bytes(bench_modules):
    """One token selects 4 of 32 experts; 2,048 tokens read all, and their products take longer than that.
    A hundredth of the weights of an expert has a hundredth of the bytes."""
    import torch
    from card import Card
    from gpu_phases import gate_cases
    from gpu_phases.bars import EXPERT_BYTES, PREDICTIONS

    floors = {each.rows: each.floor for each in PREDICTIONS}
    assert floors["mxfp4: 32 experts, 4 for each of 1 tokens"] == "4.0 x 13.2 MB / 4.3 TB/s: 12 us"
    assert floors["int8: 32 experts, 4 for each of 16 tokens"] == "28.2 x 24.9 MB / 4.3 TB/s: 163 us"
    assert floors["fp8: 32 experts, 4 for each of 2048 tokens"].endswith(" / 790 TFLOP/s: 516 us")
    assert set(EXPERT_BYTES) == {"mxfp4", *gate_cases.QUANTIZED}
    for name, num_bytes in EXPERT_BYTES.items():
        experts = gate_cases.quantized_experts(Card(torch.device("cpu"), True), name, (1, 288, 288), torch.float32)
        assert 100 * (experts.gate_up.num_bytes + experts.down.num_bytes) == pytest.approx(num_bytes, rel=0.02)


def test_bars_take_the_row_that_counts(bench_modules):
    from gpu_phases.bars import BARS, PREDICTIONS
    from gpu_phases.table import markdown, merge

    decode = [{"what": f"decode, {n}", "key": "decode_attention", "fraction": f, "value": 1.0, "unit": "us"}
              for n, f in ((64, 0.9), (256, 0.79))]  # fmt: skip
    prefill = [
        {"what": what, "key": "prefill_attention", "tflops": rate, "value": 1.0, "unit": "us"}
        for what, rate in (("own", 370), ("cudnn", 550))
    ]
    bars = {bar.rows: bar for bar in BARS}
    assert bars["decode_attention"].outcome(decode) == 0.79 and not bars["decode_attention"].holds(0.79)
    assert bars["prefill_attention"].outcome(prefill) == 550 and bars["prefill_attention"].holds(550.0)
    assert bars["start"].holds(19.0) and not bars["start"].holds(21.0) and bars["start"].outcome([]) is None
    from gpu_phases.store import Attempt

    attempts = {"attention": [Attempt("attention", 0, "as is", {}, "complete", 1.0, decode + prefill)]}
    text = markdown(merge({"tiny": False}, attempts))
    assert (
        f"1 hold, 1 are missed, {len(BARS) + sum(p.bar is not None for p in PREDICTIONS) - 2} were not measured."
        in text
    )
