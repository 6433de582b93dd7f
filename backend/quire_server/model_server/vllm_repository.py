# SPDX-License-Identifier: Apache-2.0
"""Reads model repositories of NVIDIA's vllm_backend, and converts them to engine.json and adapters.json."""

import json
import logging
import re
from pathlib import Path
from typing import Any

from quire_spec import constants
from quire_spec.dataclass_json import read_json_object
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.model_repository import CONFIG_FILE, MODEL_FILE, VllmModelFolder, find_vllm_model
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.vllm_arguments import from_vllm_arguments
from quire_spec.errors import ConfigError, truncated_repr

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
ADAPTERS_FILE = "multi_lora.json"
_MAX_SERVED_NAMES = 16
_MAX_SERVED_NAME_CHARS = 256
_USED_SETTINGS = frozenset(("name", "backend", "default_model_filename"))
"""Settings of config.pbtxt that the log does not report as ignored. `name` and `backend` agree with the served model,
and `default_model_filename` is only the name of a file."""


def read_vllm_repository(folder: Path, device: str = "cuda") -> tuple[EngineConfig, AdapterCatalog]:
    """Read a model of NVIDIA's vllm_backend: `model.json` contains vLLM's engine arguments, and `multi_lora.json` lists
    the adapters.

    `folder` is the folder of the model, or a repository that contains exactly one such model. `device` is used if
    model.json sets no device. As in vllm_backend, a value can also be a string ("true", "16"). The server logs which
    parts it ignores: other versions, other models, and the settings of config.pbtxt. The settings have no effect,
    because the tensors and instances are fixed.

    Raises:
        ConfigError: a file is missing or not valid, or arguments are not supported; the message names all of them.
    """
    model = find_vllm_model(folder)
    _log_ignored(model)
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


def write_documents(folder: Path, device: str, target: Path) -> tuple[Path, Path]:
    """Write engine.json and adapters.json of a vllm_backend model to `target`; return their paths.

    Raises:
        ConfigError: `folder` is not valid, see `read_vllm_repository`, or `target` cannot be written.
    """
    config, catalog = read_vllm_repository(folder, device)
    engine, adapters = target / constants.ENGINE_FILE, target / constants.CATALOG_FILE
    try:
        target.mkdir(parents=True, exist_ok=True)
        engine.write_text(json.dumps(config.to_json(), indent=2))
        adapters.write_text(json.dumps(catalog.to_json(), indent=2))
    except OSError as error:
        raise ConfigError(f"{target}: {error.strerror}") from error
    return engine, adapters


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


def _log_ignored(model: VllmModelFolder) -> None:
    """Log the parts of the repository that are not served."""
    if model.other_versions:
        logger.warning(
            "model versions not served model=%s served=%d not_served=%s",
            *(model.name, model.version, ",".join(map(str, model.other_versions))),
        )
    if model.other_models:
        logger.warning("other models, served only with --model-repository: %s", ", ".join(model.other_models))
    path = model.path / CONFIG_FILE
    if path.is_file() and (settings := _config_settings(path)):
        logger.warning("%s: settings without effect: %s", path, ", ".join(settings))


def _config_settings(path: Path) -> list[str]:
    """Return the names of the settings and parameters in config.pbtxt that have no effect.

    Raises:
        ConfigError: the file is not a model configuration.
    """
    # These modules are imported only if they are needed. The import takes 0.2 s, and few repositories have this file.
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        config = text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigError(f"{path}: not a model configuration: {error}; correct or remove it") from error
    if config.backend not in ("", "vllm"):
        raise ConfigError(f"{path}: backend {config.backend!r} is not vllm; give a model of vllm_backend")
    parameters = [f"parameters[{name!r}]" for name in sorted(config.parameters)]
    names = (descriptor.name for descriptor, _ in config.ListFields())
    return [name for name in names if name not in _USED_SETTINGS and name != "parameters"] + parameters
