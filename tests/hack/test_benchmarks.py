# SPDX-License-Identifier: Apache-2.0
"""One rehearsal of the benchmarks that need no GPU: they run, their numbers are consistent, and they reject wrong
output."""

import json
import statistics
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.openai_front import TINY
from support.tiny_checkpoints import BASE, make_llama, write_checkpoint
from support.tokenizer import byte_level, save_tokenizer
from transformers import LlamaConfig

BENCH = Path(__file__).resolve().parents[1] / "bench"
# The scripts in tests/bench are run by path and import their neighbours by bare name.
sys.path.insert(0, str(BENCH))

import engines  # noqa: E402
import measure  # noqa: E402
from child import ChildProcess  # noqa: E402
from workload import Request, Workload  # noqa: E402

pytestmark = pytest.mark.timeout(600)

FLAGS = "--requests 5 --prompt-tokens 8-24 --output-tokens 24-48 --seed 3 --runs 2 --rates 25 --prefix-tokens 200"


def run_script(name, *arguments, codes=(0,)):
    command = [sys.executable, str(BENCH / name), *map(str, arguments)]
    completed = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert completed.returncode in codes, completed.stdout + completed.stderr
    return completed.stdout


@pytest.mark.server
def test_serving_benchmark(tmp_path):
    model, output, page = make_llama(tmp_path / "model"), tmp_path / "results.json", tmp_path / "benchmarks.md"
    page.write_text(
        "<!-- results of tests/bench/serving.py: begin -->stale<!-- results of tests/bench/serving.py: end -->"
    )
    table = run_script("serving.py", "--model", model, "-o", output, "--markdown", page, *FLAGS.split())
    assert "| offline " in table and "| http / offline " in table
    results = json.loads(output.read_text())

    speeds = {}
    for run in results["runs"]:
        assert run["num_requests"] == 5
        assert run["output_tokens_per_s"] == pytest.approx(run["num_output_tokens"] / run["seconds"])
        speeds.setdefault((run["engine"], run["rate"]), []).append(run["output_tokens_per_s"])
    assert [*speeds] == [
        *((name, None) for name in ("offline", "http", "grpc", "openai", "transformers")),
        *((name, 25.0) for name in ("http", "grpc", "openai")),
    ]
    for row in results["summary"]:
        values = speeds[row["engine"], row["rate"]]
        assert row["output_tokens_per_s"] == {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }

    assert page.read_text().count("| offline / transformers ") == 1 and "stale" not in page.read_text()

    commands = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [command for command in commands if str(model) in command] == []


@pytest.mark.server
def test_soak():
    output = run_script("soak.py", "--minutes", "0.1", "--clients", "8")
    assert output.startswith("right ")
    processes = {"supervisor", "core", "text", "openai", "server", "stub"}
    assert {line.split()[0] for line in output.splitlines()[-6:]} == processes


@pytest.mark.server
def test_frontend_benchmark():
    output = run_script("frontend.py", "4", "20")
    assert [line.split()[0] for line in output.splitlines()] == ["client", *["http"] * 3, *["grpc"] * 3]


def test_wire_benchmark():
    """It compares this tree with itself, so its exit code is 1."""
    lines = run_script("wire.py", "--base", str(BENCH.parents[1]), "--rounds", "1", codes=(1,)).splitlines()
    totals = [line for line in lines if line.startswith("core to frontend")]
    assert len(lines) == 11 and len(totals) == 2 and all(0.5 < float(line.split()[-1]) < 2 for line in totals)


def test_openai_front_benchmark():
    """Its exit code is 1 above a bar, which a busy machine can cause."""
    sizes = "--pairs 3 --connections 8 --slow-tokens 8 --streams 2 --tokens 400 --runs 1 --prompt-tokens 8"
    sizes += " --parts ttft,slow,messages"
    output = run_script("openai_front.py", "--model", TINY, *sizes.split(), codes=(0, 1))
    assert [line.split(",")[1].split()[0] for line in output.splitlines() if "bar" in line] == ["bar"] * 5
    assert "load" in output.splitlines()[-1]


@pytest.mark.server
def test_names_benchmark(tmp_path):
    output = tmp_path / "results.json"
    flags = "--adapters 12 --slots 2 --cached 4 --clients 2 --seconds 1 --runs 1 --output-tokens 4"
    table = run_script("names.py", "--model", TINY, "-o", output, *flags.split())
    assert "| 1.1 |" in table
    [figures] = json.loads(output.read_text())["rounds"]
    assert figures["failed"] == 0 and 2 < figures["first_adapters"] <= 12


@pytest.mark.server
def test_images_benchmark() -> None:
    lines = run_script("images.py", "--sizes", "112", "--runs", "2").splitlines()
    assert [line.split(":")[0] for line in lines] == [f"112 x 112 pixels, {what}, ms" for what in ("idle", "beside")]


def test_fairness_benchmark() -> None:
    """Its exit code is 1 above the bar, which a busy machine can cause."""
    output = run_script("fairness.py", "--model", TINY, "--seconds", "2", "--prompt-tokens", "16", codes=(0, 1))
    assert [line.split()[0] for line in output.splitlines()] == ["alone", "prompts", "logprobs", "readers"]


def test_serving_benchmark_rejects_wrong_output(tmp_path):
    model, other = make_llama(tmp_path / "model"), make_llama(tmp_path / "other", seed=1)
    requests = Workload(num_requests=2, prompt_tokens=(8, 24), output_tokens=(24, 48), vocab_size=384, seed=3).requests(
        0
    )
    settings = {"dtype": "float32", "batch": 2}
    with (
        ChildProcess("oracle", "static_batches.py", {"model": str(model), **settings}, tmp_path) as oracle,
        ChildProcess("wrong", "static_batches.py", {"model": str(other), **settings}, tmp_path) as wrong,
    ):
        right, others = (child.call("run", requests=requests, offsets=None)["token_ids"] for child in (oracle, wrong))
        assert engines.check_gap("right", requests, right, oracle) == pytest.approx(0, abs=1e-4)
        with pytest.raises(measure.WrongOutput, match="standard deviations"):
            engines.check_gap("wrong", requests, others, oracle)
        engines.check_float32(str(model), requests, oracle, tmp_path)
        with pytest.raises(measure.WrongOutput, match="this engine generates"):
            engines.check_float32(str(other), requests, oracle, tmp_path)


def test_outputs_of_int4_are_compared_with_weights_of_4_bits(tmp_path):
    """Rounding to 4 bits alone changes the outputs of random weights more than the limit allows."""
    # 4 bits need a multiple of 32 input features.
    config = LlamaConfig(**(BASE | {"vocab_size": 384, "intermediate_size": 128}))
    write_checkpoint(tmp_path, config, seed=0)
    model = str(save_tokenizer(byte_level(), tmp_path))
    workload = Workload(num_requests=4, prompt_tokens=(8, 24), output_tokens=(24, 48), vocab_size=384, seed=3)
    requests, settings = workload.requests(0), {"model": model, "dtype": "float32"}
    with (
        ChildProcess("oracle", "static_batches.py", settings | {"batch": 1}, tmp_path) as oracle,
        ChildProcess("int4", "quire_offline.py", settings | {"quantization": "int4"}, tmp_path) as quantized,
    ):
        outputs = quantized.call("run", requests=requests, offsets=None)["token_ids"]
        before = engines.check_gap("int4", requests, outputs, oracle, max_gap=100)
        oracle.call("round_to_int4")
        assert engines.check_gap("int4", requests, outputs, oracle) < before / 4


def test_measured_latencies():
    requests = [Request([1] * 10, 3), Request([1] * 20, 2)]
    events = [[(0.5, 1), (0.7, 2)], [(1.0, 1), (2.0, 1)]]
    reply = {"seconds": 2.0, "token_ids": [[7, 7, 7], [8, 8]], "events": events}
    run = measure.measure(requests, [0.0, 0.9], reply)
    assert (run["num_input_tokens"], run["num_output_tokens"], run["output_tokens_per_s"]) == (30, 5, 2.5)
    assert run["ttft_ms"] == pytest.approx({"p50": 100.0, "p99": 500.0})
    assert run["itl_ms"] == pytest.approx({"p50": 200.0, "p99": 1000.0})
    with pytest.raises(measure.WrongOutput, match="asked for"):
        measure.measure(requests, None, reply | {"token_ids": [[7, 7], [8, 8]]})
