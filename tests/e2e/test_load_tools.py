# SPDX-License-Identifier: Apache-2.0
"""Compatibility with NVIDIA's load tools: perf_analyzer over gRPC, with shared memory, and genai-perf if installed."""

import csv
import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from support.frontend_harness import BASE, running_frontend
from support.other_models import write_repository
from support.quire_serve import EXAMPLES

from quire_server.model_server.launch import KEY_HEADER

pytestmark = [pytest.mark.server, pytest.mark.timeout(300)]

WHEEL = "tritonclient==2.51.0"
"""The server's release. Versions 2.41 to 2.60 contain the real perf_analyzer, newer ones do not."""
PROGRAM = "tritonclient-2.51.0.data/data/bin/perf_analyzer"
NUM_REQUESTS, NUM_TOKENS = 16, 24


@pytest.fixture(scope="module")
def perf_analyzer(tmp_path_factory):
    """Extract the program from its wheel, with two libraries of the server that it requires."""
    folder = tmp_path_factory.mktemp("perf_analyzer")
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "-q", "-d", folder]
    done = subprocess.run([*pip, WHEEL], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1]
        pytest.skip(f"pip cannot download perf_analyzer: {reason}; set PIP_INDEX_URL to an index that has {WHEEL}")
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        program = Path(archive.extract(PROGRAM, folder))
    program.chmod(0o755)
    libraries = Path(str(importlib.metadata.distribution("nvidia-pytriton").locate_file("nvidia_pytriton.libs")))
    for name, soname in (("libb64", "libb64.so.0d"), ("libcudart", "libcudart.so.12")):
        [library] = libraries.glob(f"{name}-*")
        (folder / soname).symlink_to(library)
    return program, os.environ | {"LD_LIBRARY_PATH": str(folder), "PATH": f"{program.parent}:{os.environ['PATH']}"}


def run(argv, environment, folder, code=0):
    done = subprocess.run(argv, env=environment, cwd=folder, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == code, done.stdout[:2000] + done.stdout[-2000:] + done.stderr[:2000] + done.stderr[-2000:]
    return done.stderr if code else done.stdout


def test_perf_analyzer_streams_over_grpc(service, perf_analyzer, tmp_path):
    program, environment = perf_analyzer
    parameters = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
    tensors = {"text_input": ["Once upon a time"], "stream": [True], "sampling_parameters": [json.dumps(parameters)]}
    (tmp_path / "inputs.json").write_text(json.dumps({"data": [tensors]}))
    argv = [program, "-m", "tales", "-u", f"127.0.0.1:{service.ports['grpc']}", "-i", "grpc", "--streaming", "--async"]
    argv += ["--input-data", "inputs.json", "--concurrency-range", "4", "--request-count", str(NUM_REQUESTS)]
    argv += ["--profile-export-file", "profile.json", "-f", "report.csv"]
    profile = ""
    # On a busy machine, perf_analyzer leaves the profile file empty in one of fifty runs, with a correct report.
    for _ in range(5):
        # perf_analyzer refuses to overwrite it.
        (tmp_path / "profile.json").unlink(missing_ok=True)
        output = run(argv, environment, tmp_path)
        [report] = csv.DictReader((tmp_path / "report.csv").read_text().splitlines())
        assert float(report["Inferences/Second"]) > 0 and "Failed" not in output
        if profile := (tmp_path / "profile.json").read_text():
            break
    requests = json.loads(profile)["experiments"][0]["requests"]
    assert len(requests) >= NUM_REQUESTS
    assert all(request["response_timestamps"] == sorted(request["response_timestamps"]) for request in requests)
    assert all(1 <= len(request["response_timestamps"]) <= NUM_TOKENS for request in requests)


def test_perf_analyzer_uses_shared_memory_with_the_key_only(perf_analyzer, tmp_path):
    """With another model, because perf_analyzer sends headers over HTTP only, where infer excludes decoupled models."""
    program, environment = perf_analyzer
    (tmp_path / "inputs.json").write_text(json.dumps({"data": [{"x": ["hello"]}]}))
    argv = [program, "-m", "plain", "-i", "http", "--input-data", "inputs.json", "--concurrency-range", "2"]
    argv += ["--shared-memory", "system", "--output-shared-memory-size", "1024", "-f", "report.csv"]
    argv += ["--request-count", str(NUM_REQUESTS)]
    with running_frontend(tmp_path, write_repository(tmp_path / "others", BASE)) as running:
        running.load_model("plain")
        argv += ["-u", f"127.0.0.1:{running.ports['http']}"]
        run([*argv, "-H", f"{KEY_HEADER}:{running.key}"], environment, tmp_path)
        [report] = csv.DictReader((tmp_path / "report.csv").read_text().splitlines())
        assert float(report["Inferences/Second"]) > 0
        assert "This API is restricted" in run(argv, environment, tmp_path, code=99)


def test_genai_perf_reports_tokens(service, perf_analyzer, tmp_path):
    if not (program := os.environ.get("GENAI_PERF")):
        pytest.skip("no genai-perf: pip install genai-perf==0.0.16 in a separate environment (944 MB); set GENAI_PERF")
    _, environment = perf_analyzer
    argv = [program, "profile", "-m", "tales", "--endpoint-type", "kserve", "--backend", "vllm", "--streaming"]
    argv += ["-u", f"127.0.0.1:{service.ports['grpc']}", "--tokenizer", EXAMPLES / "models/tiny", "--concurrency", "4"]
    argv += ["--request-count", str(NUM_REQUESTS), "--synthetic-input-tokens-mean", "40"]
    argv += ["--output-tokens-mean", str(NUM_TOKENS), "--artifact-dir", tmp_path / "artifacts"]
    run(argv, environment, tmp_path)
    [report_file] = (tmp_path / "artifacts").rglob("*_genai_perf.json")
    report = json.loads(report_file.read_text())
    assert report["request_count"]["avg"] >= NUM_REQUESTS
    assert 0 < report["time_to_first_token"]["avg"] < report["request_latency"]["avg"]
    assert 1 < report["output_sequence_length"]["avg"] <= 2 * NUM_TOKENS
    assert report["output_token_throughput"]["avg"] > 0
