# SPDX-License-Identifier: Apache-2.0
"""The planner's formulas against published capacities and hand-computed tables: GPUs from 24 to 141 GB, 8B and 70B.

The published figures are KV tokens that vLLM logs at startup with Llama 3.1 8B in bfloat16. vLLM is another engine; the
tests check that the formulas are within a few percent and never exceed the real capacity.
"""

from pathlib import Path

import pytest
from support.planning import GIB, MODELS, llm_service, plan_for, planner_inputs

from quire_operator.api.engine_spec import LoraSpec
from quire_operator.plan import candidates, device_memory
from quire_operator.plan.plan import FitReason
from quire_operator.plan.report import render_lines
from quire_spec.model.parallel.tensor_parallel import unsupported_reason

ROOT = Path(__file__).resolve().parents[3]

# GPU, GiB that CUDA reports, vLLM's defaults of gpu_memory_utilization, token budget and sequences, logged and
# predicted KV tokens.
PUBLISHED = [
    ("RTX 3090", 23.56, 0.85, 2048, 256, 30_960, 30_438),
    ("RTX 4090", 23.53, 0.90, 2048, 256, 40_528, 39_867),
    ("A6000 48 GB", 47.43, 0.90, 2048, 256, 216_624, 216_077),
    ("A100 40 GB", 39.39, 0.90, 2048, 256, 157_648, 156_799),
    ("H100 80 GB", 79.11, 0.90, 8192, 1024, 442_160, 432_362),
]


@pytest.mark.parametrize("case", PUBLISHED, ids=[case[0] for case in PUBLISHED])
def test_published_capacities(case):
    _, visible, share, tokens, seqs, logged, predicted = case
    shape = MODELS["8b"].shape
    used = (
        device_memory.weights_bytes(MODELS["8b"].weights_bytes, 1)
        + device_memory.activation_bytes(shape, tokens, seqs, 2, 1, LoraSpec())
        + device_memory.non_torch_bytes(1)
    )
    kv_tokens = (visible * share * GIB - used) // device_memory.kv_bytes_per_token(shape, 2, 1)
    assert kv_tokens == pytest.approx(predicted, rel=0.002)
    assert 0.975 * logged < kv_tokens < logged


A10G, A100_40, A100_80 = "NVIDIA-A10G", "NVIDIA-A100-SXM4-40GB", "NVIDIA-A100-SXM4-80GB"
H100, H200, L4 = "NVIDIA-H100-80GB-HBM3", "NVIDIA-H200", "NVIDIA-L4"

# All linear layers, embedding and output projection with LoRA rank 16; sums are in whole MiB.
SLOT = 80 * 2**20 + 2 * 16 * 2 * (MODELS["8b"].shape.vocab_size + 4096)
# GPU, visible GiB, utilization, token budget, sequences, GiB of a step, GiB of KV, KV tokens, context; KV tokens and
# context with 8 adapter slots of LoRA rank 16.
ONE_GPU = [
    (L4, 21.87, "0.90", 2048, 16, 0.29, 3.79, 31_028, 15_360, 25_391, 12_288),
    (A10G, 21.86, "0.90", 2048, 16, 0.29, 3.78, 30_985, 15_360, 25_348, 12_288),
    (A100_40, 39.38, "0.93", 4096, 64, 0.57, 20.44, 167_417, 32_768, 161_780, 32_768),
    (A100_80, 79.12, "0.93", 8192, 128, 1.15, 56.82, 465_506, 32_768, 459_869, 32_768),
    (H100, 78.77, "0.93", 8192, 128, 1.15, 56.50, 462_849, 32_768, 457_212, 32_768),
    (H200, 138.86, "0.93", 8192, 256, 1.15, 112.38, 920_615, 32_768, 914_978, 32_768),
]


@pytest.mark.parametrize("row", ONE_GPU, ids=[row[0] for row in ONE_GPU])
def test_llama_8b_on_one_gpu(row):
    gpu, visible, share, tokens, seqs, step, kv, kv_tokens, length, lora_tokens, lora_length = row
    plan = plan_for("8b", gpu)
    assert plan.gpu.visibleMiB / 1024 == pytest.approx(visible, abs=0.006)
    assert plan.gpuMemoryUtilization.value == share
    assert (plan.maxNumBatchedTokens.value, plan.maxNumSeqs.value) == (tokens, seqs)
    assert plan.bytes.weights / GIB == pytest.approx(15.11, abs=0.005)
    assert plan.bytes.activations / GIB == pytest.approx(step, abs=0.01)
    assert plan.bytes.kv / GIB == pytest.approx(kv, abs=0.01)
    assert plan.kvTokens == pytest.approx(kv_tokens, abs=2)
    assert plan.maxModelLen.value == length
    slots = plan_for("8b", gpu, "lora: {maxLoaded: 8, maxRank: 16}")
    assert slots.bytes.lora == -(-8 * SLOT // 2**20) * 2**20
    assert slots.kvTokens == pytest.approx(lora_tokens, abs=2)
    assert slots.maxModelLen.value == lora_length


def test_8b_on_24_gb_gets_advice_for_two_gpus():
    plan = plan_for("8b", L4)
    assert plan.fit is FitReason.LOW_CONCURRENCY
    assert "spec.gpu.count 2 gives 179" in plan.advice
    assert "context of 32768" in plan.advice
    two = plan_for("8b", L4, "lora: {maxLoaded: 0}\ngpu: {count: 2}")
    assert (two.tensorParallelSize.value, two.maxModelLen.value, two.fit) == (2, 32_768, FitReason.FITS)
    assert two.kvTokens == pytest.approx(179_000, rel=0.005)


# GPU, count, model, utilization, GiB of weights and of KV on each GPU, KV tokens, context (None: does not fit), with
# the token budget for the size of the GPU.
MANY_GPUS = [
    (L4, 8, "70b", "0.89", 16.59, 1.68, 43_926, 21_504),
    (A100_40, 4, "70b", "0.93", 33.18, 1.94, 25_394, 12_288),
    (A100_80, 2, "70b", "0.93", 66.37, 4.80, 31_435, 15_360),
    (H100, 2, "70b", "0.93", 66.37, 4.47, 29_310, 14_336),
    (H200, 1, "70b", "0.93", 132.73, -6.36, None, None),
    (H200, 2, "70b", "0.93", 66.37, 60.35, 395_523, 32_768),
    (L4, 8, "70b-fp8", "0.89", 8.55, 9.72, 254_777, 32_768),
    (H100, 1, "70b-fp8", "0.93", 68.38, 2.11, 6_910, None),
    (H200, 1, "70b-fp8", "0.93", 68.38, 57.99, 190_017, 32_768),
]


def budget(gpu):
    return {A100_40: 4096, L4: 2048, A10G: 2048}.get(gpu, 8192)


@pytest.mark.parametrize("row", MANY_GPUS, ids=[f"{row[0]}x{row[1]}-{row[2]}" for row in MANY_GPUS])
def test_llama_70b_on_many_gpus(row):
    gpu, count, model, share, weights, kv, kv_tokens, length = row
    spec = f"lora: {{maxLoaded: 0}}\nengine: {{tensorParallelSize: {count}, maxNumBatchedTokens: {budget(gpu)}}}"
    inputs = planner_inputs(model, gpu, spec)
    if model == "70b-fp8":
        assert candidates.limits.loaded_weights_bytes(inputs, 1) == MODELS[model].weights_bytes
    attempts = list(candidates.generate_candidates(inputs))
    best = candidates.best_candidate(inputs, attempts) or attempts[0]
    assert f"{best.utilization / 1000:.2f}" == share
    assert best.costs.weights / GIB == pytest.approx(weights, abs=0.006)
    assert best.kv_bytes / GIB == pytest.approx(kv, abs=0.01)
    assert best.max_model_len == (length or 0)
    if kv_tokens:
        assert best.kv_tokens == pytest.approx(kv_tokens, abs=25)


@pytest.mark.parametrize(("gpu", "kv_tokens", "length"), [(A100_80, 38_413, 18_432), (H100, 36_288, 17_408)])
def test_smaller_token_budget_is_used_for_a_longer_context(gpu, kv_tokens, length):
    plan = plan_for("70b", gpu, "lora: {maxLoaded: 0}\nengine: {tensorParallelSize: 2}")
    assert plan.maxNumBatchedTokens.value == 2048
    assert plan.kvTokens == pytest.approx(kv_tokens, abs=5)
    assert plan.maxModelLen.value == length


def test_tensor_parallel_size_divides_the_model():
    """70B in bfloat16 needs 9 L4, 5 A100 of 40 GB or 3 of 80 GB, but none of these numbers divides the model."""
    for gpu, expected in ((L4, 8), (A100_40, 8), (A100_80, 4), (H100, 4), (H200, 2)):
        assert plan_for("70b", gpu, "lora: {maxLoaded: 0}\ngpu: {count: 8}").tensorParallelSize.value == expected
    assert [tp for tp in (1, 2, 4, 8, 16) if not unsupported_reason(MODELS["8b"].shape, tp)] == [1, 2, 4, 8, 16]
    assert [tp for tp in (1, 2, 4, 8) if not unsupported_reason(MODELS["qwen"].shape, tp)] == [1, 2, 4]


def test_documented_output_is_current():
    documented = (
        (ROOT / "docs/planning.md").read_text().partition("```")[2].partition("```")[0].strip().splitlines()[1:]
    )
    spec = "gpu: {product: NVIDIA-L4}\nlora: {maxLoaded: 8, maxRank: 16}"
    printed = list(render_lines(llm_service(spec), MODELS["8b"], plan_for("8b", L4, spec), 100, use_color=False))
    assert len(documented) == 9
    assert documented == printed[4:13]
