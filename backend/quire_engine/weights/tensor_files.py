# SPDX-License-Identifier: Apache-2.0
"""Finds the tensors of a checkpoint in its safetensors files, and reads slices of them. The files are in a folder, or
in a bucket that REMOTE_WEIGHTS_FILE in this folder names."""

import json
import shlex
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from quire_engine.weights.conversion_report import CONVERT_COMMAND
from quire_engine.weights.remote_bucket import RemoteBucket
from quire_spec.documents.remote_weights import RemoteWeights
from quire_spec.errors import ConfigError

SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
_LANGUAGE_MODEL = "model.language_model."
_EMBED_OUT = "embed_out"
"""The output projection in checkpoints of GPT-NeoX."""
_BACKBONE = "backbone."
"""The inner module in checkpoints of Nemotron-H."""
_INNER_MODULES = ("model.", "gpt_neox.", "bert.", "roberta.", "distilbert.", "mpnet.", _BACKBONE)
_OLD_NORM_NAMES = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
"""Names of the parameters of norms in the first checkpoints of BERT."""


class TensorFiles:
    """The files of one checkpoint. A file is opened when one of its tensors is first read."""

    def __init__(self, folder: Path) -> None:
        """Find the tensors of a checkpoint in `folder`.

        Raises:
            ConfigError: there are no safetensors files, or a file is missing or invalid.
        """
        self.folder = folder
        weights = RemoteWeights.find(folder)
        self.bucket = None if weights is None else RemoteBucket(weights)
        """The bucket that contains the files. None: they are in the folder."""
        self._open_files: dict[Path, tuple[Any, frozenset[str]]] = {}
        self.file_by_tensor = self._locate_tensors()
        # Some checkpoints, such as those of embedding models, were saved from the inner module. The names of their
        # tensors lack its prefix.
        self._has_outer_module = any(name.startswith(_INNER_MODULES) for name in self.file_by_tensor)
        # If the language model is part of a larger model, all its tensor names have this prefix.
        self._is_part = any(name.startswith("language_model.") for name in self.file_by_tensor)
        # In early checkpoints with images, the tensors of the language model have the names of a model without images.
        self._is_flat = not any(name.startswith(_LANGUAGE_MODEL) for name in self.file_by_tensor)
        self._has_backbone = any(name.startswith(_BACKBONE) for name in self.file_by_tensor)
        self._has_old_norms = any(name.endswith(".LayerNorm.gamma") for name in self.file_by_tensor)
        self._has_embed_out = f"{_EMBED_OUT}.weight" in self.file_by_tensor

    def __contains__(self, name: str) -> bool:
        return name in self.file_by_tensor

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        if self.bucket is not None:
            return self.bucket.num_bytes
        return sum(path.stat().st_size for path in set(self.file_by_tensor.values()))

    def name_in_file(self, name: str) -> str:
        """Return the name that a tensor or module of the model has in the files."""
        if self._is_part:
            return f"language_model.{name.replace(_LANGUAGE_MODEL, 'model.', 1)}"
        if self._has_backbone and name.startswith("model."):
            return name.replace("model.", _BACKBONE, 1)
        if self._has_embed_out and name.startswith("lm_head"):
            return name.replace("lm_head", _EMBED_OUT, 1)
        if self._is_flat and name.startswith(_LANGUAGE_MODEL):
            return name.replace(_LANGUAGE_MODEL, "model.", 1)
        if self._has_old_norms:
            for new, old in _OLD_NORM_NAMES.items():
                name = f"{name.removesuffix(new)}{old}" if name.endswith(new) else name
        if self._has_outer_module:
            return name
        return next((name.removeprefix(prefix) for prefix in _INNER_MODULES if name.startswith(prefix)), name)

    def get_slice(self, name: str) -> Any:
        """Return a slice of a tensor.

        It has the methods `get_dtype()` and `get_shape()`. Its values are read when it is indexed.

        Raises:
            ConfigError: the file is invalid, or the tensor is in the index but not in the file.
        """
        path = self.file_by_tensor[name]
        file, names = self._open(path)
        if name not in names:
            raise ConfigError(f"{path}: {name} is in the index but not in the file; download the checkpoint again")
        return file.get_slice(name)

    def _open(self, path: Path) -> tuple[Any, frozenset[str]]:
        """Open a file if it is not open yet, and return it with the names of its tensors."""
        if path not in self._open_files:
            file: Any
            try:
                file = safe_open(path, framework="pt") if self.bucket is None else self.bucket.open(path.name)
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path}: not a safetensors file: {error}; download it again") from error
            self._open_files[path] = file, frozenset(file.keys())
        return self._open_files[path]

    def _locate_tensors(self) -> dict[str, Path]:
        """Return a dict that maps the name of each tensor to its file."""
        if (self.folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
            return self._read_index()
        path = self.folder / SAFE_WEIGHTS_NAME
        if self._has_file(SAFE_WEIGHTS_NAME):
            return dict.fromkeys(sorted(self._open(path)[1]), path)
        pickle_files = sorted(p.name for p in self.folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
        if pickle_files:
            raise ConfigError(
                f"{self.folder}: weights in {pickle_files[0]!r} can run code when they are loaded; convert them with: "
                f"{CONVERT_COMMAND} {shlex.quote(str(self.folder))} --into {shlex.quote(f'{self.folder}-safetensors')}"
            )
        raise ConfigError(
            f"{self.folder}: found neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; check that this is the "
            "folder of a checkpoint. If its repository contains only pytorch_model.bin, convert it with: "
            f"{CONVERT_COMMAND} MODEL --into FOLDER"
        )

    def _has_file(self, name: str) -> bool:
        return (self.folder / name).is_file() if self.bucket is None else name in self.bucket

    def _read_index(self) -> dict[str, Path]:
        path = self.folder / SAFE_WEIGHTS_INDEX_NAME
        try:
            weight_map = json.loads(path.read_text())["weight_map"]
            names = {str(tensor): str(file) for tensor, file in weight_map.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: not an index of shards: {type(error).__name__}: {error}") from error
        for file in sorted(set(names.values())):
            if Path(file).name != file or not file.endswith(".safetensors"):
                raise ConfigError(f"{path}: shard {file!r} is not the name of a safetensors file in this folder")
            if not self._has_file(file):
                raise ConfigError(f"{path}: shard {file!r} is missing; download the checkpoint again")
        return {tensor: self.folder / file for tensor, file in names.items()}
