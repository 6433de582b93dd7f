# SPDX-License-Identifier: Apache-2.0
"""Conversion of vLLM's engine arguments to fields of EngineConfig.

Arguments that do not affect the output are ignored. Some arguments accept only the values that this engine supports.
All other unknown arguments are rejected with an error that names them. Callers: the offline LLM and the reader of
vllm_backend repositories.
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
"""Engine arguments of vLLM that do not affect the output; they are ignored."""
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
"""Engine arguments of vLLM of which this engine supports only these values; other values are rejected."""
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def from_vllm_arguments(arguments: Mapping[str, Any], location: str = "") -> dict[str, Any]:
    """Convert vLLM's engine arguments to fields of EngineConfig; numbers and booleans may be strings.

    Raises:
        ConfigError: an argument is unknown or has an unsupported value; the message begins with `location`.
    """
    field_types = {f.name: str(getattr(f.type, "__name__", f.type)) for f in fields(EngineConfig)}
    config_fields: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _IGNORED_ARGUMENTS:
            logger.info("vllm argument ignored name=%s value=%r", name, value)
        elif name in _SUPPORTED_VALUES:
            _check_supported_value(name, _parse_literal(value), arguments, location)
        elif name == "device" and value == "auto":
            continue
        elif name in field_types:
            config_fields[name] = value if field_types[name].startswith("str") else _parse_literal(value)
        else:
            raise ConfigError(
                f"{location}{name!r}: unknown engine argument; known are {', '.join(sorted(field_types))}"
            )
    if isinstance(dtype := config_fields.get("dtype"), str):
        config_fields["dtype"] = _DTYPE_ALIASES.get(dtype, dtype)
    return config_fields


def _check_supported_value(name: str, value: object, arguments: Mapping[str, Any], location: str) -> None:
    allowed = _SUPPORTED_VALUES[name]
    if name == "tokenizer":
        allowed = (*allowed, arguments.get("model"))
    if value not in allowed:
        raise ConfigError(f"{location}{name!r}: value {value!r} is not supported by this engine; remove the argument")


def _parse_literal(value: object) -> object:
    """Parse numbers and booleans from strings, as vllm_backend's own examples contain them."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value.lower())
    except ValueError:
        return value
