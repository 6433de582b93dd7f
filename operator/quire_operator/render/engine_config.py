# SPDX-License-Identifier: Apache-2.0
"""Converts an LLMService and its plan to the configuration of the engine.

If neither the spec nor the plan sets a field, the engine uses its own default. Pure. Called by cli/serve.py and
objects.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_operator.api.llmservice import Device, LLMService, SpeculativeConfigSpec
from quire_operator.api.quantity import to_bytes
from quire_operator.api.validation_errors import ABSENT, FieldPath, Problem
from quire_operator.plan.candidates import CPU_TOKEN_BUDGET
from quire_operator.plan.device_memory import GIB
from quire_operator.plan.plan import Plan
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

_SPEC_PATHS: Mapping[str, FieldPath] = {
    "model": ("model", "source"),
    "device": ("device",),
    "dtype": ("engine", "dtype"),
    "max_model_len": ("engine", "maxModelLen"),
    "gpu_memory_utilization": ("engine", "gpuMemoryUtilization"),
    "kv_cache_memory_bytes": ("engine", "kvCacheMemory"),
    "kv_cache_dtype": ("engine", "kvCacheDtype"),
    "block_size": ("engine", "blockSize"),
    "max_num_seqs": ("engine", "maxNumSeqs"),
    "max_num_batched_tokens": ("engine", "maxNumBatchedTokens"),
    "max_num_queued_reqs": ("engine", "maxNumQueuedReqs"),
    "max_logprobs": ("engine", "maxLogprobs"),
    "skip_tokenizer_init": ("engine", "skipTokenizerInit"),
    "scheduling_policy": ("engine", "schedulingPolicy"),
    "swap_space": ("engine", "swapSpace"),
    "tensor_parallel_size": ("engine", "tensorParallelSize"),
    "max_loras": ("lora", "maxLoaded"),
    "max_lora_rank": ("lora", "maxRank"),
    "max_cpu_loras": ("lora", "maxCached"),
    "cpu_lora_memory_bytes": ("lora", "maxCachedMemory"),
    "tool_call_parser": ("openai", "toolCallParser"),
    "reasoning_parser": ("openai", "reasoningParser"),
}
"""Maps fields of EngineConfig to the paths of the corresponding fields in the spec. It serves only error messages, and
it is not complete. The values come from _spec_arguments and _plan_arguments."""


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """Where the engine finds weights."""

    model: str
    """Folder or hub ID."""
    revision: str | None = None
    """Of a hub ID."""

    @property
    def arguments(self) -> dict[str, str]:
        """Return the fields that describe this location in engine.json or in its speculative_config."""
        return {"model": self.model, **({} if self.revision is None else {"revision": self.revision})}


class UnsupportedByEngine(Exception):
    """The engine does not support a value in the spec. `problem` contains the path of the field."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


def engine_config(
    service: LLMService, model: ModelLocation, plan: Plan | None = None, draft: ModelLocation | None = None
) -> EngineConfig:
    """Return the engine's configuration without a chat template; see `engine_arguments` for the parameters."""
    return EngineConfig.from_json(engine_arguments(service, model, plan, draft=draft))


def engine_arguments(
    service: LLMService,
    model: ModelLocation,
    plan: Plan | None = None,
    chat_template: str | None = None,
    draft: ModelLocation | None = None,
) -> dict[str, Any]:
    """Return the content of engine.json.

    The values of the plan take precedence over those of the spec. If the spec sets a field, the plan contains the same
    value.

    `chat_template` is the path of a file with the chat template in spec.openai.chatTemplate, or None if this field is
    not set. `draft` is the location of the draft model that spec.engine.speculativeConfig.model sets.

    Raises:
        UnsupportedByEngine: the engine does not support a value of the spec.
    """
    chat = {"chat_template": chat_template} if chat_template is not None else {}
    arguments = {**model.arguments, **chat, **_spec_arguments(service, draft), **_plan_arguments(plan)}
    try:
        EngineConfig.from_json(arguments)
    except ConfigError as error:
        name, _, reason = str(error).partition(": ")
        path = ("spec", *_spec_path(name))
        fix = "change the field or omit it"
        raise UnsupportedByEngine(Problem(path, ABSENT, f"the engine rejects the value: {reason}", fix)) from error
    return arguments


def _spec_path(name: str) -> FieldPath:
    """Return the path in the spec that corresponds to a field of EngineConfig. The field can also be in its
    speculative_config."""
    section, _, field = name.partition(".")
    if section == "speculative_config" and field:
        first, *words = field.split("_")
        return ("engine", "speculativeConfig", first + "".join(map(str.title, words)))
    return _SPEC_PATHS.get(name, ("engine",))


def _spec_arguments(service: LLMService, draft: ModelLocation | None) -> dict[str, Any]:
    """Return the fields of EngineConfig that follow from the spec, including its device."""
    spec, lora, openai = service.spec.engine, service.spec.lora, service.spec.openai
    cpu = service.spec.device is Device.CPU
    requested = {
        "dtype": spec.dtype,
        "max_model_len": spec.maxModelLen,
        "gpu_memory_utilization": _to_float(spec.gpuMemoryUtilization),
        "kv_cache_memory_bytes": None if spec.kvCacheMemory is None else to_bytes(spec.kvCacheMemory),
        "kv_cache_dtype": spec.kvCacheDtype,
        "block_size": spec.blockSize,
        "max_num_seqs": spec.maxNumSeqs,
        "max_num_batched_tokens": spec.maxNumBatchedTokens or _batched_tokens(cpu, spec.maxNumSeqs),
        "max_num_queued_reqs": spec.maxNumQueuedReqs,
        "max_logprobs": spec.maxLogprobs,
        "skip_tokenizer_init": spec.skipTokenizerInit or None,
        "scheduling_policy": spec.schedulingPolicy,
        "swap_space": None if spec.swapSpace is None else to_bytes(spec.swapSpace) / GIB,
        "tensor_parallel_size": spec.tensorParallelSize,
        "quantization": None if spec.quantization == "None" else spec.quantization,
        "speculative_config": _speculative_config(spec.speculativeConfig, draft),
        "tool_call_parser": None if openai.toolCallParser == "auto" else openai.toolCallParser,
        "reasoning_parser": None if openai.reasoningParser == "auto" else openai.reasoningParser,
        "max_loras": lora.maxLoaded or None,
        "max_cpu_loras": lora.maxCached if lora.maxLoaded else None,
        "cpu_lora_memory_bytes": to_bytes(lora.maxCachedMemory) if lora.maxCachedMemory and lora.maxLoaded else None,
    }
    return {
        "device": "cpu" if cpu else "cuda",
        "enable_prefix_caching": spec.prefixCaching,
        "enable_lora": lora.maxLoaded > 0,
        "max_lora_rank": lora.maxRank,
        **{name: value for name, value in requested.items() if value is not None},
    }


def _speculative_config(spec: SpeculativeConfigSpec | None, draft: ModelLocation | None) -> dict[str, Any] | None:
    if spec is None:
        return None
    values = {
        **({} if draft is None else draft.arguments),
        "method": spec.method,
        "num_speculative_tokens": spec.numSpeculativeTokens,
        "prompt_lookup_min": spec.promptLookupMin,
        "prompt_lookup_max": spec.promptLookupMax,
        "suffix_decoding_max_tree_depth": spec.suffixDecodingMaxTreeDepth,
        "suffix_decoding_max_cached_requests": spec.suffixDecodingMaxCachedRequests,
        "suffix_decoding_max_spec_factor": _to_float(spec.suffixDecodingMaxSpecFactor),
        "suffix_decoding_min_token_prob": _to_float(spec.suffixDecodingMinTokenProb),
    }
    return {name: value for name, value in values.items() if value is not None}


def _to_float(text: str | None) -> float | None:
    return None if text is None else float(text)


def _plan_arguments(plan: Plan | None) -> dict[str, Any]:
    """Return the fields of EngineConfig that the plan sets. If the spec sets a value, the plan contains it
    unchanged."""
    if plan is None:
        return {}
    kv, utilization = plan.kvCacheMemory, plan.gpuMemoryUtilization
    return {
        "dtype": plan.dtype.value,
        "tensor_parallel_size": plan.tensorParallelSize.value,
        "block_size": plan.blockSize.value,
        "max_model_len": plan.maxModelLen.value,
        "max_num_seqs": plan.maxNumSeqs.value,
        "max_num_batched_tokens": plan.maxNumBatchedTokens.value,
        **({"gpu_memory_utilization": float(utilization.value)} if utilization else {}),
        **({"kv_cache_memory_bytes": to_bytes(kv.value)} if kv else {}),
    }


def _batched_tokens(cpu: bool, max_num_seqs: int | None) -> int:
    """Return the token budget of a step: the default budget, or max_num_seqs of the spec if that is larger."""
    default = CPU_TOKEN_BUDGET if cpu else EngineConfig(model="-").max_num_batched_tokens
    return max(default, max_num_seqs or 0)
