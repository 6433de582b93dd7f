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

from quire_spec.config import EngineConfig
from quire_spec.errors import ConfigError

log = logging.getLogger(__name__)

_NO_EFFECT = (
    "disable_log_requests",
    "disable_log_stats",
    "enable_log_requests",
    "enforce_eager",
    "disable_custom_all_reduce",
    "max_parallel_loading_workers",
    "compilation_config",
)
"""Engine arguments of vLLM that change no output and that this engine decides itself."""
_ONLY: dict[str, tuple[object, ...]] = {
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
_DTYPES = {"half": "float16", "float": "float32"}


def engine_fields(arguments: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Fields of EngineConfig out of vLLM's engine arguments; numbers and truth values may be strings.

    Raises:
        ConfigError: an argument that is unknown, or has a value that this engine cannot do; the message begins with
            `where` and names it.
    """
    kinds = {f.name: str(getattr(f.type, "__name__", f.type)) for f in fields(EngineConfig)}
    taken: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _NO_EFFECT:
            log.info("vllm argument without effect here name=%s value=%r", name, value)
        elif name in _ONLY:
            _check_only(name, _unquoted(value), arguments, where)
        elif name == "device" and value == "auto":
            continue
        elif name in kinds:
            taken[name] = value if kinds[name].startswith("str") else _unquoted(value)
        else:
            raise ConfigError(f"{where}{name!r}: this engine has no such argument; it has {', '.join(sorted(kinds))}")
    if isinstance(dtype := taken.get("dtype"), str):
        taken["dtype"] = _DTYPES.get(dtype, dtype)
    return taken


def _check_only(name: str, value: object, arguments: Mapping[str, Any], where: str) -> None:
    allowed = _ONLY[name]
    if name == "tokenizer":
        allowed = (*allowed, arguments.get("model"))
    if value not in allowed:
        raise ConfigError(f"{where}{name!r}: {value!r} is not supported by this engine; remove it")


def _unquoted(value: object) -> object:
    """Numbers and truth values out of the strings that vllm_backend's own examples write."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value.lower())
    except ValueError:
        return value
