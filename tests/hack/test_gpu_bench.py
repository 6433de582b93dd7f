# SPDX-License-Identifier: Apache-2.0
"""The GPU benchmark's code runs: all phases but the peers, with tiny shapes on this CPU, kernels interpreted."""

import json
import re
import signal
import subprocess
import sys
import tempfile
from functools import partial
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


@pytest.fixture
def bench_modules(monkeypatch):
    """They are run by path, and import their neighbours by bare name."""
    monkeypatch.syspath_prepend(str(BENCH))


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
        assert command in (DOCS / "performance.md").read_text()
        for asked in re.findall("--phases (\\S+)", command):
            assert set(asked.split(",")) <= set(phases)


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
    """Has QUIRE_FORMS ask for forms."""
    from quire_kernels import dispatch

    def ask(forms):
        monkeypatch.setenv("QUIRE_FORMS", forms)
        dispatch.wishes.cache_clear()

    yield ask
    monkeypatch.undo()
    dispatch.wishes.cache_clear()


def test_the_gate_judges_the_forms_that_run(wish):
    """Behind one that is wrong, all else can be timed where QUIRE_FORMS has another one run in its place."""
    import gpu_gate

    import quire_kernels as ops

    assert gpu_gate.runs(ops.paged_attention)
    wish("paged_attention=torch,rms_norm=reference")
    assert not gpu_gate.runs(ops.paged_attention)
    assert not gpu_gate.runs(ops.rms_norm)
    assert gpu_gate.runs(ops.choose)
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

        shape, _steps = SimpleNamespace(vocab_size=9), SimpleNamespace(ahead=None)
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


def test_an_engine_starts_when_the_memory_of_the_one_before_is_free(bench_modules, monkeypatch):
    import card
    import torch

    free = iter([1 << 30, 1 << 30, 9 << 30])
    monkeypatch.setattr(card.Card, "free_bytes", property(lambda _: next(free)))
    monkeypatch.setattr(card.time, "sleep", lambda _: None)
    card.Card(torch.device("cpu")).wait_free(10 << 30)
    assert next(free, None) is None
    monkeypatch.setattr(card.Card, "free_bytes", property(lambda _: 1 << 30))
    monkeypatch.setattr(card, "FREE_TIMEOUT_S", 0.0)
    with pytest.raises(
        TimeoutError, match=r"1\.0 GiB of the card are free after 0 s, 10\.0 were; this process holds 0\.0"
    ):
        card.Card(torch.device("cpu")).wait_free(10 << 30)


def test_each_peer_is_alone_and_one_that_fails_leaves_the_others(bench_modules, monkeypatch):
    import card
    import gpu_peers
    import torch
    from child import ChildFailed

    open_, waited = [], []

    class Child:
        """Makes a token in a second, and fails as vLLM."""

        def __init__(self, name, script, settings, folder, python=None, timeout_s=None):
            assert (BENCH / script).is_file()
            self.name = name

        def __enter__(self):
            assert not open_
            assert len(waited) == self.num_started
            open_.append(self.name)
            return self

        def __exit__(self, *_):
            open_.clear()

        @property
        def num_started(self):
            return {"quire": 1, "vLLM": 2, "transformers": 3}[self.name]

        def call(self, command, requests, offsets):
            if self.name == "vLLM":
                raise ChildFailed("vLLM failed at 'run':\nTraceback\nRuntimeError: no")
            tokens = [[1] * num for _, num in requests]
            return {"seconds": self.num_started, "token_ids": tokens, "events": None}

    monkeypatch.setattr(gpu_peers, "Child", Child)
    monkeypatch.setattr(gpu_peers, "_cannot", lambda *_: None)
    monkeypatch.setattr(card.Card, "wait_free", lambda _, num_bytes: waited.append(num_bytes))
    rows = list(gpu_peers.rows(card.Card(torch.device("cpu")), False, sys.executable, 5))
    assert waited == [5, 5, 5]
    assert [(row["engine"], row.get("what"), row.get("left_out")) for row in rows] == [
        ("quire", "12 in, 6 out", None),
        ("quire", "a mix", None),
        ("vLLM", None, "vLLM left out: RuntimeError: no"),
        ("transformers", "12 in, 6 out", None),
        ("transformers", "a mix", None),
    ]
    assert [(r["to"], r["what"], r["ratio"], r["bar"]) for r in gpu_peers.ratios(rows)] == [
        ("transformers", "12 in, 6 out", 3.0, 3.0),
        ("transformers", "a mix", 3.0, 3.0),
    ]


def test_transformers_gets_loads_that_it_can_be_waited_for(bench_modules, tmp_path):
    """And its warm-up and plans are of those."""
    import gpu_peers
    import torch
    from card import Card

    card = Card(torch.device("cuda"))  # none is touched
    found = {peer.name: peer for peer in gpu_peers.peers(card, gpu_peers.loads(card, False), "python", tmp_path)}
    whats = {name: [load.what for load in peer.loads] for name, peer in found.items()}
    assert whats["quire"][-1] == "1000 in, 1000 out, 256 requests"
    assert whats["quire"] == whats["vLLM"]
    assert whats["transformers"] == whats["quire"][:-1]
    assert found["transformers"].settings["num_requests"] == 512


def test_without_vllm_one_line_says_so(bench_modules, tmp_path):
    import gpu_report
    import gpu_vllm
    import torch
    from card import Card

    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'Traceback' >&2\necho \"ImportError: no vllm\" >&2\nexit 1\n")
    python.chmod(0o755)
    # It is asked before anything is made, so that no GPU is touched.
    found = gpu_vllm.compare(Card(torch.device("cuda")), str(python))
    line = f"vLLM left out: '{python}' cannot import it: ImportError: no vllm"
    assert found == {"left_out": line}
    assert gpu_report.markdown({"about": {"card": "a card", "command": "gpu.py"}, "vllm": found}).endswith(
        f"\n{line}\n"
    )
    assert "cannot be run: No such file" in gpu_vllm.left_out(str(tmp_path / "none"))
    assert gpu_vllm.left_out("true") is None


def test_wrong_tokens_of_an_adapter_are_found(bench_modules, tmp_path):
    """Its last token changed, or its tokens taken for another adapter's."""
    import adapters
    import gpu_engine
    import gpu_vllm
    import torch
    from card import Card
    from measure import WrongOutput

    card = Card(torch.device("cpu"))
    gpu_vllm.write_checkpoint(card, gpu_engine.TINY, tmp_path / "model")
    folders = adapters.make(tmp_path / "model", tmp_path / "adapters", 2, 8)
    lora = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "model": str(tmp_path / "model")}
    with torch.inference_mode(), gpu_vllm.own_engine(card, gpu_engine.settings(card) | lora, folders) as (engine, run):
        right = gpu_vllm.warm_up(card, run)
        assert gpu_vllm.check(card, engine, right, folders) < 1e-3
        changed = [*right[:-1], [*right[-1][:-1], (right[-1][-1] + 1) % 300]]
        for wrong, which in ((changed, folders), (right, folders[::-1])):
            with pytest.raises(WrongOutput, match="deviations below the likeliest"):
                gpu_vllm.check(card, engine, wrong, which)


@pytest.fixture
def itl_of(bench_modules, monkeypatch):
    """One run of itl.py on a core that answers as told."""
    import core_traffic
    import itl

    def run(kind, said, far, num_loaded):
        def send(pod, asks, moves):
            moves += [itl.AdapterMove("slot", "cold", 0.1)] * num_loaded
            return [core_traffic.Answer(ask, 0.0, [said] * ask.num_tokens, [0.1 + i for i in range(2)]) for ask in asks]

        monkeypatch.setattr(itl, "send", send)
        monkeypatch.setattr(itl, "gap", lambda *_: far)
        plan = itl.Plan(1, 4.0, 4, 8, 2, 1, 50, deviation=2.0)
        return itl._run(None, plan, itl.Cast(["r"], ["c"], []), (0, kind, 3.0, ["c"]), {"c": [7]}, [])

    return run


def test_time_between_tokens_needs_right_tokens_and_loads(itl_of):
    assert itl_of("with", 7, 0.0, 4)["with_p99_ms"] == pytest.approx(1000)
    assert itl_of("without", 7, 0.0, 0)["without_p50_ms"] == pytest.approx(1000)
    # Another token, but as likely: two deviations are one of these logits.
    assert itl_of("with", 8, 0.9, 4)
    from measure import WrongOutput

    with pytest.raises(WrongOutput, match=r"'c' said \[8\] and alone \[7\]: 0.55 deviations below"):
        itl_of("with", 8, 1.1, 4)
    with pytest.raises(WrongOutput, match="a run with loads loaded 3 adapters; its short requests are 4"):
        itl_of("with", 7, 0.0, 3)
    with pytest.raises(WrongOutput, match="a run without loads loaded 1 adapters"):
        itl_of("without", 7, 0.0, 1)


def test_rounds_of_time_between_tokens_are_kept_as_they_come(bench, monkeypatch):
    """Each is written when it is over, and none is begun that would not end in time."""
    import gpu_bench
    import gpu_itl
    from measure import WrongOutput

    def phase(run, wrong):
        def rounds(*_):
            for i in range(1, 6):
                run._began -= 100
                yield {"runs": [{}] * i, "rounds": 5, "seconds": 50.0, "ratio": 1.0 + i / 10}
                written.append(json.loads(run._options.out.read_text())["itl"]["ratio"])
                if wrong:
                    raise WrongOutput("no")

        monkeypatch.setattr(gpu_itl, "measure", rounds)
        run._checks = {"adapters": {"other_tokens": 0, "tokens": 7}}
        run._card = SimpleNamespace(wait_free=lambda _: None)
        gpu_bench.Bench._itl(run)

    written: list[float] = []
    code, found = bench({"itl": lambda run: phase(run, False)}, budget_s=350.0)
    assert (code, found["cut_short"], found["itl"]["ratio"]) == (0, ["itl"], 1.3)
    assert written == [1.1, 1.2]
    code, found = bench({"itl": lambda run: phase(run, False)})
    assert (code, "cut_short" in found, found["itl"]["ratio"]) == (0, False, 1.5)
    code, found = bench({"itl": lambda run: phase(run, True)})
    assert (code, found["itl"]) == (1, {"check": {"other_tokens": 0, "tokens": 7}})


def test_room_for_adapters_is_looked_for(bench_modules, monkeypatch, tmp_path):
    """On the disk, or in memory, or for fewer of them."""
    import adapters
    import gpu_engine
    import gpu_itl

    assert adapters.num_bytes(gpu_engine.LLAMA_8B, 16) == 83_886_080
    monkeypatch.setattr(gpu_itl.tempfile, "gettempdir", lambda: str(tmp_path))
    shm = Path("/dev/shm")

    def found(on_disk, in_memory):
        free = {tmp_path: on_disk, shm: in_memory}
        monkeypatch.setattr(gpu_itl.shutil, "disk_usage", lambda place: type("", (), {"free": 100 * free[place]}))
        with gpu_itl._room(100, 20) as (folder, num):
            return folder.parent, num

    assert found(28, 1000) == (tmp_path, 20)
    assert found(27, 1000) == (shm, 20)
    assert found(27, 12) == (tmp_path, 19)
    assert found(10, 12) == (shm, 4)
    with pytest.raises(OSError, match="no room for 9 files of 100 bytes; set TMPDIR"):
        found(8, 8)


def test_files_without_a_disk_are_not_said_to_be_read_from_one(bench_modules):
    import adapters

    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        Path(name, "adapter_model.safetensors").write_bytes(b"0" * 5000)
        assert adapters.leave_memory([Path(name)]) in ("memory", "unknown")


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
