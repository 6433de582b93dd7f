# SPDX-License-Identifier: Apache-2.0
"""Properties of the planner: more memory never gives a worse plan, values of the spec are kept, upgrades keep plans."""

import dataclasses
import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.planning import (
    GIB,
    H100,
    L4,
    MODELS,
    NO_LORA,
    QWEN3_5_4B,
    T4,
    checkpoint_info,
    plan_for,
    planner_inputs,
    schema_problems,
)

from quire_operator.api.engine_spec import LoraSpec
from quire_operator.plan import candidates, device_memory, host_memory, planner
from quire_operator.plan.errors import Unplannable, UnplannableReason
from quire_operator.plan.gpu import GpuInfo, MemorySource
from quire_operator.plan.limits import kv_bytes_per_token
from quire_operator.plan.plan import FitReason, Plan
from quire_spec.errors import ConfigError
from quire_spec.model import capabilities

ON_CPU = 0
pins = st.fixed_dictionaries(
    {},
    optional={
        "minConcurrency": st.integers(1, 200),
        "maxModelLen": st.integers(16, 131_072),
        "blockSize": st.sampled_from(capabilities.BLOCK_SIZES),
        "maxNumBatchedTokens": st.sampled_from([512, 3000, 16384]),
        "maxNumSeqs": st.integers(1, 500),
        "dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
    },
)
loras = st.fixed_dictionaries(
    {"maxLoaded": st.integers(0, 64), "maxRank": st.sampled_from(capabilities.LORA_RANKS)},
)


def planned(model, memory, engine, lora, count=1):
    """Return inputs, best candidate and plan (or None). `memory` is MiB of a GPU, or of a CPU if negative."""
    base = planner_inputs(model, 10_000 if memory > 0 else None)
    if "maxModelLen" in engine:
        engine["maxModelLen"] = min(engine["maxModelLen"], base.model.shape.max_position_embeddings)
    inputs = dataclasses.replace(
        base,
        engine=dataclasses.replace(base.engine, **engine),
        lora=LoraSpec(**lora),
        max_gpus=count or 1,
        gpu=GpuInfo("", memory, MemorySource.SPEC) if memory > 0 else None,
        memory_limit=None if memory > 0 else -memory * 2**20,
    )
    best = candidates.best_candidate(inputs, candidates.generate_candidates(inputs))
    return inputs, best, planner.make_plan(inputs) if best else None


@settings(max_examples=150)
@given(
    model=st.sampled_from(["8b", "70b", "qwen", "tiny"]),
    less=st.integers(2_000, 200_000),
    more=st.integers(0, 40_000),
    count=st.sampled_from([1, 2, 4, 8, ON_CPU]),
    engine=pins,
    lora=loras,
)
@example(model="8b", less=73_300, more=2_000, count=1, engine={}, lora={"maxLoaded": 0, "maxRank": 8})
@example(model="8b", less=33_400, more=2_000, count=1, engine={}, lora={"maxLoaded": 0, "maxRank": 8})
def test_more_memory_never_gives_a_worse_plan(model, less, more, count, engine, lora):
    """A better plan has a longer context, then fewer GPUs, more sequences, and more tokens in a step."""
    if engine.get("maxNumBatchedTokens", 1 << 20) < engine.get("maxNumSeqs", 1):
        del engine["maxNumSeqs"]
    unit = -1 if count == ON_CPU else 1
    small, best_small, _ = planned(model, unit * less, engine, lora, count)
    large, best_large, plan = planned(model, unit * (less + more), engine, lora, count)
    if best_small is None:
        return
    assert best_large is not None
    assert candidates.sort_key(large, best_large) >= candidates.sort_key(small, best_small)
    check(large, plan)


def check(inputs, plan):
    """Check the invariants of every plan."""
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert plan.inputsHash == inputs.inputs_hash
    assert plan.kvTokens >= plan.maxModelLen.value
    assert plan.maxNumBatchedTokens.value >= plan.maxNumSeqs.value
    assert plan.blockSize.value in capabilities.BLOCK_SIZES
    assert schema_problems(plan.to_json()) == []
    requested = {k: v for k, v in dataclasses.asdict(inputs.engine).items() if v is not None}
    for name, value in requested.items():
        if hasattr(plan, name):
            assert getattr(plan, name).value == value
            assert getattr(plan, name).origin == "Spec"
    if inputs.gpu is not None:
        assert plan.bytes.total == plan.gpu.visibleMiB * 2**20
        assert plan.bytes.reserve >= 0
    else:
        assert plan.hostBytes.required <= plan.hostBytes.total <= (inputs.memory_limit or plan.hostBytes.total)
        assert plan.hostBytes.model == plan.bytes.total


@given(
    less=st.tuples(st.integers(0, 64), st.sampled_from(capabilities.LORA_RANKS)),
    more=st.tuples(st.integers(0, 64), st.sampled_from(capabilities.LORA_RANKS)),
)
@settings(max_examples=60)
def test_more_or_larger_adapter_slots_never_give_a_better_plan(less, more):
    low, high = sorted([less, more])
    if low[1] > high[1]:
        return
    (few, best_few, _), (many, best_many, _) = (
        planned("8b", 46_068, {}, {"maxLoaded": n, "maxRank": r}) for n, r in (low, high)
    )
    if best_many is not None:
        assert candidates.sort_key(few, best_few) >= candidates.sort_key(many, best_many)


def test_plan_contains_origin_and_reason_of_each_value():
    plan = plan_for(
        "8b", L4, "lora: {maxLoaded: 4, maxRank: 32}\nengine: {maxModelLen: 8192, gpuMemoryUtilization: '0.91'}"
    )
    body = plan.to_json()
    assert body["maxModelLen"] == {"value": 8192, "from": "Spec", "why": "set in the spec"}
    assert body["gpuMemoryUtilization"]["value"] == "0.91"
    assert body["maxNumSeqs"]["from"] == "Computed"
    assert "KV tokens, at about 2048" in body["maxNumSeqs"]["why"]
    assert body["gpu"] == {"product": L4, "visibleMiB": 22394, "count": 1, "from": "ProductTable"}
    assert schema_problems(body) == []


def test_digest_does_not_change_between_releases():
    """Stored plans contain the digest. If it changed, an upgrade would plan all services again and restart them."""
    inputs = planner_inputs("8b", L4, "lora: {maxLoaded: 8}\nengine: {maxModelLen: 8192}")
    assert inputs.inputs_hash == "sha256:1cd7f8c70d5618eaf0635b14750afc06b853860bdb6eb649b66162018c87b0e3"


def test_stored_plan_is_kept_until_inputs_change():
    inputs = planner_inputs("8b", L4)
    stored = dataclasses.replace(planner.make_plan(inputs), plannerVersion=0, kvTokens=1)
    assert planner.reuse_or_make_plan(stored, inputs) is stored
    assert planner.reuse_or_make_plan(stored, inputs, replan=True).kvTokens > 1
    other = planner_inputs("8b", L4, "lora: {maxLoaded: 0}\nengine: {maxModelLen: 4096}")
    assert planner.reuse_or_make_plan(stored, other).maxModelLen.value == 4096
    assert planner.reuse_or_make_plan(None, inputs) == planner.make_plan(inputs)


@pytest.mark.parametrize("text", ["engine: {prefixCaching: false}", "replicas: 4", "adapters: []", "paused: true"])
def test_digest_ignores_fields_that_do_not_affect_the_plan(text):
    inputs = planner_inputs("8b", L4, f"lora: {{maxLoaded: 0}}\n{text}")
    assert inputs.inputs_hash == planner_inputs("8b", L4).inputs_hash


@pytest.mark.parametrize(
    "text",
    [
        "engine: {minConcurrency: 3}", "engine: {kvCacheMemory: 2Gi}", "runtime: {memory: 20Gi}",
        "runtime: {sharedMemory: 2Gi}", "gpu: {count: 2}", "lora: {maxLoaded: 1}", "engine: {dtype: float16}",
        "openai: {enabled: false}", "openai: {apiServerCount: 2}",
    ],
)  # fmt: skip
def test_digest_contains_fields_that_affect_the_plan(text):
    base = "" if text.startswith("lora") else "lora: {maxLoaded: 0}\n"
    assert planner_inputs("8b", L4, base + text).inputs_hash != planner_inputs("8b", L4).inputs_hash


def unplannable(model, gpu, text):
    with pytest.raises(Unplannable) as error:
        plan_for(model, gpu, text)
    return error.value.reason, str(error.value)


def test_does_not_fit_message_has_a_table_and_sufficient_gpus():
    why, text = unplannable("70b", L4, "lora: {maxLoaded: 0}\ngpu: {count: 2}")
    assert why is UnplannableReason.DOES_NOT_FIT
    head, columns, one, two, four, eight, sufficient = text.splitlines()
    assert head.startswith("spec.gpu: NVIDIA-L4: the model does not fit with a context of 4096 tokens; use a larger")
    assert "short by" in columns
    assert one.split() == ["1", "19.68", "132.73", "0.57", "0.50", "0.00", "-114.11", "116.61"]
    assert two.split()[0] == "2"
    assert four.strip() == "4 not tried: spec.gpu.count is 2"
    assert eight.strip() == "8 not tried: spec.gpu.count is 2"
    assert sufficient == (
        "The model fits on 1 x NVIDIA-B200, or 2 x NVIDIA-H100-80GB-HBM3, or 4 x NVIDIA-A100-PCIE-40GB, "
        "or 8 x NVIDIA-A10."
    )
    for offer in sufficient.removesuffix(".").partition(" fits on ")[2].split(", or "):
        count, _, product = offer.partition(" x ")
        assert plan_for("70b", product, f"lora: {{maxLoaded: 0}}\ngpu: {{count: {count}}}")


def test_unsupported_values_are_neither_planned_nor_recommended(monkeypatch):
    monkeypatch.setattr(capabilities, "TENSOR_PARALLEL_SIZES", (1,))
    why, text = unplannable("70b", H100, "lora: {maxLoaded: 0}\ngpu: {count: 8}")
    assert why is UnplannableReason.DOES_NOT_FIT
    assert "2 not possible: the engine of this release does not support it" in text
    assert text.splitlines()[-1] == "The model fits on 1 x NVIDIA-B200."
    why, text = unplannable("70b", H100, "lora: {maxLoaded: 0}\nengine: {tensorParallelSize: 4}")
    assert why is UnplannableReason.UNSUPPORTED_BY_ENGINE
    assert text.startswith("spec.engine.tensorParallelSize: 4: the engine of this release supports 1")
    tight = plan_for("8b", L4, "lora: {maxLoaded: 0}\ngpu: {count: 4}")
    assert tight.tensorParallelSize.value == 1
    assert "spec.gpu.count" not in tight.advice
    assert "NVIDIA-A100-PCIE-40GB gives" in tight.advice or "NVIDIA-GeForce" in tight.advice


def test_all_experts_count_as_weights():
    assert plan_for("moe", H100).bytes.weights == pytest.approx(1.01 * 2 * 30_532_122_624, rel=1e-3)
    # They stay quantized.
    assert plan_for("moe-fp8", H100).bytes.weights == pytest.approx(1.01 * 1.04 * 31 * GIB, rel=1e-3)
    # Their scales are larger in memory than in the files.
    assert plan_for("moe-nvfp4", H100).bytes.weights == pytest.approx(1.01 * 1.34 * 18 * GIB, rel=1e-3)
    at_load = "lora: {maxLoaded: 0}\nengine: {quantization: int8}"
    assert plan_for("moe", H100, at_load).bytes.weights == plan_for("moe", H100).bytes.weights


def test_unplannable_messages_have_field_value_and_fix():
    why, text = unplannable("qwen", H100, "lora: {maxLoaded: 0}\nengine: {tensorParallelSize: 8}")
    assert (why, text) == (
        UnplannableReason.DOES_NOT_FIT,
        "spec.engine.tensorParallelSize: 8: the number of attention heads, 28, is not a multiple of 8; use 1 or 2 or 4",
    )
    why, text = unplannable("8b", T4, "lora: {maxLoaded: 0}")
    assert (why, text) == (
        UnplannableReason.UNSUPPORTED_DTYPE,
        "spec.engine.dtype: not set, and the checkpoint's dtype is bfloat16: Tesla-T4 has compute capability 7.5, "
        "but bfloat16 needs 8.0; set it to float16, or use another GPU",
    )
    assert (
        unplannable("8b", T4, "lora: {maxLoaded: 0}\nengine: {dtype: bfloat16}")[0]
        is UnplannableReason.UNSUPPORTED_DTYPE
    )
    assert unplannable("8b", H100, "lora: {maxLoaded: 0}\nengine: {quantization: awq}") == (
        UnplannableReason.UNSUPPORTED_BY_ENGINE,
        "spec.engine.quantization: is 'awq', but config.json of the checkpoint has no quantization_config; remove "
        "quantization, or use int8 or int4 or fp8 to quantize weights when they are loaded",
    )
    assert unplannable("8b", "NVIDIA-A100-SXM4-80GB", "lora: {maxLoaded: 0}\nengine: {kvCacheDtype: fp8}") == (
        UnplannableReason.UNSUPPORTED_DTYPE,
        "spec.engine.kvCacheDtype: fp8: NVIDIA-A100-SXM4-80GB has compute capability 8.0, but fp8 needs 8.9; set it to "
        "auto, or use another GPU",
    )
    assert unplannable("8b", H100, "lora: {maxLoaded: 0}\nengine: {kvCacheDtype: int8_per_token_head}") == (
        UnplannableReason.UNSUPPORTED_DTYPE,
        "spec.engine.kvCacheDtype: int8_per_token_head: the engine supports this dtype only on CPUs; set it to fp8 or "
        "auto",
    )


def test_counts_the_scales_of_an_int8_kv_cache():
    """4 KV heads of 128 codes and a scale, keys and values, 28 layers; four times as many bytes in float32."""
    inputs = planner_inputs("qwen", None, NO_LORA + "\nengine: {kvCacheDtype: int8_per_token_head}")
    assert kv_bytes_per_token(inputs, 1) == 28 * 2 * 4 * (128 + 4)
    assert kv_bytes_per_token(planner_inputs("qwen", None, NO_LORA), 1) == 28 * 2 * 4 * 128 * 4


def test_counts_layers_with_a_window_up_to_their_window():
    """In the memory of 32 requests of 8192 tokens, more fit if 40 of 48 layers keep 1024 tokens and two blocks."""
    spec = NO_LORA + "\nengine: {maxModelLen: 8192, kvCacheMemory: 96Gi}"
    plan, full = (plan_for(model, "NVIDIA-H200", spec) for model in ("gemma", "gemma-full"))
    assert full.kvTokens == 32 * 8192 and full.concurrency == 32
    assert plan.kvTokens == 8192 + 31 * 8192 * 6 * 8192 // (8192 + 5 * (1024 + 256))
    spec = NO_LORA + "\nengine: {minConcurrency: 32}"
    lengths = [plan_for(model, "NVIDIA-H200", spec).maxModelLen.value for model in ("gemma", "gemma-full")]
    assert lengths[0] > 3 * lengths[1]


def test_counts_states_of_layers_with_linear_attention():
    """A quarter of 32 layers has 4 KV heads of 256 elements. The others have 32 matrices of 128 x 128 float32, and the
    last 3 inputs of 8192 features in bfloat16."""
    spec = NO_LORA + "\nengine: {maxNumSeqs: %d, maxNumBatchedTokens: 2048%s}"
    assert kv_bytes_per_token(planner_inputs("qwen3.5", H100, NO_LORA), 1) == 8 * 2 * 4 * 256 * 2
    state = 24 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    states = [
        candidates.evaluate(planner_inputs("qwen3.5", H100, spec % (num, text)), 1, 2048, num).costs.states
        for num, text in ((64, ""), (64, ", prefixCaching: false"), (32, ", prefixCaching: false"))
    ]
    assert states == [80 * state, 64 * state, 32 * state]
    half = planner_inputs("qwen3.5", H100, spec % (64, ", mambaSsmCacheDtype: bfloat16"))
    assert candidates.evaluate(half, 1, 2048, 64).costs.states == 80 * (state - 24 * 32 * 128 * 128 * 2)
    plan = planner.make_plan(half)
    assert plan.bytes.states == -(-80 * (state - 24 * 32 * 128 * 128 * 2) // 2**20) * 2**20
    assert Plan.from_json(plan.to_json()) == plan
    # The inputs of drafts: those of the convolution, and two numbers per head.
    drafts = planner_inputs(
        "qwen3.5", H100, spec % (64, ", speculativeConfig: {method: ngram, numSpeculativeTokens: 3}")
    )
    assert candidates.evaluate(drafts, 1, 2048, 64).costs.states == 80 * (state + 24 * 3 * (8192 + 64) * 2)
    tiers = f"{NO_LORA}\nengine: {{kvCacheOffloading: {{memory: %s}}}}"
    planner.make_plan(planner_inputs("qwen3.5", H100, tiers % "1Gi"))
    _, message = unplannable("qwen3.5", H100, tiers % "64Mi")
    size = f"{-(-2 * state // 2**20)}Mi"
    assert (
        message == f"spec.engine.kvCacheOffloading.memory: 64Mi: half of it is for states; raise it to {size} or more"
    )
    folder = "1Gi, secondary: [{folder: {emptyDir: {}}, size: 1Gi}]"
    for size in (1, 2):
        spec = (tiers % folder).replace("engine: {", f"engine: {{tensorParallelSize: {size}, ")
        assert planner.make_plan(planner_inputs("qwen3.5", H100, spec)).tensorParallelSize.value == size
    planner.make_plan(
        planner_inputs("qwen3.5", H100, (tiers % "1Gi").replace("engine: {", "engine: {kvTransfer: {}, "))
    )


def test_counts_the_layer_that_predicts_further_tokens():
    """It has gated attention, an MLP, a projection of two inputs, and keys of its own. With several GPUs, the first one
    also has the whole embedding, which is the output projection."""
    spec = f"{NO_LORA}\nengine: {{speculativeConfig: {{method: mtp, numSpeculativeTokens: 2}}}}"
    inputs = planner_inputs("qwen3.5", H100, spec)
    assert kv_bytes_per_token(inputs, 1) == 9 * 2 * 4 * 256 * 2
    elements = 2560 * (2 * 2560 + 256 * (2 * 16 + 2 * 4 + 16) + 3 * 9216)
    embedding = 248320 * 2560
    sizes = [candidates.evaluate(inputs, tp, 2048, 64).costs.draft for tp in (1, 2)]
    assert sizes == [device_memory.weights_bytes(2 * size, 1) for size in (elements, elements + embedding)]
    assert planner.make_plan(inputs).modelBytes == plan_for("qwen3.5", H100).modelBytes
    assert unplannable("qwen", H100, spec) == (
        UnplannableReason.UNSUPPORTED_BY_ENGINE,
        "spec.engine.speculativeConfig.method: mtp: the model has the architecture 'Qwen2ForCausalLM' and 0 layers "
        "that predict further tokens, and the engine supports none of them; use suffix or ngram",
    )


def test_latent_attention_keeps_one_row_per_token():
    """On GPUs, an element takes 2 bytes, and each rank has all rows."""
    for gpu, num_bytes in ((None, 4), (H100, 2)):
        inputs = planner_inputs("deepseek-lite", gpu, NO_LORA)
        assert kv_bytes_per_token(inputs, 1) == kv_bytes_per_token(inputs, 2) == 27 * (512 + 64) * num_bytes


def test_layers_with_keys_of_different_sizes():
    """12 layers with heads of 256 elements and 3 layers with heads of 512; the others read their keys."""
    inputs = planner_inputs("gemma-4", H100, NO_LORA)
    assert kv_bytes_per_token(inputs, 1) == kv_bytes_per_token(inputs, 2) == 2 * 2 * (12 * 256 + 3 * 512)
    # The embeddings of layers are 2.3 of 4.6 billion parameters.
    assert inputs.model.weights_bytes > 2 * 262144 * 35 * 256 + 2 * 262144 * 1536
    for gpu, text, message in (
        (None, "kvCacheDtype: int8_per_token_head", "kvCacheDtype: int8_per_token_head: this model has layers"),
        (H100, "kvCacheOffloading: {memory: 1Gi}", "kvCacheOffloading: only some layers"),
    ):
        assert f"spec.engine.{message}" in unplannable("gemma-4", gpu, f"{NO_LORA}\nengine: {{{text}}}")[1]
    fields = {"model": {"source": {"huggingFace": {"repo": "org/draft"}}}, "method": "draft_model"}
    engine = {"speculativeConfig": {**fields, "numSpeculativeTokens": 3}}
    _, message = unplannable("gemma-4", H100, f"{NO_LORA}\nengine: {json.dumps(engine)}")
    assert "draft_model does not support architecture 'Gemma4ForCausalLM'" in message


def test_rejects_a_context_longer_than_the_model_supports():
    assert unplannable("qwen", H100, "lora: {maxLoaded: 0}\nengine: {maxModelLen: 32769}") == (
        UnplannableReason.UNSUPPORTED_BY_ENGINE,
        "spec.engine.maxModelLen: 32769: the model supports at most 32768 tokens (max_position_embeddings); lower it",
    )


def test_accepts_a_context_that_rope_scaling_extends():
    spec = "lora: {maxLoaded: 0}\nengine: {maxModelLen: 65536}"
    inputs = planner_inputs("qwen", H100, spec)
    yarn = dataclasses.replace(inputs.model.shape.ropes[0], rope_type="yarn", factor=2.0, original_max_position=32768)
    shape = dataclasses.replace(inputs.model.shape, ropes=(yarn,) * inputs.model.shape.num_layers)
    model = dataclasses.replace(inputs.model, shape=shape)
    assert planner.make_plan(dataclasses.replace(inputs, model=model)).maxModelLen.value == 65536
    engine = dataclasses.replace(inputs.engine, maxModelLen=65537)
    with pytest.raises(Unplannable, match=r"at most 65536 tokens \(max_position_embeddings and rope_scaling\)"):
        planner.make_plan(dataclasses.replace(inputs, model=model, engine=engine))


def test_from_json_rejects_invalid_plans():
    body = plan_for("8b", L4).to_json()
    for name in body:
        if name not in ("advice", "gpu", "gpuMemoryUtilization", "kvCacheMemory"):
            with pytest.raises(ConfigError, match=r"status.plan: is not a plan that this operator wrote"):
                Plan.from_json({key: value for key, value in body.items() if key != name})
    for wrong in ({"dtype": 1}, {"fit": "Well"}, {"bytes": {"kv": 5}}, {"modelBytes": None}):
        with pytest.raises(ConfigError):
            Plan.from_json(body | wrong)


def test_high_requested_utilization_is_reported():
    plan = plan_for("8b", H100, "lora: {maxLoaded: 0}\nengine: {gpuMemoryUtilization: '0.995'}")
    assert plan.fit is FitReason.UTILIZATION_RISK
    assert plan.advice.startswith("spec.engine.gpuMemoryUtilization 0.995 leaves only 0.4 GiB")


def test_requested_kv_cache_is_used_exactly_or_rejected():
    plan = plan_for("8b", H100, "lora: {maxLoaded: 0}\nengine: {kvCacheMemory: 4Gi}")
    assert (plan.bytes.kv, plan.kvTokens, plan.kvCacheMemory.value) == (4 * GIB, 32768, "4Gi")
    assert plan.maxModelLen.value == 16384
    assert (
        unplannable("8b", L4, "lora: {maxLoaded: 0}\nengine: {kvCacheMemory: 8Gi}")[0] is UnplannableReason.DOES_NOT_FIT
    )


# CPU.


def test_kv_cache_on_a_cpu_gets_the_rest_of_the_limit():
    small, large = (plan_for("qwen", None, f"runtime: {{memory: {n}Gi}}\nlora: {{maxLoaded: 0}}") for n in (40, 60))
    assert large.bytes.kv + large.bytes.activations - small.bytes.kv - small.bytes.activations == 20 * GIB
    assert large.hostBytes.total == 60 * GIB
    assert large.bytes.weights == pytest.approx(2 * MODELS["qwen"].weights_bytes * 1.01, rel=1e-3)
    why, text = unplannable("qwen", None, "runtime: {memory: 8Gi}\nlora: {maxLoaded: 0}")
    assert why is UnplannableReason.DOES_NOT_FIT
    assert text.startswith(
        "spec.runtime.memory: 8192Mi: the model does not fit with a context of 4096 tokens; raise it"
    )
    required_mib = int(text.partition("raise it to ")[2].partition("Mi")[0])
    assert (
        plan_for("qwen", None, f"runtime: {{memory: {required_mib}Mi}}\nlora: {{maxLoaded: 0}}").maxModelLen.value
        >= 4096
    )


def test_rejects_a_too_small_kv_cache_on_a_cpu():
    why, text = unplannable("qwen", None, "engine: {kvCacheMemory: 1Mi}\nlora: {maxLoaded: 0}")
    assert why is UnplannableReason.DOES_NOT_FIT
    assert text.startswith("spec.engine.kvCacheMemory: 1Mi: a context of 4096 tokens needs ")
    required_mib = int(text.partition(" needs ")[2].partition("Mi")[0])
    assert plan_for("qwen", None, f"engine: {{kvCacheMemory: {required_mib}Mi}}\nlora: {{maxLoaded: 0}}")


@pytest.mark.parametrize(
    "text",
    [
        "swapSpace: 4Gi",
        "swapSpace: 4Gi, tensorParallelSize: 2",
        "swapSpace: 4Gi, dataParallelSize: 2",
        "maxModelLen: 1000, minConcurrency: 3",
        "maxNumSeqs: 7",
    ],
)
def test_suggested_memory_on_a_cpu_is_sufficient_and_minimal(text):
    spec = f"lora: {{maxLoaded: 4}}\nengine: {{{text}}}\nruntime: {{memory: %dMi}}"
    required_mib = int(unplannable("qwen", None, spec % 8192)[1].partition("raise it to ")[2].partition("Mi")[0])
    assert plan_for("qwen", None, spec % required_mib).hostBytes.required <= required_mib * 2**20
    assert unplannable("qwen", None, spec % (required_mib - 2))[0] is UnplannableReason.DOES_NOT_FIT


@pytest.mark.parametrize(
    ("gpu", "field"),
    [
        (L4, "kvCacheMemory: 64Gi"), ("NVIDIA-H200", "gpuMemoryUtilization: '0.1'"), (L4, "maxNumSeqs: 4096"),
        ("NVIDIA-GeForce-RTX-5090", "dtype: float32"), (None, "kvCacheMemory: 64Mi"), (None, "swapSpace: 64Gi"),
    ],
)  # fmt: skip
def test_message_names_the_requested_field_that_does_not_fit(gpu, field):
    rest = "lora: {maxLoaded: 0}\nruntime: {memory: 60Gi}"
    text = unplannable("8b", gpu, f"{rest}\nengine: {{{field}}}")[1]
    name, value = field.replace("'", "").split(": ")
    assert f"omit spec.engine.{name} ({value})" in text.splitlines()[0]
    assert plan_for("8b", gpu, rest)


@pytest.mark.parametrize("requested", [{"maxModelLen": 32768}, {"minConcurrency": 2}, {"tensorParallelSize": 1}])
def test_suggestions_for_more_requests_are_sufficient(requested):
    """Each suggested option is planned by itself."""
    advice = plan_for("qwen", L4, f"{NO_LORA}\nengine: {json.dumps(requested)}").advice
    gpus, larger, *shorter = advice.partition("To fit more: ")[2].split("; ")
    assert gpus.startswith("spec.gpu.count 2 with spec.engine.tensorParallelSize 2 gives ")
    shared = json.dumps(requested | {"tensorParallelSize": 2})
    plans = [plan_for("qwen", L4, f"{NO_LORA}\nengine: {shared}\ngpu: {{count: 2}}")]
    plans += [plan_for("qwen", larger.partition(" gives ")[0], f"{NO_LORA}\nengine: {json.dumps(requested)}")]
    for plan, option in zip(plans, (gpus, larger), strict=True):
        assert f" gives {plan.kvTokens} KV tokens and a context of {plan.maxModelLen.value}" in option
    for option in shorter:
        length = re.fullmatch(r"lower spec.engine.maxModelLen to (\d+).", option)[1]
        plans.append(plan_for("qwen", L4, f"{NO_LORA}\nengine: {{maxModelLen: {length}}}"))
    assert len(plans) == 2 + ("maxModelLen" in requested)
    assert all(plan.kvTokens >= 4 * plan.maxModelLen.value for plan in plans)


# Copy of an adapter of LoRA rank 16 for all target modules; sums are in whole MiB.
SLOT = 80 * 2**20 + 2 * 16 * 2 * (MODELS["8b"].shape.vocab_size + 4096)


def test_host_memory_includes_the_processes_that_read_images():
    images = checkpoint_info(QWEN3_5_4B | {"vision_config": {}, "image_token_id": 5})
    inputs = dataclasses.replace(planner_inputs("qwen3.5", None), model=images)
    only_text = dataclasses.replace(inputs, engine=dataclasses.replace(inputs.engine, languageModelOnly=True))
    costs = [host_memory.host_costs(each, 0).processes for each in (inputs, only_text)]
    assert costs[0] - costs[1] == 2 * GIB


def test_host_memory_includes_stubs_adapter_copies_and_shared_memory():
    none, some = plan_for("8b", H100), plan_for("8b", H100, "lora: {maxLoaded: 8, maxRank: 16, maxCached: 32}")
    assert none.hostBytes.loraCopies == 0
    assert some.hostBytes.loraCopies == -(-32 * SLOT // 2**20) * 2**20
    assert some.hostBytes.stubs == 65 * none.hostBytes.stubs
    assert some.sharedMemory.value == "1024Mi"
    two = plan_for("8b", L4, "lora: {maxLoaded: 0}\ngpu: {count: 2}")
    assert two.sharedMemory.value == "2048Mi"
    assert two.hostBytes.sharedMemory == 2 * GIB
    small = plan_for("8b", H100, "runtime: {memory: 2Gi}\nlora: {maxLoaded: 0}")
    assert "spec.runtime.memory is too small" in small.advice


def test_slots_and_copies_of_adapters_have_room_for_experts_if_these_can_be_adapted():
    plain, without, experts = (
        plan_for("moe", H100, f"lora: {{maxLoaded: 2, maxRank: 16{field}}}")
        for field in ("", ", experts: false", ", experts: true")
    )
    # 48 layers with 128 experts of 768 features; 2,048 hidden features; two bytes for each element.
    adapter = 48 * 128 * 16 * (2048 + 2 * 768 + 768 + 2048) * 2
    assert plain.bytes.lora == without.bytes.lora
    assert experts.bytes.lora - plain.bytes.lora == pytest.approx(2 * adapter, abs=2**20)
    # On a GPU, the inputs of the experts are copied for their adapters.
    steps = [
        device_memory.activation_bytes(MODELS["moe"].shape, 4096, 64, 2, 1, LoraSpec(experts=on))
        for on in (True, False)
    ]
    assert steps[0] - steps[1] == pytest.approx(4096 * 8 * 2048 * 2, rel=0.3)
    assert experts.hostBytes.loraCopies - plain.hostBytes.loraCopies == pytest.approx(8 * adapter, abs=2**20)
    dense = [plan_for("8b", H100, f"lora: {{maxRank: 16{field}}}") for field in ("", ", experts: true")]
    assert dense[0].bytes.lora == dense[1].bytes.lora > 0


def test_slots_and_copies_of_adapters_have_room_for_whole_modules_if_these_can_be_saved():
    plain, whole = (
        plan_for("8b", None, f"lora: {{maxLoaded: 2, maxRank: 16{field}}}") for field in ("", ", modulesToSave: true")
    )
    # 128,256 tokens and 4,096 features, and for each of both modules an identity; four bytes for each element.
    adapter = 2 * (128256 + 4096) * 4096 * 4
    page = (32 * 81_920 + 2 * (128256 + 4096)) * 4  # they take whole pages of one LoRA rank of all modules
    assert 2 * adapter <= whole.bytes.lora - plain.bytes.lora <= 2 * (adapter + page)
    assert 8 * adapter <= whole.hostBytes.loraCopies - plain.hostBytes.loraCopies <= 8 * (adapter + page)


def test_loaded_ranks_limit_slots_and_copies():
    """Eight adapters of LoRA rank 8 and one of rank 128; copies of four times as many."""
    largest, sum_ = (
        plan_for("8b", H100, f"lora: {{maxLoaded: 9, {field}}}") for field in ("maxRank: 128", "maxLoadedRanks: 192")
    )
    for before, after in (
        (largest.bytes.lora, sum_.bytes.lora),
        (largest.hostBytes.loraCopies, sum_.hostBytes.loraCopies),
    ):
        assert after / before == pytest.approx(192 / 1152, rel=1e-3)
    assert sum_.bytes.lora == -(-192 * SLOT // 16 // 2**20) * 2**20
    assert sum_.hostBytes.loraCopies == -(-4 * 192 * SLOT // 16 // 2**20) * 2**20


def test_max_cached_memory_limits_adapter_copies():
    by_number, by_bytes = "lora: {maxCached: 32}", "lora: {maxCachedMemory: 1Gi}"
    assert plan_for("8b", H100, by_number).hostBytes.loraCopies == -(-32 * SLOT // 2**20) * 2**20
    assert plan_for("8b", H100, by_bytes).hostBytes.loraCopies == GIB
    assert (
        plan_for("8b", H100, "lora: {maxCached: 32, maxCachedMemory: 9Gi}").hostBytes.loraCopies
        == -(-32 * SLOT // 2**20) * 2**20
    )
    assert plan_for("8b", H100, "lora: {maxCached: 32, maxCachedMemory: 1Gi}").hostBytes.loraCopies == GIB
    why, text = unplannable("8b", H100, "lora: {maxCachedMemory: 704Mi}")
    assert why is UnplannableReason.DOES_NOT_FIT
    assert text.startswith(
        "spec.lora.maxCachedMemory: 704Mi: adapters in slots with 128 LoRA ranks in total need 705Mi; raise it, or "
    )


def test_swap_space_is_added_to_the_request_and_counts_against_a_limit():
    none, some = plan_for("8b", H100), plan_for("8b", H100, "lora: {maxLoaded: 0}\nengine: {swapSpace: 4Gi}")
    assert "swap" not in none.to_json()["hostBytes"], "plans without swap space are unchanged"
    assert some.to_json()["hostBytes"]["swap"] == "4096Mi"
    assert some.hostBytes.total - none.hostBytes.total == 4 * GIB
    assert Plan.from_json(some.to_json()) == some
    assert schema_problems(some.to_json()) == []
    limit = "runtime: {memory: 40Gi}\nlora: {maxLoaded: 0}"
    without, with_it = plan_for("qwen", None, limit), plan_for("qwen", None, f"{limit}\nengine: {{swapSpace: 2Gi}}")
    assert without.bytes.kv - with_it.bytes.kv == 2 * GIB


def test_kv_offloading_is_added_to_the_request_and_counts_against_a_limit():
    text = "lora: {maxLoaded: 0}\nengine: {kvCacheOffloading: {memory: 16Gi}%s}"
    none, some = plan_for("8b", H100), plan_for("8b", H100, text % "")
    assert "kvOffloading" not in none.to_json()["hostBytes"], "plans without it are unchanged"
    assert some.to_json()["hostBytes"]["kvOffloading"] == f"{16 * 1024}Mi"
    assert some.hostBytes.total - none.hostBytes.total == 16 * GIB, "for all GPUs together"
    assert some.inputsHash != none.inputsHash
    assert Plan.from_json(some.to_json()) == some and schema_problems(some.to_json()) == []
    assert plan_for("8b", H100, text % ", tensorParallelSize: 1").hostBytes.kvOffloading == 16 * GIB
    limit = "runtime: {memory: 80Gi}\n"
    without, with_it = plan_for("qwen", None, limit + NO_LORA), plan_for("qwen", None, limit + text % "")
    assert without.bytes.kv - with_it.bytes.kv == 16 * GIB


def test_kv_offloading_that_does_not_fit_or_work_is_refused_by_name():
    text = "lora: {maxLoaded: 0}\nengine: {kvCacheOffloading: {memory: 64Gi}}"
    reason, message = unplannable("8b", H100, f"{text}\nruntime: {{memory: 40Gi}}")
    assert reason is UnplannableReason.DOES_NOT_FIT
    assert message.startswith("spec.engine.kvCacheOffloading.memory: 64Gi: the pod needs ")
    required_mib = int(message.partition("spec.runtime.memory to at least ")[2].removesuffix("Mi"))
    assert plan_for("8b", H100, f"{text}\nruntime: {{memory: {required_mib}Mi}}").hostBytes.kvOffloading == 64 * GIB
    assert (
        "omit spec.engine.kvCacheOffloading (64Gi)"
        in unplannable("qwen", None, f"{text}\nruntime: {{memory: 60Gi}}")[1]
    )
    reason, message = unplannable("gemma", H100, text)
    assert reason is UnplannableReason.UNSUPPORTED_BY_ENGINE
    assert message.startswith("spec.engine.kvCacheOffloading: only some layers of this model have a sliding window")
    assert plan_for("gemma-full", H100, text).hostBytes.kvOffloading == 64 * GIB


FOLDER = "kvCacheOffloading: {memory: 16Gi, secondary: [{folder: {emptyDir: {}}, size: 100Gi}]}"


def test_kv_folder_is_planned_for_several_gpus():
    two = "lora: {maxLoaded: 0}\ngpu: {count: 2}\nengine: {maxModelLen: 131072, minConcurrency: 4, %s}"
    without, with_it = (plan_for("8b", H100, two % text) for text in (FOLDER.partition(", sec")[0] + "}", FOLDER))
    assert (without.tensorParallelSize.value, with_it.tensorParallelSize.value) == (2, 2)
    assert with_it.inputsHash != without.inputsHash


def test_kv_transfer_is_planned_for_several_gpus():
    tiers = "kvCacheOffloading: {memory: 16Gi}, kvTransfer: {enabled: %s}"
    two = "lora: {maxLoaded: 0}\ngpu: {count: 2}\nengine: {maxModelLen: 131072, minConcurrency: 4, %s}"
    off, on = (plan_for("8b", H100, two % (tiers % enabled)) for enabled in ("false", "true"))
    assert (off.tensorParallelSize.value, on.tensorParallelSize.value) == (2, 2)
    assert off.inputsHash == plan_for("8b", H100, two % tiers.partition(", kvT")[0]).inputsHash != on.inputsHash
    one = "lora: {maxLoaded: 0}\nengine: {tensorParallelSize: 1, %s}"
    off, on = (plan_for("8b", H100, one % (tiers % enabled)) for enabled in ("false", "true"))
    assert on.hostBytes.processes - off.hostBytes.processes == 64 * 2**20, "of the process that sends blocks"


def test_memory_of_the_openai_api_is_counted():
    texts = ("enabled: false", "enabled: true", "apiServerCount: 4")
    off, one, four = (plan_for("8b", L4, f"openai: {{{text}}}").hostBytes.processes >> 20 for text in texts)
    assert (one - off, four - one) == (128, 3 * 64)


def test_tensor_parallel_processes_on_a_cpu_divide_its_memory():
    spec = "lora: {maxLoaded: 0}\nruntime: {memory: 8Gi}\nengine: {tensorParallelSize: %d}"
    one, two = (plan_for("qwen-0.5b", None, spec % size) for size in (1, 2))
    assert (one.tensorParallelSize.value, two.tensorParallelSize.value) == (1, 2)
    assert two.bytes.weights == pytest.approx(one.bytes.weights / 2, abs=2**20)
    assert two.hostBytes.model == 2 * two.bytes.total
    assert two.hostBytes.processes == one.hostBytes.processes + 256 * 2**20
    # Each part of each process is rounded up to MiB.
    assert two.hostBytes.required <= two.hostBytes.total + 6 * 2**20
    with pytest.raises(
        Unplannable, match="Size: 4: the number of attention heads, 14, is not a multiple of 4; use 1 or 2"
    ):
        plan_for("qwen-0.5b", None, spec % 4)


def test_cores_multiply_gpus_and_host_memory():
    """Each core has its own GPUs and its own copies of adapters. The settings of a core are those of a pod with one."""
    spec = "lora: {maxLoaded: 4}\nengine: {swapSpace: 4Gi, tensorParallelSize: 2, dataParallelSize: %d}"
    one, three = (plan_for("8b", H100, spec % size) for size in (1, 3))
    assert (one.gpu.count, three.gpu.count) == (2, 6)
    assert (three.bytes, three.maxModelLen, three.maxNumSeqs) == (one.bytes, one.maxModelLen, one.maxNumSeqs)
    assert three.hostBytes.swap == 3 * one.hostBytes.swap == 24 * GIB
    assert three.hostBytes.loraCopies == pytest.approx(3 * one.hostBytes.loraCopies, abs=3 * 2**20)
    assert three.hostBytes.processes == one.hostBytes.processes + (4 * 2048 + 2 * 256) * 2**20


def test_cores_divide_gpu_count():
    """gpu.count is the limit of the pod, not of a core."""
    spec = "lora: {maxLoaded: 0}\ngpu: {count: 4}\nengine: {dataParallelSize: %d}"
    assert [plan_for("70b", H100, spec % size).tensorParallelSize.value for size in (1, 2)] == [4, 2]
    why, text = unplannable("70b", H100, spec % 4)
    assert why is UnplannableReason.DOES_NOT_FIT
    assert "not tried: spec.gpu.count is 4, and spec.engine.dataParallelSize is 4" in text


def test_cores_divide_the_memory_of_a_cpu():
    spec = "lora: {maxLoaded: 0}\nruntime: {memory: 16Gi}\nengine: {dataParallelSize: %d}"
    one, two = (plan_for("qwen-0.5b", None, spec % size) for size in (1, 2))
    assert two.bytes.weights == one.bytes.weights and two.hostBytes.model == 2 * two.bytes.total
    assert two.hostBytes.required <= 16 * GIB
    assert unplannable("qwen-0.5b", None, spec % 16)[0] is UnplannableReason.DOES_NOT_FIT


def test_the_pipeline_stage_with_the_least_room_decides():
    """A stage has its own layers; one stage also has what is outside of the layers, and samples."""
    inputs = planner_inputs("70b", H100)
    for size in (2, 4):
        plan = planner.make_plan(dataclasses.replace(inputs, pipeline_parallel_size=size, max_gpus=size))
        assert (plan.gpu.count, plan.tensorParallelSize.value) == (size, 1)
        # The largest stage has at most half a layer more than its part of the weights, in files of 131.4 GiB.
        assert plan.bytes.weights == pytest.approx(1.01 * 141_107_412_992 / size, rel=0.025)
        token = 80 / size * 2 * 8 * 128 * 2
        assert plan.kvTokens == pytest.approx(plan.bytes.kv / token, rel=0.06)
    for model, why in (("gemma-4", "read keys, values or embeddings of other layers"), ("qwen3.5", "with states")):
        with pytest.raises(Unplannable, match=f"^pipeline_parallel_size: 2 .*{why}.*; use 1"):
            planner.make_plan(dataclasses.replace(planner_inputs(model, H100), pipeline_parallel_size=2))


def test_replicas_are_advised_beyond_the_text_process():
    spec = "lora: {maxLoaded: 0}\nengine: {dataParallelSize: %d}"
    assert plan_for("8b", H100, spec % 4).advice == "" == plan_for("70b", H100, spec % 2 + "\ngpu: {count: 8}").advice
    advice = plan_for("8b", H100, spec % 12).advice
    assert "lower spec.engine.dataParallelSize to 7, and use more replicas" in advice


BERT_BASE = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}
XLM_R_LARGE = BERT_BASE | {"architectures": ["XLMRobertaModel"], "model_type": "xlm-roberta", "vocab_size": 250002}
XLM_R_LARGE |= {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
XLM_R_LARGE |= {"max_position_embeddings": 8194, "pad_token_id": 1, "type_vocab_size": 1}


@pytest.mark.parametrize(("config", "length"), [(BERT_BASE, 512), (XLM_R_LARGE, 8192)], ids=["bert", "xlm-r"])
@pytest.mark.parametrize("gpu", [None, L4])
def test_an_encoder_has_no_kv_cache(monkeypatch, config, length, gpu):
    monkeypatch.setitem(MODELS, "encoder", checkpoint_info(config))
    plan = plan_for("encoder", gpu)
    assert (plan.bytes.kv, plan.kvCacheMemory, plan.maxModelLen.value) == (0, None, length)
    assert plan.maxNumBatchedTokens.value >= length and not schema_problems(plan.to_json())
    for field, message in (
        ("kvCacheMemory: 1Gi", "kvCacheMemory: not possible with an encoder, which has no KV cache"),
        ("maxNumBatchedTokens: 100, maxNumSeqs: 4", f"a request can have {length} tokens; raise it, or lower"),
    ):
        with pytest.raises(Unplannable, match=message):
            plan_for("encoder", gpu, f"{NO_LORA}\nengine: {{{field}}}")
