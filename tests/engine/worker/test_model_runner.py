# SPDX-License-Identifier: Apache-2.0
"""The model runner alone: order of outputs, isolation between sequences, precision and the 8-bit KV cache."""

import dataclasses
import math

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.single_steps import CONFIG, SequenceFactory, random_prompt, run_prompt
from support.tiny_checkpoints import VOCAB, make_adapter

from quire_engine.lora.peft import adapter
from quire_engine.lora.peft.adapter_tensors import WEIGHTS_FILE
from quire_engine.step.plan import ScheduledSpan, StepPlan
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_spec.errors import ConfigError
from quire_spec.model.capabilities import KV_SCALE_BYTES
from quire_spec.model.memory_sizing import kv_block_bytes


def _prompt_spans(sequences, slots):
    return [ScheduledSpan(s, 0, s.num_tokens, slot) for s, slot in zip(sequences, slots, strict=True)]


def _decode_spans(sequences, slots):
    return [ScheduledSpan(s, s.num_tokens - 1, 1, slot) for s, slot in zip(sequences, slots, strict=True)]


def _token_ids(runner, spans):
    return [output.token_ids for output in runner.execute(StepPlan(spans))]


def _first_token(runner, *args, **params):
    return run_prompt(runner, *args, **params).token_ids


def test_overflowing_adapter_affects_only_its_own_sequences(llama_folder, llama_shape, tmp_path, monkeypatch):
    """The limit of the norm refuses most such adapters; a limit on the weights cannot bound the activations."""
    monkeypatch.setattr(adapter, "MAX_ROW_NORM", math.inf)
    broken = make_adapter(llama_folder, tmp_path / "broken", seed=1)
    tensors = load_file(broken / WEIGHTS_FILE)
    save_file({name: tensor * 1e25 for name, tensor in tensors.items()}, broken / WEIGHTS_FILE)
    runner = DeviceModelRunner(CONFIG, llama_shape, llama_folder)
    runner.store_adapter("broken", runner.read_adapter(broken))
    runner.store_adapter("d0", runner.read_adapter(make_adapter(llama_folder, tmp_path / "d0", seed=0)))
    prompts = [random_prompt(20, seed=i) for i in range(3)]
    expected = [_first_token(runner, prompts[1], 1, [("broken", 0), ("d0", 1)]), _first_token(runner, prompts[2])]
    # The NaNs of the first step stay in the KV blocks that the second step's sequences get.
    for slots in ((0, 0, 0), (0, 1, None)):
        factory = SequenceFactory()
        sequences = [factory.create(prompt) for prompt in prompts]
        outputs = _token_ids(runner, _prompt_spans(sequences, slots))
    assert outputs[1:] == expected
    assert not runner._kv_cache.layers[1].isfinite().all()
    assert 0 <= outputs[0][0] < VOCAB
    for sequence, token_ids in zip(sequences, outputs, strict=True):
        sequence.output_token_ids += token_ids
    decoded = _token_ids(runner, _decode_spans(sequences, slots))
    assert decoded[1] == _first_token(runner, prompts[1] + expected[0], 1)
    assert decoded[2] == _first_token(runner, prompts[2] + expected[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eight_bit_cache_is_smaller_and_changes_logprobs_little(dtype, llama_folder, llama_shape):
    """Compares log probabilities of a prompt computed in two chunks, so that the second chunk reads the cache."""
    logprobs = []
    for kv_cache_dtype in ("auto", "fp8", "int8_per_token_head"):
        config = dataclasses.replace(CONFIG, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
        runner = DeviceModelRunner(config, llama_shape, llama_folder)
        sequence = SequenceFactory().create(random_prompt(60), prompt_logprobs=0)
        runner.execute(StepPlan([ScheduledSpan(sequence, 0, 40, None)]))
        [output] = runner.execute(StepPlan([ScheduledSpan(sequence, 40, 20, None)]))
        logprobs.append(torch.tensor([entries[0].logprob for entries in output.prompt_logprobs]))
        element_bytes = getattr(torch, dtype).itemsize if kv_cache_dtype == "auto" else 1
        block_bytes = kv_block_bytes(llama_shape, 8, element_bytes, KV_SCALE_BYTES.get(kv_cache_dtype, 0))
        assert runner.memory.kv_bytes // runner.memory.num_blocks == block_bytes
    fp8_error, int8_error = ((each - logprobs[0]).norm() / logprobs[0].norm() for each in logprobs[1:])
    # 3 % of the attention output per layer, in two layers. This model's weights are ten times as wide as trained ones.
    assert 1e-4 < int8_error < fp8_error < 0.15


def test_rejects_cuda_without_a_cuda_device(llama_folder, llama_shape, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch found no CUDA device"):
        DeviceModelRunner(dataclasses.replace(CONFIG, device="cuda"), llama_shape, llama_folder)
