# SPDX-License-Identifier: Apache-2.0
"""What the model, the GPU and the engine allow at all: numbers of GPUs, types, lengths. Pure."""

from quire_operator.api.quantity import to_bytes
from quire_operator.plan import device_memory
from quire_operator.plan.device_memory import MIB
from quire_operator.plan.errors import Unplannable, UnplannableReason
from quire_operator.plan.gpu import GpuInfo
from quire_operator.plan.inputs import PlannerInputs
from quire_spec.model import capabilities
from quire_spec.model.tensor_parallel import unsupported_reason

TP_SIZES = (1, 2, 4, 8)
MAX_DEFAULT_CONTEXT = 32768
"""Longest maxModelLen that is planned; more has to be asked for."""
MIN_DEFAULT_CONTEXT = 4096
"""Shortest that is planned, unless the model itself is made for less."""


def allowed_tp_sizes(inputs: PlannerInputs) -> list[int]:
    """Numbers of GPUs that the spec, the model and the engine allow; of processes on a CPU, where more than one is
    never better by itself and has to be asked for.

    Raises:
        Unplannable: the pinned one is not among them.
    """
    pinned = inputs.engine.tensorParallelSize
    if pinned is None and inputs.gpu is None:
        return [1]
    if pinned is None:
        return [tp for tp in TP_SIZES if not rejection_reason(inputs, tp)]
    field = f"spec.engine.tensorParallelSize: {pinned}"
    if reason := unsupported_reason(inputs.model.shape, pinned):
        possible = " or ".join(str(tp) for tp in TP_SIZES if not unsupported_reason(inputs.model.shape, tp))
        raise Unplannable(UnplannableReason.DOES_NOT_FIT, f"{field}: {reason}; use {possible}")
    if inputs.gpu is not None and inputs.gpu.gpus_per_node is not None and pinned > inputs.gpu.gpus_per_node:
        fix = (
            f"nodes with {inputs.gpu.name} have {inputs.gpu.gpus_per_node} GPUs, and layers are shared on "
            f"one node; lower it"
        )
        raise Unplannable(UnplannableReason.DOES_NOT_FIT, f"{field}: {fix}")
    if pinned not in inputs.capabilities.tensor_parallel_sizes:
        supported = ", ".join(map(str, inputs.capabilities.tensor_parallel_sizes))
        fix = f"the engine of this release knows {supported}; omit the field, and use a larger GPU where one is needed"
        raise Unplannable(UnplannableReason.UNSUPPORTED_BY_ENGINE, f"{field}: {fix}")
    return [pinned]


def rejection_reason(inputs: PlannerInputs, tp: int) -> str:
    """Why a number of GPUs is not tried, when none is pinned; empty when it is."""
    if reason := unsupported_reason(inputs.model.shape, tp):
        return f"not possible: {reason}"
    if tp > inputs.max_gpus:
        return f"not tried: spec.gpu.count is {inputs.max_gpus}"
    if inputs.gpu is not None and inputs.gpu.gpus_per_node is not None and tp > inputs.gpu.gpus_per_node:
        return f"not possible: a node has {inputs.gpu.gpus_per_node}"
    if tp not in inputs.capabilities.tensor_parallel_sizes:
        return "not possible: the engine of this release does not share layers between so many"
    return ""


def check_dtypes(inputs: PlannerInputs) -> None:
    """Raise Unplannable when the engine or the GPU cannot compute in the type that is asked for."""
    dtype = inputs.engine.dtype or inputs.model.dtype
    if dtype not in capabilities.DTYPE_BYTES:
        fix = f"set {' or '.join(capabilities.DTYPE_BYTES)}"
        raise Unplannable(
            UnplannableReason.UNSUPPORTED_DTYPE,
            f"spec.engine.dtype: {_describe_dtype(inputs)}, which the engine does not know; {fix}",
        )
    if inputs.gpu is not None and (problem := dtype_error(inputs, inputs.gpu)):
        raise Unplannable(UnplannableReason.UNSUPPORTED_DTYPE, problem)


def dtype_error(inputs: PlannerInputs, gpu: GpuInfo) -> str:
    """Why a GPU cannot compute in the types that are asked for; "" when it can, or nothing is known of it."""
    if gpu.compute_capability is None:
        return ""
    capability_text = f"{gpu.name} has compute capability {gpu.compute_capability[0]}.{gpu.compute_capability[1]}"
    dtype = inputs.engine.dtype or inputs.model.dtype
    if dtype == "bfloat16" and gpu.compute_capability < (8, 0):
        fix = "set it to float16, or use another GPU"
        return f"spec.engine.dtype: {_describe_dtype(inputs)}: {capability_text} and bfloat16 needs 8.0; {fix}"
    if inputs.engine.kvCacheDtype == "fp8" and gpu.compute_capability < (8, 9):
        return f"spec.engine.kvCacheDtype: fp8: {capability_text} and fp8 needs 8.9; set it to auto, or use another GPU"
    return ""


def _describe_dtype(inputs: PlannerInputs) -> str:
    return inputs.engine.dtype or f"absent, and the checkpoint's is {inputs.model.dtype}"


def check_context(inputs: PlannerInputs) -> None:
    """Raise Unplannable when the pinned context is longer than the model was made for: the engine refuses it."""
    pinned, limit = inputs.engine.maxModelLen, inputs.model.shape.max_position_embeddings
    if pinned is not None and pinned > limit:
        fix = f"the model is made for {limit} tokens (max_position_embeddings), and the engine refuses more; lower it"
        raise Unplannable(UnplannableReason.UNSUPPORTED_BY_ENGINE, f"spec.engine.maxModelLen: {pinned}: {fix}")


def check_lora_cache(inputs: PlannerInputs) -> None:
    """Raise Unplannable when host memory has no room for the copy of an adapter in each slot: the engine refuses it."""
    lora = inputs.lora
    if lora.maxCachedMemory is None or not lora.maxLoaded:
        return
    min_bytes = device_memory.lora_bytes(inputs.model.shape, lora.maxLoaded, lora.maxRank, element_bytes(inputs))
    if to_bytes(lora.maxCachedMemory) < min_bytes:
        size_text = f"{lora.maxLoaded} adapters of rank {lora.maxRank} take {-(-min_bytes // MIB)}Mi"
        fix = f"{size_text}; raise it, or lower spec.lora.maxLoaded or maxRank"
        raise Unplannable(UnplannableReason.DOES_NOT_FIT, f"spec.lora.maxCachedMemory: {lora.maxCachedMemory}: {fix}")


def element_bytes(inputs: PlannerInputs) -> int:
    """Bytes of a number that the engine computes with. A CPU without bfloat16 takes float32, so that is counted."""
    if inputs.engine.dtype is None and inputs.gpu is None:
        return capabilities.DTYPE_BYTES["float32"]
    return capabilities.DTYPE_BYTES[inputs.engine.dtype or inputs.model.dtype]


def kv_element_bytes(inputs: PlannerInputs) -> int:
    """Bytes of a number in the KV cache."""
    return element_bytes(inputs) if inputs.engine.kvCacheDtype in (None, "auto") else 1


def loaded_weights_bytes(inputs: PlannerInputs) -> int:
    """Bytes of all weights in the type that the engine computes in."""
    return inputs.model.weights_bytes * element_bytes(inputs) // capabilities.DTYPE_BYTES.get(inputs.model.dtype, 2)


def max_context(inputs: PlannerInputs) -> int:
    """The context that is planned when memory is no matter."""
    return inputs.engine.maxModelLen or min(inputs.model.shape.max_position_embeddings, MAX_DEFAULT_CONTEXT)


def min_context(inputs: PlannerInputs) -> int:
    """The shortest context that is worth a start."""
    return inputs.engine.maxModelLen or min(MIN_DEFAULT_CONTEXT, max_context(inputs))
