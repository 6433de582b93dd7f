# SPDX-License-Identifier: Apache-2.0
"""A start with a shipped kernel cache compiles nothing. The device computes nothing here (EMULATOR_DRY)."""

import os
import subprocess
import sys

import pytest
from support.quantized_checkpoints import FOLDER
from support.requirements_of_machine import requires_emulated_gpu
from support.tiny_checkpoints import BASE, make_adapter, make_checkpoint, write_checkpoint
from transformers import LlamaConfig

pytestmark = [requires_emulated_gpu, pytest.mark.timeout(1200)]

# Prints the name of each kernel that is compiled, then the number of those that were found.
SCRIPT = """
import json, sys
from triton import knobs
from quire_engine.api.llm import LLM
from quire_engine.api.outputs import LoRARequest
from quire_engine import SamplingParams
found = []
def listen(src, cache_hit, **event):
    found.append(cache_hit)
    if not cache_hit:
        print(src.name, flush=True)
knobs.compilation.listener = listen
model, adapter, fields = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(model=model, device="cuda", dtype="bfloat16", max_model_len=96, max_num_seqs=20, max_num_batched_tokens=64,
          enable_lora=True, max_loras=2, max_lora_rank=16, **fields)
params = [SamplingParams(temperature=0.0, max_tokens=4), SamplingParams(max_tokens=5, top_p=0.9, presence_penalty=0.5)]
prompts = [{"prompt_token_ids": [5] * n} for n in (7, 70)]
loras = [LoRARequest("a", 1, adapter), None] if adapter else None
llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
print(sum(found))
"""


@pytest.fixture(scope="module")
def environment():
    """Kernels are compiled, also on the emulated device."""
    return {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Models whose layers have different kernels: dense, experts, sinks with windows, and quantized experts."""
    # Groups of 32 inputs, for 4 bits.
    llama = write_checkpoint(tmp_path_factory.mktemp("llama"), LlamaConfig(**BASE | {"intermediate_size": 128}), 1)
    others = {name: make_checkpoint(tmp_path_factory.mktemp(name), name) for name in ("qwen3_moe", "gpt_oss")}
    return {"llama": llama, "mxfp4": FOLDER / "mxfp4", **others}


@pytest.fixture(scope="module")
def shipped(models, environment, tmp_path_factory):
    folder = tmp_path_factory.mktemp("shipped")
    command = ["-m", "quire_engine", "compile", "--capability", "9.0", "--into", str(folder)]
    options = [argument for model in models.values() for argument in ("--model", str(model))]
    subprocess.run([sys.executable, *command, *options], env=environment, check=True, timeout=800)
    return folder


@pytest.mark.parametrize(
    ("name", "fields", "selected"),
    [
        ("llama", "{}", ""),
        ("llama", '{"quantization": "int4", "kv_cache_dtype": "fp8"}', ""),
        ("qwen3_moe", "{}", ""),
        ("gpt_oss", "{}", ""),
        ("mxfp4", "{}", ""),
        ("llama", "{}", "sample=histogram"),
    ],
    ids=["dense", "int4", "experts", "sinks", "quantized-experts", "histograms"],
)
def test_a_start_with_the_cache_compiles_nothing(models, shipped, environment, tmp_path, name, fields, selected):
    adapter = make_adapter(models[name], tmp_path / "adapter", r=4) if name == "llama" else ""
    variables = {"EMULATOR_DRY": "1", "EMULATOR_SMS": "132", "QUIRE_KERNEL_CACHE": str(shipped)}
    variables |= {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "QUIRE_KERNELS": selected}
    argv = [sys.executable, "-c", SCRIPT, str(models[name]), str(adapter), fields]
    done = subprocess.run(argv, env=environment | variables, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    *compiled, num_found = done.stdout.splitlines()
    assert compiled == []
    assert int(num_found) > 15
