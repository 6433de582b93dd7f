# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism on emulated GPUs: torch's NCCL process group, captured collectives, and their end."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.requirements_of_machine import requires_emulated_gpu
from support.tiny_checkpoints import make_checkpoint

pytestmark = requires_emulated_gpu

SCRIPT = """
import json, os, signal, sys, time
import psutil
from quire_engine.api.llm import LLM
from quire_spec.errors import QuireError
from quire_engine import SamplingParams
model, device, size, kill = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4] == "kill"
llm = LLM(model=model, device=device, tensor_parallel_size=size, dtype="float32", max_model_len=64, block_size=8,
          max_num_seqs=2, max_num_batched_tokens=32)
prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (7, 19)]
params = [SamplingParams(temperature=0.0, max_tokens=6), SamplingParams(temperature=1.0, seed=1, max_tokens=5)]
outputs = llm.generate(prompts, params, use_tqdm=False)
print(json.dumps([output.outputs[0].token_ids for output in outputs]), flush=True)
if kill:
    [rank] = psutil.Process().children()
    rank.kill()
    start = time.monotonic()
    try:
        llm.generate(prompts, params, use_tqdm=False)
    except QuireError as error:
        print(json.dumps([str(error), time.monotonic() - start]), flush=True)
print(time.time(), flush=True)
"""


def _run(model: Path, device: str, size: int, then: str = "end") -> tuple[list[str], float]:
    """Return the lines that the script prints, and the seconds from its last line to its exit."""
    environment = os.environ | {"EMULATOR_DEVICES": str(size)}
    argv = [sys.executable, "-c", SCRIPT, str(model), device, str(size), then]
    result = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=150, check=False)
    ended = time.time()
    assert result.returncode == 0, result.stderr[-3000:]
    *lines, last = result.stdout.splitlines()
    return lines, ended - float(last)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def test_two_ranks_generate_the_tokens_of_one_and_exit(model):
    expected, _ = _run(model, "cpu", 1)
    tokens, seconds = _run(model, "cuda", 2)
    assert tokens == expected
    # Threads of torch that search a deleted rendezvous file would keep the process alive for minutes.
    assert seconds < 15


def test_killed_worker_ends_the_wait_of_rank_0(model):
    (_, lost), seconds = _run(model, "cuda", 2, "kill")
    error, seconds_to_error = json.loads(lost)
    assert "rank 1 of 2 ended: killed by SIGKILL" in error
    assert seconds_to_error < 10
    assert seconds < 15
