# SPDX-License-Identifier: Apache-2.0
"""Reads model repositories of NVIDIA's vllm_backend. `quire serve --vllm-repository` writes pod.json and adapters.json
from them."""

import re
from pathlib import Path
from typing import Any

from quire_spec.dataclass_json import read_json_object
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.model_repository import MODEL_FILE, VllmModelFolder, find_vllm_model
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.vllm_arguments import from_vllm_arguments
from quire_spec.errors import ConfigError, truncated_repr

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
ADAPTERS_FILE = "multi_lora.json"
_MAX_SERVED_NAMES = 16
_MAX_SERVED_NAME_CHARS = 256


def read_vllm_repository(folder: Path, device: str = "cuda") -> tuple[EngineConfig, AdapterCatalog]:
    """Read a model of NVIDIA's vllm_backend: `model.json` contains vLLM's engine arguments, and `multi_lora.json` lists
    the adapters.

    `folder` is the folder of the model, or a repository that contains exactly one such model. `device` is used if
    model.json sets no device. As in vllm_backend, a value can also be a string ("true", "16"). The supervisor logs
    which parts are ignored: other versions, other models, and the settings of config.pbtxt. The settings have no
    effect, because the tensors and instances are fixed.

    Raises:
        ConfigError: a file is missing or not valid, or arguments are not supported; the message names all of them.
    """
    model = find_vllm_model(folder)
    path = model.version_dir / MODEL_FILE
    arguments = {key: value for key, value in read_json_object(path).items() if value is not None}
    # This argument only sets the names of the model in the OpenAI API. `read_served_model_names` reads it.
    arguments.pop("served_model_name", None)
    fields = from_vllm_arguments(arguments, f"{path}: ")
    for name in ("model", "generation_config"):
        if fields.get(name) and (model.version_dir / str(fields[name])).is_dir():
            fields[name] = str((model.version_dir / fields[name]).resolve())
    if fields.get("download_dir"):
        fields["download_dir"] = str(Path(fields["download_dir"]).expanduser().absolute())
    try:
        config = EngineConfig.from_json({"device": device, **fields})
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return config, _read_catalog(model) if config.enable_lora else AdapterCatalog()


def read_served_model_names(folder: Path) -> tuple[str, ...]:
    """Return the names in the field `served_model_name` of model.json. In the OpenAI API, they are the names of the
    base model. If the result is empty, the API uses the name of the model's folder.

    Raises:
        ConfigError: a name is not a text, is too long, or is the name of an adapter.
    """
    model = find_vllm_model(folder)
    path = model.version_dir / MODEL_FILE
    value = read_json_object(path).get("served_model_name")
    names = [] if value is None else value if isinstance(value, list) else [value]
    if len(names) > _MAX_SERVED_NAMES:
        raise ConfigError(
            f"{path}: served_model_name: at most {_MAX_SERVED_NAMES} names are allowed, got {len(names)}; give fewer"
        )
    for name in names:
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_SERVED_NAME_CHARS:
            raise ConfigError(
                f"{path}: served_model_name: {truncated_repr(name)} is not a name of 1 to {_MAX_SERVED_NAME_CHARS} "
                "characters; give another"
            )
    adapters = model.version_dir / ADAPTERS_FILE
    for name in names if adapters.exists() else ():
        if name in read_json_object(adapters):
            raise ConfigError(f"{path}: served_model_name: {name!r} is an adapter in {adapters}; rename one of them")
    return tuple(names)


def _read_catalog(model: VllmModelFolder) -> AdapterCatalog:
    path = model.version_dir / ADAPTERS_FILE
    if not path.exists():
        raise ConfigError(
            f"{path}: missing, but model.json sets enable_lora; create the file, and write {{}} into it if there are "
            "no adapters"
        )
    sources: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for name, location in read_json_object(path).items():
        if (source := _adapter_source(model, str(location))) is None:
            problems.append(
                f"{path}: {name!r}: {location!r} is neither a folder (absolute, or relative to the working directory "
                f"{Path.cwd()} or to {model.version_dir}) nor a hub id such as org/name; correct the path"
            )
        else:
            sources[name] = source
    if problems:
        raise ConfigError("\n".join(problems))
    return AdapterCatalog.from_json({"adapters": [{"name": name, "source": sources[name]} for name in sources]})


def _adapter_source(model: VllmModelFolder, location: str) -> dict[str, Any] | None:
    """Return the source of an adapter; None if the location is not valid.

    vLLM resolves a relative path against the working directory. Because users also write paths relative to the
    repository, the folders of the repository are searched as well. If no such folder exists, a location that contains
    one slash is a hub id, as in vLLM.
    """
    folder = Path(location).expanduser()
    if folder.is_absolute():
        return {"path": str(folder)}
    if not location:
        return None
    for base in (Path.cwd(), model.version_dir, model.path, model.path.parent):
        if (base / folder).is_dir():
            return {"path": str((base / folder).resolve())}
    return {"huggingFace": {"repo": location}} if _HUB_ID.fullmatch(location) else None
