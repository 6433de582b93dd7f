# SPDX-License-Identifier: Apache-2.0
"""Advice for a plan with little KV cache, and for a model that does not fit.

The advice lists larger GPUs, other settings, and the candidates that were tried. Before this module recommends a
setting, it makes a plan with it. Therefore, the engine accepts every recommendation. The functions are pure. Called by
planner.py and build_plan.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from quire_operator.api.engine_spec import KVCacheOffloadingSpec, LoraSpec
from quire_operator.api.quantity import to_bytes
from quire_operator.plan import device_memory, limits
from quire_operator.plan.candidates import Candidate, best_candidate, generate_candidates, round_up_to_blocks
from quire_operator.plan.device_memory import GIB, MIB, round_up_mib
from quire_operator.plan.gpu import PRODUCTS, GpuInfo
from quire_operator.plan.host_memory import host_costs
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.plan import FitReason
from quire_spec.model import capabilities
from quire_spec.model.parallel.tensor_parallel import unsupported_reason

MIN_FULL_LENGTH_REQUESTS = 4
"""The KV cache should have space for this number of requests with maxModelLen tokens each. If it has space for fewer
requests, the plan gets the reason LowConcurrency."""
_LARGE_LORA_DIVISOR = 4
"""If the adapter slots need more than 1/4 as much memory as the KV cache, the advice suggests fewer slots."""
_TEXT_PROCESS_TOKENS_S = 21_000
"""Tokens per second that the text process of a pod handles. Measured with 64 streams: 21,000 to 27,000."""
_GPU_TOKENS_S, _GPU_WEIGHTS_BYTES = 3_000, 16 * 10**9
"""A GPU generates about 3,000 tokens per second with a model of 8 billion parameters in 16 bits. With other models, the
rate is assumed to be inversely proportional to the size of the weights, which each step reads."""
_RELAXABLE_FIELDS = (
    "kvCacheMemory", "gpuMemoryUtilization", "maxNumSeqs", "maxNumBatchedTokens", "tensorParallelSize", "dtype",
    "swapSpace", "kvCacheOffloading", "kvTransfer",
)  # fmt: skip
"""Optional fields of spec.engine whose values can prevent a model from fitting."""


def assess_fit(inputs: PlannerInputs, candidate: Candidate) -> tuple[FitReason, str]:
    """Return two texts for the candidate: the reason for the condition Planned, and the advice ("" if there is
    none)."""
    fits: list[tuple[FitReason, str]] = []
    if text := _utilization_risk(inputs, candidate):
        fits.append((FitReason.UTILIZATION_RISK, text))
    if candidate.kv_tokens < MIN_FULL_LENGTH_REQUESTS * candidate.max_model_len:
        fits.append((FitReason.LOW_CONCURRENCY, _low_concurrency(inputs, candidate)))
    if inputs.gpu is not None and inputs.gpu.larger_products:
        kinds = ", ".join(inputs.gpu.larger_products)
        text = f"Pods can also run on larger GPUs ({kinds}); set spec.gpu.product to plan for one product."
        fits.append((FitReason.HETEROGENEOUS_POOL, text))
    if text := _host_memory_advice(inputs, candidate):
        fits.append((FitReason.FITS, text))
    if text := _text_process_advice(inputs, candidate):
        fits.append((FitReason.FITS, text))
    return (fits[0][0], " ".join(text for _, text in fits)) if fits else (FitReason.FITS, "")


def explain_no_fit(inputs: PlannerInputs, attempts: list[Candidate]) -> str:
    """Return the message for the reason DoesNotFit. It consists of a summary, a table of the attempts, and the smallest
    GPUs on which the model fits."""
    if inputs.gpu is None:
        return _explain_no_fit_on_cpu(inputs, attempts)
    gpu, context = inputs.gpu, limits.min_context(inputs)
    summary = (
        f"spec.gpu: {gpu.name}: the model does not fit with a context of {context} tokens; use a larger GPU, or "
        f"{_reduction_options(inputs)}"
    )
    return "\n".join([summary, *_attempts_table(inputs, attempts), _sufficient_gpus(inputs)])


def smallest_gpus(inputs: PlannerInputs) -> Iterator[tuple[int, str]]:
    """Yield pairs; each pair consists of a number of GPUs and a GPU product. The product is the smallest one with which
    the model fits on this number of GPUs. Numbers that the engine or the model does not support are omitted."""
    for count in limits.TP_SIZES:
        if count not in capabilities.TENSOR_PARALLEL_SIZES or unsupported_reason(inputs.model.shape, count):
            continue
        for product in PRODUCTS:
            engine = replace(inputs.engine, tensorParallelSize=count)
            if _best_candidate_with(
                inputs, gpu=GpuInfo.from_product(product), max_gpus=inputs.num_ranks(count), engine=engine
            ):
                yield inputs.num_ranks(count), product
                break


def _attempts_table(inputs: PlannerInputs, attempts: list[Candidate]) -> Iterator[str]:
    """Yield the lines of a table with one row for each number of GPUs. A row shows the best candidate, or the reason
    why the planner did not try this number."""
    columns = ("GPUs", "share", "weights", "step", "other", "adapters", "left", "short by")
    yield "  " + " ".join(f"{name:>8}" for name in columns) + "   (GiB on each)"
    for tp in limits.TP_SIZES:
        tp_attempts = [w for w in attempts if w.tp == tp]
        if not tp_attempts:
            if reason := _not_tried_reason(inputs, tp):
                yield f"  {tp:>8} {reason}"
            continue
        best_attempt = max(tp_attempts, key=lambda w: (w.kv_bytes, -w.max_num_seqs))
        yield f"  {tp:>8} " + " ".join(f"{size / GIB:>8.2f}" for size in _attempt_row(inputs, best_attempt))


def _attempt_row(inputs: PlannerInputs, candidate: Candidate) -> tuple[int, ...]:
    assert inputs.gpu is not None, "only GPUs have a table"
    costs = candidate.costs
    share = inputs.gpu.visible_bytes * candidate.utilization // 1000
    requested = inputs.engine.kvCacheMemory
    required = max(_min_kv_bytes(inputs, candidate.tp), 0 if requested is None else to_bytes(requested))
    available = share - costs.total
    return (
        share,
        costs.weights,
        costs.activations + costs.states,
        costs.non_torch,
        costs.lora,
        available,
        required - available,
    )


def _min_kv_bytes(inputs: PlannerInputs, tp: int) -> int:
    requested = inputs.engine.maxModelLen
    tokens = round_up_to_blocks(requested or limits.min_context(inputs) * inputs.engine.minConcurrency)
    return tokens * max(limits.kv_bytes_per_token(inputs, tp, stage) for stage in limits.stages(inputs))


def _not_tried_reason(inputs: PlannerInputs, tp: int) -> str:
    requested = inputs.engine.tensorParallelSize
    return (
        f"not tried: spec.engine.tensorParallelSize is {requested}"
        if requested
        else limits.rejection_reason(inputs, tp)
    )


def _sufficient_gpus(inputs: PlannerInputs) -> str:
    options = ", or ".join(f"{count} x {product}" for count, product in smallest_gpus(inputs))
    return f"The model fits on {options}." if options else "No GPU in the table of products is large enough."


def _reduction_options(inputs: PlannerInputs) -> str:
    """Return changes to the spec that reduce the memory of the model: values to lower, and fields to omit."""
    engine, options = inputs.engine, ["a smaller model"]
    if inputs.lora.maxLoaded:
        options.append(_lower_ranks(inputs.lora))
    if inputs.lora.maxLoaded and inputs.lora.experts:
        options.append("omit spec.lora.experts")
    if inputs.lora.maxLoaded and inputs.lora.modulesToSave:
        options.append("omit spec.lora.modulesToSave")
    if engine.maxModelLen is not None:
        options.append(f"lower spec.engine.maxModelLen ({engine.maxModelLen})")
    if _best_candidate_with(inputs, engine=replace(engine, minConcurrency=1)):
        options.append(f"lower spec.engine.minConcurrency ({engine.minConcurrency})")
    for name in _RELAXABLE_FIELDS:
        value = getattr(engine, name)
        override: dict[str, Any] = {name: None}
        if value is not None and _best_candidate_with(inputs, engine=replace(engine, **override)):
            shown = value.memory if isinstance(value, KVCacheOffloadingSpec) else value
            options.append(f"omit spec.engine.{name} ({shown})")
    return ", or ".join(options)


def _explain_no_fit_on_cpu(inputs: PlannerInputs, attempts: list[Candidate]) -> str:
    best_attempt = max(attempts, key=lambda w: (w.kv_bytes, -w.max_num_seqs))
    host, costs, tp = host_costs(inputs, 0), best_attempt.costs, best_attempt.tp
    requested, num_ranks = inputs.engine.kvCacheMemory, inputs.num_ranks(tp)
    min_kv = round_up_mib(_min_kv_bytes(inputs, tp))
    kv = min_kv if requested is None else max(min_kv, to_bytes(requested))
    rows = {
        "weights": num_ranks * costs.weights, "step": num_ranks * costs.activations,
        "states": num_ranks * costs.states,
        "adapter slots": num_ranks * costs.lora, "least KV cache": num_ranks * kv,
        "adapter copies": host.lora_copies, "swap space": host.swap, "KV offloading": host.kv_offloading,
        "processes": host.processes,
        "models' processes": host.stubs, "shared memory": host.shared_memory,
    }  # fmt: skip
    total, limit = host.rounded_total + num_ranks * (costs.rounded_total + kv), inputs.memory_limit
    context = limits.min_context(inputs)
    if requested is not None and to_bytes(requested) < min_kv:
        summary = (
            f"spec.engine.kvCacheMemory: {requested}: a context of {context} tokens needs {min_kv // MIB}Mi; raise "
            f"it, or use {_reduction_options(inputs)}"
        )
    else:
        assert limit is not None, "without a memory limit the KV cache always has the minimum size"
        summary = (
            f"spec.runtime.memory: {limit // MIB}Mi: the model does not fit with a context of {context} tokens; raise "
            f"it to {total // MIB}Mi, or use {_reduction_options(inputs)}"
        )
    table = [f"  {name:<18} {size / GIB:>8.2f} GiB" for name, size in rows.items() if size]
    return "\n".join([summary, *table])


def _utilization_risk(inputs: PlannerInputs, candidate: Candidate) -> str:
    if inputs.gpu is None or inputs.engine.gpuMemoryUtilization is None:
        return ""
    unreserved = inputs.gpu.visible_bytes * (1000 - candidate.utilization) // 1000
    required = device_memory.graph_bytes(inputs.model.shape) + GIB // 2
    if unreserved >= required:
        return ""
    return (
        f"spec.engine.gpuMemoryUtilization {inputs.engine.gpuMemoryUtilization} leaves only "
        f"{unreserved / GIB:.1f} GiB free, but CUDA graphs and the server need about {required / GIB:.1f} GiB; "
        "lower it."
    )


def _low_concurrency(inputs: PlannerInputs, candidate: Candidate) -> str:
    tokens, length = candidate.kv_tokens, candidate.max_model_len
    summary = f"{tokens} KV tokens are enough for {tokens / length:.1f} requests of {length} tokens."
    options = [*_more_gpus_options(inputs, candidate), *_fewer_adapter_slots_options(inputs, candidate)]
    if inputs.engine.maxModelLen is not None:
        max_model_len = candidate.kv_tokens // MIN_FULL_LENGTH_REQUESTS
        if _sufficient_candidate_with(inputs, engine=replace(inputs.engine, maxModelLen=max_model_len)):
            options.append(f"lower spec.engine.maxModelLen to {max_model_len}")
    if inputs.gpu is None:
        options.append("raise spec.runtime.memory or spec.engine.kvCacheMemory")
    return f"{summary} To fit more: {'; '.join(options)}." if options else summary


def _more_gpus_options(inputs: PlannerInputs, candidate: Candidate) -> Iterator[str]:
    """Yield up to two options: more GPUs of the same product, and the smallest larger product. Each of them has enough
    memory for MIN_FULL_LENGTH_REQUESTS requests."""
    gpu = inputs.gpu
    if gpu is None or inputs.engine.kvCacheMemory is not None:
        return
    for count in limits.TP_SIZES:
        num_gpus = inputs.num_ranks(count)
        unrestricted = replace(inputs, max_gpus=num_gpus, engine=replace(inputs.engine, tensorParallelSize=None))
        if count <= candidate.tp or limits.rejection_reason(unrestricted, count):
            continue
        if alternative := _sufficient_candidate_with(inputs, max_gpus=num_gpus):
            yield _suggestion(f"spec.gpu.count {num_gpus}", alternative)
            break
        # Without a requested tensorParallelSize, the planner uses the fewest GPUs that give the longest context.
        if alternative := _sufficient_candidate_with(
            unrestricted, engine=replace(inputs.engine, tensorParallelSize=count)
        ):
            yield _suggestion(f"spec.gpu.count {num_gpus} with spec.engine.tensorParallelSize {count}", alternative)
            break
    for product, (mib, _) in PRODUCTS.items():
        larger = GpuInfo.from_product(product) if mib > gpu.memory_mib else None
        if larger and (alternative := _sufficient_candidate_with(inputs, gpu=larger)):
            yield _suggestion(product, alternative)
            break


def _fewer_adapter_slots_options(inputs: PlannerInputs, candidate: Candidate) -> Iterator[str]:
    if candidate.costs.lora * _LARGE_LORA_DIVISOR > max(candidate.kv_bytes, 1):
        size, lora = candidate.costs.lora / GIB, inputs.lora
        yield (
            f"{_lower_ranks(lora)}: {lora.total_rank} LoRA ranks in {lora.maxLoaded} adapter slots use {size:.1f} GiB"
        )


def _lower_ranks(lora: LoraSpec) -> str:
    """Return how to reduce the memory of the adapter slots."""
    if lora.maxLoadedRanks is None:
        return f"lower spec.lora.maxLoaded ({lora.maxLoaded}) or maxRank ({lora.maxRank}), or set maxLoadedRanks"
    return f"lower spec.lora.maxLoadedRanks ({lora.maxLoadedRanks})"


def _best_candidate_with(inputs: PlannerInputs, **changes: Any) -> Candidate | None:
    """Return the best candidate after these changes of the inputs; None if no candidate fits."""
    changed = replace(inputs, **changes)
    if changed.gpu is not None and limits.dtype_error(changed, changed.gpu):
        return None
    return best_candidate(changed, generate_candidates(changed))


def _sufficient_candidate_with(inputs: PlannerInputs, **changes: Any) -> Candidate | None:
    """Return the best candidate after these changes of the inputs. If its KV cache does not have space for
    MIN_FULL_LENGTH_REQUESTS requests, return None."""
    best = _best_candidate_with(inputs, **changes)
    return best if best and best.kv_tokens >= MIN_FULL_LENGTH_REQUESTS * best.max_model_len else None


def _suggestion(change: str, candidate: Candidate) -> str:
    return f"{change} gives {candidate.kv_tokens} KV tokens and a context of {candidate.max_model_len}"


def _text_process_advice(inputs: PlannerInputs, candidate: Candidate) -> str:
    """Return advice if the cores can generate more tokens than the one text process of their pod handles."""
    if inputs.gpu is None or inputs.num_cores == 1:
        return ""
    weights = max(1, limits.loaded_weights_bytes(inputs, candidate.tp))
    core_tokens_s = _GPU_TOKENS_S * _GPU_WEIGHTS_BYTES * candidate.tp // weights
    if inputs.num_cores * core_tokens_s <= _TEXT_PROCESS_TOKENS_S:
        return ""
    num_cores = max(1, _TEXT_PROCESS_TOKENS_S // core_tokens_s)
    return (
        f"{inputs.num_cores} cores can generate about {inputs.num_cores * core_tokens_s} tokens/s, but the text "
        f"process of a replica handles about {_TEXT_PROCESS_TOKENS_S}; lower spec.engine.dataParallelSize to "
        f"{num_cores}, and use more replicas."
    )


def _host_memory_advice(inputs: PlannerInputs, candidate: Candidate) -> str:
    if inputs.gpu is None or inputs.memory_limit is None:
        return ""
    required = host_costs(inputs, inputs.num_ranks(candidate.tp)).total
    if required <= inputs.memory_limit:
        return ""
    return (
        f"spec.runtime.memory is too small: the pod's processes are expected to use {required // MIB + 1}Mi; raise it "
        "to at least this value."
    )
