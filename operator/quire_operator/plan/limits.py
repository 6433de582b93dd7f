# SPDX-License-Identifier: Apache-2.0
"""What the model, the GPU and the engine allow at all: numbers of GPUs, types, lengths. Pure."""

from quire_operator.plan import memory
from quire_operator.plan.errors import Unplannable, Why
from quire_operator.plan.gpu import Gpu
from quire_operator.plan.inputs import Inputs
from quire_operator.plan.memory import MIB
from quire_operator.quantity import num_bytes
from quire_spec.model import capabilities
from quire_spec.model.tensor_parallel import unsupported_reason

TP_SIZES = (1, 2, 4, 8)
MAX_DEFAULT_LENGTH = 32768
"""Longest maxModelLen that is planned; more has to be asked for."""
MIN_DEFAULT_LENGTH = 4096
"""Shortest that is planned, unless the model itself is made for less."""


def tp_allowed(inputs: Inputs) -> list[int]:
    """Numbers of GPUs that the spec, the model and the engine allow; of processes on a CPU, where more than one is
    never better by itself and has to be asked for.

    Raises:
        Unplannable: the pinned one is not among them.
    """
    pinned = inputs.engine.tensorParallelSize
    if pinned is None and inputs.gpu is None:
        return [1]
    if pinned is None:
        return [tp for tp in TP_SIZES if not why_not(inputs, tp)]
    field = f"spec.engine.tensorParallelSize: {pinned}"
    if why := unsupported_reason(inputs.model.shape, pinned):
        possible = " or ".join(str(tp) for tp in TP_SIZES if not unsupported_reason(inputs.model.shape, tp))
        raise Unplannable(Why.DOES_NOT_FIT, f"{field}: {why}; use {possible}")
    if inputs.gpu is not None and inputs.gpu.per_node is not None and pinned > inputs.gpu.per_node:
        fix = (
            f"nodes with {inputs.gpu.name} have {inputs.gpu.per_node} GPUs, and layers are shared on one node; lower it"
        )
        raise Unplannable(Why.DOES_NOT_FIT, f"{field}: {fix}")
    if pinned not in inputs.abilities.tensor_parallel_sizes:
        known = ", ".join(map(str, inputs.abilities.tensor_parallel_sizes))
        fix = f"the engine of this release knows {known}; omit the field, and use a larger GPU where one is needed"
        raise Unplannable(Why.UNSUPPORTED_BY_ENGINE, f"{field}: {fix}")
    return [pinned]


def why_not(inputs: Inputs, tp: int) -> str:
    """Why a number of GPUs is not tried, when none is pinned; empty when it is."""
    if why := unsupported_reason(inputs.model.shape, tp):
        return f"not possible: {why}"
    if tp > inputs.max_gpus:
        return f"not tried: spec.gpu.count is {inputs.max_gpus}"
    if inputs.gpu is not None and inputs.gpu.per_node is not None and tp > inputs.gpu.per_node:
        return f"not possible: a node has {inputs.gpu.per_node}"
    if tp not in inputs.abilities.tensor_parallel_sizes:
        return "not possible: the engine of this release does not share layers between so many"
    return ""


def check_type(inputs: Inputs) -> None:
    """Raise Unplannable when the engine or the GPU cannot compute in the type that is asked for."""
    dtype = inputs.engine.dtype or inputs.model.dtype
    if dtype not in capabilities.DTYPE_BYTES:
        fix = f"set {' or '.join(capabilities.DTYPE_BYTES)}"
        raise Unplannable(
            Why.UNSUPPORTED_DTYPE, f"spec.engine.dtype: {_whose(inputs)}, which the engine does not know; {fix}"
        )
    if inputs.gpu is not None and (problem := type_problem(inputs, inputs.gpu)):
        raise Unplannable(Why.UNSUPPORTED_DTYPE, problem)


def type_problem(inputs: Inputs, gpu: Gpu) -> str:
    """Why a GPU cannot compute in the types that are asked for; "" when it can, or nothing is known of it."""
    if gpu.compute is None:
        return ""
    found = f"{gpu.name} has compute capability {gpu.compute[0]}.{gpu.compute[1]}"
    dtype = inputs.engine.dtype or inputs.model.dtype
    if dtype == "bfloat16" and gpu.compute < (8, 0):
        fix = "set it to float16, or use another GPU"
        return f"spec.engine.dtype: {_whose(inputs)}: {found} and bfloat16 needs 8.0; {fix}"
    if inputs.engine.kvCacheDtype == "fp8" and gpu.compute < (8, 9):
        return f"spec.engine.kvCacheDtype: fp8: {found} and fp8 needs 8.9; set it to auto, or use another GPU"
    return ""


def _whose(inputs: Inputs) -> str:
    return inputs.engine.dtype or f"absent, and the checkpoint's is {inputs.model.dtype}"


def check_length(inputs: Inputs) -> None:
    """Raise Unplannable when the pinned context is longer than the model was made for: the engine refuses it."""
    pinned, limit = inputs.engine.maxModelLen, inputs.model.shape.max_position_embeddings
    if pinned is not None and pinned > limit:
        fix = f"the model is made for {limit} tokens (max_position_embeddings), and the engine refuses more; lower it"
        raise Unplannable(Why.UNSUPPORTED_BY_ENGINE, f"spec.engine.maxModelLen: {pinned}: {fix}")


def check_copies(inputs: Inputs) -> None:
    """Raise Unplannable when host memory has no room for the copy of an adapter in each slot: the engine refuses it."""
    lora = inputs.lora
    if lora.maxCachedMemory is None or not lora.maxLoaded:
        return
    least = memory.lora_bytes(inputs.model.shape, lora.maxLoaded, lora.maxRank, element_bytes(inputs))
    if num_bytes(lora.maxCachedMemory) < least:
        taken = f"{lora.maxLoaded} adapters of rank {lora.maxRank} take {-(-least // MIB)}Mi"
        fix = f"{taken}; raise it, or lower spec.lora.maxLoaded or maxRank"
        raise Unplannable(Why.DOES_NOT_FIT, f"spec.lora.maxCachedMemory: {lora.maxCachedMemory}: {fix}")


def element_bytes(inputs: Inputs) -> int:
    """Bytes of a number that the engine computes with. A CPU without bfloat16 takes float32, so that is counted."""
    if inputs.engine.dtype is None and inputs.gpu is None:
        return capabilities.DTYPE_BYTES["float32"]
    return capabilities.DTYPE_BYTES[inputs.engine.dtype or inputs.model.dtype]


def kv_element_bytes(inputs: Inputs) -> int:
    """Bytes of a number in the KV cache."""
    return element_bytes(inputs) if inputs.engine.kvCacheDtype in (None, "auto") else 1


def computed_bytes(inputs: Inputs) -> int:
    """Bytes of all weights in the type that the engine computes in."""
    return inputs.model.weights_bytes * element_bytes(inputs) // capabilities.DTYPE_BYTES.get(inputs.model.dtype, 2)


def length_limit(inputs: Inputs) -> int:
    """The context that is planned when memory is no matter."""
    return inputs.engine.maxModelLen or min(inputs.model.shape.max_position_embeddings, MAX_DEFAULT_LENGTH)


def least_length(inputs: Inputs) -> int:
    """The shortest context that is worth a start."""
    return inputs.engine.maxModelLen or min(MIN_DEFAULT_LENGTH, length_limit(inputs))
