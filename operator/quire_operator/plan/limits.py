# SPDX-License-Identifier: Apache-2.0
"""Limits that the model, the GPU and the engine set for the number of GPUs, the dtypes and the context length. Pure.

Called by planner.py, candidates.py and advice.py.
"""

import functools
from dataclasses import replace

from quire_operator.api.quantity import to_bytes
from quire_operator.plan import device_memory
from quire_operator.plan.device_memory import MIB
from quire_operator.plan.errors import Unplannable, UnplannableReason
from quire_operator.plan.gpu import GpuInfo
from quire_operator.plan.inputs import PlannerInputs
from quire_spec.engine.speculative_config import SpeculativeConfig
from quire_spec.errors import ConfigError
from quire_spec.model import capabilities, memory_sizing
from quire_spec.model.attention import state_config
from quire_spec.model.attention.state_config import StateConfig, num_host_states, num_state_rows
from quire_spec.model.kv_layout import UNSUPPORTED_KEY_SIZES, UNSUPPORTED_LAYOUT, KVLayout
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.parallel import pipeline_parallel
from quire_spec.model.parallel.tensor_parallel import unsupported_reason
from quire_spec.model.quantization import resolve_quantization

TP_SIZES = (1, 2, 4, 8)
MAX_DEFAULT_CONTEXT = 32768
"""Largest maxModelLen that the planner chooses. Only the spec can set a larger maxModelLen."""
MIN_DEFAULT_CONTEXT = 4096
"""Smallest maxModelLen that the planner chooses, unless the model's limit is smaller."""


def allowed_tp_sizes(inputs: PlannerInputs) -> list[int]:
    """Return the tensor-parallel sizes (numbers of GPUs) that the spec, the model and the engine allow.

    On a CPU the size is the number of processes: 1, or the value in the spec.

    Raises:
        Unplannable: spec.engine.tensorParallelSize is not allowed.
    """
    requested = inputs.engine.tensorParallelSize
    if requested is None and inputs.gpu is None:
        return [1]
    if requested is None:
        return [tp for tp in TP_SIZES if not rejection_reason(inputs, tp)]
    field = f"spec.engine.tensorParallelSize: {requested}"
    if reason := unsupported_reason(inputs.model.shape, requested):
        possible = " or ".join(str(tp) for tp in TP_SIZES if not unsupported_reason(inputs.model.shape, tp))
        raise Unplannable(UnplannableReason.DOES_NOT_FIT, f"{field}: {reason}; use {possible}")
    gpu = inputs.gpu
    if gpu is not None and gpu.gpus_per_node is not None and inputs.num_ranks(requested) > gpu.gpus_per_node:
        cores = f", and {inputs.num_cores} cores need {inputs.num_ranks(requested)}" if inputs.num_cores > 1 else ""
        fix = f"nodes with {gpu.name} have {gpu.gpus_per_node} GPUs{cores}, and a replica runs on one node; lower it"
        raise Unplannable(UnplannableReason.DOES_NOT_FIT, f"{field}: {fix}")
    if requested not in capabilities.TENSOR_PARALLEL_SIZES:
        supported = ", ".join(map(str, capabilities.TENSOR_PARALLEL_SIZES))
        fix = f"the engine of this release supports {supported}; omit the field, and use a larger GPU if needed"
        raise Unplannable(UnplannableReason.UNSUPPORTED_BY_ENGINE, f"{field}: {fix}")
    return [requested]


def rejection_reason(inputs: PlannerInputs, tp: int) -> str:
    """Return the reason why the planner does not try `tp` GPUs; "" if it tries them. This is for specs that do not set
    tensorParallelSize."""
    if reason := unsupported_reason(inputs.model.shape, tp):
        return f"not possible: {reason}"
    num_gpus = inputs.num_ranks(tp)
    if num_gpus > inputs.max_gpus:
        cores = f", and spec.engine.dataParallelSize is {inputs.num_cores}" if inputs.num_cores > 1 else ""
        return f"not tried: spec.gpu.count is {inputs.max_gpus}{cores}"
    if inputs.gpu is not None and inputs.gpu.gpus_per_node is not None and num_gpus > inputs.gpu.gpus_per_node:
        return f"not possible: a node has {inputs.gpu.gpus_per_node}"
    if tp not in capabilities.TENSOR_PARALLEL_SIZES:
        return "not possible: the engine of this release does not support it"
    return ""


def check_dtypes(inputs: PlannerInputs) -> None:
    """Check that the engine and the GPU support the dtype.

    Raises:
        Unplannable: the engine or the GPU does not support the dtype.
    """
    dtype = inputs.engine.dtype or inputs.model.dtype
    if dtype not in capabilities.DTYPE_BYTES:
        fix = f"which the engine does not support; set {' or '.join(capabilities.DTYPE_BYTES)}"
        message = f"spec.engine.dtype: {_describe_dtype(inputs)}, {fix}"
        raise Unplannable(UnplannableReason.UNSUPPORTED_DTYPE, message)
    if inputs.gpu is not None and inputs.engine.kvCacheDtype == "int8_per_token_head":
        fix = "the engine supports this dtype only on CPUs; set it to fp8 or auto"
        raise Unplannable(UnplannableReason.UNSUPPORTED_DTYPE, f"spec.engine.kvCacheDtype: int8_per_token_head: {fix}")
    if inputs.gpu is not None and (problem := dtype_error(inputs, inputs.gpu)):
        raise Unplannable(UnplannableReason.UNSUPPORTED_DTYPE, problem)


def dtype_error(inputs: PlannerInputs, gpu: GpuInfo) -> str:
    """Return the reason why a GPU does not support the dtypes. The reason is "" if the GPU supports them, or if its
    compute capability is unknown."""
    if gpu.compute_capability is None:
        return ""
    capability_text = f"{gpu.name} has compute capability {gpu.compute_capability[0]}.{gpu.compute_capability[1]}"
    dtype = inputs.engine.dtype or inputs.model.dtype
    if dtype == "bfloat16" and gpu.compute_capability < (8, 0):
        fix = "set it to float16, or use another GPU"
        return f"spec.engine.dtype: {_describe_dtype(inputs)}: {capability_text}, but bfloat16 needs 8.0; {fix}"
    if inputs.engine.kvCacheDtype == "fp8" and gpu.compute_capability < (8, 9):
        fix = "set it to auto, or use another GPU"
        return f"spec.engine.kvCacheDtype: fp8: {capability_text}, but fp8 needs 8.9; {fix}"
    return ""


def _describe_dtype(inputs: PlannerInputs) -> str:
    return inputs.engine.dtype or f"not set, and the checkpoint's dtype is {inputs.model.dtype}"


def check_context(inputs: PlannerInputs) -> None:
    """Check that spec.engine.maxModelLen is at most the model's maximum.

    Raises:
        Unplannable: maxModelLen exceeds the model's maximum, so the engine would reject it.
    """
    requested, limit = inputs.engine.maxModelLen, inputs.model.shape.max_length
    if requested is not None and requested > limit:
        fix = f"the model supports at most {limit} tokens ({inputs.model.shape.max_length_origin}); lower it"
        raise Unplannable(UnplannableReason.UNSUPPORTED_BY_ENGINE, f"spec.engine.maxModelLen: {requested}: {fix}")


def check_speculation(inputs: PlannerInputs) -> None:
    """Check that the engine can use spec.engine.speculativeConfig with this model.

    Raises:
        Unplannable: the engine cannot use it with this model.
    """
    speculative, shape = inputs.engine.speculativeConfig, inputs.model.shape
    if speculative is None:
        return
    field = "spec.engine.speculativeConfig"
    if shape.long_rope_threshold is not None:
        message = f"{field}: speculative decoding does not support models with longrope; remove the field"
        raise Unplannable(UnplannableReason.UNSUPPORTED_BY_ENGINE, message)
    try:
        SpeculativeConfig(speculative.method, speculative.numSpeculativeTokens).check_target(shape)
    except ConfigError as error:
        message = f"{field}.{str(error).removeprefix('speculative_config.')}"
        raise Unplannable(UnplannableReason.UNSUPPORTED_BY_ENGINE, message) from error


def check_quantization(inputs: PlannerInputs) -> None:
    """Check that spec.engine.quantization matches the checkpoint.

    Raises:
        Unplannable: the value does not match.
    """
    requested = inputs.engine.quantization
    try:
        resolve_quantization(None if requested == "None" else requested, inputs.model.shape.quantization)
    except ConfigError as error:
        raise Unplannable(UnplannableReason.UNSUPPORTED_BY_ENGINE, f"spec.engine.{error}") from error


def check_lora_cache(inputs: PlannerInputs) -> None:
    """Check that maxCachedMemory has space for the adapters in slots. The engine keeps copies of them in host memory.

    Raises:
        Unplannable: maxCachedMemory is too small, and the engine would reject it.
    """
    lora = inputs.lora
    if lora.maxCachedMemory is None or not lora.maxLoaded:
        return
    min_bytes = device_memory.lora_bytes(
        inputs.model.shape, lora.maxLoaded, lora.total_rank, lora, element_bytes(inputs)
    )
    if to_bytes(lora.maxCachedMemory) < min_bytes:
        size_text = f"adapters in slots with {lora.total_rank} LoRA ranks in total need {-(-min_bytes // MIB)}Mi"
        fix = f"{size_text}; raise it, or lower spec.lora.maxLoadedRanks, maxLoaded or maxRank"
        raise Unplannable(UnplannableReason.DOES_NOT_FIT, f"spec.lora.maxCachedMemory: {lora.maxCachedMemory}: {fix}")


def check_kv_offloading(inputs: PlannerInputs) -> None:
    """Check that the engine can cache this model's KV blocks in host memory and in a folder.

    Raises:
        Unplannable: it cannot.
    """
    offloading, field = inputs.engine.kvCacheOffloading, "spec.engine.kvCacheOffloading"
    if offloading is None:
        return
    problem = ""
    if kv_layout(inputs).num_groups > 1:
        problem = f"{field}: {UNSUPPORTED_LAYOUT}; remove the field"
    if (states := inputs.model.shape.states) is not None:
        bytes_per_state = _bytes_per_state(inputs, states, 0)
        if not num_host_states(to_bytes(offloading.memory) // inputs.num_cores, bytes_per_state):
            size = f"{-(-2 * bytes_per_state * inputs.num_cores // MIB)}Mi"
            problem = f"{field}.memory: {offloading.memory}: half of it is for states; raise it to {size} or more"
    stores = {f"{field}.secondary": bool(offloading.secondary), "spec.engine.kvTransfer": inputs.transfers_kv}
    store = next((name for name, is_set in stores.items() if is_set), "")
    if not problem and store and inputs.draft is not None:
        problem = f"{store}: not possible with speculativeConfig.method {inputs.draft.method}; remove one of the two"
    if problem:
        raise Unplannable(UnplannableReason.UNSUPPORTED_BY_ENGINE, problem)


def check_encoder(inputs: PlannerInputs) -> None:
    """Check that the spec sets nothing that only a KV cache has, if the model is an encoder.

    Raises:
        Unplannable: it does.
    """
    if inputs.model.shape.encoder is None:
        return
    for name in ("kvCacheMemory", "kvCacheOffloading", "speculativeConfig"):
        if getattr(inputs.engine, name) is not None:
            message = f"spec.engine.{name}: not possible with an encoder, which has no KV cache; remove the field"
            raise Unplannable(UnplannableReason.UNSUPPORTED_BY_ENGINE, message)
    tokens, longest = inputs.engine.maxNumBatchedTokens, max_context(inputs)
    if tokens is not None and tokens < longest:
        message = (
            f"spec.engine.maxNumBatchedTokens: {tokens}: an encoder computes each request in one step, and a request "
            f"can have {longest} tokens; raise it, or lower maxModelLen"
        )
        raise Unplannable(UnplannableReason.UNSUPPORTED_BY_ENGINE, message)


def check_pipeline(inputs: PlannerInputs) -> None:
    """Check that the layers of this model can be split into the pipeline stages of the inputs.

    Raises:
        Unplannable: they cannot.
    """
    try:
        pipeline_parallel.check(inputs.model.shape, inputs.pipeline_parallel_size)
    except ConfigError as error:
        field = "spec.engine.pipelineParallelSize" if inputs.num_nodes > 1 else "pipeline_parallel_size"
        message = f"{field}{str(error).removeprefix('pipeline_parallel_size')}"
        raise Unplannable(UnplannableReason.UNSUPPORTED_BY_ENGINE, message) from error
    if inputs.pipeline_parallel_size > 1 and inputs.draft is not None:
        field = f"spec.engine.speculativeConfig.method: {inputs.draft.method}"
        message = f"{field}: not possible with pipeline stages; use ngram or suffix"
        raise Unplannable(UnplannableReason.UNSUPPORTED_BY_ENGINE, message)


def stages(inputs: PlannerInputs) -> list[ModelConfig]:
    """Return the configuration of each pipeline stage; the only one is that of the model."""
    return _stages(inputs.model.shape, inputs.pipeline_parallel_size, inputs.engine.quantization)


# The planner asks for each candidate.
@functools.lru_cache(maxsize=64)
def _stages(shape: ModelConfig, size: int, quantization: str | None) -> list[ModelConfig]:
    return pipeline_parallel.split_stages(shape, size, quantization)


def check_kv_cache_dtype(inputs: PlannerInputs) -> None:
    """Check that the engine can store this model's keys in spec.engine.kvCacheDtype.

    Raises:
        Unplannable: it cannot.
    """
    dtype = inputs.engine.kvCacheDtype
    if dtype == "int8_per_token_head" and inputs.model.shape.variants is not None:
        message = f"spec.engine.kvCacheDtype: {dtype}: {UNSUPPORTED_KEY_SIZES}"
        raise Unplannable(UnplannableReason.UNSUPPORTED_BY_ENGINE, message)


def element_bytes(inputs: PlannerInputs) -> int:
    """Return the number of bytes of an element in the engine's dtype. If the spec does not set a dtype, float32 is
    assumed on a CPU."""
    if inputs.engine.dtype is None and inputs.gpu is None:
        return capabilities.DTYPE_BYTES["float32"]
    return capabilities.DTYPE_BYTES[inputs.engine.dtype or inputs.model.dtype]


def kv_element_bytes(inputs: PlannerInputs) -> int:
    """Return the number of bytes of an element in the KV cache."""
    return element_bytes(inputs) if inputs.engine.kvCacheDtype in (None, "auto") else 1


def kv_layout(inputs: PlannerInputs) -> KVLayout:
    """Return which layers share KV blocks. The plan is assumed to have the longest possible context."""
    is_staged = inputs.pipeline_parallel_size > 1
    return _kv_layout(inputs.model.shape, max_context(inputs), inputs.draft is not None, is_staged)


# The planner asks for each candidate.
@functools.lru_cache(maxsize=64)
def _kv_layout(shape: ModelConfig, max_model_len: int, has_drafter: bool, is_staged: bool) -> KVLayout:
    return KVLayout.from_model(shape, max_model_len, has_drafter, is_staged)


def kv_bytes_per_token(inputs: PlannerInputs, tp: int, stage: ModelConfig | None = None) -> int:
    """Return the number of bytes that one token needs in the KV cache of each of the `tp` devices of a pipeline stage,
    or of the whole model. If there is a draft model, the result is for the first device, which also stores the KV cache
    of the draft model."""
    stage = stage or inputs.model.shape
    scale_bytes = capabilities.KV_SCALE_BYTES.get(inputs.engine.kvCacheDtype or "auto", 0)
    element, draft = kv_element_bytes(inputs), inputs.draft
    layout = kv_layout(inputs)
    if stage.stage is not None:
        layout = layout.for_stage(range(stage.first_layer, stage.first_layer + stage.num_layers))
    num_layers = layout.total_layers
    model_bytes = device_memory.kv_bytes_per_token(stage, element, tp, scale_bytes, num_layers)
    if draft is None or draft.kv_shape is None:
        return model_bytes
    return model_bytes + device_memory.kv_bytes_per_token(draft.kv_shape, element, 1, scale_bytes)


def state_bytes(inputs: PlannerInputs, tp: int, num_seqs: int) -> int:
    """Return the number of bytes of the states of sequences on each of `tp` devices; 0 if the model
    has none."""
    shape = inputs.model.shape
    if shape.states is None:
        return 0
    num_rows = num_state_rows(num_seqs, has_snapshots=inputs.engine.prefixCaching is not False)
    speculative = inputs.engine.speculativeConfig
    max_drafts = 0 if speculative is None else speculative.numSpeculativeTokens
    return num_rows * _bytes_per_state(inputs, shape.states.shard(tp), max_drafts)


def _bytes_per_state(inputs: PlannerInputs, states: StateConfig, max_drafts: int) -> int:
    state_dtype = inputs.engine.mambaSsmCacheDtype
    state_element = capabilities.DTYPE_BYTES["bfloat16" if state_dtype == "bfloat16" else "float32"]
    return state_config.state_bytes(states, element_bytes(inputs), state_element, max_drafts)


def draft_bytes(inputs: PlannerInputs, tp: int) -> int:
    """Return the number of bytes of the draft model or of the heads. With tensor parallelism, only the first rank loads
    them."""
    draft = inputs.draft
    if draft is None:
        return 0
    if draft.checkpoint is None:
        # A draft head without its own embedding uses the model's embedding. With several ranks, each rank has only a
        # shard of that embedding, so the head needs a full copy.
        shape = inputs.model.shape
        needs_copy = draft.kv_shape is not None and not draft.has_embedding and tp > 1
        embedding = shape.vocab_size * shape.embedding_size if needs_copy else 0
        if draft.method == "mtp" and not shape.tie_word_embeddings:
            embedding *= 2  # It also needs the output projection.
        return device_memory.weights_bytes((draft.num_elements + embedding) * element_bytes(inputs), 1)
    engine = replace(inputs.engine, quantization=None)
    if inputs.gpu is not None:
        # The draft model runs in the dtype of the model.
        engine = replace(engine, dtype=inputs.engine.dtype or inputs.model.dtype)
    loaded = loaded_weights_bytes(replace(inputs, model=draft.checkpoint, engine=engine), 1)
    return device_memory.weights_bytes(loaded, 1)


def loaded_weights_bytes(inputs: PlannerInputs, tp: int) -> int:
    """Return the number of bytes of all weights after the engine has loaded them. The engine converts them to its
    dtype, unless they stay quantized.

    On a CPU, weights stay quantized only if the dtype is bfloat16, because the CPU kernels support no other dtype.
    """
    quantization, device = inputs.model.shape.quantization, "cpu" if inputs.gpu is None else "cuda"
    if quantization is not None:
        has_kernels = quantization.has_kernels(tp, has_experts=inputs.model.shape.moe is not None)
        stays_quantized = device in capabilities.QUANTIZED_KERNEL_DEVICES and has_kernels
        if stays_quantized and (device != "cpu" or inputs.engine.dtype == "bfloat16"):
            num_bytes = inputs.model.weights_bytes * quantization.memory_percent // 100
            # In GGUF files, the embedding is quantized, too, and the engine dequantizes it.
            embedding = inputs.model.shape.vocab_size * inputs.model.shape.embedding_size
            return num_bytes + (embedding * element_bytes(inputs) if quantization.method == "gguf" else 0)
        return memory_sizing.weights_bytes(inputs.model.shape, element_bytes(inputs))
    return inputs.model.weights_bytes * element_bytes(inputs) // capabilities.DTYPE_BYTES.get(inputs.model.dtype, 2)


def stage_weights_bytes(inputs: PlannerInputs, tp: int, stage: ModelConfig) -> int:
    """Return the number of bytes of the weights of a pipeline stage on each of its `tp` devices."""
    loaded, shape = loaded_weights_bytes(inputs, tp), inputs.model.shape
    if stage.stage is not None:
        loaded = loaded * memory_sizing.weights_bytes(stage, 1) // memory_sizing.weights_bytes(shape, 1)
    return device_memory.weights_bytes(loaded, tp)


def max_context(inputs: PlannerInputs) -> int:
    """Return the context length that the planner chooses if memory is sufficient."""
    return inputs.engine.maxModelLen or min(inputs.model.shape.max_length, MAX_DEFAULT_CONTEXT)


def min_context(inputs: PlannerInputs) -> int:
    """Return the shortest context length that a plan can have."""
    return inputs.engine.maxModelLen or min(MIN_DEFAULT_CONTEXT, max_context(inputs))
