# SPDX-License-Identifier: Apache-2.0
"""The steps of the migration guide, executed: conversion of an older checkpoint, each check, the LLMService."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from support.doc_snippets import ROOT, code_blocks
from support.quire_serve import EXAMPLES, QuireServeProcess, running_service
from support.tiny_checkpoints import make_adapter, make_checkpoint
from support.tokenizer import byte_level
from transformers import AutoModelForCausalLM, GPT2Tokenizer

pytestmark = pytest.mark.server

GUIDE = ROOT / "docs/migrate-from-vllm-backend.md"
PORTS = {"8000": "http", "8002": "metrics", "8003": "health"}
PROMPT = "the quick brown fox"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose model has the files of facebook/opt-125m, converted with the guide's command."""
    published = tmp_path / "published"
    make_adapter(make_checkpoint(published, "opt"), tmp_path / "lora", target_modules=["q_proj", "v_proj"])
    model = AutoModelForCausalLM.from_pretrained(published)
    torch.save(model.state_dict(), published / "pytorch_model.bin")
    (published / "model.safetensors").unlink()
    byte_level(vocab_size=model.config.vocab_size).model.save(str(published))
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "</s>")
    config = {"tokenizer_class": "GPT2Tokenizer", "add_bos_token": True, **special}
    (published / "tokenizer_config.json").write_text(json.dumps(config))
    version = tmp_path / "model_repository/vllm_model/1"
    version.mkdir(parents=True)
    arguments = {"model": str(tmp_path / "opt-125m"), "dtype": "float32", "enable_lora": True, "max_loras": 2}
    (version / "model.json").write_text(json.dumps(arguments))
    for name in ("doll", "sheep"):
        (version / "loras").mkdir(exist_ok=True)
        (version / "loras" / name).symlink_to(tmp_path / "lora")
    (version / "multi_lora.json").write_text(json.dumps({name: f"loras/{name}" for name in ("doll", "sheep")}))
    (convert,) = code_blocks(GUIDE, "bash")
    words = shlex.split(convert.replace("facebook/opt-125m", str(published)).replace("./opt-125m", arguments["model"]))
    subprocess.run([sys.executable, *words[1:]], check=True, timeout=120)
    return version.parent


def run_checks(service: QuireServeProcess) -> int:
    """Run the commands of the guide; each prints its comment. Return their number."""
    (block,) = [text for text in code_blocks(GUIDE, "sh") if "/v2/health/ready" in text]
    commands = [line for line in block.splitlines() if line.startswith("curl")]
    for line in commands:
        command, _, expected = line.rpartition("# ")
        for number, name in PORTS.items():
            command = command.replace(f"localhost:{number}", f"localhost:{service.ports[name]}")
        output = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60).stdout
        assert expected in output, (command, output)
    return len(commands)


def test_an_older_checkpoint_passes_each_check_of_the_guide(repository: Path, tmp_path: Path) -> None:
    tokenizer = GPT2Tokenizer.from_pretrained(tmp_path / "opt-125m")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with running_service(repository, tmp_path, "--device=cpu", ready_port="http") as service:
        for name in ("doll", "sheep"):
            path = f"/v2/models/{name}/ready"
            service.wait(lambda path=path: service.request("http", path).status == 200, 30, "ready")
        assert run_checks(service) == 10
        text = service.text("vllm_model", PROMPT, temperature=0, max_tokens=12, ignore_eos=True)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "opt-125m", dtype=torch.float32)
    ids = reference.generate(**inputs, max_new_tokens=12, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert text.removeprefix(PROMPT) == tokenizer.decode(ids, skip_special_tokens=True)


def test_the_service_of_the_guide_reads_its_claim_with_volume(tmp_path: Path) -> None:
    weights = tmp_path / "weights"
    shutil.copytree(EXAMPLES / "models/tiny", weights / "backbone/llama-3.1-8b")
    for name, adapter in (("doll", "pirate"), ("sheep", "sql")):
        shutil.copytree(EXAMPLES / "adapters" / adapter, weights / f"loras/llama-{name}")
    (document,) = (yaml.safe_load(text) for text in code_blocks(GUIDE, "yaml"))
    # A machine without a GPU: the arguments for one are left out.
    del document["spec"]["gpu"], document["spec"]["engine"]["gpuMemoryUtilization"]
    document["spec"]["device"] = "CPU"
    document["spec"]["engine"] |= {"dtype": "float32", "maxModelLen": 512}
    with running_service(document, tmp_path, f"--volume=weights={weights}") as service:
        assert run_checks(service) == 10
