# SPDX-License-Identifier: Apache-2.0
"""A whole engine on the emulated GPU: CUDA graphs, async scheduling, adapters and pinned copies.

The expected tokens are those of an engine on the CPU.
"""

import gc
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from support.requirements_of_machine import emulated_device, requires_emulated_gpu
from support.tiny_checkpoints import VOCAB, make_adapter, make_checkpoint
from torch.nn.attention import SDPBackend

from quire_engine import SamplingParams, StructuredOutputsParams
from quire_engine.api.llm import LLM
from quire_engine.api.outputs import LoRARequest
from quire_engine.speculation.draft_policy import DraftPolicy
from quire_engine.speculation.proposer import NgramProposer
from quire_engine.worker import graph_shapes
from quire_engine.worker.cuda_graphs import _SEGMENT_BYTES, CudaGraphRunner
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_kernels import dispatch, paged_attention, sample
from quire_kernels.gpu import fused_attention
from quire_kernels.lora import adapted_linear
from quire_spec.errors import ConfigError

pytestmark = requires_emulated_gpu

TINY = Path(__file__).parents[2] / "examples/models/tiny"
SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 96, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 48,
}  # fmt: skip
BLOCK_BYTES = 8 * 2 * 2 * 2 * 16 * 4
"""Bytes of a KV block of 8 tokens in float32, over both layers of the checkpoint."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    paths = [make_adapter(model, tmp_path_factory.mktemp(f"a{i}"), seed=i, r=4 * i) for i in (1, 2)]
    return [LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1)]


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each step that replays a graph: whether it has adapters."""
    steps, run = [], CudaGraphRunner.run

    def recording_run(self: CudaGraphRunner, graph_input: Any, *args: Any) -> Any:
        steps.append(graph_input.has_adapters)
        return run(self, graph_input, *args)

    monkeypatch.setattr(CudaGraphRunner, "run", recording_run)
    return steps


def _prompts(*lengths: int) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(3)
    return [{"prompt_token_ids": torch.randint(VOCAB, (length,), generator=draw).tolist()} for length in lengths]


def _generate_on_both(
    model: Path, prompts: Any, params: Any, on_cpu: dict[str, Any] | None = None, **options: Any
) -> tuple[Any, Any]:
    """Return the outputs of a CPU engine and of a GPU engine; `on_cpu` are options of the CPU engine only."""
    loras, fields = options.pop("loras", None), SMALL | options
    outputs_by_device = []
    for kind in ("cpu", "cuda"):
        llm = LLM(model=model, device=kind, **fields | ((on_cpu or {}) if kind == "cpu" else {}))
        outputs = llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
        outputs_by_device.append([output.outputs[0] for output in outputs])
        del llm
    return outputs_by_device[0], outputs_by_device[1]


def _assert_same_tokens(cpu: Any, gpu: Any) -> None:
    assert [output.token_ids for output in gpu] == [output.token_ids for output in cpu]


def test_tokens_equal_the_cpus_for_all_sampling_parameters(model):
    params = [
        SamplingParams(temperature=0.0, max_tokens=9, logprobs=3),
        SamplingParams(temperature=1.0, seed=5, max_tokens=8, top_p=0.8, top_k=40),
        SamplingParams(temperature=0.7, seed=6, max_tokens=7, min_p=0.02, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=5, presence_penalty=0.8, logit_bias={7: 3.0}),
        SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=2),
    ]
    cpu, gpu = _generate_on_both(model, _prompts(5, 60, 17, 30, 9), params)
    _assert_same_tokens(cpu, gpu)
    for gpu_logprobs, cpu_logprobs in zip(gpu[0].logprobs, cpu[0].logprobs, strict=True):
        assert gpu_logprobs.keys() == cpu_logprobs.keys()
        for token, entry in gpu_logprobs.items():
            assert entry.logprob == pytest.approx(cpu_logprobs[token].logprob, abs=1e-3)


def test_long_prompts_use_fused_attention(model, monkeypatch):
    """Selected at start, beside other sequences, with steps in flight. PyTorch's fused attention is not available on
    this device."""
    prefill, calls = fused_attention._prefill_with_sdpa, []

    def recording_prefill(queries: Any, cache: Any, batch: Any, opening: Any, scale: float) -> Any:
        calls.append((opening.length, len(batch.lengths)))
        return prefill(queries, cache, batch, opening, scale)

    monkeypatch.setattr(fused_attention, "_prefill_with_sdpa", recording_prefill)
    monkeypatch.setattr(fused_attention, "MIN_TOKENS", 16)
    # As in production, graphs compute only shorter prompts.
    monkeypatch.setattr(graph_shapes, "MAX_MIXED_TOKENS", 8)
    monkeypatch.setattr(fused_attention, "BACKENDS", (SDPBackend.MATH,))
    monkeypatch.setattr(paged_attention, "dispatch_table", {})
    monkeypatch.setattr(paged_attention, "_preferred", {})
    cpu, gpu = _generate_on_both(model, _prompts(5, 60, 17, 30, 9), SamplingParams(temperature=0.0, max_tokens=9))
    _assert_same_tokens(cpu, gpu)
    assert paged_attention.preferred("cuda") == "fused"
    assert {length for length, _ in calls} >= {17}
    assert any(num_spans > 1 for _, num_spans in calls)


def test_adapter_slot_is_reloaded_while_steps_run(model, adapters, monkeypatch):
    """With one slot, each adapter overwrites the other one while steps without it run."""
    compute, captured = adapted_linear.get("cuda", "torch"), []

    def counted(*args: Any) -> Any:
        captured.append(torch.cuda.is_current_stream_capturing())
        return compute(*args)

    monkeypatch.setitem(adapted_linear.dispatch_table, "cuda", counted)
    loras = [adapters[0], None, adapters[1], adapters[0], None]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (5, 12, 5, 4, 6)]
    options = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8, "loras": loras}
    _assert_same_tokens(*_generate_on_both(model, _prompts(5, 20, 17, 30, 9), params, **options))
    assert True in captured


def test_adapters_that_transform_products_or_replace_modules(model, adapters, tmp_path, replayed):
    """Steps without such an adapter still replay graphs."""
    configs = [
        {"use_dora": True, "r": 4},
        {"bias": "all", "lora_bias": True, "target_modules": ["q_proj", "down_proj"]},
        {"modules_to_save": ["lm_head", "embed_tokens", "norm"], "target_modules": ["v_proj"]},
    ]
    paths = [make_adapter(model, tmp_path / f"{i}", seed=i, **config) for i, config in enumerate(configs)]
    special = [LoRARequest(f"special-{i}", 5 + i, str(path)) for i, path in enumerate(paths)]
    loras = [*special, adapters[0], None, special[0]]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (6, 5, 7, 16, 14, 3)]
    options = {"enable_lora": True, "max_loras": 4, "max_lora_rank": 8, "lora_modules_to_save": True, "loras": loras}
    cpu, gpu = _generate_on_both(model, _prompts(5, 20, 9, 17, 30, 11), params, **options)
    _assert_same_tokens(cpu, gpu)
    assert any(replayed)


@pytest.mark.parametrize("kind", ["nemotron_h", "granite4", "qwen3_5"])
def test_layers_with_states(kind, tmp_path):
    """Mamba-2 and Gated DeltaNet of prompts, one of them of several chunks, of sequences that decode, and of drafts."""
    model = make_checkpoint(tmp_path, kind)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (12, 4, 14)]
    prompts = [{"prompt_token_ids": prompt["prompt_token_ids"] * 3} for prompt in _prompts(4, 24, 6)]
    fields = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "max_num_batched_tokens": 96}
    _assert_same_tokens(*_generate_on_both(model, prompts, params, **fields))


def test_attention_within_chunks(tmp_path):
    """Prompts that end in later chunks than they begin, whole and in parts, and outputs that reach the next chunk."""
    model = make_checkpoint(tmp_path, "llama4")
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (12, 20)]
    prompts = [{"prompt_token_ids": prompt["prompt_token_ids"] * 3} for prompt in _prompts(14, 6)]
    _assert_same_tokens(*_generate_on_both(model, prompts, params, max_num_batched_tokens=32, block_size=8))


@pytest.mark.parametrize("kind", ["deepseek_v3", "kimi_linear"])
def test_latent_attention(kind, tmp_path, replayed):
    """Steps with an adapter that changes the absorbed projection do not replay graphs; the others do. Kimi Linear also
    has states, whose steps never replay graphs."""
    model = make_checkpoint(tmp_path / "model", kind)
    options = [
        {"target_modules": ["q_b_proj" if kind == "deepseek_v3" else "q_proj", "o_proj"]},
        {"target_modules": ["kv_b_proj", "kv_a_proj_with_mqa"]},
    ]
    paths = [make_adapter(model, tmp_path / f"{i}", seed=i, r=4, **fields) for i, fields in enumerate(options)]
    loras = [LoRARequest(f"a{i}", 1 + i, str(path)) for i, path in enumerate(paths)]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (12, 4, 14, 9)]
    fields = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "loras": [*loras, None, loras[0]]}
    cpu, gpu = _generate_on_both(model, _prompts(5, 60, 17, 30), params, **fields)
    _assert_same_tokens(cpu, gpu)
    assert set(replayed) == ({True, False} if kind == "deepseek_v3" else set())


def test_graphs_compute_prompts_and_drafts(model, adapters, monkeypatch):
    """Steps with prompts, chunks and drafts replay graphs, with adapters and without, and the memory of all graphs was
    known before the first one was captured. Each shape is captured once."""
    build_input, capture_all = CudaGraphRunner.build_input, CudaGraphRunner.capture_all
    replayed, has_drafts, memory = [], [], []

    def recording_build(self: Any, plan: Any) -> Any:
        graph_input = build_input(self, plan)
        replayed.append((graph_input.is_mixed, graph_input.has_adapters))
        has_drafts.append(any(span.draft_token_ids for span in plan.spans))
        return graph_input

    def measured_capture(self: Any, planned_bytes: int) -> None:
        capture_all(self, planned_bytes)
        assert len(self._graphs) == sum(map(len, self.shapes.kinds))
        memory.append((self.num_bytes, planned_bytes))

    monkeypatch.setattr(CudaGraphRunner, "build_input", recording_build)
    monkeypatch.setattr(NgramProposer, "propose", lambda self, sequence, max_tokens: [7, 7, 7][:max_tokens])
    monkeypatch.setattr(DraftPolicy, "draft_length", lambda *_: 3)
    monkeypatch.setattr(CudaGraphRunner, "capture_all", measured_capture)
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (6, 5, 7, 10, 9)]
    prompts = [{"prompt_token_ids": prompt["prompt_token_ids"] * 3} for prompt in _prompts(4, 20, 6, 10, 3)]
    loras = [adapters[0], adapters[1], None, None, None]
    fields = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8, "loras": loras}
    speculation = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}
    _assert_same_tokens(*_generate_on_both(model, prompts, params, **fields, **speculation))
    assert set(replayed) >= {(True, True), (True, False)}
    assert any(has_drafts)
    [(num_bytes, planned_bytes)] = memory
    assert num_bytes <= planned_bytes <= num_bytes + _SEGMENT_BYTES


def test_grammars_constrain_steps_of_graphs(monkeypatch):
    """The masks of grammars apply to logits that graphs compute, one step ahead, beside a sequence without grammar."""
    build_input, replayed = CudaGraphRunner.build_input, []

    def recording_build(self: Any, plan: Any) -> Any:
        graph_input = build_input(self, plan)
        replayed.append(graph_input is not None and any(span.sequence.grammar for span in plan.spans))
        return graph_input

    monkeypatch.setattr(CudaGraphRunner, "build_input", recording_build)
    constraints = [{"regex": "[0-9]{3}-[a-f]{2}"}, {"choice": ["green ideas", "red"]}, None]
    params = [
        SamplingParams(temperature=0.0, max_tokens=8, structured_outputs=fields and StructuredOutputsParams(**fields))
        for fields in constraints
    ]
    prompts = ["Once upon a time", "The captain", "One day a dog"]
    cpu, gpu = _generate_on_both(TINY, prompts, params, max_num_batched_tokens=96)
    _assert_same_tokens(cpu, gpu)
    assert re.fullmatch("[0-9]{3}-[a-f]{2}", gpu[0].text) and gpu[1].text in ("green ideas", "red")
    assert sum(replayed) >= 3


def test_sampling_by_histograms(model, monkeypatch):
    """As for few rows of a large vocabulary."""
    monkeypatch.setattr(sample, "dispatch_table", {})
    monkeypatch.setattr(sample, "_preferred", {})
    params = [
        SamplingParams(temperature=0.0, max_tokens=9),
        SamplingParams(temperature=1.0, seed=5, max_tokens=8, top_p=0.8, top_k=40),
        SamplingParams(temperature=0.9, seed=6, max_tokens=8, min_p=0.02, top_p=0.95),
    ]
    tokens = []
    for kind, overrides in (("cpu", {}), ("cuda", {"sample": "histogram"})):
        monkeypatch.setattr(dispatch, "overrides", lambda overrides=overrides: overrides)
        llm = LLM(model=model, device=kind, **SMALL)
        outputs = llm.generate(_prompts(5, 30, 9), params, use_tqdm=False)
        tokens.append([output.outputs[0].token_ids for output in outputs])
        del llm
    assert tokens[0] == tokens[1]


def test_swapped_sequences_are_restored_from_pinned_memory(model):
    fields = {"kv_cache_memory_bytes": 14 * BLOCK_BYTES, "swap_space": 0.01, "enable_prefix_caching": False}
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    without_preemption = {"kv_cache_memory_bytes": 200 * BLOCK_BYTES}
    _assert_same_tokens(*_generate_on_both(model, _prompts(30, 28, 27), params, on_cpu=without_preemption, **fields))


def test_launching_a_step_does_not_wait_for_the_device(model, adapters, monkeypatch):
    execute_async, waits = DeviceModelRunner.execute_async, []

    def counted(*args: Any) -> Any:
        num_waits = emulated_device.waits()
        get_outputs = execute_async(*args)
        waits.append(emulated_device.waits() - num_waits)
        return get_outputs

    monkeypatch.setattr(DeviceModelRunner, "execute_async", counted)
    params = [
        SamplingParams(temperature=0.0, max_tokens=4, presence_penalty=0.5, logprobs=1),
        SamplingParams(temperature=1.0, seed=2, max_tokens=6, top_p=0.9, min_p=0.01, top_k=30),
    ]
    llm = LLM(model=model, device="cuda", enable_lora=True, max_loras=2, max_lora_rank=8, **SMALL)
    llm.generate(_prompts(60, 9), params, lora_request=[adapters[0], None], use_tqdm=False)
    assert len(waits) > 4
    assert set(waits) == {0}


def test_startup_without_memory_names_the_setting(model):
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        LLM(model=model, device="cuda", gpu_memory_utilization=0.01, **SMALL)


def test_largest_step_without_memory_reports_the_bytes(model):
    """The weights fit, but the steps that compile kernels during loading do not."""
    torch.cuda.empty_cache()
    ballast = torch.empty(torch.cuda.mem_get_info()[0] - (24 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens(.|\n)*weights"):
        LLM(model=model, device="cuda", **SMALL)
    del ballast


def test_deleted_engine_leaves_no_memory(model):
    def use() -> None:
        LLM(model=model, device="cuda", **SMALL)

    use()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    use()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before
