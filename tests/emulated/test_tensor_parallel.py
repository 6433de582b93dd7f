# SPDX-License-Identifier: Apache-2.0
"""Ranks on emulated GPUs: torch's own NCCL process group, captured collectives, and their end."""

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
from quire_spec.engine.sampling_params import SamplingParams
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
    """What the script prints, and seconds from its last line to its end."""
    environment = os.environ | {"EMULATOR_DEVICES": str(size)}
    argv = [sys.executable, "-c", SCRIPT, str(model), device, str(size), then]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=150, check=False)
    ended = time.time()
    assert done.returncode == 0, done.stderr[-3000:]
    *lines, last = done.stdout.splitlines()
    return lines, ended - float(last)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def test_two_ranks_choose_the_tokens_of_one_and_end_when_asked(model):
    expected, _ = _run(model, "cpu", 1)
    found, seconds = _run(model, "cuda", 2)
    assert found == expected
    # torch's own threads kept the process for minutes where they looked for what was gone.
    assert seconds < 15


def test_a_killed_rank_ends_the_others_wait(model):
    (_, lost), seconds = _run(model, "cuda", 2, "kill")
    why, waited = json.loads(lost)
    assert "rank 1 of 2 ended: killed by SIGKILL" in why
    assert waited < 10
    assert seconds < 15
