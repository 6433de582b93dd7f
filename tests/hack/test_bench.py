# SPDX-License-Identifier: Apache-2.0
"""The serving benchmark: its numbers add up, it refuses to report the speed of wrong output, and it leaves nothing."""

import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import jsonschema
import psutil
import pytest
from support.tiny_checkpoints import make_llama

_ROOT = Path(__file__).resolve().parents[2]
# The scripts in tests/bench are run by path and import their neighbours by bare name.
sys.path.insert(0, str(_ROOT / "tests" / "bench"))

import engines  # noqa: E402
import measure  # noqa: E402
import plot  # noqa: E402
import report  # noqa: E402
from child import ChildProcess  # noqa: E402
from workload import Request, Workload  # noqa: E402

pytestmark = pytest.mark.timeout(600)

_WORK = Workload(num_requests=5, prompt_tokens=(8, 24), output_tokens=(24, 48), vocab_size=384, seed=3)
_RUNS, _RATE = 2, 25.0
_FLAGS = "--requests 5 --prompt-tokens 8-24 --output-tokens 24-48 --seed 3 --runs 2 --rates 25 --prefix-tokens 200"

_COUNT, _SIZE = {"type": "integer", "minimum": 1}, {"type": "number", "exclusiveMinimum": 0}


def _object(**properties):
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def _list(**properties):
    return {"type": "array", "items": _object(**properties), "minItems": 1}


_TAIL = {"anyOf": [{"type": "null"}, _object(p50=_SIZE, p99=_SIZE)]}
_SPREAD = _object(median=_SIZE, min=_SIZE, max=_SIZE)
_TAIL_SPREAD = {"anyOf": [{"type": "null"}, _object(p50=_SPREAD, p99=_SPREAD)]}
_TEXT, _RATE_OR_NONE = {"type": "string", "minLength": 1}, {"anyOf": [{"type": "null"}, _SIZE]}
_SPEED = {"output_tokens_per_s": _SIZE, "ttft_ms": _TAIL, "itl_ms": _TAIL, "seconds": _SIZE}
_COUNTS = {f"num_{what}": _COUNT for what in ("requests", "input_tokens", "output_tokens")}
_SCHEMA = _object(
    format={"const": 1},
    **dict.fromkeys(("when", "command", "commit"), _TEXT),
    **{name: {"type": "object", "minProperties": 1} for name in ("settings", "workload", "about", "versions")},
    machine=_object(cpu=_TEXT, flags={"type": "array"}, num_cpus=_COUNT, memory_bytes=_COUNT, load={"type": "array"}),
    check=_object(
        requests={"type": "integer", "minimum": 0},
        max_gap=_SIZE,
        gaps={"type": "object", "additionalProperties": {"type": "number"}},
    ),
    runs=_list(
        engine={"enum": list(engines.ENGINE_NAMES)}, rate=_RATE_OR_NONE, round={"type": "integer"}, **_COUNTS, **_SPEED
    ),
    summary=_list(
        engine=_TEXT, rate=_RATE_OR_NONE, output_tokens_per_s=_SPREAD, ttft_ms=_TAIL_SPREAD, itl_ms=_TAIL_SPREAD
    ),
    ratios=_list(of=_TEXT, to=_TEXT, median=_SIZE, min=_SIZE, max=_SIZE),
    prefix=_list(engine=_TEXT, first_ms=_SIZE, second_ms=_SIZE, ratio=_SIZE),
    memory=_object(
        pss={"type": "object", "additionalProperties": _COUNT},
        offline=_object(peak=_COUNT, weights=_COUNT, kv=_COUNT, torch=_COUNT, beyond={"type": "integer"}),
    ),
    kv=_list(seconds=_SIZE, num_running=_COUNT, num_blocks=_COUNT, num_tokens=_COUNT),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("bench") / "model")


@pytest.fixture(scope="module")
def results(model):
    """Of a real run of the script on a tiny model."""
    output = model.parent / "results.json"
    command = [sys.executable, _ROOT / "tests/bench/serving.py", "--model", model, "-o", output, *_FLAGS.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| offline " in done.stdout and "| http / offline " in done.stdout
    return json.loads(output.read_text())


@pytest.mark.server
def test_results_have_the_documented_form(results):
    jsonschema.validate(results, _SCHEMA)


@pytest.mark.server
def test_every_engine_ran_the_same_trace_in_every_round(results):
    found = [(run["round"], run["rate"], run["engine"]) for run in results["runs"]]
    at_once, at_rate = ["offline", "http", "grpc", "transformers"], ["http", "grpc"]
    rounds = range(_RUNS)
    assert found == [(r, rate, n) for r in rounds for rate, names in ((None, at_once), (_RATE, at_rate)) for n in names]
    for run in results["runs"]:
        requests = _WORK.requests(run["round"], run["rate"])
        assert run["num_requests"] == 5
        assert run["num_input_tokens"] == sum(len(request.prompt_token_ids) for request in requests)
        assert run["num_output_tokens"] == sum(request.num_output_tokens for request in requests)


@pytest.mark.server
def test_rates_percentiles_and_medians_are_consistent(results):
    for run in results["runs"]:
        assert run["output_tokens_per_s"] == pytest.approx(run["num_output_tokens"] / run["seconds"])
        for name in ("ttft_ms", "itl_ms"):
            assert (run[name] is None) == (run["engine"] == "transformers")
            assert run[name] is None or 0 < run[name]["p50"] <= run[name]["p99"] <= 1e3 * run["seconds"]
        if run["rate"]:
            assert run["seconds"] >= _WORK.offsets(_RATE, run["round"], _RATE)[-1]
    speed = {(run["engine"], run["rate"], run["round"]): run["output_tokens_per_s"] for run in results["runs"]}
    for entry in results["summary"]:
        values = [speed[entry["engine"], entry["rate"], round] for round in range(_RUNS)]
        assert entry["output_tokens_per_s"] == {
            "median": statistics.median(values),
            "min": min(values),
            "max": max(values),
        }
    for ratio in results["ratios"]:
        each = [speed[ratio["of"], None, round] / speed[ratio["to"], None, round] for round in range(_RUNS)]
        assert ratio["median"] == pytest.approx(statistics.median(each))


@pytest.mark.server
def test_kv_samples_and_memory_are_within_their_bounds(results):
    block = results["settings"]["block_size"]
    for sample in results["kv"]:
        assert 0 <= sample["num_blocks"] * block - sample["num_tokens"] < block * sample["num_running"]
    account = results["memory"]["offline"]
    assert account["beyond"] == account["peak"] - account["weights"] - account["kv"] - account["torch"]
    # Pages of the KV cache that were written: those of the run at least, and not the whole of it.
    assert max(s["num_blocks"] for s in results["kv"]) * 2 * 2 * 2 * block * 16 * 4 <= account["kv"]
    assert account["kv"] < results["about"]["offline"]["kv_bytes"]
    assert set(results["memory"]["pss"]) == {"offline", "http", "grpc", "transformers"}


@pytest.mark.server
def test_nothing_is_left_of_a_run(results, model):
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    assert [line for line in lines if str(model) in line] == []


@pytest.mark.server
def test_a_picture_of_the_results(results, tmp_path):
    plot.draw_plot(results, tmp_path / "results.png")
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.server
def test_markdown_replaces_what_stands_between_its_marks(results, tmp_path):
    document = tmp_path / "benchmarks.md"
    document.write_text(f"before\n{report.BEGIN}\nstale\n{report.END}\nafter\n")
    for _ in range(2):
        report.write_markdown(results, document)
    text = document.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n") and text.endswith(f"{report.END}\nafter\n")
    assert text.count("| offline / transformers ") == 1 and "stale" not in text
    document.write_text("no marks")
    with pytest.raises(SystemExit, match="has no lines"):
        report.write_markdown(results, document)


def test_wrong_output_is_refused(model, tmp_path):
    requests = _WORK.requests("checked")[:2]
    stranger = make_llama(tmp_path / "stranger", seed=1)
    settings = {"dtype": "float32", "batch": 2}
    with (
        ChildProcess("oracle", "static_batches.py", {"model": str(model), **settings}, tmp_path) as oracle,
        ChildProcess("wrong", "static_batches.py", {"model": str(stranger), **settings}, tmp_path) as wrong,
    ):
        right, others = (child.call("run", requests=requests, offsets=None)["token_ids"] for child in (oracle, wrong))
        assert engines.check_gap("right", requests, right, oracle) == pytest.approx(0, abs=1e-4)
        with pytest.raises(measure.WrongOutput, match="standard deviations"):
            engines.check_gap("wrong", requests, others, oracle)
        engines.check_float32(str(model), requests, oracle, tmp_path)
        with pytest.raises(measure.WrongOutput, match="this engine generates"):
            engines.check_float32(str(stranger), requests, oracle, tmp_path)


def test_numbers_of_a_run_by_hand():
    requests = [Request([1] * 10, 3), Request([1] * 20, 2)]
    events = [[(0.5, 1), (0.7, 2)], [(1.0, 1), (2.0, 1)]]
    reply = {"seconds": 2.0, "token_ids": [[7, 7, 7], [8, 8]], "events": events}
    found = measure.measure(requests, [0.0, 0.9], reply)
    assert (found["num_input_tokens"], found["num_output_tokens"], found["output_tokens_per_s"]) == (30, 5, 2.5)
    assert found["ttft_ms"] == pytest.approx({"p50": 100.0, "p99": 500.0})
    assert found["itl_ms"] == pytest.approx({"p50": 200.0, "p99": 1000.0})
    for wrong in ({"token_ids": [[7, 7], [8, 8]]}, {"events": [[(0.5, 1), (0.7, 1)], events[1]]}):
        with pytest.raises(measure.WrongOutput, match="asked for"):
            measure.measure(requests, None, reply | wrong)


def test_kv_use_by_hand():
    requests = [Request([1] * 10, 3), Request([1] * 20, 2)]
    events = [[(1.0, 1), (2.0, 1), (3.0, 1)], [(2.0, 1), (4.0, 1)]]
    # At 1 s the second prompt is read in part; at 3 s the first request is over.
    reply = {"events": events, "kv": [(1.0, 2, 3), (2.0, 2, 4), (3.0, 1, 2), (4.0, 0, 0)]}
    found = [
        (s["seconds"], s["num_running"], s["num_blocks"], s["num_tokens"]) for s in measure.kv_usage(requests, reply)
    ]
    assert found == [(2.0, 2, 4, 11 + 20), (3.0, 1, 2, 20)]


def test_percentiles_are_values_by_nearest_rank():
    values = list(range(1, 201))
    assert [measure.percentile(reversed(values), p) for p in (0, 50, 99, 100)] == [1, 100, 198, 200]
    assert measure.percentile([5.0], 99) == 5.0


def test_traces_repeat_by_seed_and_share_no_prompt():
    assert _WORK.requests(0) == _WORK.requests(0) != _WORK.requests(1)
    sizes = [(len(r.prompt_token_ids), r.num_output_tokens) for i in range(40) for r in _WORK.requests(i)]
    assert [(min(each), max(each)) for each in zip(*sizes, strict=True)] == [(8, 24), (24, 48)]
    first, second = _WORK.prefix_pair(100, 0)
    assert first.prompt_token_ids[:100] == second.prompt_token_ids[:100]
    assert first.prompt_token_ids[100:] != second.prompt_token_ids[100:]
    offsets = Workload(4000, (1, 1), (1, 1), 2, 0).offsets(10.0, 0)
    assert offsets[0] == 0.0 and offsets == sorted(offsets)
    assert math.isclose(offsets[-1], 400, rel_tol=0.1)
