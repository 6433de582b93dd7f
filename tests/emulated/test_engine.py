# SPDX-License-Identifier: Apache-2.0
"""A whole engine on the emulated GPU: graphs, steps ahead, adapters, pinned copies. The measure is the CPU's tokens."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from support.requirements_of_machine import emulated_device, requires_emulated_gpu
from support.tiny_checkpoints import VOCAB, make_adapter, make_checkpoint
from torch.nn.attention import SDPBackend

from quire_engine.api.llm import LLM
from quire_engine.api.outputs import LoRARequest
from quire_engine.worker.model_runner import DeviceModelRunner
from quire_kernels import paged_attention
from quire_kernels.gpu import fused_attention
from quire_kernels.lora import adapted_linear
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import ConfigError

pytestmark = requires_emulated_gpu

SMALL: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 96, "block_size": 8, "max_num_seqs": 4, "max_num_batched_tokens": 48,
}  # fmt: skip
BLOCK_BYTES = 8 * 2 * 2 * 2 * 16 * 4
"""Of a block of 8 tokens in float32, over both layers of the checkpoint."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[LoRARequest]:
    paths = [make_adapter(model, tmp_path_factory.mktemp(f"a{i}"), seed=i, r=4 * i) for i in (1, 2)]
    return [LoRARequest(path.name, i, str(path)) for i, path in enumerate(paths, 1)]


def _prompts(*lengths: int) -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(3)
    return [{"prompt_token_ids": torch.randint(VOCAB, (length,), generator=draw).tolist()} for length in lengths]


def _both(model: Path, prompts: Any, params: Any, on_cpu: dict[str, Any] | None = None, **how: Any) -> tuple[Any, Any]:
    """Outputs of the CPU's engine and of the GPU's. `on_cpu`: fields of the former alone."""
    loras, fields = how.pop("loras", None), SMALL | how
    found = []
    for kind in ("cpu", "cuda"):
        llm = LLM(model=model, device=kind, **fields | ((on_cpu or {}) if kind == "cpu" else {}))
        outputs = llm.generate(prompts, params, lora_request=loras, use_tqdm=False)
        found.append([output.outputs[0] for output in outputs])
        del llm
    return found[0], found[1]


def _same(cpu: Any, gpu: Any) -> None:
    assert [output.token_ids for output in gpu] == [output.token_ids for output in cpu]


def test_tokens_are_the_cpus_however_they_are_chosen(model):
    params = [
        SamplingParams(temperature=0.0, max_tokens=9, logprobs=3),
        SamplingParams(temperature=1.0, seed=5, max_tokens=8, top_p=0.8, top_k=40),
        SamplingParams(temperature=0.7, seed=6, max_tokens=7, min_p=0.02, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=5, presence_penalty=0.8, logit_bias={7: 3.0}),
        SamplingParams(temperature=0.0, max_tokens=6, prompt_logprobs=2),
    ]
    cpu, gpu = _both(model, _prompts(5, 60, 17, 30, 9), params)
    _same(cpu, gpu)
    for ours, theirs in zip(gpu[0].logprobs, cpu[0].logprobs, strict=True):
        assert ours.keys() == theirs.keys()
        for token, found in ours.items():
            assert found.logprob == pytest.approx(theirs[token].logprob, abs=1e-3)


def test_long_prompts_are_computed_apart(model, monkeypatch):
    """Beside others' tokens, and behind steps that are under way. PyTorch's fused attention is not to be had here."""
    attend, alone = fused_attention._prefill_with_sdpa, []

    def counted(queries: Any, cache: Any, batch: Any, opening: Any, scale: float) -> Any:
        alone.append((opening.length, len(batch.lengths)))
        return attend(queries, cache, batch, opening, scale)

    monkeypatch.setattr(fused_attention, "_prefill_with_sdpa", counted)
    monkeypatch.setattr(fused_attention, "MIN_TOKENS", 16)
    monkeypatch.setattr(fused_attention, "BACKENDS", (SDPBackend.MATH,))
    monkeypatch.setitem(paged_attention.dispatch_table, "cuda", fused_attention.paged_attention)
    cpu, gpu = _both(model, _prompts(5, 60, 17, 30, 9), SamplingParams(temperature=0.0, max_tokens=9))
    _same(cpu, gpu)
    assert {length for length, _ in alone} >= {17}
    assert any(num_spans > 1 for _, num_spans in alone)


@pytest.mark.parametrize("form", ["torch", "side"])
def test_adapters_change_places_while_others_run(model, adapters, form, monkeypatch):
    """One slot, so that each adapter is written over the other's while steps without it are under way."""
    compute, captured = adapted_linear.get("cuda", form), []

    def counted(*args: Any) -> Any:
        captured.append(torch.cuda.is_current_stream_capturing())
        return compute(*args)

    monkeypatch.setitem(adapted_linear.dispatch_table, "cuda", counted)
    loras = [adapters[0], None, adapters[1], adapters[0], None]
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (5, 12, 5, 4, 6)]
    how = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8, "loras": loras}
    _same(*_both(model, _prompts(5, 20, 17, 30, 9), params, **how))
    assert True in captured


def test_sequences_swapped_to_pinned_memory_come_back(model):
    fields = {"kv_cache_memory_bytes": 14 * BLOCK_BYTES, "swap_space": 0.01, "enable_prefix_caching": False}
    params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
    roomy = {"kv_cache_memory_bytes": 200 * BLOCK_BYTES}
    _same(*_both(model, _prompts(30, 28, 27), params, on_cpu=roomy, **fields))


def test_no_step_waits_for_the_device_before_it_is_begun(model, adapters, monkeypatch):
    begin, waited = DeviceModelRunner.execute_async, []

    def counted(*args: Any) -> Any:
        before = emulated_device.waits()
        outcome = begin(*args)
        waited.append(emulated_device.waits() - before)
        return outcome

    monkeypatch.setattr(DeviceModelRunner, "execute_async", counted)
    params = [
        SamplingParams(temperature=0.0, max_tokens=4, presence_penalty=0.5, logprobs=1),
        SamplingParams(temperature=1.0, seed=2, max_tokens=6, top_p=0.9, min_p=0.01, top_k=30),
    ]
    llm = LLM(model=model, device="cuda", enable_lora=True, max_loras=2, max_lora_rank=8, **SMALL)
    llm.generate(_prompts(60, 9), params, lora_request=[adapters[0], None], use_tqdm=False)
    assert len(waited) > 4
    assert set(waited) == {0}


def test_a_start_without_room_says_what_takes_it(model):
    with pytest.raises(ConfigError, match="gpu_memory_utilization"):
        LLM(model=model, device="cuda", gpu_memory_utilization=0.01, **SMALL)


def test_a_step_without_room_is_refused_with_its_bytes(model):
    """Weights fit, the steps that compile kernels beside their loading do not."""
    torch.cuda.empty_cache()
    taken = torch.empty(torch.cuda.mem_get_info()[0] - (24 << 20), dtype=torch.uint8, device="cuda")
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens(.|\n)*weights"):
        LLM(model=model, device="cuda", **SMALL)
    del taken


def test_an_engine_that_is_gone_leaves_no_memory(model):
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
