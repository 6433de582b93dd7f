# SPDX-License-Identifier: Apache-2.0
"""Converts an LLMService and its plan to the configuration of the engine.

If neither the spec nor the plan sets a field, the engine uses its own default. Pure. Called by pod_config.py.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from quire_operator.api.disaggregation_spec import Role
from quire_operator.api.engine_spec import SpeculativeConfigSpec
from quire_operator.api.llmservice import Device, LLMService
from quire_operator.api.quantity import to_bytes
from quire_operator.api.validation_errors import ABSENT, FieldPath, Problem
from quire_operator.plan.candidates import CPU_TOKEN_BUDGET
from quire_operator.plan.device_memory import GIB
from quire_operator.plan.plan import Plan
from quire_spec.dataclass_json import non_default_json
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.kv_events_config import KVEventsConfig
from quire_spec.engine.kv_transfer_config import KVTransferConfig
from quire_spec.errors import ConfigError
from quire_spec.net.addresses import ANY_ADDRESS


def _unless(default: str) -> Callable[[str], str | None]:
    return lambda value: None if value == default else value


def _keep(value: Any) -> Any:
    return value


_SPEC_FIELDS: Mapping[str, tuple[FieldPath, Callable[[Any], Any]]] = {
    "dtype": (("engine", "dtype"), _keep),
    "max_model_len": (("engine", "maxModelLen"), _keep),
    "gpu_memory_utilization": (("engine", "gpuMemoryUtilization"), float),
    "kv_cache_memory_bytes": (("engine", "kvCacheMemory"), to_bytes),
    "kv_cache_dtype": (("engine", "kvCacheDtype"), _keep),
    "mamba_ssm_cache_dtype": (("engine", "mambaSsmCacheDtype"), _unless("auto")),
    "block_size": (("engine", "blockSize"), _keep),
    "max_num_seqs": (("engine", "maxNumSeqs"), _keep),
    "max_num_batched_tokens": (("engine", "maxNumBatchedTokens"), _keep),
    "max_num_queued_reqs": (("engine", "maxNumQueuedReqs"), _keep),
    "max_logprobs": (("engine", "maxLogprobs"), _keep),
    "seed": (("engine", "seed"), _keep),
    "skip_tokenizer_init": (("engine", "skipTokenizerInit"), lambda value: value or None),
    "language_model_only": (("engine", "languageModelOnly"), lambda value: value or None),
    "limit_mm_per_prompt": (("engine", "limitMmPerPrompt"), lambda limits: {"image": limits.image}),
    "model_impl": (("engine", "modelImpl"), _unless("auto")),
    "load_format": (("engine", "loadFormat"), _unless("auto")),
    "convert": (("engine", "convert"), _unless("auto")),
    "pooling_type": (("engine", "poolingType"), _unless("auto")),
    "scheduling_policy": (("engine", "schedulingPolicy"), _keep),
    "swap_space": (("engine", "swapSpace"), lambda size: to_bytes(size) / GIB),
    "tensor_parallel_size": (("engine", "tensorParallelSize"), _keep),
    "data_parallel_size": (("engine", "dataParallelSize"), _keep),
    "pipeline_parallel_size": (("engine", "pipelineParallelSize"), lambda size: None if size == 1 else size),
    "quantization": (("engine", "quantization"), _unless("None")),
    "enable_prefix_caching": (("engine", "prefixCaching"), _keep),
    "max_loras": (("lora", "maxLoaded"), _keep),
    "max_lora_rank": (("lora", "maxRank"), _keep),
    "max_loaded_lora_ranks": (("lora", "maxLoadedRanks"), _keep),
    "lora_experts": (("lora", "experts"), lambda value: value or None),
    "lora_modules_to_save": (("lora", "modulesToSave"), lambda value: value or None),
    "max_cpu_loras": (("lora", "maxCached"), _keep),
    "cpu_lora_memory_bytes": (("lora", "maxCachedMemory"), to_bytes),
    "tool_call_parser": (("openai", "toolCallParser"), _unless("auto")),
    "reasoning_parser": (("openai", "reasoningParser"), _unless("auto")),
}
"""Maps each field of EngineConfig that follows from one field of the spec to the path of that field, and to a function
that converts its value. If the function returns None, the engine uses its default."""
_PLANNED_FIELDS = frozenset((
    "dtype", "tensor_parallel_size", "block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
    "gpu_memory_utilization", "kv_cache_memory_bytes",
))  # fmt: skip
"""Fields whose value a plan contains, under the name that they have in the spec. If the spec sets the value, the plan
contains the same value."""
_DECODE_FIELDS = {
    "prefill_local_tokens": "localTokens",
    "kv_recompute_threshold": "recomputeThreshold",
    "kv_load_failure_policy": "loadFailurePolicy",
}
"""Fields of EngineConfig that only decode pods have, and their names in spec.disaggregation."""
_OTHER_PATHS: Mapping[str, FieldPath] = {
    "model": ("model", "source"), "device": ("device",),
    "otlp_traces_endpoint": ("observability", "tracing", "endpoint"),
    "kv_offloading_size": ("engine", "kvCacheOffloading", "memory"),
    "kv_offloading_folder": ("engine", "kvCacheOffloading", "secondary", 0, "folder"),
    "kv_offloading_folder_size": ("engine", "kvCacheOffloading", "secondary", 0, "size"),
    "kv_transfer": ("engine", "kvTransfer"),
    "nnodes": ("engine", "pipelineParallelSize"),
    **{name: ("disaggregation", field) for name, field in _DECODE_FIELDS.items()},
}  # fmt: skip
"""Paths in the spec of the fields of EngineConfig that follow from the spec in another way."""
_ADAPTER_FIELDS = frozenset((
    "max_loras", "max_loaded_lora_ranks", "lora_experts", "lora_modules_to_save", "max_cpu_loras",
    "cpu_lora_memory_bytes",
))  # fmt: skip
"""Fields that are set only if the engine accepts adapters."""


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """Where the engine finds weights."""

    model: str
    """Folder or hub ID."""
    revision: str | None = None
    """Of a hub ID."""

    @property
    def arguments(self) -> dict[str, str]:
        """Return the fields of EngineConfig or of its speculative_config that describe this location."""
        return {"model": self.model, **({} if self.revision is None else {"revision": self.revision})}


@dataclass(frozen=True, slots=True)
class KVPeers:
    """What the pods have in common that read KV blocks from each other."""

    key_file: str
    names: tuple[str, ...] = ()
    """Names that stand for the addresses of all of them."""


class UnsupportedByEngine(Exception):
    """The engine does not support a value in the spec. `problem` contains the path of the field."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


def engine_arguments(
    service: LLMService,
    model: ModelLocation,
    plan: Plan | None = None,
    chat_template: str | None = None,
    draft: ModelLocation | None = None,
    kv_folder: str | None = None,
    kv_peers: KVPeers | None = None,
    rank_key_file: str | None = None,
) -> dict[str, Any]:
    """Return the fields of EngineConfig that the plan or the spec sets.

    `chat_template` is the path of a file with the chat template in spec.openai.chatTemplate, or None if this field is
    not set. `draft` is the location of the draft model that spec.engine.speculativeConfig.model sets. `kv_folder` is
    the path of the folder that spec.engine.kvCacheOffloading.secondary sets. `kv_peers` is what the pods of
    spec.engine.kvTransfer have in common; without it, the field has no effect.
    `rank_key_file` is the path of the key with which the pods of a group meet; without it, all pipeline stages are on
    one machine.

    Raises:
        UnsupportedByEngine: the engine does not support a value of the spec.
    """
    arguments = {**model.arguments, **dict(_fields(service, plan, draft, kv_folder, kv_peers))}
    if chat_template is not None:
        arguments["chat_template"] = chat_template
    if service.num_nodes > 1 and rank_key_file is not None:
        arguments |= {"nnodes": service.num_nodes, "rank_key_file": rank_key_file}
    try:
        EngineConfig.from_json(arguments)
    except ConfigError as error:
        name, _, reason = str(error).partition(": ")
        path = ("spec", *_spec_path(name))
        fix = "change the field or omit it"
        raise UnsupportedByEngine(Problem(path, ABSENT, f"the engine rejects the value: {reason}", fix)) from error
    return arguments


def _fields(
    service: LLMService,
    plan: Plan | None,
    draft: ModelLocation | None,
    kv_folder: str | None,
    kv_peers: KVPeers | None,
) -> Iterator[tuple[str, Any]]:
    spec = service.spec
    cpu, accepts_adapters = spec.device is Device.CPU, spec.lora.maxLoaded > 0
    yield "device", "cpu" if cpu else "cuda"
    yield "enable_lora", accepts_adapters
    if spec.engine.speculativeConfig is not None:
        yield "speculative_config", _speculative_config(spec.engine.speculativeConfig, draft)
    if spec.engine.kvCacheOffloading is not None:
        yield "kv_offloading_size", to_bytes(spec.engine.kvCacheOffloading.memory) / GIB
    if service.kv_tier is not None:
        yield "kv_offloading_folder", kv_folder
        yield "kv_offloading_folder_size", to_bytes(service.kv_tier.size) / GIB
    if (transfer := service.kv_transfer) is not None and kv_peers is not None:
        speed = None if transfer.bytesPerSecond is None else to_bytes(transfer.bytesPerSecond)
        peer_ports = [transfer.port]
        if service.role is Role.DECODE and service.openai_port is not None:
            peer_ports.append(service.openai_port)  # of the prefill pods that a request can name
        peers = *(f"{name}:{port}" for port in peer_ports for name in kv_peers.names), *transfer.allowedPeers
        yield "kv_transfer", non_default_json(KVTransferConfig(kv_peers.key_file, transfer.port, peers, speed))
    if service.role is Role.DECODE:
        for name, field in _DECODE_FIELDS.items():
            if (value := getattr(spec.disaggregation, field)) is not None:
                yield name, value
    if spec.observability.tracing is not None:
        yield "otlp_traces_endpoint", spec.observability.tracing.endpoint
    if spec.networking.kvEvents is not None:
        ports = service.kv_event_ports
        yield (
            "kv_events_config",
            non_default_json(
                KVEventsConfig.listening_on(
                    ANY_ADDRESS, ports["kv-events"], ports["kv-replay"], spec.networking.kvEvents.topic
                )
            ),
        )
    for name, (path, convert) in _SPEC_FIELDS.items():
        if name in _ADAPTER_FIELDS and not accepts_adapters:
            continue
        planned = getattr(plan, str(path[-1])) if plan is not None and name in _PLANNED_FIELDS else None
        value = attrgetter(".".join(map(str, path)))(spec) if planned is None else planned.value
        if name == "max_lora_rank":
            value = spec.lora.largest_rank
        if value is None and name == "max_num_batched_tokens":
            value = _batched_tokens(cpu, spec.engine.maxNumSeqs)
        if value is not None and (converted := convert(value)) is not None:
            yield name, converted


def _spec_path(name: str) -> FieldPath:
    """Return the path in the spec that corresponds to a field of EngineConfig. The field can also be in its
    speculative_config."""
    section, _, field = name.partition(".")
    if section == "speculative_config" and field:
        first, *words = field.split("_")
        return ("engine", "speculativeConfig", first + "".join(map(str.title, words)))
    if section == "kv_transfer":
        return _OTHER_PATHS[section]
    if section == "kv_events_config":
        return ("networking", "kvEvents")
    if name in _OTHER_PATHS:
        return _OTHER_PATHS[name]
    path, _ = _SPEC_FIELDS.get(name, (("engine",), _keep))
    return path


def _speculative_config(spec: SpeculativeConfigSpec, draft: ModelLocation | None) -> dict[str, Any]:
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


def _batched_tokens(cpu: bool, max_num_seqs: int | None) -> int:
    """Return the token budget of a step: the default budget, or max_num_seqs of the spec if that is larger."""
    default = CPU_TOKEN_BUDGET if cpu else EngineConfig(model="-").max_num_batched_tokens
    return max(default, max_num_seqs or 0)
