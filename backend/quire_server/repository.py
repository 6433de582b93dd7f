# SPDX-License-Identifier: Apache-2.0
"""The server's model repository: what a model of ours looks like to it, and how NVIDIA's vllm_backend lays one out.

Rendering is pure but for `write_base`. Every model, base and adapter alike, is the same one-line program; what tells
them apart is the name that the server gives them. The supervisor calls this.
"""

import json
import logging
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from quire_server import interface
from quire_spec import names
from quire_spec.catalogue import Catalogue
from quire_spec.config import EngineConfig
from quire_spec.errors import ConfigError

log = logging.getLogger(__name__)

MODEL_FILE = "1/model.py"
MODEL_PY = "from quire_server.frontend import TritonPythonModel  # noqa: F401\n"


def model_config(name: str, base: str, text_socket: Path) -> dict[str, Any]:
    """The config of model `name`, in the JSON form that the repository API takes.

    `base` is the served name of the base model; `name` is the same or an adapter's. `text_socket` is absolute.

    Raises:
        InvalidArgument: `name` or `base` is not a model name.
    """
    names.check_model_name(name, "model")
    names.check_model_name(base, "base model")
    return {
        "name": name,
        "backend": "python",
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "input": [{"name": n, "data_type": t, "dims": [d], "optional": True} for n, t, d in interface.INPUTS],
        "output": [{"name": n, "data_type": t, "dims": [d]} for n, t, d in interface.OUTPUTS],
        # A stub holds no device; the default would start one per GPU.
        "instance_group": [{"kind": "KIND_CPU", "count": 1}],
        "parameters": {
            interface.PARAM_SOCKET: {"string_value": str(text_socket)},
            interface.PARAM_BASE: {"string_value": base},
        },
    }


def model_files() -> dict[str, bytes]:
    """The files of a model that the repository API is to load, by path."""
    return {MODEL_FILE: MODEL_PY.encode()}


def write_base(repository: Path, base: str, text_socket: Path) -> Path:
    """Write the base model's folder into `repository`, over an older one; returns the folder.

    Raises:
        InvalidArgument: `base` is not a model name.
    """
    config = model_config(base, base, text_socket)
    folder = repository / base
    (folder / MODEL_FILE).parent.mkdir(parents=True, exist_ok=True)
    (folder / MODEL_FILE).write_text(MODEL_PY)
    (folder / "config.pbtxt").write_text(pbtxt(config))
    return folder


def pbtxt(config: Mapping[str, Any]) -> str:
    """The protobuf text form of a config, which is what the server reads from a folder."""
    return "".join(f"{line}\n" for key, value in config.items() for line in _field(key, value))


def _field(key: str, value: object) -> list[str]:
    if key == "parameters" and isinstance(value, Mapping):
        entries = [{"key": k, "value": v} for k, v in value.items()]
        return [line for entry in entries for line in _message(key, entry)]
    if isinstance(value, list):
        return [line for item in value for line in _field(key, item)]
    if isinstance(value, Mapping):
        return _message(key, value)
    return [f"{key}: {_scalar(value)}"]


def _message(key: str, value: Mapping[str, Any]) -> list[str]:
    body = [f"  {line}" for k, v in value.items() for line in _field(k, v)]
    return [f"{key} {{", *body, "}"]


def _scalar(value: object) -> str:
    if isinstance(value, str) and value.startswith(("TYPE_", "KIND_")):
        return value
    return json.dumps(value)


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
    version = _version_folder(folder)
    path = version / "model.json"
    arguments = {key: value for key, value in _read_object(path).items() if value is not None}
    config = EngineConfig.from_json({"device": device, **_engine_fields(arguments, path)})
    return config, _read_loras(version) if config.enable_lora else Catalogue()


def _version_folder(folder: Path) -> Path:
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
