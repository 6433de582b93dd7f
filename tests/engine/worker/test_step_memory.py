# SPDX-License-Identifier: Apache-2.0
"""The warm-up steps need as much memory as any later step; on a GPU the KV cache gets all the rest.

Tensors are counted on the CPU as torch allocates them. Kernels are replaced by ones that allocate as little as a GPU's.
"""

import dataclasses
from typing import Any

import pytest
import torch
from support.peak_memory import PeakTensorBytes
from support.tiny_checkpoints import BASE, make_checkpoint

from quire_engine.core.engine import Engine
from quire_engine.kv_cache import device_cache
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_engine.worker.sampling import logprobs, penalty_state
from quire_engine.worker.startup import RunnerStartup
from quire_engine.worker.warmup import compile_steps, peak_memory_steps
from quire_kernels import apply_penalties, paged_attention, sample
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import SequenceRequest

VOCAB = 6000
CONFIG = EngineConfig(
    model="m", dtype="float32", max_model_len=160, block_size=8, max_num_seqs=10, max_num_batched_tokens=64,
    kv_cache_memory_bytes=240 * 8 * 2 * 2 * 2 * 16 * 4, max_logprobs=-1,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BASE, "vocab_size", VOCAB)
        return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


def _penalize(logits, rows, in_prompt, counts, state_rows, presence, frequency, repetition, token_ids=None):
    assert token_ids is None
    for row, at, weight in zip(rows.tolist(), state_rows.tolist(), presence.tolist(), strict=True):
        logits[row].sub_(weight)
        assert in_prompt[at].any()


@pytest.fixture
def gpu_like_kernels(monkeypatch):
    """Replace kernels by ones that allocate as little as those of a GPU, and use small chunks for this small model."""
    monkeypatch.setattr(penalty_state, "_uses_token_lists", lambda device: False)
    monkeypatch.setitem(apply_penalties.dispatch_table, "cpu", _penalize)
    monkeypatch.setitem(sample.dispatch_table, "cpu", lambda logits, *_: logits.argmax(-1))
    monkeypatch.setitem(paged_attention.dispatch_table, "cpu", lambda queries, *_: queries.clone())
    monkeypatch.setattr("quire_engine.worker.sampling.sampler.CPU_CHUNK_BYTES", 1 << 40)
    monkeypatch.setattr(logprobs, "_MAX_CHUNK_BYTES", 4 * 4 * VOCAB)
    monkeypatch.setattr(device_cache, "_MAX_COPY_BYTES", 1 << 15)


PENALIZED = {"presence_penalty": 0.5, "repetition_penalty": 1.1}
SAMPLING_PARAMS = {
    "plain": {},
    "penalties": PENALIZED,
    "allowed": {"allowed_token_ids": list(range(40))},
    "bias": {"logit_bias": dict.fromkeys(range(1024), 1.0), "min_tokens": 5, "stop_token_ids": list(range(100))},
    "log probabilities": {"logprobs": 20},
    "all log probabilities": {"logprobs": -1, "max_tokens": 2},
    "log probabilities of prompts": {"prompt_logprobs": 20, "logprobs": 1},
    "everything": PENALIZED
    | {"allowed_token_ids": [5, 6, 7], "logit_bias": {5: 1.0}, "min_tokens": 1, "logprobs": -1, "max_tokens": 2},
}  # fmt: skip


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("kind", SAMPLING_PARAMS)
def test_no_step_needs_more_memory_than_the_warmup(folder, gpu_like_kernels, monkeypatch, kind, ahead):
    engine = Engine.from_config(
        dataclasses.replace(CONFIG, model=str(folder), async_scheduling=ahead, swap_space=1e-3, seed=1)
    )
    runner: Any = engine._runner
    assert isinstance(runner, DeviceModelRunner)
    factory = ParamFactory(torch.float32, torch.device("cpu"))
    startup = RunnerStartup(CONFIG, runner._model, factory, 0, runner._run_eager)
    single_block_cache = startup._create_cache(1)
    monkeypatch.setattr(startup, "_create_cache", lambda num_blocks: single_block_cache)
    with PeakTensorBytes() as tensors:
        startup.run_dummy_steps(peak_memory_steps(CONFIG, 160, VOCAB))
        startup.run_dummy_steps(compile_steps(CONFIG, 160))
    measured, tensors.peak_bytes = tensors.peak_bytes, 0
    draw = torch.Generator().manual_seed(3)
    params = {"max_tokens": 12, "temperature": 1.0, "top_p": 0.9, "seed": 1} | SAMPLING_PARAMS[kind]
    shared = torch.randint(VOCAB, (21,), generator=draw).tolist()
    for wave in range(2):
        for i in range(10):
            # Prompts of many lengths, one of them long, and forks that copy a shared block.
            length = 120 if i == 0 else 3 + 2 * i
            prompt = shared if i > 5 else torch.randint(VOCAB, (length,), generator=draw).tolist()
            parent_id = 10 * wave + 6 if i > 6 else None
            engine.add(SequenceRequest(10 * wave + i, prompt, SamplingParams.from_mapping(params), parent_id=parent_id))
        with tensors:
            for _ in range(15):
                for result in engine.step().results if engine.has_work else []:
                    assert result.error_code is None, result.error
    assert measured > 4 * VOCAB * 10
    assert tensors.peak_bytes <= measured
