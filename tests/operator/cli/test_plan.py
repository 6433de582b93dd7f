# SPDX-License-Identifier: Apache-2.0
"""`quire plan` as a process: the text report at every width, and the JSON of status.plan."""

import json
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from fcntl import ioctl
from pathlib import Path

import pytest
import yaml
from support.planning import LLAMA_8B, LLAMA_70B, schema_problems

from quire_operator.plan.plan import Plan

ROOT = Path(__file__).resolve().parents[3]
QUIRE = Path(sys.executable).with_name("quire")
LLAMA = "examples/gpu-llama-3.1-8b.yaml"


@pytest.fixture(scope="module")
def configs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("configs")
    for name, config in (("8b", LLAMA_8B), ("70b", LLAMA_70B)):
        (folder / f"{name}.json").write_text(json.dumps(config))
    return folder


def quire(*arguments, stdin=""):
    return subprocess.run(
        [QUIRE, *map(str, arguments)], input=stdin, capture_output=True, text=True, timeout=60, cwd=ROOT,
        env=os.environ | {"COLUMNS": "100"},
    )  # fmt: skip


def test_text_report_shows_memory_and_planned_values(configs):
    done = quire("plan", "-f", LLAMA, "--model-config", configs / "8b.json")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert (
        lines[0]
        == "support: 1 x NVIDIA-L4 for each replica (21.87 GiB of CUDA memory each, from the table of products)"
    )
    bar = next(line for line in lines if line.startswith("["))
    rows = dict(re.findall(r"^(\S) .{20} +([\d.]+)", done.stdout.partition("host memory")[0], re.M))
    assert list(rows) == ["W", "s", "o", "A", "K", "."]
    assert sum(map(float, rows.values())) == pytest.approx(21.87, abs=0.03)
    for letter, size in rows.items():
        assert bar.count(letter) / (len(bar) - 2) == pytest.approx(float(size) / 21.87, abs=0.02)
    assert re.search(r"^maxModelLen +12288  Computed  253\d\d KV tokens for 2 requests", done.stdout, re.M)
    assert "It fits, but LowConcurrency" in done.stdout
    assert "\x1b" not in done.stdout
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize(
    ("folder", "place"),
    [({"emptyDir": {}}, "an emptyDir of each pod"), ({"pvc": {"claimName": "blocks"}}, "claim blocks")],
)
def test_report_names_the_folder_of_kv_blocks(configs, tmp_path, folder, place):
    document = yaml.safe_load((ROOT / LLAMA).read_text())
    tiers = {"memory": "16Gi", "secondary": [{"folder": folder, "size": "200Gi"}]}
    document["spec"].setdefault("engine", {})["kvCacheOffloading"] = tiers
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(document))
    done = quire("plan", "-f", tmp_path / "service.yaml", "--model-config", configs / "8b.json")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"KV blocks in files: at most 200Gi on {place}\n" in done.stdout


@pytest.mark.parametrize(("product", "bandwidth"), [("NVIDIA-L4", 4.5), ("NVIDIA-H100-80GB-HBM3", 37.1)])
def test_report_estimates_the_bandwidth_for_kv_peers(configs, tmp_path, product, bandwidth):
    document = yaml.safe_load((ROOT / LLAMA).read_text())
    document["spec"]["gpu"] = {"product": product}
    document["spec"].setdefault("engine", {}).update({"kvCacheOffloading": {"memory": "16Gi"}, "kvTransfer": {}})
    (tmp_path / "service.yaml").write_text(yaml.safe_dump(document))
    done = quire("plan", "-f", tmp_path / "service.yaml", "--model-config", configs / "8b.json")
    assert (done.returncode, done.stderr) == (0, "")
    report = " ".join(done.stdout.split())
    found = re.search(r"computing them above ([\d.]+) Gbit/s between pods, .* with 128 KiB a token", report)
    # 128 KiB, half of the peak, and 2 operations for each of 7 billion elements.
    assert found and float(found[1]) == pytest.approx(bandwidth, rel=0.02), report


def test_json_is_status_plan(configs):
    done = quire("plan", "-f", LLAMA, "--model-config", configs / "8b.json", "-o", "json")
    body = json.loads(done.stdout)
    assert (done.returncode, done.stderr, schema_problems(body)) == (0, "", [])
    assert Plan.from_json(body).to_json() == body
    other = json.loads(
        quire("plan", "-f", LLAMA, "--model-config", configs / "8b.json", "-o", "json", "--gpu", "NVIDIA-H200").stdout
    )
    assert (other["gpu"]["product"], other["maxModelLen"]["value"]) == ("NVIDIA-H200", 32768)


def test_report_for_a_cpu_and_a_local_model():
    done = quire("plan", "-f", "examples/llmservice.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("tales: on a CPU\n")
    assert "from the safetensors header" in done.stdout
    assert "memory of the pod" in done.stdout


@pytest.mark.parametrize(("width", "use_color"), [(64, True), (80, True), (120, False)])
def test_terminal_sets_width_and_color(configs, width, use_color):
    main, terminal = pty.openpty()
    ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    environment |= {} if use_color else {"NO_COLOR": "1"}
    command = [QUIRE, "plan", "-f", LLAMA, "--model-config", str(configs / "8b.json")]
    with subprocess.Popen(command, stdout=terminal, stderr=terminal, cwd=ROOT, env=environment) as process:
        os.close(terminal)
        output = b""
        while data := _read(main):
            output += data
        assert process.wait(60) == 0
    os.close(main)
    text = output.decode()
    assert ("\x1b[" in text) == use_color
    lines = re.sub(r"\x1b\[\d+m", "", text).split("\r\n")
    assert max(map(len, lines)) <= width
    assert len(next(line for line in lines if line.startswith("["))) == width


def _read(descriptor):
    try:
        return os.read(descriptor, 65536)
    except OSError:  # Linux raises EIO when the other end is closed.
        return b""


def test_a_model_that_does_not_fit_gets_advice(configs):
    done = quire("plan", "-f", LLAMA, "--model-config", configs / "70b.json", "-o", "json")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("spec.gpu: NVIDIA-L4: the model does not fit with a context of 4096 tokens; ")
    assert done.stderr.splitlines()[-1] == (
        "The model fits on 1 x NVIDIA-B200, or 2 x NVIDIA-H100-80GB-HBM3, or 4 x NVIDIA-A40, "
        "or 8 x NVIDIA-GeForce-RTX-5090."
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-f", LLAMA, "--gpu", "L4", "--model-config", "CONFIG"], "did you mean NVIDIA-L4 or NVIDIA-L40 or"),
        (["-f", "examples/pvc-qwen2.5-7b.yaml", "--gpu", "NVIDIA-L4"], '9: spec.model.source.pvc.claimName: "models"'),
        (["-f", "examples/llmservice.yaml", "--gpu", "NVIDIA-L4"], "--count and --nodes require GPU, got CPU"),
        (["-f", "examples/pvc-qwen2.5-7b.yaml", "--model-config", "CONFIG"], "give --gpu or --nodes to this command"),
        (["-f", LLAMA, "--nodes", "README.md"], "--nodes README.md: Expecting value"),
    ],
)  # fmt: skip
def test_errors_name_field_value_and_fix(configs, arguments, message):
    done = quire("plan", *(str(configs / "8b.json") if a == "CONFIG" else a for a in arguments))
    assert (done.returncode, done.stdout) == (1, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_an_unreachable_hub_is_reported_with_a_workaround():
    command = [QUIRE, "plan", "-f", "examples/cpu-cluster.yaml"]
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("hub repository 'Qwen/Qwen2.5-0.5B-Instruct' at its default branch, config.json: ")
    assert "no response from http://127.0.0.1:9: " in done.stderr
    assert done.stderr.endswith("give the path of config.json: --model-config PATH\n")


def test_nodes_option_plans_for_the_smallest_gpu(configs):
    def node(product, memory):
        return {"metadata": {"labels": {"nvidia.com/gpu.product": product, "nvidia.com/gpu.memory": str(memory)}}}

    listing = json.dumps({"items": [node("NVIDIA-H200", 143771), node("NVIDIA-A10", 23028), {"metadata": {}}]})
    arguments = ("--model-config", configs / "8b.json", "--nodes", "-", "-o", "json")
    done = quire("plan", "-f", "examples/pvc-qwen2.5-7b.yaml", *arguments, stdin=listing)
    body = json.loads(done.stdout)
    assert (body["gpu"]["product"], body["gpu"]["from"]) == ("NVIDIA-A10", "NodeLabels")
    assert "NVIDIA-H200" in body["advice"]
