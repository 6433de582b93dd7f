# SPDX-License-Identifier: Apache-2.0
"""A model repository of NVIDIA's vllm_backend, read as it is: arguments and adapters become our documents."""

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from quire_spec import names
from quire_spec.catalogue import Catalogue
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
}
"""Engine arguments of vLLM that this engine has one answer to: any other value is refused."""
_DTYPES = {"half": "float16", "float": "float32"}


def read_vllm_repository(folder: Path, device: str = "cuda") -> tuple[EngineConfig, Catalogue]:
    """Read a model of NVIDIA's vllm_backend: `1/model.json` (vLLM's engine arguments) and `1/multi_lora.json`.

    `folder` is the model's folder, or a repository that holds only this one. `device` is taken where model.json says
    none. Values may be strings ("true", "16"), as that backend allows. Its config.pbtxt is not read: tensors are fixed.

    Raises:
        ConfigError: files are missing or not JSON, or ask for what this engine does not have; the message names it.
    """
    version = version_folder(folder)
    path = version / "model.json"
    arguments = {key: value for key, value in _read_object(path).items() if value is not None}
    config = EngineConfig.from_json({"device": device, **_engine_fields(arguments, path)})
    return config, _read_loras(version) if config.enable_lora else Catalogue()


def write_documents(folder: Path, device: str, into: Path) -> tuple[Path, Path]:
    """Write engine.json and adapters.json of a vllm_backend model to `into`; returns their paths.

    Raises:
        ConfigError: as `read_vllm_repository`, or `into` cannot be written.
    """
    config, catalogue = read_vllm_repository(folder, device)
    engine, adapters = into / names.ENGINE_FILE, into / names.CATALOGUE_FILE
    try:
        into.mkdir(parents=True, exist_ok=True)
        engine.write_text(json.dumps(config.to_json(), indent=2))
        adapters.write_text(json.dumps(catalogue.to_json(), indent=2))
    except OSError as error:
        raise ConfigError(f"{into}: {error.strerror}") from error
    return engine, adapters


def version_folder(folder: Path) -> Path:
    """Folder `1` of the only model in `folder`, which is that model's or a repository; raises ConfigError."""
    found = sorted(folder.glob("1/model.json")) or sorted(folder.glob("*/1/model.json"))
    if len(found) != 1:
        raise ConfigError(
            f"{str(folder)!r}: {len(found)} files 1/model.json found, one is needed; give the folder of one model"
        )
    return found[0].parent


def _read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: expected an object, found {type(data).__name__}")
    return data


def _engine_fields(arguments: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Fields of EngineConfig out of vLLM's engine arguments."""
    kinds = {f.name: str(getattr(f.type, "__name__", f.type)) for f in fields(EngineConfig)}
    taken: dict[str, Any] = {}
    for name, value in arguments.items():
        if name in _NO_EFFECT:
            log.info("vllm argument without effect here name=%s value=%r", name, value)
        elif name in _ONLY:
            _check_only(name, _unquoted(value), arguments, path)
        elif name == "device" and value == "auto":
            continue
        elif name in kinds:
            taken[name] = value if kinds[name].startswith("str") else _unquoted(value)
        else:
            raise ConfigError(f"{path}: {name!r}: this engine has no such argument; it has {', '.join(sorted(kinds))}")
    if "dtype" in taken:
        taken["dtype"] = _DTYPES.get(taken["dtype"], taken["dtype"])
    if (path.parent / str(taken.get("model", ""))).is_dir() and taken.get("model"):
        taken["model"] = str((path.parent / taken["model"]).resolve())
    return taken


def _check_only(name: str, value: object, arguments: Mapping[str, Any], path: Path) -> None:
    allowed = _ONLY[name]
    if name == "tokenizer":
        allowed = (*allowed, arguments.get("model"))
    if value not in allowed:
        raise ConfigError(f"{path}: {name!r}: {value!r} is not supported by this engine; remove it")


def _unquoted(value: object) -> object:
    """Numbers and truth values out of the strings that vllm_backend's own examples write."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value.lower())
    except ValueError:
        return value


def _read_loras(version: Path) -> Catalogue:
    path = version / "multi_lora.json"
    if not path.exists():
        raise ConfigError(f"{path}: missing, and model.json has enable_lora; write {{}} there for no adapters")
    adapters = [
        {"name": name, "source": {"path": str((version / str(where)).resolve())}}
        for name, where in _read_object(path).items()
    ]
    return Catalogue.from_json({"adapters": adapters})
