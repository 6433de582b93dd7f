# SPDX-License-Identifier: Apache-2.0
"""From the way that was chosen to the Plan: values with their origins and reasons, memory in whole MiB. Pure."""

from collections.abc import Mapping
from dataclasses import replace

from quire_operator.plan import advice, limits
from quire_operator.plan.gpu import Gpu
from quire_operator.plan.host import host_of, shared_memory
from quire_operator.plan.inputs import Inputs
from quire_operator.plan.memory import MIB, up
from quire_operator.plan.plan import (
    VERSION,
    DeviceBytes,
    HostBytes,
    Origin,
    Plan,
    Planned,
    PlannedGpu,
    T,
    down,
    quantity,
)
from quire_operator.plan.ways import MEAN_SEQUENCE, Way, block_size

_SPEC = "pinned in the spec"


def plan_of(inputs: Inputs, found: Way, images: Mapping[str, str]) -> Plan:
    """The plan that the way `found` is; `images` has this release's for GPU and CPU."""
    engine, gpu = inputs.engine, inputs.gpu
    device = _device_bytes(inputs, found)
    fit, text = advice.judge(inputs, found)
    count = 0 if gpu is None else found.tp
    shm = shared_memory(count) if inputs.shared_memory is None else inputs.shared_memory
    return Plan(
        inputsHash=inputs.digest,
        plannerVersion=VERSION,
        gpu=None if gpu is None else _gpu(gpu, found.tp),
        dtype=_planned(engine.dtype, *_dtype(inputs)),
        tensorParallelSize=_planned(engine.tensorParallelSize, found.tp, _why_tp(inputs, found)),
        gpuMemoryUtilization=None if gpu is None else _utilization(inputs, found),
        kvCacheMemory=_kv_cache_memory(inputs, device),
        blockSize=_planned(engine.blockSize, block_size(inputs, found), "few tokens are lost in half-filled blocks"),
        maxModelLen=_planned(engine.maxModelLen, found.max_model_len, _why_length(inputs, found)),
        maxNumSeqs=_planned(engine.maxNumSeqs, found.max_num_seqs, _why_seqs(inputs, found)),
        maxNumBatchedTokens=_planned(
            engine.maxNumBatchedTokens, found.max_num_batched_tokens, _why_budget(inputs, found)
        ),
        bytes=device,
        hostBytes=_host_bytes(inputs, count, device, found.tp),
        sharedMemory=Planned(
            quantity(up(shm)),
            Origin.COMPUTED if inputs.shared_memory is None else Origin.SPEC,
            "1Gi for each GPU, at least one" if inputs.shared_memory is None else _SPEC,
        ),
        image=_planned(inputs.image, images["CPU" if gpu is None else "GPU"], "of the release that planned"),
        modelBytes=up(inputs.model.weights_bytes),
        kvTokens=found.kv_tokens,
        fit=fit,
        advice=text,
    )


def _planned(pinned: T | None, value: T, why: str) -> Planned[T]:
    return Planned(value, Origin.COMPUTED, why) if pinned is None else Planned(pinned, Origin.SPEC, _SPEC)


def _gpu(gpu: Gpu, count: int) -> PlannedGpu:
    return PlannedGpu(gpu.product, gpu.visible_bytes // MIB, count, gpu.known_from)


def _device_bytes(inputs: Inputs, found: Way) -> DeviceBytes:
    costs = found.costs
    used = DeviceBytes(
        weights=up(costs.weights),
        activations=up(costs.activations),
        nonTorch=up(costs.non_torch),
        lora=up(costs.lora),
        kv=down(found.kv_bytes),
        reserve=0,
    )
    return used if inputs.gpu is None else replace(used, reserve=down(inputs.gpu.visible_bytes) - used.total)


def _host_bytes(inputs: Inputs, num_gpus: int, device: DeviceBytes, tp: int) -> HostBytes:
    host = host_of(inputs, num_gpus)
    needed = HostBytes(
        processes=up(host.processes),
        stubs=up(host.stubs),
        loraCopies=up(host.lora_copies),
        sharedMemory=up(host.shared_memory),
        model=0 if num_gpus else device.total * tp,
        total=0,
        swap=up(host.swap),
    )
    return replace(needed, total=needed.needed if inputs.memory_limit is None else up(inputs.memory_limit))


def _dtype(inputs: Inputs) -> tuple[str, str]:
    if inputs.gpu is None:
        return (
            "auto",
            f"the checkpoint's {inputs.model.dtype} where the CPU computes in it, else float32 (counted here)",
        )
    return inputs.model.dtype, "the checkpoint's"


def _utilization(inputs: Inputs, found: Way) -> Planned[str]:
    pinned = inputs.engine.gpuMemoryUtilization
    return _planned(
        pinned, f"{found.utilization / 1000:.2f}", "leaves room for CUDA graphs, the server and fragments, 0.80 to 0.93"
    )


def _kv_cache_memory(inputs: Inputs, device: DeviceBytes) -> Planned[str] | None:
    pinned = inputs.engine.kvCacheMemory
    if inputs.gpu is not None and pinned is None:
        return None
    why = "a bounded share of memory" if inputs.memory_limit is None else "what the container's memory leaves"
    return _planned(pinned, quantity(device.kv), why)


def _why_tp(inputs: Inputs, found: Way) -> str:
    if inputs.gpu is None:
        return "a CPU"
    if inputs.max_gpus == 1:
        return "one GPU for each replica"
    sizes = limits.tp_allowed(inputs)
    if len(sizes) == 1:
        return "the only number that the model divides by and the engine can do"
    allowed = ", ".join(map(str, sizes))
    return f"the fewest of {allowed} with the longest context, up to {limits.MAX_DEFAULT_LENGTH} tokens"


def _why_length(inputs: Inputs, found: Way) -> str:
    limit = limits.length_limit(inputs)
    if found.max_model_len < limit:
        return f"{found.kv_tokens} KV tokens for {inputs.engine.minConcurrency} requests (minConcurrency) at once"
    return "the model's own limit" if limit < limits.MAX_DEFAULT_LENGTH else "the longest that is planned"


def _why_seqs(inputs: Inputs, found: Way) -> str:
    if found.max_num_seqs <= inputs.engine.minConcurrency:
        return "minConcurrency"
    return f"{found.kv_tokens} KV tokens at about {min(MEAN_SEQUENCE, found.max_model_len)} for each"


def _why_budget(inputs: Inputs, found: Way) -> str:
    if found.max_num_batched_tokens == found.max_num_seqs:
        return "one token for each sequence"
    return "a CPU: more would hold up running answers" if inputs.gpu is None else "by the GPU's memory"
