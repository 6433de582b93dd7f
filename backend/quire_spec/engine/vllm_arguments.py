# SPDX-License-Identifier: Apache-2.0
"""Convert vLLM's engine arguments to fields of EngineConfig.

An argument that cannot change the output of this engine is accepted, but has no effect. One warning lists all such
arguments. For some arguments, only the values that this engine supports are accepted. If several arguments are wrong, a
single error message reports all of them. Callers: the offline LLM and the reader of vllm_backend repositories.
"""

import difflib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

logger = logging.getLogger(__name__)

_IGNORED_ARGUMENTS = frozenset(
    (
        *("disable_log_requests", "disable_log_stats", "enable_log_requests", "max_log_len", "collect_detailed_traces"),
        *("enforce_eager", "compilation_config", "max_seq_len_to_capture", "max_context_len_to_capture"),
        *("disable_custom_all_reduce", "distributed_executor_backend", "worker_use_ray", "worker_cls", "scheduler_cls"),
        *("ray_workers_use_nsight", "max_parallel_loading_workers", "use_tqdm_on_load", "model_loader_extra_config"),
        *(
            "use_v2_block_manager",
            "preemption_mode",
            "disable_cascade_attn",
            "disable_async_output_proc",
            "multi_step_stream_outputs",
        ),
        *("max_num_partial_prefills", "max_long_partial_prefills", "long_prefill_token_threshold"),
        *("scheduler_delay_factor", "num_lookahead_slots", "disable_mm_preprocessor_cache"),
        *(
            "fully_sharded_loras",
            "default_mm_loras",
            "enable_tower_connector_lora",
            "lora_extra_vocab_size",
            "served_model_name",
            "guided_decoding_backend",
        ),
    )
)
"""Arguments that affect only how vLLM computes, logs or starts. In this engine, they never change the output tokens."""

_HUB_TOKEN_FIX = "set the environment variable HF_TOKEN, or tokenSecretRef in an LLMService"
_TOKENIZER_FIX = "the tokenizer of the checkpoint is always used; remove the argument"
_SUPPORTED_VALUES: dict[str, tuple[tuple[object, ...], str]] = {
    "decode_context_parallel_size": ((1,), "use tensor_parallel_size"),
    "trust_remote_code": ((False,), "code of a checkpoint is never executed; remove the argument"),
    "tokenizer": ((None,), _TOKENIZER_FIX),
    "tokenizer_mode": (("auto",), _TOKENIZER_FIX),
    "tokenizer_revision": ((None,), "the tokenizer is read at the revision of the model; remove the argument"),
    "config_format": (("auto", "hf"), "use a checkpoint in Hugging Face format"),
    "override_generation_config": ((None, {}), "set sampling parameters in requests"),
    "enable_prompt_adapter": ((False,), "use a LoRA adapter"),
    "max_prompt_adapters": ((1,), "use LoRA adapters"),
    "max_prompt_adapter_token": ((0,), "use LoRA adapters"),
    "qlora_adapter_name_or_path": ((None,), "list the adapter in multi_lora.json"),
    "long_lora_scaling_factors": ((None,), "use an adapter that was trained without long LoRA"),
    "lora_dtype": (("auto",), "adapters always use the dtype of the model; remove the argument"),
    "lora_target_modules": ((None, []), "each adapter changes the modules in its own target_modules"),
    "task": (
        (None, "auto", "generate", "classify", "score", "reward"),
        "set convert to embed or classify",
    ),
    "runner": (("auto", "generate", "pooling"), "set convert to embed or classify"),
    "num_scheduler_steps": ((1,), "each step is scheduled separately; remove the argument"),
    "stream_interval": ((1,), "each token is streamed at once; remove the argument"),
    "num_gpu_blocks_override": ((None,), "set kv_cache_memory_bytes"),
    "calculate_kv_scales": ((False,), "remove the argument"),
    "disable_sliding_window": ((False,), "set max_model_len to the size of the window instead"),
    "rope_scaling": ((None,), "set it in the checkpoint's config.json"),
    "rope_theta": ((None,), "set it in the checkpoint's config.json"),
    "hf_overrides": ((None, {}), "change the checkpoint's config.json"),
    "hf_token": ((None,), _HUB_TOKEN_FIX),
    "hf_config_path": ((None,), "put config.json into the folder of the weights"),
    "code_revision": ((None,), "code of a checkpoint is never executed; remove the argument"),
    "cpu_offload_gb": ((0,), "use a GPU with more memory, or tensor_parallel_size"),
    "enable_sleep_mode": ((False,), "scale the deployment to zero instead"),
    "enable_expert_parallel": ((False,), "use tensor_parallel_size"),
    "kv_transfer_config": ((None,), "remove the argument"),
    "kv_offloading_backend": ((None, "native"), "remove the argument"),
    "logits_processors": ((None,), "use logit_bias, allowed_token_ids or bad_words in requests"),
    "logits_processor_pattern": ((None,), "use logit_bias, allowed_token_ids or bad_words in requests"),
    "enable_reasoning": ((False,), "remove the argument"),
}
"""Maps each argument to a pair: the values that this engine supports, and the fix that an error message suggests for
all other values."""
OTHER_VLLM_ARGUMENTS = _IGNORED_ARGUMENTS | _SUPPORTED_VALUES.keys()
"""Arguments that vLLM has but EngineConfig does not have."""
_EMBEDDING_TASKS = ("embed", "embedding")
"""Values of `task` that any model can have. For other tasks, the checkpoint must be a classifier."""
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def fix_of(name: str) -> str:
    """Return what to do instead of using an argument of OTHER_VLLM_ARGUMENTS."""
    return "it would have no effect; remove it" if name in _IGNORED_ARGUMENTS else _SUPPORTED_VALUES[name][1]


def from_vllm_arguments(arguments: Mapping[str, Any], location: str = "") -> dict[str, Any]:
    """Convert vLLM's engine arguments to fields of EngineConfig. A number or boolean can also be given as a string.

    Raises:
        ConfigError: arguments are unknown or have unsupported values. Each line of the message begins with `location`
            and names one argument.
    """
    field_types = {f.name: str(getattr(f.type, "__name__", f.type)) for f in fields(EngineConfig)}
    config_fields: dict[str, Any] = {}
    without_effect: list[str] = []
    problems: list[str] = []
    for name, value in arguments.items():
        if value is None and name in OTHER_VLLM_ARGUMENTS:
            continue  # not set
        if name in _IGNORED_ARGUMENTS:
            without_effect.append(f"{name}={value!r}")
        elif name == "task" and value in _EMBEDDING_TASKS:
            config_fields.setdefault("convert", "embed")
        elif name in _SUPPORTED_VALUES:
            without_effect.append(f"{name}={value!r}")
            problems += _unsupported_value(name, _parse_literal(value), arguments)
        elif name == "device" and value == "auto":
            continue
        elif name == "reasoning_parser" and not value:
            config_fields[name] = "none"
        elif name in field_types:
            config_fields[name] = value if field_types[name].startswith("str") else _parse_literal(value)
        else:
            problems.append(_unknown_argument(name, sorted(field_types)))
    if config_fields.get("model_impl") == "vllm":
        config_fields["model_impl"] = "quire"
    if isinstance(dtype := config_fields.get("dtype"), str):
        config_fields["dtype"] = _DTYPE_ALIASES.get(dtype, dtype)
    if problems:
        raise ConfigError("\n".join(f"{location}{problem}" for problem in problems))
    if without_effect:
        logger.warning("vllm arguments without effect: %s", " ".join(without_effect))
    return config_fields


def _unknown_argument(name: str, known: Sequence[str]) -> str:
    suggestions = difflib.get_close_matches(name[:80], known, n=1)
    fix = f"did you mean {suggestions[0]}? Known arguments" if suggestions else "remove it; known arguments"
    return f"{name!r}: unknown engine argument; {fix} are {', '.join(known)}"


def _unsupported_value(name: str, value: object, arguments: Mapping[str, Any]) -> list[str]:
    """Check the value of one argument. Return a list that contains the problem, or an empty list if the value is
    supported."""
    allowed, fix = _SUPPORTED_VALUES[name]
    if name == "tokenizer":
        allowed = (*allowed, arguments.get("model"))
    return [] if value in allowed else [f"{name!r}: value {value!r} is not supported by this engine; {fix}"]


def _parse_literal(value: object) -> object:
    """If `value` is a string that contains a number or boolean, parse it. The examples of vllm_backend contain such
    strings."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value.lower())
    except ValueError:
        return value
