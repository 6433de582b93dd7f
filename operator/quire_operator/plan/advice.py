# SPDX-License-Identifier: Apache-2.0
"""What to do when a plan is tight or there is none: what was tried, which GPU would do, what is worth changing.

Pure. Everything it recommends has been planned first; what the engine refuses is never recommended.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from quire_operator.plan import limits, memory
from quire_operator.plan.gpu import PRODUCTS, Gpu
from quire_operator.plan.host import host_of
from quire_operator.plan.inputs import Inputs
from quire_operator.plan.memory import GIB, MIB, up
from quire_operator.plan.plan import Fit
from quire_operator.plan.ways import Way, all_ways, best, whole_blocks
from quire_operator.quantity import num_bytes
from quire_spec.model.tensor_parallel import unsupported_reason

ENOUGH_REQUESTS = 4
"""Requests of full length that a service without LowConcurrency holds."""
_LARGE_SHARE = 4
"""Adapters take much when they take a quarter of what KV gets."""
_LARGE = (
    "kvCacheMemory", "gpuMemoryUtilization", "maxNumSeqs", "maxNumBatchedTokens", "tensorParallelSize", "dtype",
    "swapSpace",
)  # fmt: skip
"""Fields of spec.engine that may be what does not fit, and can be left out."""


def judge(inputs: Inputs, found: Way) -> tuple[Fit, str]:
    """How well the way fits, and what to change; "" when nothing."""
    fits: list[tuple[Fit, str]] = []
    if inputs.gpu is not None and (text := _utilization_risk(inputs, inputs.gpu, found)):
        fits.append((Fit.UTILIZATION_RISK, text))
    if found.kv_tokens < ENOUGH_REQUESTS * found.max_model_len:
        fits.append((Fit.LOW_CONCURRENCY, _low_concurrency(inputs, found)))
    if inputs.gpu is not None and inputs.gpu.others:
        kinds = ", ".join(inputs.gpu.others)
        text = f"Pods may also land on {kinds}, which are larger; set spec.gpu.product to plan for one kind."
        fits.append((Fit.HETEROGENEOUS_POOL, text))
    if text := _host_too_small(inputs, found):
        fits.append((Fit.FITS, text))
    return (fits[0][0], " ".join(text for _, text in fits)) if fits else (Fit.FITS, "")


def does_not_fit(inputs: Inputs, tried: list[Way]) -> str:
    """The message of DoesNotFit: a sentence, the table of what was tried, and what would do."""
    if inputs.gpu is None:
        return _cpu_does_not_fit(inputs, tried)
    gpu, length = inputs.gpu, limits.least_length(inputs)
    head = (
        f"spec.gpu: {gpu.name}: the model does not fit with a context of {length} tokens; take a larger GPU, or "
        f"{_smaller(inputs)}"
    )
    return "\n".join([head, *_table(inputs, tried), _would_do(inputs)])


def smallest(inputs: Inputs) -> Iterator[tuple[int, str]]:
    """For each number of GPUs that the engine and the model allow, the smallest product that fits."""
    for count in limits.TP_SIZES:
        if count not in inputs.abilities.tensor_parallel_sizes or unsupported_reason(inputs.model.shape, count):
            continue
        for product in PRODUCTS:
            engine = replace(inputs.engine, tensorParallelSize=count)
            if _fits_with(inputs, gpu=Gpu.of_product(product), max_gpus=count, engine=engine):
                yield count, product
                break


def _table(inputs: Inputs, tried: list[Way]) -> Iterator[str]:
    """One row for each number of GPUs: its best attempt, or why there was none."""
    columns = ("GPUs", "share", "weights", "step", "other", "adapters", "left", "short by")
    yield "  " + " ".join(f"{name:>8}" for name in columns) + "   (GiB on each)"
    for tp in limits.TP_SIZES:
        ways = [w for w in tried if w.tp == tp]
        if not ways:
            if why := _not_tried(inputs, tp):
                yield f"  {tp:>8} {why}"
            continue
        nearest = max(ways, key=lambda w: (w.kv_bytes, -w.max_num_seqs))
        yield f"  {tp:>8} " + " ".join(f"{size / GIB:>8.2f}" for size in _row(inputs, nearest))


def _row(inputs: Inputs, found: Way) -> tuple[int, ...]:
    assert inputs.gpu is not None, "only GPUs have a table"
    costs = found.costs
    share = inputs.gpu.visible_bytes * found.utilization // 1000
    pinned = inputs.engine.kvCacheMemory
    needed = max(_least_kv_bytes(inputs, found.tp), 0 if pinned is None else num_bytes(pinned))
    left = share - costs.total
    return share, costs.weights, costs.activations, costs.non_torch, costs.lora, left, needed - left


def _least_kv_bytes(inputs: Inputs, tp: int) -> int:
    pinned = inputs.engine.maxModelLen
    tokens = whole_blocks(pinned or limits.least_length(inputs) * inputs.engine.minConcurrency)
    return tokens * memory.token_bytes(inputs.model.shape, limits.kv_element_bytes(inputs), tp)


def _not_tried(inputs: Inputs, tp: int) -> str:
    pinned = inputs.engine.tensorParallelSize
    return limits.why_not(inputs, tp) if pinned is None else f"not tried: spec.engine.tensorParallelSize is {pinned}"


def _would_do(inputs: Inputs) -> str:
    found = ", or ".join(f"{count} x {product}" for count, product in smallest(inputs))
    return f"The smallest that would do: {found}." if found else "No GPU in the table of products would do."


def _smaller(inputs: Inputs) -> str:
    """What in the spec could be made smaller, or left to the planner."""
    engine, parts = inputs.engine, ["a smaller model"]
    if inputs.lora.maxLoaded:
        parts.append(f"lower spec.lora.maxLoaded ({inputs.lora.maxLoaded}) or maxRank ({inputs.lora.maxRank})")
    if engine.maxModelLen is not None:
        parts.append(f"lower spec.engine.maxModelLen ({engine.maxModelLen})")
    if _fits_with(inputs, engine=replace(engine, minConcurrency=1)):
        parts.append(f"lower spec.engine.minConcurrency ({engine.minConcurrency})")
    for name in _LARGE:
        value = getattr(engine, name)
        unset: dict[str, Any] = {name: None}
        if value is not None and _fits_with(inputs, engine=replace(engine, **unset)):
            parts.append(f"omit spec.engine.{name} ({value})")
    return ", or ".join(parts)


def _cpu_does_not_fit(inputs: Inputs, tried: list[Way]) -> str:
    nearest = max(tried, key=lambda w: (w.kv_bytes, -w.max_num_seqs))
    host, costs, tp = host_of(inputs, 0), nearest.costs, nearest.tp
    pinned = inputs.engine.kvCacheMemory
    least = up(_least_kv_bytes(inputs, tp))
    kv = least if pinned is None else max(least, num_bytes(pinned))
    rows = {
        "weights": tp * costs.weights, "step": tp * costs.activations, "adapter slots": tp * costs.lora,
        "least KV cache": tp * kv,
        "adapter copies": host.lora_copies, "swap space": host.swap, "processes": host.processes,
        "models' processes": host.stubs, "shared memory": host.shared_memory,
    }  # fmt: skip
    total, limit = host.whole + tp * (costs.whole + kv), inputs.memory_limit
    length = limits.least_length(inputs)
    if pinned is not None and num_bytes(pinned) < least:
        head = (
            f"spec.engine.kvCacheMemory: {pinned}: a context of {length} tokens takes {least // MIB}Mi; raise it, or "
            f"take {_smaller(inputs)}"
        )
    else:
        assert limit is not None, "where nobody says how much memory there is, the KV cache is as large as it must be"
        head = (
            f"spec.runtime.memory: {limit // MIB}Mi: the model does not fit with a context of {length} tokens; raise "
            f"it to {total // MIB}Mi, or take {_smaller(inputs)}"
        )
    table = [f"  {name:<18} {size / GIB:>8.2f} GiB" for name, size in rows.items() if size]
    return "\n".join([head, *table])


def _utilization_risk(inputs: Inputs, gpu: Gpu, found: Way) -> str:
    if inputs.engine.gpuMemoryUtilization is None:
        return ""
    left = gpu.visible_bytes * (1000 - found.utilization) // 1000
    needed = memory.graph_bytes(inputs.model.shape) + GIB // 2
    if left >= needed:
        return ""
    return (
        f"spec.engine.gpuMemoryUtilization {inputs.engine.gpuMemoryUtilization} leaves {left / GIB:.1f} GiB, and CUDA "
        f"graphs and the server take about {needed / GIB:.1f}; lower it."
    )


def _low_concurrency(inputs: Inputs, found: Way) -> str:
    requests = found.kv_tokens / found.max_model_len
    head = f"{found.kv_tokens} KV tokens hold {requests:.1f} requests of {found.max_model_len} tokens."
    options = [*_more_gpus(inputs, found), *_fewer_slots(inputs, found)]
    if inputs.engine.maxModelLen is not None:
        shorter = found.kv_tokens // ENOUGH_REQUESTS
        if _enough_with(inputs, engine=replace(inputs.engine, maxModelLen=shorter)):
            options.append(f"lower spec.engine.maxModelLen to {shorter}")
    if inputs.gpu is None:
        options.append("raise spec.runtime.memory or spec.engine.kvCacheMemory")
    return f"{head} To hold more: {'; '.join(options)}." if options else head


def _more_gpus(inputs: Inputs, found: Way) -> Iterator[str]:
    """More GPUs of the same kind, and the smallest kind whose memory is enough for ENOUGH_REQUESTS."""
    gpu = inputs.gpu
    if gpu is None or inputs.engine.kvCacheMemory is not None:
        return
    for count in limits.TP_SIZES:
        more = replace(inputs, max_gpus=count, engine=replace(inputs.engine, tensorParallelSize=None))
        if count <= found.tp or limits.why_not(more, count):
            continue
        if other := _enough_with(inputs, max_gpus=count):
            yield _offer(f"spec.gpu.count {count}", other)
            break
        # By itself a plan takes the fewest GPUs that have the longest context.
        if other := _enough_with(more, engine=replace(inputs.engine, tensorParallelSize=count)):
            yield _offer(f"spec.gpu.count {count} with spec.engine.tensorParallelSize {count}", other)
            break
    for product, (mib, _) in PRODUCTS.items():
        larger = Gpu.of_product(product) if mib > gpu.memory_mib else None
        if larger and (other := _enough_with(inputs, gpu=larger)):
            yield _offer(product, other)
            break


def _fewer_slots(inputs: Inputs, found: Way) -> Iterator[str]:
    if found.costs.lora * _LARGE_SHARE > max(found.kv_bytes, 1):
        size, lora = found.costs.lora / GIB, inputs.lora
        yield (
            f"the {lora.maxLoaded} adapter slots of rank {lora.maxRank} take {size:.1f} GiB: lower spec.lora.maxLoaded "
            "or maxRank"
        )


def _fits_with(inputs: Inputs, **changes: Any) -> Way | None:
    """The best way with these changes, if one fits."""
    changed = replace(inputs, **changes)
    if changed.gpu is not None and limits.type_problem(changed, changed.gpu):
        return None
    return best(changed, all_ways(changed))


def _enough_with(inputs: Inputs, **changes: Any) -> Way | None:
    """The same, if it holds ENOUGH_REQUESTS."""
    found = _fits_with(inputs, **changes)
    return found if found and found.kv_tokens >= ENOUGH_REQUESTS * found.max_model_len else None


def _offer(what: str, found: Way) -> str:
    return f"{what} gives {found.kv_tokens} KV tokens and a context of {found.max_model_len}"


def _host_too_small(inputs: Inputs, found: Way) -> str:
    if inputs.gpu is None or inputs.memory_limit is None:
        return ""
    needed = host_of(inputs, found.tp).total
    if needed <= inputs.memory_limit:
        return ""
    return f"spec.runtime.memory is less than the {needed // MIB + 1}Mi that the pod's processes are expected to take."
