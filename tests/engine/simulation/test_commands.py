# SPDX-License-Identifier: Apache-2.0
"""`quire simulate record`, `fit` and `run` on the tiny model, as a user calls them."""

import json
import subprocess
import sys

import pytest
from support.quire_serve import EXAMPLES
from support.simulation import TINY

from quire_spec.engine.config import EngineConfig

SERVICE = str(EXAMPLES / "llmservice.yaml")
BLOCK = "--trace-block-size=32"


def simulate(*arguments, code=0):
    command = [sys.executable, "-m", "quire_operator.cli", "simulate", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert result.returncode == code, result.stderr
    return result.stdout if code == 0 else result.stderr


def write_trace(path, count, interval_ms=20, adapters=(None, "pirate", "sql")):
    # The first output is so long that there are enough steps, however many requests a slow machine runs at a time.
    lines = [
        {"timestamp": interval_ms * i, "input_length": 30 + 97 * i % 300, "output_length": 5 + i % 40 if i else 300}
        | {"hash_ids": [i % 3], "adapter": adapters[i % len(adapters)]}
        for i in range(count)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A trace, its recording and the step model."""
    folder = tmp_path_factory.mktemp("simulate")
    trace = write_trace(folder / "trace.jsonl", 60)
    printed = simulate("record", "-f", SERVICE, f"--trace={trace}", BLOCK, "-o", folder / "recording.jsonl")
    assert "steps" in printed and "first token" in printed
    printed = simulate("fit", folder / "recording.jsonl", "-o", folder / "steps.json")
    assert "decode_rows" in printed and "adapter_copy" in printed and "error of a step" in printed
    return trace, folder / "recording.jsonl", folder / "steps.json"


def test_run_reports_latencies_goodput_and_cost(recorded):
    trace, _, steps = recorded
    common = ("run", f"--model={steps}", f"--trace={trace}", BLOCK)
    text = simulate(*common, "--price=2.5", "--slo=ttft=10s,itl=1s")
    assert "goodput           100.0%" in text and "cost              $2.50 an hour" in text
    assert "adapter copy" in text and "ms, recording" in text
    slow = json.loads(simulate(*common, "--costs=adapter-copy=2s", "-o", "json"))
    assert slow["origins"]["adapter copy"] == "2000 ms, --costs" and slow["latencies_ms"]["ttft"]["p99"] > 2000
    planned = json.loads(simulate(*common, "-f", SERVICE, "--replicas=2", "-o", "json", "--limit=20"))
    assert (planned["replicas"], planned["requests"]) == (2, 20)
    assert planned["latencies_ms"]["ttft"]["p50"] > 0 and planned["simulated_steps_per_s"] > 100
    fewest = json.loads(simulate(*common, "--replicas=auto", "--rate-scale=50", "--slo=ttft=1s,itl=1s", "-o", "json"))
    assert fewest["goodput"] >= 0.99 and 1 <= fewest["replicas"] <= 60


def test_extrapolation_is_announced_and_strict_fails(recorded, tmp_path):
    _, _, steps = recorded
    burst = write_trace(tmp_path / "burst.jsonl", 60, interval_ms=0)
    common = ("run", f"--model={steps}", f"--trace={burst}", BLOCK, "--rate-scale=1")
    model = json.loads(steps.read_text())
    model["recorded_maximum"] |= {"decode_rows": 1}
    steps_of_one = tmp_path / "steps.json"
    steps_of_one.write_text(json.dumps(model))
    assert "extrapolated      0.0%" not in simulate(*common, f"--model={steps_of_one}")
    assert "larger than every recorded one" in simulate(*common, f"--model={steps_of_one}", "--strict", code=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--costs=block=5ms"], "'block=5ms' is not adapter-read=NUMBERms or adapter-copy=NUMBERms"),
        (["--slo=ttft=5"], "'ttft=5' is not ttft=NUMBERms"),
        (["--replicas=0"], "'0' is not an integer of at least 1"),
        (["--rate-scale=nan"], "'nan' is not a number above 0"),
        (["--goodput=2"], "'2' is not a number from 0 to 1"),
        (["--trace=/no/such/file"], "/no/such/file"),
        (["--model=/no/such/file"], "--model: /no/such/file does not exist; give a file that `quire simulate fit`"),
        (["--replicas=auto", "--slo=ttft=0.0001ms"], "requests that run alone reach a goodput of only 0.000"),
    ],
)
def test_wrong_input_is_one_error(recorded, arguments, message):
    trace, _, steps = recorded
    error = simulate("run", f"--model={steps}", f"--trace={trace}", BLOCK, *arguments, code=2)
    assert message in error and "Traceback" not in error


def test_a_service_whose_steps_take_another_time_is_refused(recorded, tmp_path):
    trace, _, steps = recorded
    document = (
        (EXAMPLES / "llmservice.yaml").read_text().replace("\nspec:\n", "\nspec:\n  engine: {quantization: int8}\n", 1)
    )
    (tmp_path / "service.yaml").write_text(document.replace("path: ", f"path: {EXAMPLES}/"))
    command = ("run", f"--model={steps}", f"--trace={trace}", BLOCK, "-f", tmp_path / "service.yaml")
    assert "quantization: " in simulate(*command, code=2)


def test_requests_that_arrive_at_once_have_no_rate(recorded, tmp_path):
    _, _, steps = recorded
    burst = write_trace(tmp_path / "burst.jsonl", 3, interval_ms=0)
    assert "3, all at once" in simulate("run", f"--model={steps}", f"--trace={burst}", BLOCK)


def test_the_copies_of_tiers_are_recorded(tmp_path):
    tiers = {"kv_offloading_size": 1 / 32, "kv_offloading_folder": str(tmp_path / "kv")}
    config = EngineConfig(str(TINY), device="cpu", kv_cache_memory_bytes=2**25, max_model_len=1024, **tiers)
    (tmp_path / "engine.json").write_text(json.dumps(config.to_json()))
    trace = write_trace(tmp_path / "trace.jsonl", 10, adapters=(None,))

    def run(*arguments):
        command = [sys.executable, "-m", "quire_engine.simulation", *map(str, arguments)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert result.returncode == 0, result.stderr
        return result.stdout

    run("record", f"--engine={tmp_path}/engine.json", f"--trace={trace}", BLOCK, "-o", tmp_path / "recording.jsonl")
    printed = run("fit", tmp_path / "recording.jsonl", "-o", tmp_path / "steps.json")
    assert "block_copy" in printed and "folder_block" in printed
    result = json.loads(run("run", f"--model={tmp_path}/steps.json", f"--trace={trace}", BLOCK, "--format=json"))
    assert {"block copy", "folder block"} <= result["origins"].keys()
    assert all("recording" in origin for origin in result["origins"].values() if "ms" in origin)


def test_an_adapter_that_the_service_has_not_is_refused(tmp_path):
    line = {"timestamp": 0, "input_length": 9, "output_length": 2, "adapter": "sqk"}
    (tmp_path / "trace.jsonl").write_text(json.dumps(line))
    command = ("record", "-f", SERVICE, f"--trace={tmp_path}/trace.jsonl", "-o", tmp_path / "recording.jsonl")
    error = simulate(*command, code=2)
    assert "line 1 of the trace: adapter 'sqk' is not one of the service (pirate, sql, tools)" in error


def test_a_recording_of_another_kind_is_refused(recorded, tmp_path):
    trace, recording, _ = recorded
    assert "is not a recording" in simulate("fit", trace, "-o", tmp_path / "steps.json", code=2)
    lines = recording.read_text().splitlines()
    (tmp_path / "short.jsonl").write_text("\n".join(lines[:50]))
    assert "200 are needed" in simulate("fit", tmp_path / "short.jsonl", "-o", tmp_path / "steps.json", code=2)
