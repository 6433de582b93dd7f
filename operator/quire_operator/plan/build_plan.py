# SPDX-License-Identifier: Apache-2.0
"""Converts the chosen candidate to a Plan, in which each value has an origin and a reason. Pure.

Called by planner.py.
"""

from collections.abc import Mapping
from dataclasses import astuple, replace

from quire_operator.plan import advice, limits
from quire_operator.plan.candidates import MEAN_SEQUENCE_LEN, Candidate, choose_block_size
from quire_operator.plan.device_memory import MIB, round_up_mib
from quire_operator.plan.host_memory import host_costs, shared_memory
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.plan import (
    VERSION,
    DeviceMemory,
    HostMemory,
    Origin,
    Plan,
    PlannedGpu,
    PlannedValue,
    T,
    round_down_mib,
    to_quantity,
)


def build_plan(inputs: PlannerInputs, candidate: Candidate, images: Mapping[str, str]) -> Plan:
    """Convert the candidate to a plan. `images` maps each device to the image of this release."""
    engine, gpu = inputs.engine, inputs.gpu
    device_memory = _device_memory(inputs, candidate)
    fit, text = advice.assess_fit(inputs, candidate)
    count = 0 if gpu is None else inputs.num_ranks(candidate.tp)
    shm = None if inputs.shared_memory is None else to_quantity(round_up_mib(inputs.shared_memory))
    default_image = images["CPU" if gpu is None else "GPU"]
    return Plan(
        inputsHash=inputs.inputs_hash,
        plannerVersion=VERSION,
        gpu=None if gpu is None else PlannedGpu(gpu.product, gpu.visible_bytes // MIB, count, gpu.memory_source),
        dtype=_planned_value(engine.dtype, *_default_dtype(inputs)),
        tensorParallelSize=_planned_value(engine.tensorParallelSize, candidate.tp, _tp_reason(inputs, candidate)),
        gpuMemoryUtilization=None if gpu is None else _utilization(inputs, candidate),
        kvCacheMemory=_kv_cache_memory(inputs, device_memory),
        blockSize=_planned_value(
            engine.blockSize, choose_block_size(inputs, candidate), "little memory is wasted in partly filled blocks"
        ),
        maxModelLen=_planned_value(engine.maxModelLen, candidate.max_model_len, _context_reason(inputs, candidate)),
        maxNumSeqs=_planned_value(engine.maxNumSeqs, candidate.max_num_seqs, _max_num_seqs_reason(inputs, candidate)),
        maxNumBatchedTokens=_planned_value(
            engine.maxNumBatchedTokens, candidate.max_num_batched_tokens, _token_budget_reason(inputs, candidate)
        ),
        bytes=device_memory,
        hostBytes=_host_memory(inputs, count, device_memory, candidate.tp),
        sharedMemory=_planned_value(shm, to_quantity(shared_memory(count)), "1Gi for each GPU, at least 1Gi"),
        image=_planned_value(inputs.image, default_image, "image of the release that made the plan"),
        modelBytes=round_up_mib(inputs.model.weights_bytes + (inputs.draft.file_bytes if inputs.draft else 0)),
        kvTokens=candidate.kv_tokens,
        fit=fit,
        advice=text,
    )


def _planned_value(requested: T | None, value: T, reason: str) -> PlannedValue[T]:
    if requested is None:
        return PlannedValue(value, Origin.COMPUTED, reason)
    return PlannedValue(requested, Origin.SPEC, "set in the spec")


def _device_memory(inputs: PlannerInputs, candidate: Candidate) -> DeviceMemory:
    weights, activations, non_torch, lora, draft, states = map(round_up_mib, astuple(candidate.costs))
    kv = round_down_mib(candidate.kv_bytes)
    used = DeviceMemory(weights, activations, non_torch, lora, kv, reserve=0, draft=draft, states=states)
    reserve = 0 if inputs.gpu is None else round_down_mib(inputs.gpu.visible_bytes) - used.total
    return replace(used, reserve=reserve)


def _host_memory(inputs: PlannerInputs, num_gpus: int, device_memory: DeviceMemory, tp: int) -> HostMemory:
    host = host_costs(inputs, num_gpus)
    host_memory = HostMemory(
        processes=round_up_mib(host.processes),
        stubs=round_up_mib(host.stubs),
        loraCopies=round_up_mib(host.lora_copies),
        sharedMemory=round_up_mib(host.shared_memory),
        model=0 if num_gpus else device_memory.total * inputs.num_ranks(tp),
        total=0,
        swap=round_up_mib(host.swap),
        kvOffloading=round_up_mib(host.kv_offloading),
    )
    limit = inputs.memory_limit
    return replace(host_memory, total=host_memory.required if limit is None else round_up_mib(limit))


def _default_dtype(inputs: PlannerInputs) -> tuple[str, str]:
    if inputs.gpu is None:
        return "auto", f"{inputs.model.dtype} if the CPU supports it, else float32; the plan assumes float32"
    return inputs.model.dtype, "dtype of the checkpoint"


def _utilization(inputs: PlannerInputs, candidate: Candidate) -> PlannedValue[str]:
    reason = "0.80 to 0.93; the rest of the memory is for CUDA graphs, the server and fragmentation"
    return _planned_value(inputs.engine.gpuMemoryUtilization, f"{candidate.utilization / 1000:.2f}", reason)


def _kv_cache_memory(inputs: PlannerInputs, device_memory: DeviceMemory) -> PlannedValue[str] | None:
    requested = inputs.engine.kvCacheMemory
    if (inputs.gpu is not None or inputs.model.shape.encoder is not None) and requested is None:
        return None
    reason = "a bounded fraction of memory" if inputs.memory_limit is None else "the rest of the container's memory"
    return _planned_value(requested, to_quantity(device_memory.kv), reason)


def _tp_reason(inputs: PlannerInputs, candidate: Candidate) -> str:
    if inputs.gpu is None:
        return "one process on a CPU"
    if inputs.max_gpus == 1:
        return "one GPU for each replica"
    sizes = limits.allowed_tp_sizes(inputs)
    if len(sizes) == 1:
        return "the only number of GPUs that model and engine support"
    allowed = ", ".join(map(str, sizes))
    return f"smallest of {allowed} with the longest context, up to {limits.MAX_DEFAULT_CONTEXT} tokens"


def _context_reason(inputs: PlannerInputs, candidate: Candidate) -> str:
    limit = limits.max_context(inputs)
    if candidate.max_model_len < limit:
        return f"{candidate.kv_tokens} KV tokens for {inputs.engine.minConcurrency} requests (minConcurrency)"
    return "limit of the model" if limit < limits.MAX_DEFAULT_CONTEXT else "the planner's maximum"


def _max_num_seqs_reason(inputs: PlannerInputs, candidate: Candidate) -> str:
    if candidate.max_num_seqs <= inputs.engine.minConcurrency:
        return "minConcurrency"
    if inputs.model.shape.encoder is not None:
        return "sequences of an encoder need no KV cache"
    mean = min(MEAN_SEQUENCE_LEN, candidate.max_model_len)
    return f"{candidate.kv_tokens} KV tokens, at about {mean} tokens per sequence"


def _token_budget_reason(inputs: PlannerInputs, candidate: Candidate) -> str:
    if candidate.max_num_batched_tokens == candidate.max_model_len and inputs.model.shape.encoder is not None:
        return "an encoder computes each request in one step"
    if candidate.max_num_batched_tokens == candidate.max_num_seqs:
        return "one token for each sequence"
    return "a larger step would delay running requests" if inputs.gpu is None else "chosen by the GPU's memory"
