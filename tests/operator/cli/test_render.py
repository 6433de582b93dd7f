# SPDX-License-Identifier: Apache-2.0
"""`quire render` as a process: objects on standard output, omissions on standard error."""

import base64
import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from support.planning import LLAMA_8B
from support.rendering import ROOT, server_container


def quire(*arguments):
    command = [Path(sys.executable).with_name("quire"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("render") / "config.json"
    file.write_text(json.dumps(LLAMA_8B))
    return file


def test_render_prints_objects_and_reports_omissions(config, tmp_path):
    arguments = ("render", "-f", "examples/gpu-llama-3.1-8b.yaml", "--model-config", config)
    done = quire(*arguments)
    kinds = [m["kind"] for m in yaml.safe_load_all(done.stdout)]
    assert done.returncode == 0
    assert "PodMonitor" not in kinds
    assert kinds[-2:] == ["Deployment", "PodDisruptionBudget"]
    assert "PodMonitor omitted; if the cluster has that kind, add --with PodMonitor" in done.stderr
    assert "values of Secrets adapter-store, hf-token omitted; give --secrets-dir" in done.stderr
    for name, key in (("hf-token", "token"), ("adapter-store", "AWS_ACCESS_KEY_ID"), ("adapter-store", "other")):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / key).write_text("s3cr3t\n")
    done = quire(*arguments, "--with", "PodMonitor", "--secrets-dir", tmp_path, "--image", "i:1", "-o", "json")
    assert (done.returncode, done.stderr) == (0, "")
    manifests = json.loads(done.stdout)
    assert manifests[-1]["kind"] == "PodMonitor"
    (secret,) = [m for m in manifests if m["metadata"]["name"] == "support-credentials"]
    assert json.loads(base64.b64decode(secret["data"]["adapter-store"])) == {"AWS_ACCESS_KEY_ID": "s3cr3t"}
    assert server_container(manifests)[1]["image"] == "i:1"


def test_render_rejects_a_local_path_source(config):
    done = quire("render", "-f", "examples/llmservice.yaml")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("spec.model.source.path: 'models/tiny' is a local folder, which pods cannot read")
    assert quire("render", "-f", "x", "--with", "Nothing").returncode == 2
