# SPDX-License-Identifier: Apache-2.0
"""`quire serve --vllm-repository` serves repositories in the shape of NVIDIA's samples without an edit."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.other_models import write_plain
from support.quire_serve import EXAMPLES, QuireServeProcess, running_service

pytestmark = pytest.mark.server

PROMPT = "Once upon a time"
ARGUMENTS = {
    "model": str(EXAMPLES / "models/tiny"),
    "distributed_executor_backend": "ray",
    "disable_log_requests": "true",
    "tensor_parallel_size": "1",
    "enable_lora": "true",
    "max_cpu_loras": 2,
    "max_lora_rank": 32,
    "device": "cpu",
    "dtype": "float32",
    "served_model_name": ["llama-chat", "org/llama"],
    "generation_config": "vllm",
    "download_dir": "~/models",
}


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a model of two versions, an adapter in the hub's cache, another adapter, and a model of another
    backend."""
    for version, arguments in (("1", {"model": "/old"}), ("2", ARGUMENTS)):
        folder = tmp_path / "repository/llama" / version
        folder.mkdir(parents=True)
        (folder / "model.json").write_text(json.dumps(arguments))
    (folder / "loras").symlink_to(EXAMPLES / "adapters")
    snapshot = hub_snapshot(EXAMPLES / "adapters/pirate", tmp_path / "hub/models--org--pirate")
    write_adapters(folder.parent, {"pirate": str(snapshot), "sql": "./loras/sql"})
    (folder.parent / "config.pbtxt").write_text('backend: "vllm"\ninstance_group [{count: 1 kind: KIND_MODEL}]\n')
    write_plain(tmp_path / "repository", "embedder")
    return tmp_path / "repository"


def hub_snapshot(folder: Path, repository: Path) -> Path:
    """Copy a folder in the form in which huggingface_hub caches it, and return the snapshot: links to blobs."""
    snapshot = repository / "snapshots/0123456789abcdef"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in folder.iterdir():
        blob = repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copyfile(file, blob)
        (snapshot / file.name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def write_adapters(model: Path, adapters: dict[str, Any]) -> None:
    (model / "2/multi_lora.json").write_text(json.dumps(adapters))


def test_repository_answers_for_every_adapter_without_an_edit(repository: Path, tmp_path: Path) -> None:
    others = f"--model-repository={repository}"
    with running_service(repository, tmp_path, others, ready_port="http") as service:
        # The server reports ready when the first request would be answered, and each adapter's model likewise.
        base = service.text("llama", PROMPT, temperature=0)
        for name in ("pirate", "sql"):
            path = f"/v2/models/{name}/ready"
            service.wait(lambda path=path: service.request("http", path).status == 200, 30, "ready")
        for name in ("pirate", "sql"):
            by_name = service.text(name, PROMPT, temperature=0)
            assert by_name == service.text("llama", PROMPT, temperature=0, lora_name=name) != base
        # The other model of the repository runs beside it, the vllm_backend model only once.
        body = {"inputs": [{"name": "x", "shape": [1], "datatype": "BYTES", "data": ["hi"]}]}
        answer = service.request("http", "/v2/models/embedder/infer", body).body
        assert answer["outputs"][0]["data"] == ["HI"]
        assert [model["name"] for model in service.status()["other_models"]] == ["embedder"]
        log = service.log.read_text()
        cards = service.request("openai", "/v1/models").body["data"]
        assert [(card["id"], card["parent"]) for card in cards[:3]] == [
            *(("llama-chat", None), ("org/llama", None), ("pirate", "llama-chat"))
        ]
        for name in (None, "org/llama", "llama"):
            body = {"model": name, "prompt": PROMPT, "temperature": 0, "max_tokens": 4}
            answer = service.request("openai", "/v1/completions", body).body
            assert answer["model"] == (name or "llama-chat") and answer["choices"][0]["text"] in base
    assert "distributed_executor_backend='ray'" in log and "served only with --model-repository: embedder" in log


def test_adapter_that_fails_fails_the_start(repository: Path, tmp_path: Path) -> None:
    write_adapters(repository / "llama", {"pirate": "loras/pirate", "gone": "/no/such/adapter"})
    service = QuireServeProcess(repository, tmp_path)
    assert service.process.wait(60) == 2
    assert "adapter 'gone': " in service.tail() and "/no/such/adapter" in service.tail()
    service.assert_nothing_left()
