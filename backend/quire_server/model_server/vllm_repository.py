# SPDX-License-Identifier: Apache-2.0
"""Reader of model repositories of NVIDIA's vllm_backend: converts them to engine.json and adapters.json."""

import json
from pathlib import Path

from quire_spec import constants
from quire_spec.dataclass_json import read_json_object
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.vllm_arguments import from_vllm_arguments
from quire_spec.errors import ConfigError


def read_vllm_repository(folder: Path, device: str = "cuda") -> tuple[EngineConfig, AdapterCatalog]:
    """Read a model of NVIDIA's vllm_backend: `1/model.json` (vLLM's engine arguments) and `1/multi_lora.json`.

    `folder` is the model's folder, or a repository that contains only this model. `device` is used if model.json has
    none. Values can be strings ("true", "16"), as in that backend. config.pbtxt is ignored, because tensors are fixed.

    Raises:
        ConfigError: a file is missing or not JSON, or an argument is not supported; the message names it.
    """
    version_dir = version_folder(folder)
    path = version_dir / "model.json"
    arguments = {key: value for key, value in read_json_object(path).items() if value is not None}
    fields = from_vllm_arguments(arguments, f"{path}: ")
    if fields.get("model") and (version_dir / str(fields["model"])).is_dir():
        fields["model"] = str((version_dir / fields["model"]).resolve())
    config = EngineConfig.from_json({"device": device, **fields})
    return config, _read_catalog(version_dir) if config.enable_lora else AdapterCatalog()


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


def version_folder(folder: Path) -> Path:
    """Return folder `1` of the only model in `folder`, a model's folder or a repository; raises ConfigError."""
    model_files = sorted(folder.glob("1/model.json")) or sorted(folder.glob("*/1/model.json"))
    if len(model_files) != 1:
        raise ConfigError(
            f"{str(folder)!r}: exactly one file 1/model.json is required, got {len(model_files)}; give the folder of "
            "one model"
        )
    return model_files[0].parent


def _read_catalog(version_dir: Path) -> AdapterCatalog:
    path = version_dir / "multi_lora.json"
    if not path.exists():
        raise ConfigError(f"{path}: missing, but model.json has enable_lora; write {{}} to it for no adapters")
    adapters = [
        {"name": name, "source": {"path": str((version_dir / str(folder)).resolve())}}
        for name, folder in read_json_object(path).items()
    ]
    return AdapterCatalog.from_json({"adapters": adapters})
