# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine arguments, as its users write them, to fields of EngineConfig.

Of arguments that this engine does not have, some change no output, some have one answer here, and all others are
refused by name. The offline LLM and the reader of vllm_backend's repositories call it.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError

logger = logging.getLogger(__name__)

_IGNORED_ARGUMENTS = (
    "disable_log_requests",
    "disable_log_stats",
    "enable_log_requests",
    "enforce_eager",
    "disable_custom_all_reduce",
    "max_parallel_loading_workers",
    "compilation_config",
)
"""Engine arguments of vLLM that change no output and that this engine decides itself."""
_SUPPORTED_VALUES: dict[str, tuple[object, ...]] = {
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "trust_remote_code": (False,),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "load_format": ("auto", "safetensors"),
    "enable_prompt_adapter": (False,),
    "task": (None, "auto", "generate"),
    "runner": ("auto", "generate"),
    "skip_tokenizer_init": (False,),
    "cpu_offload_gb": (0, 0.0),
    "tokenizer_revision": (None,),
    "hf_token": (None,),
    "hf_overrides": (None,),
    "logits_processors": (None,),
}
"""Engine arguments of vLLM that this engine has one answer to: any other value is refused."""
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def from_vllm_arguments(arguments: Mapping[str, Any], location: str = "") -> dict[str, Any]:
    """Fields of EngineConfig out of vLLM's engine arguments; numbers and truth values may be strings.

    Raises:
        ConfigError: an argument that is unknown, or has a value that this engine cannot do; the message begins with
            `where` and names it.
    """
    field_types = {f.name: str(getattr(f.type, "__name__", f.type)) for f in fields(EngineConfig)}
    config_fields: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _IGNORED_ARGUMENTS:
            logger.info("vllm argument without effect here name=%s value=%r", name, value)
        elif name in _SUPPORTED_VALUES:
            _check_supported_value(name, _parse_literal(value), arguments, location)
        elif name == "device" and value == "auto":
            continue
        elif name in field_types:
            config_fields[name] = value if field_types[name].startswith("str") else _parse_literal(value)
        else:
            raise ConfigError(
                f"{location}{name!r}: this engine has no such argument; it has {', '.join(sorted(field_types))}"
            )
    if isinstance(dtype := config_fields.get("dtype"), str):
        config_fields["dtype"] = _DTYPE_ALIASES.get(dtype, dtype)
    return config_fields


def _check_supported_value(name: str, value: object, arguments: Mapping[str, Any], location: str) -> None:
    allowed = _SUPPORTED_VALUES[name]
    if name == "tokenizer":
        allowed = (*allowed, arguments.get("model"))
    if value not in allowed:
        raise ConfigError(f"{location}{name!r}: {value!r} is not supported by this engine; remove it")


def _parse_literal(value: object) -> object:
    """Numbers and truth values out of the strings that vllm_backend's own examples write."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value.lower())
    except ValueError:
        return value
