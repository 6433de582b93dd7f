# SPDX-License-Identifier: Apache-2.0
"""Loads a checkpoint into parameters: safetensors only, one file or several, read by slice into merged parameters."""

import json
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from quire_engine.weights.param_shard import LoadTarget, ParamShard, unsharded
from quire_spec.errors import ConfigError

SAFE_WEIGHTS_INDEX_NAME = "model.safetensors.index.json"
SAFE_WEIGHTS_NAME = "model.safetensors"
CONVERT_COMMAND = "python -m quire_engine convert"
FLOAT_DTYPES = ("F64", "F32", "BF16", "F16")

# Bytes read at a time: limits the memory for conversion.
_CHUNK_BYTES = 64 << 20
_LM_HEAD_NAME = "lm_head.weight"
_MISSING_HINT = "config.json does not match this checkpoint, or the checkpoint is incomplete"
# Part of old Llama checkpoints, which the engine computes from config.json; and the parts of a model that reads images,
# of which only the language model is served.
_UNUSED_TENSORS = re.compile(
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq|(model\.)?(vision_tower|multi_modal_projector)\..*"
)


def load_weights(
    folder: Path, tensors: Iterable[tuple[str, LoadTarget]], *, tied_to: str | None = None, progress: bool = False
) -> None:
    """Fill parameters from the checkpoint in `folder`, converting to their dtype and device.

    Args:
        folder: of the checkpoint.
        tensors: names of tensors in the checkpoint, each with the parameter or shard that it fills.
        tied_to: name of the embedding if the output projection is the same; a copy in the checkpoint is not loaded.
        progress: show a progress bar on stderr.

    Raises:
        ConfigError: files or tensors are missing, unexpected, of another shape or not floating point; or the output
            projection differs from the embedding in spite of `tied_to`.
    """
    file_by_tensor = _locate_tensors(folder)
    name_in_file = _names_in_files(file_by_tensor)
    targets = {name_in_file(name): unsharded(target) for name, target in tensors}
    lm_head_name = name_in_file(_LM_HEAD_NAME)
    tensor_names = {name for name in file_by_tensor if not _UNUSED_TENSORS.fullmatch(name)} - (
        {lm_head_name} if tied_to else set()
    )
    if missing := sorted(set(targets) - tensor_names):
        raise ConfigError(f"{folder}: {_summarize_names(missing)} missing; {_MISSING_HINT}")
    if unexpected := sorted(tensor_names - set(targets)):
        raise ConfigError(
            f"{folder}: {_summarize_names(unexpected)} unexpected; config.json does not match this checkpoint"
        )
    total = sum(t.nbytes for t in targets.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=not progress) as bar:
        for path in sorted({file_by_tensor[name] for name in targets}):
            _load_file(path, {name: t for name, t in targets.items() if file_by_tensor[name] == path}, bar)
    if (
        tied_to
        and lm_head_name in file_by_tensor
        and not _equal_in_checkpoint(file_by_tensor, name_in_file(tied_to), lm_head_name)
    ):
        raise ConfigError(
            f"{folder}: {lm_head_name} differs from {tied_to}, but config.json ties them; set tie_word_embeddings "
            "to false in config.json"
        )


def equals_checkpoint(folder: Path, name: str, tensor: Tensor) -> bool:
    """Return whether a tensor equals the checkpoint's tensor of that name, compared in the narrower of both dtypes.

    Raises:
        ConfigError: the checkpoint cannot be read, or does not contain the tensor.
    """
    file_by_tensor = _locate_tensors(folder)
    key = _names_in_files(file_by_tensor)(name)
    if key not in file_by_tensor:
        raise ConfigError(f"{folder}: {key} missing; {_MISSING_HINT}")
    with _open_safetensors(file_by_tensor[key]) as file:
        checkpoint_tensor = file.get_tensor(key)
    if checkpoint_tensor.shape != tensor.shape:
        return False
    narrow_dtype = min(checkpoint_tensor.dtype, tensor.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(checkpoint_tensor.to(narrow_dtype), tensor.to(narrow_dtype))


def _names_in_files(file_by_tensor: Mapping[str, Path]) -> Callable[[str], str]:
    """Return a function from a tensor's name in the model to its name in the files of a checkpoint."""
    if any(name.startswith("language_model.") for name in file_by_tensor):
        # The language model of a larger one was saved with all its names under this prefix.
        return lambda name: f"language_model.{name.replace('model.language_model.', 'model.', 1)}"
    # Some checkpoints, mostly of OPT, were saved from the inner module `model`, so their names lack the prefix.
    prefix = "" if any(name.startswith("model.") for name in file_by_tensor) else "model."
    return lambda name: name.removeprefix(prefix)


def _equal_in_checkpoint(file_by_tensor: dict[str, Path], name: str, other_name: str) -> bool:
    """Return whether two matrices of a checkpoint are equal, comparing chunk by chunk."""
    with _open_safetensors(file_by_tensor[name]) as file, _open_safetensors(file_by_tensor[other_name]) as other_file:
        tensor_slice, other_slice = file.get_slice(name), other_file.get_slice(other_name)
        if tensor_slice.get_shape() != other_slice.get_shape():
            return False
        rows, columns = tensor_slice.get_shape()
        size = max(1, _CHUNK_BYTES // (8 * columns))
        return all(
            torch.equal(tensor_slice[i : i + size].float(), other_slice[i : i + size].float())
            for i in range(0, rows, size)
        )


def _locate_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor."""
    if (folder / SAFE_WEIGHTS_INDEX_NAME).is_file():
        return _read_index(folder)
    path = folder / SAFE_WEIGHTS_NAME
    if path.is_file():
        with _open_safetensors(path) as file:
            return dict.fromkeys(file.keys(), path)
    pickle_files = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickle_files:
        raise ConfigError(
            f"{folder}: weights in {pickle_files[0]!r} can run code when they are loaded; convert them with: "
            f"{CONVERT_COMMAND} {shlex.quote(str(folder))} --into {shlex.quote(f'{folder}-safetensors')}"
        )
    raise ConfigError(
        f"{folder}: found neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; check that this is the folder of "
        f"a checkpoint. If its repository has only pytorch_model.bin: {CONVERT_COMMAND} MODEL --into FOLDER"
    )


def _read_index(folder: Path) -> dict[str, Path]:
    path = folder / SAFE_WEIGHTS_INDEX_NAME
    try:
        weight_map = json.loads(path.read_text())["weight_map"]
        names = {str(tensor): str(file) for tensor, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not an index of shards: {type(error).__name__}: {error}") from error
    for file in sorted(set(names.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError(f"{path}: shard {file!r} is not the name of a safetensors file in this folder")
        if not (folder / file).is_file():
            raise ConfigError(f"{path}: shard {file!r} is missing; download the checkpoint again")
    return {tensor: folder / file for tensor, file in names.items()}


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a safetensors file: {error}; download it again") from error


def _load_file(path: Path, targets: dict[str, ParamShard], bar: "tqdm[Any]") -> None:
    with _open_safetensors(path) as file:
        present = set(file.keys())
        for name, target in targets.items():
            if name not in present:
                raise ConfigError(f"{path}: {name} is in the index but not in the file; download the checkpoint again")
            source = file.get_slice(name)
            shape, dtype = tuple(source.get_shape()), source.get_dtype()
            if shape != target.checkpoint_shape:
                raise ConfigError(f"{path}: {name} has shape {shape}; config.json implies {target.checkpoint_shape}")
            if dtype not in FLOAT_DTYPES:
                raise ConfigError(f"{path}: {name} is {dtype}; quantized checkpoints are not supported")
            _copy_shard(source, target)
            bar.update(target.nbytes)


def _copy_shard(source: Any, target: ParamShard) -> None:
    """Read only the rows and columns of the shard from the file."""
    size = max(1, _CHUNK_BYTES * target.tensor.shape[0] // max(target.nbytes, 1))
    with torch.inference_mode():
        for destination, rows in target.row_slices():
            for start in range(0, len(rows), size):
                row_chunk = rows[start : start + size]
                index = slice(row_chunk.start, row_chunk.stop)
                columns = target.columns
                values = source[index] if columns is None else source[index, columns.start : columns.stop]
                destination[start : start + size].copy_(values)


def _summarize_names(names: list[str]) -> str:
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{listed} {'is' if len(names) == 1 else 'are'}"
