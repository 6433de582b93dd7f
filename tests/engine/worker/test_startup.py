# SPDX-License-Identifier: Apache-2.0
"""Startup of a model runner: measured and allocated memory, warm-up steps, kernel compilation and GPU profiling."""

import dataclasses
import threading

import pytest
import torch
from safetensors.torch import load_file
from support.graph_captures import replace_captures
from support.single_steps import CONFIG, random_prompt, run_prompt

from quire_engine.core.engine import Engine
from quire_engine.kv_cache.swap_policy import SwapCosts
from quire_engine.models import base
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.llama import LlamaForCausalLM
from quire_engine.worker import startup
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_engine.worker.startup import RunnerStartup
from quire_engine.worker.warmup import compile_steps, peak_memory_steps
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError
from quire_spec.model.memory_sizing import kv_block_bytes, lora_bytes
from quire_spec.protocol.messages import SequenceRequest

FACTORY = ParamFactory(torch.float32, torch.device("cpu"))
MIB = 1 << 20


def test_measured_memory_equals_what_is_allocated(llama_folder, llama_shape):
    memory = DeviceModelRunner(CONFIG, llama_shape, llama_folder).memory
    assert memory.weights_bytes == sum(t.nbytes for t in load_file(llama_folder / "model.safetensors").values())
    assert memory.lora_bytes == lora_bytes(llama_shape, 2 * 8, 4)
    assert memory.num_blocks == 8 * 128 // 8
    assert memory.kv_bytes == memory.num_blocks * kv_block_bytes(llama_shape, 8, 4)
    assert (memory.block_size, memory.max_model_len, memory.dtype, memory.device) == (8, 128, "float32", "cpu")
    assert memory.swap_bytes == 0


def _allocate(llama_shape, run_step=lambda *_: None, **changes):
    """Allocate for a model without weights."""
    model = LlamaForCausalLM(llama_shape, FACTORY)
    return RunnerStartup(dataclasses.replace(CONFIG, **changes), model, FACTORY, 0, run_step).allocate()


def test_swap_costs_are_measured_if_there_is_swap_space(llama_shape):
    without = _allocate(llama_shape)
    assert without.swap_costs == SwapCosts() and without.host_swap is None
    bytes_per_block, steps = kv_block_bytes(llama_shape, 8, 4), []
    memory = _allocate(
        llama_shape, lambda step_input, *_: steps.append(step_input), swap_space=5.5 * bytes_per_block / 2**30
    )
    assert memory.swap_costs.num_host_blocks == 5 and memory.measured.swap_bytes == 5 * bytes_per_block
    assert 0 < memory.swap_costs.seconds_per_block < 1 and 0 < memory.swap_costs.seconds_per_token < 1
    # A prompt of the longest sequence.
    assert {tuple(step.lengths) for step in steps} == {(127,)}


def test_default_max_model_len_is_that_of_the_checkpoint(llama_shape):
    memory = _allocate(llama_shape, max_model_len=None, max_num_seqs=1)
    assert memory.measured.max_model_len == 512
    assert memory.measured.num_blocks == memory.kv_cache.num_blocks == 512 // 8


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("kv_cache_memory_bytes", 65_535, r"(?s)^max_model_len: .*raise kv_cache_memory_bytes to 65536 .*65,535 bytes"),
        ("kv_cache_memory_bytes", 2**60, rf"^kv_cache_memory_bytes: {2**60} .* \d+ bytes that are free; lower it"),
        ("swap_space", 2.0**30, "^swap_space: the memory cannot be allocated; lower it"),
    ],
)
def test_rejects_memory_settings_that_do_not_fit(llama_shape, name, value, error):
    with pytest.raises(ConfigError, match=error):
        _allocate(llama_shape, **{name: value})


@pytest.mark.parametrize(
    ("loras", "more"), [(0, ""), (4, ", or lower max_loaded_lora_ranks, max_loras or max_lora_rank")]
)
def test_rejects_a_model_that_does_not_fit_before_loading_it(llama_folder, llama_shape, monkeypatch, loras, more):
    monkeypatch.setattr("quire_engine.worker.device.available_memory_bytes", lambda: 100_000)
    monkeypatch.setattr(base, "load_weights", None)
    config = dataclasses.replace(CONFIG, enable_lora=loras > 0, max_loras=loras or 1)
    with pytest.raises(ConfigError) as error:
        DeviceModelRunner(config, llama_shape, llama_folder)
    first, *table = str(error.value).splitlines()
    fix = f"free memory, or choose a smaller model{more}"
    assert first == f"model: {config.model!r} does not fit into the memory that is free; {fix}"
    slot_rows = ["adapter slots (4 with 32 LoRA ranks)"] * (loras > 0)
    assert [line.split("  ")[1] for line in table] == ["weights", *slot_rows, "free"]
    assert table[-1].split()[1:] == ["100,000", "bytes", "0.00", "GiB"]


def test_compile_steps_cover_prompt_and_decode_with_every_sampling_variant(llama_shape):
    steps = []

    def record(step_input, spans, kv_cache):
        (variant,) = {(p.greedy, p.top_p < 1, p.has_penalties) for p in (span.sequence.params for span in spans)}
        assert step_input.copies and kv_cache.num_blocks == 1
        steps.append((step_input.starts, step_input.lengths, step_input.adapter_slots, *variant))

    model = LlamaForCausalLM(llama_shape, FACTORY)
    RunnerStartup(CONFIG, model, FACTORY, 0, record).run_dummy_steps(compile_steps(CONFIG, 128))
    alone = [([126], [1], [0]), ([0], [64], [0])]
    both = ([126, 0], [1, 64], [0, 0])
    plain = [(True, False, False), (False, False, False), (False, True, False)]
    penalized = [(True, False, True), (False, False, True), (False, True, True)]
    assert steps == [(*step, True, False, False) for step in alone] + [(*both, *way) for way in plain + penalized]


def test_dummy_tokens_are_in_the_vocabulary_shard_of_every_rank():
    config = dataclasses.replace(CONFIG, tensor_parallel_size=4)
    first_step, *steps_of_attention = peak_memory_steps(config, 128, 400)
    assert {token for [span] in steps_of_attention for token in span.sequence.prompt_token_ids} == {0}
    for span in first_step:
        token_ids = {
            *span.sequence.suppressed_token_ids,
            *(span.sequence.params.logit_bias or ()),
            *span.sequence.tokens(0, 1),
        }
        assert max(token_ids.union(*span.sequence.bad_words)) == 99


def test_kernels_compile_while_weights_load(llama_folder, llama_shape, monkeypatch):
    """The dummy steps compute finite numbers and leave nothing behind."""
    expected = run_prompt(DeviceModelRunner(CONFIG, llama_shape, llama_folder), random_prompt(20))
    step_ran, waited = threading.Event(), []
    compute_logits, load_weights = LlamaForCausalLM.compute_logits, base.load_weights

    def checked_logits(model, hidden, batch):
        logits = compute_logits(model, hidden, batch)
        assert logits.isfinite().all()
        step_ran.set()
        return logits

    def load_after_a_step(*args, **options):
        waited.append(step_ran.wait(60))
        load_weights(*args, **options)

    monkeypatch.setattr(LlamaForCausalLM, "compute_logits", checked_logits)
    monkeypatch.setattr(base, "load_weights", load_after_a_step)
    monkeypatch.setattr(startup, "_compiles_kernels", lambda device: True)
    assert run_prompt(DeviceModelRunner(CONFIG, llama_shape, llama_folder), random_prompt(20)) == expected
    assert waited == [True]


def test_kernel_that_does_not_compile_stops_the_startup(llama_folder, llama_shape, monkeypatch):
    def fail(*_):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(LlamaForCausalLM, "compute_logits", fail)
    monkeypatch.setattr(startup, "_compiles_kernels", lambda device: True)
    with pytest.raises(RuntimeError, match="no such instruction"):
        DeviceModelRunner(CONFIG, llama_shape, llama_folder)


@pytest.mark.parametrize(("adapters", "max_num_seqs"), [(False, 6), (True, 6), (True, 1)])
def test_engine_starts_as_on_a_gpu(llama_folder, monkeypatch, adapters, max_num_seqs):
    """Everything except the capture and the memory queries: profiling steps run before the KV cache is allocated."""
    answers = {"max_memory_reserved": 300 * MIB, "memory_reserved": 200 * MIB, "mem_get_info": (700 * MIB, 1000 * MIB)}
    for name, answer in (answers | {"empty_cache": None, "reset_peak_memory_stats": None}).items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)
    replace_captures(monkeypatch)
    budgets = []

    def measure(self):
        budgets.append(self._measure_gpu_memory())
        return budgets[0]

    monkeypatch.setattr(RunnerStartup, "_measure_memory", measure)
    config = dataclasses.replace(CONFIG, model=str(llama_folder), swap_space=1e-3, async_scheduling=True)
    engine = Engine.from_config(dataclasses.replace(config, max_num_seqs=max_num_seqs, enable_lora=adapters))
    [budget] = budgets
    assert budget.total == 900 * MIB
    # 300 of the device are in use, 200 of them by this process; at the peak this process uses 300.
    assert budget.weights + budget.lora + budget.activations == 400 * MIB
    assert budget.available_for_kv == 500 * MIB
    assert (budget.lora > 0) == adapters
    engine.add(
        SequenceRequest(
            0, [1, 2, 3], SamplingParams.from_mapping({"temperature": 0.0, "max_tokens": 5, "ignore_eos": True})
        )
    )
    tokens = []
    while engine.has_work:
        for result in engine.step().results:
            assert result.error_code is None, result.error
            tokens += result.token_ids
    assert len(tokens) == 5


def test_largest_step_without_memory_reports_the_bytes(llama_shape, monkeypatch):
    def fail(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (700 << 20, 1000 << 20))
    monkeypatch.setattr(RunnerStartup, "_measure_gpu_memory", fail)
    model = LlamaForCausalLM(llama_shape, FACTORY)
    cuda_startup = RunnerStartup(CONFIG, model, FACTORY, 0, lambda *_: None)
    cuda_startup._device = torch.device("cuda")
    with pytest.raises(ConfigError, match=r"(?s)^max_num_batched_tokens: a step of .* weights .*1,048,576,000 bytes"):
        cuda_startup.allocate()
