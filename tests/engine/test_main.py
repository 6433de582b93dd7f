# SPDX-License-Identifier: Apache-2.0
"""The commands print the requested outputs, and report errors in one line."""

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.tiny_checkpoints import VOCAB, make_adapter, make_checkpoint
from support.tokenizer import byte_level, save_tokenizer

from quire_engine.__main__ import main
from quire_engine.api.benchmark import LatencyStats

# peft reads an attribute that transformers has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint, with the adapters `a` and `b` in sibling folders."""
    folder = make_checkpoint(tmp_path_factory.mktemp("models") / "m", "llama")
    save_tokenizer(byte_level(VOCAB - 1), folder)
    for seed, name in enumerate("ab"):
        make_adapter(folder, folder.parent / name, seed=seed)
    return folder


def engine_options(model: Path, *names: str) -> list[str]:
    loras = [f"--lora={name}={model.parent / name}" for name in names]
    return [
        "--model",
        str(model),
        "--dtype=float32",
        "--max-model-len=128",
        "--set=kv_cache_memory_bytes=4194304",
        *loras,
    ]


def test_generate_runs_each_prompt_with_base_and_adapters(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ["--prompt=the fox", "--prompt=jumps", "--temperature=0", "--max-tokens=6", "--logprobs=1", "-o=json"]
    assert main(["generate", *engine_options(model, "a", "b"), *prompts]) == 0
    outputs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    names = [a["lora_request"] and a["lora_request"]["lora_name"] for a in outputs]
    assert names == [None, "a", "b"] * 2
    assert [a["prompt"] for a in outputs] == ["the fox"] * 3 + ["jumps"] * 3
    tokens = [tuple(a["outputs"][0]["token_ids"]) for a in outputs]
    assert len(set(tokens)) == 6 and all(len(t) == 6 for t in tokens)
    assert len(outputs[0]["outputs"][0]["logprobs"]) == 6


def test_generate_accepts_every_parameter(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = ["--param=allowed_token_ids=[300, 301]", '--param=bad_words=["x"]', "--param=min_tokens=4", "--n=2"]
    assert main(["generate", *engine_options(model), "--prompt=the fox", "--max-tokens=4", *params, "-o=json"]) == 0
    [output] = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(completion["token_ids"]) for completion in output["outputs"]] == [4, 4]
    assert {token for completion in output["outputs"] for token in completion["token_ids"]} <= {300, 301}
    assert main(["generate", *engine_options(model), "--prompt=the fox", "--max-tokens=2", "--n=3"]) == 0
    assert capsys.readouterr().out.count("[base, length, 2 tokens] the fox") == 3


def test_generate_reads_prompts_from_a_file(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("the fox\n\nGrüße\n", encoding="utf-8")
    assert main(["generate", *engine_options(model), f"--prompt-file={file}", "--max-tokens=3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("[base, length, 3 tokens] the fox")
    assert any(line.startswith("[base, length, 3 tokens] Grüße") for line in lines)
    monkeypatch.setattr(sys, "stdin", io.StringIO("jumps\n"))
    assert main(["generate", *engine_options(model), "--prompt-file=-", "--max-tokens=3"]) == 0
    assert capsys.readouterr().out.startswith("[base, length, 3 tokens] jumps")


@pytest.mark.parametrize(
    "extra",
    [
        [],
        ["--rate=200"],
        ["--param=frequency_penalty=1", "--param=logprobs=2"],
        ["--set=max_loras=1", "--set=max_cpu_loras=1"],
    ],
    ids=str,
)
def test_bench_reports_counts_and_latencies(model: Path, extra: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    workload_options = ["--num-prompts=6", "--input-len=20", "--output-len=5"]
    assert main(["bench", *engine_options(model, "a", "b"), *workload_options, *extra, "-o=json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    report = document["report"]
    counts = ("num_prompts", "num_input_tokens", "num_output_tokens", "num_preemptions")
    assert tuple(report[name] for name in counts) == (6, 120, 30, 0)
    assert report["num_steps"] >= 5
    assert report["output_tokens_per_s"] == pytest.approx(30 / report["duration_s"])
    assert 0 < report["ttft_ms"]["percentiles"]["p50"] <= report["ttft_ms"]["percentiles"]["p99"]
    assert document["load"]["rate"] == (200 if "--rate=200" in extra else None)
    assert (document["engine"]["dtype"], document["engine"]["device"]) == ("float32", "cpu")


def test_bench_prints_a_table(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload_options = ["--num-prompts=2", "--input-len=4", "--output-len=1", "--no-warmup"]
    assert main(["bench", *engine_options(model), *workload_options]) == 0
    settings_line, *lines = capsys.readouterr().out.splitlines()
    assert f"model={model}" in settings_line and "dtype=float32" in settings_line
    table = {line[:18].strip(): line[18:].split() for line in lines if line}
    assert table["output tokens"] == ["2"]
    assert len(table["first token"]) == 4 and "between tokens" not in table


def test_latency_percentiles() -> None:
    latency = LatencyStats.from_seconds([i / 1000 for i in range(1, 101)])
    assert latency == LatencyStats(pytest.approx(50.5), {"p50": 51.0, "p90": 91.0, "p99": 100.0})
    assert LatencyStats.from_seconds([]) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "error: generate: no prompt; give --prompt TEXT or --prompt-file FILE"),
        (["generate", "--prompt=a", "--prompt-file=/nowhere"], "error: --prompt-file: /nowhere: "),
        (["generate", "--prompt=a", "--lora=sql"], "error: --lora: 'sql' is not of the form NAME=PATH"),
        (["generate", "--prompt=a", "--lora=sql=/nowhere"], "error: adapter 'sql': "),
        (["generate", "--prompt=a", "--set=blocksize=3"], "error: 'blocksize': unknown engine argument"),
        (["generate", "--prompt=a", "--set=block_size"], "error: --set: 'block_size' is not NAME=VALUE"),
        (["generate", "--prompt=a", "--top-p=7"], "error: sampling parameter 'top_p': must be from 1e-06 to 1,"),
        (["generate", "--prompt=a", "--param=top_p"], "error: --param: 'top_p' is not NAME=VALUE"),
        (["generate", "--prompt=a", "--param=topp=1"], "error: unknown sampling parameter 'topp'"),
        (["generate", "--prompt=a", "--chat"], "error: chat: "),
        (["bench", "--input-len=4", "--param=min_p=2"], "error: sampling parameter 'min_p': must be from 0 to 1, got"),
        (["bench", "--input-len=4", "--param=n=2", "--temperature=1"], "error: bench: n, best_of, bad_words"),
        (["bench", "--num-prompts=0"], "error: bench: num_prompts must be at least 1, got 0"),
        (["bench", "--output-len=0"], "error: bench: output_len must be at least 1, got 0"),
        (["bench", "--rate=0"], "error: bench: rate must be a finite number above 0, got 0.0"),
        (["bench", "--input-len=128"], "error: bench: 128 input and 64 output tokens exceed max_model_len 128"),
    ],
)
def test_errors_are_reported_in_one_line(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([arguments[0], *engine_options(model), *arguments[1:]]) == 1
    error = capsys.readouterr().err
    assert error.splitlines()[-1].startswith(message)


@pytest.mark.parametrize("command", ["bench", "generate"])
def test_profile_writes_a_trace_with_named_ranges(
    command: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire_engine.api.profiler.MAX_PROFILED_STEPS", 3)
    options = {
        "bench": ["--num-prompts=2", "--input-len=5", "--output-len=6", "--no-warmup"],
        "generate": ["--prompt=the fox", "--max-tokens=6"],
    }
    trace = tmp_path / "trace.json"
    assert main([command, *engine_options(model), *options[command], f"--profile={trace}"]) == 0
    names = [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]
    steps = [name for name in names if name.startswith("step of")]
    # Six steps run; the first three are traced.
    assert len(steps) == 3
    assert steps[0].startswith("step of 10 tokens of 2" if command == "bench" else "step of ")
    assert {"inputs", "model", "sampler"} <= set(names)


def test_trace_path_is_checked_before_the_first_step(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *engine_options(model), "--input-len=5", f"--profile={tmp_path}/none/trace.json"]) == 1
    assert "--profile: " in capsys.readouterr().err
