# SPDX-License-Identifier: Apache-2.0
"""Layout of model repositories.

Quire reads two kinds: repositories of NVIDIA's vllm_backend, and repositories of other models that the same server
serves.

This module looks only at the names of files and folders, and never reads the files. The reader of vllm_backend
repositories, the supervisor and `quire serve` call this module.
"""

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from quire_spec import constants
from quire_spec.errors import ConfigError, InvalidArgument

MODEL_FILE = "model.json"
"""File with vLLM's engine arguments. The folder of every version of the model contains this file."""
CONFIG_FILE = "config.pbtxt"


@dataclass(frozen=True, slots=True)
class VllmModelFolder:
    """A vllm_backend model, the only one in its repository."""

    path: Path
    """Folder of the model; its name is the model's name."""
    version: int
    """The highest version of the model. Triton Inference Server loads it by default."""
    other_versions: tuple[int, ...]
    """The other versions of the model in ascending order. They are not served."""
    other_models: tuple[str, ...]
    """Names of the other models in the repository, which use other backends."""

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.path.resolve().name

    @property
    def version_dir(self) -> Path:
        """The folder that contains model.json and multi_lora.json."""
        return self.path / str(self.version)


def find_vllm_model(folder: Path) -> VllmModelFolder:
    """Return the vllm_backend model in `folder`. `folder` is either a repository or the folder of the model itself.

    Raises:
        ConfigError: `folder` contains no vllm_backend model, or it contains several. In that case, the message names
            them.
    """
    if versions := _versions(folder):
        return VllmModelFolder(folder, versions[-1], versions[:-1], ())
    children = sorted(child for child in folder.iterdir() if child.is_dir()) if folder.is_dir() else []
    models = {child: versions for child in children if (versions := _versions(child))}
    if len(models) != 1:
        names = f" ({', '.join(model.name for model in models)})" if models else ""
        raise ConfigError(
            f"{str(folder)!r}: exactly one model with a file VERSION/{MODEL_FILE} is required, got {len(models)}{names}"
            "; give the folder of one model"
        )
    ((path, versions),) = models.items()
    other_models = tuple(child.name for child in children if child != path and _is_model(child))
    return VllmModelFolder(path, versions[-1], versions[:-1], other_models)


def find_other_models(folder: Path, own_names: Set[str], own_folder: Path | None = None) -> tuple[str, ...]:
    """Return the names of the models in the repository `folder`, sorted in ascending order.

    `own_names` are the names of the base model and the adapters. `own_folder` is the folder of the vllm_backend model
    that Quire serves. The result does not contain this model.

    Raises:
        ConfigError: `folder` cannot be read, a model's name is not valid, or a model's name is one of `own_names`.
    """
    try:
        children = sorted(child for child in folder.iterdir() if child.is_dir() and _is_model(child))
    except OSError as error:
        raise ConfigError(f"{str(folder)!r}: not a model repository: {error.strerror}; give a folder") from error
    if own_folder is not None:
        children = [child for child in children if child.resolve() != own_folder.resolve()]
    for child in children:
        try:
            constants.check_model_name(child.name, str(folder))
        except InvalidArgument as error:
            raise ConfigError(f"{error}; rename the folder") from error
        if child.name in own_names:
            raise ConfigError(
                f"{str(child)!r}: {child.name!r} is the name of the base model or of an adapter; rename the folder or "
                "that model"
            )
    return tuple(child.name for child in children)


def _versions(folder: Path) -> tuple[int, ...]:
    """Return the numbers of the versions whose folders contain a model.json, in ascending order.

    The server ignores folders whose names begin with 0.
    """
    names = (file.parent.name for file in folder.glob(f"[1-9]*/{MODEL_FILE}"))
    return tuple(sorted(int(name) for name in names if name.isdecimal()))


def _is_model(folder: Path) -> bool:
    try:
        return (folder / CONFIG_FILE).is_file() or any(child.name.isdecimal() for child in folder.iterdir())
    except OSError:  # lost+found of a volume is readable by root only
        return False
