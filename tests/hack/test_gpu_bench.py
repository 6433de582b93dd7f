# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark's code runs: all phases but the peers, with tiny shapes on this CPU, kernels interpreted."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.timeout(600)

BENCH = Path(__file__).parents[1] / "bench"
DOCS = BENCH.parents[1] / "docs"
PHASES = "gate,limits,kernels,start,engine,lora,itl,vllm,tune"


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
    of_adapters = ["adapters", "adapters, side stream"]
    of_base = ["base, LoRA disabled", "base, LoRA enabled"]
    assert [row["row"] for row in results["lora"]["rows"]] == of_base + of_adapters
    assert {(r["of"], r["bar"]) for r in results["lora"]["ratios"]} == {
        ("adapters", 0.88),
        ("base, LoRA enabled", 0.98),
        ("adapters, side stream", 1.0),
    }
    assert [(row["what"], row["bar"]) for row in results["start"]] == [
        ("first start, nothing compiled", None),
        ("second start", 20.0),
    ]
    assert all(row["seconds"] > 0 and row["weights_bytes"] > 0 for row in results["start"])
    itl = results["itl"]
    assert (itl["bar"], itl["aim"], itl["files"], itl["loads_per_run"], len(itl["runs"])) == (1.1, 1.03, 6, 6, 2)
    assert itl["ratio"] == itl["p99_ratio"]["median"] > 0
    assert itl["check"] == {"other_tokens": 0, "tokens": 7}
    [ratio] = results["vllm"]["ratios"]
    assert (ratio["of"], ratio["to"]) == ("adapters", "this engine in vLLM's place, adapters")
    assert (ratio["bar"], ratio["aim"]) == (1.2, 1.5)
    # It judges the same tokens of the same weights: both gaps are what float32 rounds.
    assert max(results["vllm"]["gaps"].values()) < 1e-3
    # What has traced a process leaves it slower: nothing is timed after it.
    assert list(results["engine"])[-1] == "idle"
    # A trace without a device's work says nothing.
    assert {idle["idle_ms"] for idle in results["engine"]["idle"]} == {None}
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
    assert "A core process, second start: " in run[1]
    assert "while 6 of 6 cold adapters of 0.0 MB load in 0.5 s from" in run[1]
    assert "| adapters / this engine in vLLM's place, adapters |" in run[1]


def test_without_a_gpu_it_says_what_to_do():
    done = subprocess.run([sys.executable, str(BENCH / "gpu.py")], capture_output=True, text=True)
    assert done.returncode == 2
    assert "--cpu-rehearsal" in done.stderr


def test_help_needs_no_torch_and_knows_every_phase(bench_modules):
    from gpu_phases import PHASES as phases

    program = "import runpy, sys; sys.modules['torch'] = None; sys.argv = ['gpu.py', '--help']; "
    program += f"runpy.run_path({str(BENCH / 'gpu.py')!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    documents = (DOCS / "benchmarks.md").read_text() + done.stdout
    for name, phase in phases.items():
        assert phase.what in done.stdout
        assert f"| `{name}` |" in documents
    commands = re.findall(r"python3 tests/bench/gpu.py .*?(?=  |$)", done.stdout, re.MULTILINE)
    assert len(commands) == 7
    for command in commands[:-1]:
        assert command in (DOCS / "gpu-design.md").read_text()
        for asked in re.findall("--phases (\\S+)", command):
            assert set(asked.split(",")) <= set(phases)


def measured(run):
    run.results["limits"] = {"copy_bytes_per_s": 1.0}


def a_minute_passes(run):
    run._began -= 61


def broken(run):
    run.results["lora"] = {"rows": [1]}
    raise RuntimeError("out of memory")


def test_a_phase_that_fails_keeps_what_was_measured_and_stops_nobody(bench, capsys):
    import gpu_report

    code, written = bench({"gate": lambda _: None, "limits": measured, "lora": broken, "tune": lambda _: None})
    assert code == 1
    assert written["limits"] == {"copy_bytes_per_s": 1.0}
    assert written["lora"] == {"rows": [1]}
    assert written["failed"] == {"lora": "RuntimeError: out of memory"}
    assert list(written["seconds"]) == ["gate", "limits", "lora", "tune"]
    assert "Traceback" in capsys.readouterr().err
    assert "lora failed: RuntimeError: out of memory" in gpu_report.markdown({**written, "limits": None, "lora": None})


def test_a_red_gate_times_nothing(bench, monkeypatch, capsys):
    """A form that computes wrongly ends the run before anything is timed."""
    import gpu_bench
    import gpu_gate

    wrong = gpu_gate.Finding("rms_norm", 1.0, 1e-5)
    monkeypatch.setattr(gpu_gate, "check_all", lambda *_: iter([wrong]))
    monkeypatch.setattr(gpu_gate, "eight_bit_error", lambda card: None)
    code, written = bench({"gate": gpu_bench.Bench._gate, "limits": measured})
    out, err = capsys.readouterr()
    assert (code, "limits" in written) == (1, False)
    assert "WRONG rms_norm" in out
    assert "nothing is timed" in err


def test_a_gate_that_does_not_end_is_ended(bench_modules, tmp_path, monkeypatch, capsys):
    import gpu_verdict

    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 100\n")
    hangs.chmod(0o755)
    started, popen = [], subprocess.Popen
    monkeypatch.setattr(gpu_verdict.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1])
    monkeypatch.setattr(gpu_verdict, "sys", SimpleNamespace(executable=str(hangs), stderr=sys.stderr))
    monkeypatch.setattr(gpu_verdict, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(gpu_verdict.os, "cpu_count", lambda: 4)
    monkeypatch.setattr(gpu_verdict, "GRACE_S", 0.1)
    assert gpu_verdict.findings(SimpleNamespace(is_gpu=True)) == ([], False)
    assert "--gate-share 0/2 has not ended after 0.2 s" in capsys.readouterr().err
    assert [process.returncode for process in started] == [-signal.SIGKILL] * 2


def test_a_part_of_the_gate_that_fails_hides_nothing_of_the_others(bench_modules, tmp_path, monkeypatch, capsys):
    """What they found narrows the fault down."""
    import gpu_verdict

    share = tmp_path / "python"
    share.write_text("""#!/bin/sh
[ "$3" = 0/2 ] && exit 1
echo '[{"what": "rms_norm", "error": 1.0, "limit": 0.1, "form": ""}]'
""")
    share.chmod(0o755)
    monkeypatch.setattr(gpu_verdict, "sys", SimpleNamespace(executable=str(share), stderr=sys.stderr))
    monkeypatch.setattr(gpu_verdict.os, "cpu_count", lambda: 4)
    findings, whole = gpu_verdict.findings(SimpleNamespace(is_gpu=True))
    assert ([finding.what for finding in findings], whole) == (["rms_norm"], False)
    assert "--gate-share 0/2: exit code 1" in capsys.readouterr().err


@pytest.fixture
def wish(bench_modules, monkeypatch):
    """Has QUIRE_KERNELS ask for forms."""
    from quire_kernels import dispatch

    def ask(forms):
        monkeypatch.setenv("QUIRE_KERNELS", forms)
        dispatch.overrides.cache_clear()

    yield ask
    monkeypatch.undo()
    dispatch.overrides.cache_clear()


def test_the_gate_judges_the_forms_that_run(wish):
    """Behind one that is wrong, all else can be timed where QUIRE_KERNELS has another one run in its place."""
    import gpu_gate

    import quire_kernels as ops

    assert gpu_gate.runs(ops.paged_attention)
    wish("paged_attention=torch,rms_norm=reference")
    assert not gpu_gate.runs(ops.paged_attention)
    assert not gpu_gate.runs(ops.rms_norm)
    assert gpu_gate.runs(ops.sample)
    # It leaves most to ours.
    wish("paged_attention=fused")
    assert gpu_gate.runs(ops.paged_attention)
    # Where an operation has no such form, the preferred one runs.
    wish("torch")
    assert (gpu_gate.runs(ops.rms_norm), gpu_gate.runs(ops.prepare_inputs)) == (False, True)


def test_a_form_that_runs_only_if_asked_for_costs_nobody_else(bench, wish, monkeypatch):
    import gpu_bench
    import gpu_gate

    def fused():
        yield gpu_gate.Finding("fused", 1.0, 0.1)
        raise RuntimeError("no engine")

    found = list(gpu_gate._asked_for(gpu_gate.FUSED, fused()))
    assert [finding.good for finding in found] == [False, False]
    assert "RuntimeError: no engine" in found[1].what
    monkeypatch.setattr(gpu_gate, "check_all", lambda *_: iter([gpu_gate.Finding("ours", 0.0, 0.1), *found]))
    monkeypatch.setattr(gpu_gate, "eight_bit_error", lambda card: None)
    code, written = bench({"gate": gpu_bench.Bench._gate, "limits": measured})
    assert (code, written["gate"]["bad"], written["gate"]["left_out"]) == (0, [], [gpu_gate.FUSED])
    assert "limits" in written
    wish(gpu_gate.FUSED)
    with pytest.raises(RuntimeError, match="no engine"):
        list(gpu_gate._asked_for(gpu_gate.FUSED, fused()))


def test_a_form_of_torchs_that_cannot_be_measured_leaves_the_others(bench_modules, capsys):
    import gpu_kernels

    def seconds(calls):
        raise RuntimeError("operation not permitted when stream is capturing")

    card, limits = SimpleNamespace(seconds=seconds), gpu_kernels.Limits(1.0, 1.0)
    assert not list(gpu_kernels._of_form(card, limits, "torch", "choose (torch)", [], 1.0))
    assert "choose (torch): RuntimeError: operation not permitted" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match="capturing"):
        list(gpu_kernels._of_form(card, limits, "own", "choose (own)", [], 1.0))


def test_a_tie_is_no_wrong_token(bench_modules, monkeypatch):
    """Rounding may turn round two tokens that are as likely; what comes after them is another text."""
    import gpu_engine
    import torch
    from card import Card

    drive, runs = gpu_engine.drive, []

    def turned_round(*args):
        found = drive(*args)
        runs.append(found)
        if len(runs) % 2:
            found["token_ids"][0] = [found["token_ids"][0][0], *((t + 1) % 300 for t in found["token_ids"][0][1:])]
        return found

    monkeypatch.setattr(gpu_engine, "drive", turned_round)
    card = Card(torch.device("cpu"))
    with torch.inference_mode():
        assert gpu_engine.check_graphs(card) == (3, 7)
        # As far apart as they are, by the logits of the references.
        monkeypatch.setattr(gpu_engine, "MAX_TIE", 10.0)
        assert gpu_engine.check_graphs(card) == (0, 7)


def test_idle_time_is_measured_while_all_decode(bench_modules, monkeypatch):
    """Prompts start one a step here, as long ones do: the first to start must not be over before the last step."""
    import gpu_engine
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    num_seqs, num_steps = 30, 4

    class Engine:
        """Counts down the tokens of its sequences."""

        shape, _step_executor = SimpleNamespace(vocab_size=9), SimpleNamespace(overlap=None)
        _runner = SimpleNamespace(_graphs=None)

        def __init__(self):
            self.waiting, self.running, self.sizes = [], {}, []

        def add(self, request):
            self.waiting.append(request)

        def step(self):
            if self.waiting:
                request = self.waiting.pop(0)
                self.running[request.id] = request.params["max_tokens"]
            results = [SimpleNamespace(id=i) for i in self.running]
            self.running = {i: left - 1 for i, left in self.running.items() if left > 1}
            self.sizes.append(len(results))
            return SimpleNamespace(results=results)

        def abort(self, ids):
            self.running = {}

        has_work = property(lambda self: bool(self.running))

    engine = Engine()
    gpu_engine.idle_per_step(engine, num_seqs, 5, num_steps, ahead=True)
    assert engine.sizes[-3 * num_steps :] == [num_seqs] * 3 * num_steps


def test_nothing_starts_when_time_is_over(bench, capsys):
    import gpu_report

    code, written = bench({"gate": a_minute_passes, "limits": measured}, budget_s=60.0)
    assert (code, written["not_started"], "limits" in written) == (0, ["limits"], False)
    assert "== limits: not started, 60 s are over" in capsys.readouterr().out
    assert gpu_report.markdown(written).endswith("\nNot started, as time was over: limits.\n")


def test_a_green_gate_counts_for_the_same_code_on_the_same_card(bench, bench_modules, tmp_path, monkeypatch, capsys):
    import gpu_bench
    import gpu_gate

    _, earlier = bench({"gate": lambda run: run.results.update(gate={"num": 7, "bad": []})})
    monkeypatch.setattr(gpu_gate, "check_all", lambda *_: iter([]))
    monkeypatch.setattr(gpu_gate, "eight_bit_error", lambda card: None)

    def num(change):
        path = tmp_path / "earlier.json"
        path.write_text(json.dumps(earlier | {"about": earlier["about"] | change.pop("about", {})} | change))
        return bench({"gate": gpu_bench.Bench._gate}, gated=path)[1]["gate"]["num"]

    assert num({}) == 7
    checked: list[dict[str, object]] = []
    path = tmp_path / "checked.json"
    check = {"other_tokens": 0, "tokens": 7}
    wrong = {"other_tokens": 1, "tokens": 7}
    path.write_text(json.dumps(earlier | {"lora": {"check": check}, "engine": {"check": wrong}}))
    bench({"gate": gpu_bench.Bench._gate, "itl": lambda run: checked.append(run._checks)}, gated=path)
    # What was wrong is checked again.
    assert checked == [{"adapters": check}]
    assert num({"about": {"code": "another"}}) == 0
    assert "does not count: another code" in capsys.readouterr().out
    assert num({"about": {"card": "another"}}) == 0
    assert num({"gate": {"num": 7, "bad": [{}]}}) == 0
    monkeypatch.setenv("QUIRE_EARLY_LAUNCH", "0")
    assert num({}) == 0
    assert "does not count: another forms" in capsys.readouterr().out


def test_what_was_measured_is_kept_when_it_is_told_to_end(tmp_path):
    script = tmp_path / "ended.py"
    script.write_text(
        "import os, runpy, signal, sys\n"
        f"sys.path[:0] = {[str(BENCH), str(BENCH.parents[1] / 'backend'), str(BENCH.parents[1] / 'kernels')]!r}\n"
        f"sys.argv = [{str(BENCH / 'gpu.py')!r}, '--cpu-rehearsal', '--phases', 'limits', '-o', 'results.json']\n"
        "import gpu_bench\n"
        "gpu_bench.Bench._gate = lambda run: run.results.update(gate={'num': 7, 'bad': []})\n"
        "gpu_bench.Bench._limits = lambda run: os.kill(os.getpid(), signal.SIGTERM)\n"
        f"runpy.run_path({str(BENCH / 'gpu.py')!r}, run_name='__main__')\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 143, done.stderr
    assert json.loads((tmp_path / "results.json").read_text())["gate"]["num"] == 7
    assert "Gate: 7 of 7 comparisons good." in done.stdout


def test_idle_time_is_what_no_kernel_covers(bench_modules):
    from gpu_engine import busy_and_idle

    events = [
        {"cat": "kernel", "ts": 10, "dur": 5},
        {"cat": "cpu_op", "ts": 0, "dur": 100},
        {"cat": "kernel", "ts": 12, "dur": 6},
        {"cat": "gpu_memcpy", "ts": 25, "dur": 5},
        {"cat": "kernel"},
    ]
    assert busy_and_idle(events) == {"num": 3, "busy": 13, "idle": 7, "gaps": 7}
    assert busy_and_idle([]) == {"num": 0, "busy": 0, "idle": 0, "gaps": 0}
    # Between kernels of a graph there are one or two.
    assert busy_and_idle([*events, {"cat": "kernel", "ts": 32, "dur": 1}])["gaps"] == 7
