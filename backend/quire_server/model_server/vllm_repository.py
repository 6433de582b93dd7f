# SPDX-License-Identifier: Apache-2.0
"""A model repository of NVIDIA's vllm_backend, read as it is: arguments and adapters become our documents."""

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

    `folder` is the model's folder, or a repository that holds only this one. `device` is taken where model.json says
    none. Values may be strings ("true", "16"), as that backend allows. Its config.pbtxt is not read: tensors are fixed.

    Raises:
        ConfigError: files are missing or not JSON, or ask for what this engine does not have; the message names it.
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
    """Write engine.json and adapters.json of a vllm_backend model to `into`; returns their paths.

    Raises:
        ConfigError: as `read_vllm_repository`, or `into` cannot be written.
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
    """Folder `1` of the only model in `folder`, which is that model's or a repository; raises ConfigError."""
    model_files = sorted(folder.glob("1/model.json")) or sorted(folder.glob("*/1/model.json"))
    if len(model_files) != 1:
        raise ConfigError(
            f"{str(folder)!r}: {len(model_files)} files 1/model.json found, one is needed; give the folder of one model"
        )
    return model_files[0].parent


def _read_catalog(version_dir: Path) -> AdapterCatalog:
    path = version_dir / "multi_lora.json"
    if not path.exists():
        raise ConfigError(f"{path}: missing, and model.json has enable_lora; write {{}} there for no adapters")
    adapters = [
        {"name": name, "source": {"path": str((version_dir / str(folder)).resolve())}}
        for name, folder in read_json_object(path).items()
    ]
    return AdapterCatalog.from_json({"adapters": adapters})
