# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files to parameters: safetensors only, single or sharded, read by slice into merged parameters."""

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from quire_engine.part import Part, Target, whole
from quire_spec.errors import ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FLOATS = ("F64", "F32", "BF16", "F16")

# Bytes read at a time: bounds what conversion holds beside the parameters.
_CHUNK_BYTES = 64 << 20
_HEAD = "lm_head.weight"
# In old Llama checkpoints; computed here from config.json.
_DERIVED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


def load_weights(
    folder: Path, tensors: Iterable[tuple[str, Target]], *, tied: str | None = None, progress: bool = False
) -> None:
    """Fill parameters from the checkpoint in `folder`, converting to their dtype and device.

    Args:
        tensors: each tensor's name in the checkpoint, and the part of a parameter that it, or a part of it, fills.
        tied: the embedding's name, where the output projection is the same; its copy in some checkpoints is left alone.
        progress: show a bar on stderr.

    Raises:
        ConfigError: files or tensors are missing, unexpected, of another shape or not floating point; or the output
            projection is another than the embedding, against `tied`.
    """
    where = _locate(folder)
    # Some checkpoints, of OPT above all, were saved from what is inside the module `model`.
    outer = "" if any(name.startswith("model.") for name in where) else "model."
    targets = {name.removeprefix(outer): whole(target) for name, target in tensors}
    found = {name for name in where if not _DERIVED.fullmatch(name)} - ({_HEAD} if tied else set())
    if missing := sorted(set(targets) - found):
        raise ConfigError(f"{folder}: {_some(missing)} missing; config.json does not fit this checkpoint, or it is cut")
    if unexpected := sorted(found - set(targets)):
        raise ConfigError(f"{folder}: {_some(unexpected)} unexpected; config.json does not fit this checkpoint")
    total = sum(t.nbytes for t in targets.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=not progress) as bar:
        for path in sorted({where[name] for name in targets}):
            _load_file(path, {name: t for name, t in targets.items() if where[name] == path}, bar)
    if tied and _HEAD in where and not _same(where, tied.removeprefix(outer), _HEAD):
        raise ConfigError(
            f"{folder}: {_HEAD} differs from {tied}, which it is by config.json; set tie_word_embeddings to false there"
        )


def equals_checkpoint(folder: Path, name: str, tensor: Tensor) -> bool:
    """Whether a tensor is the checkpoint's of that name, as far as the narrower of the two types can tell.

    Raises:
        ConfigError: the checkpoint cannot be read, or has no such tensor.
    """
    where = _locate(folder)
    outer = "" if any(key.startswith("model.") for key in where) else "model."
    key = name.removeprefix(outer)
    if key not in where:
        raise ConfigError(f"{folder}: {key} missing; config.json does not fit this checkpoint, or it is cut")
    with _open(where[key]) as file:
        own = file.get_tensor(key)
    if own.shape != tensor.shape:
        return False
    narrow = min(own.dtype, tensor.dtype, key=lambda dtype: dtype.itemsize)
    return torch.equal(own.to(narrow), tensor.to(narrow))


def _same(where: dict[str, Path], name: str, other: str) -> bool:
    """Whether two matrices of a checkpoint have the same values, a chunk of both at a time."""
    with _open(where[name]) as file, _open(where[other]) as others:
        one, two = file.get_slice(name), others.get_slice(other)
        if one.get_shape() != two.get_shape():
            return False
        rows, columns = one.get_shape()
        size = max(1, _CHUNK_BYTES // (8 * columns))
        return all(torch.equal(one[i : i + size].float(), two[i : i + size].float()) for i in range(0, rows, size))


def _locate(folder: Path) -> dict[str, Path]:
    """Each tensor's file."""
    if (folder / INDEX).is_file():
        return _read_index(folder)
    path = folder / SINGLE
    if path.is_file():
        with _open(path) as file:
            return dict.fromkeys(file.keys(), path)
    pickled = sorted(p.name for p in folder.glob("*") if p.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickled:
        raise ConfigError(
            f"{folder}: weights in {pickled[0]!r} can run code when read; only safetensors are; "
            "convert with transformers' save_pretrained"
        )
    raise ConfigError(f"{folder}: found neither {SINGLE} nor {INDEX}; is this the folder of a checkpoint?")


def _read_index(folder: Path) -> dict[str, Path]:
    path = folder / INDEX
    try:
        shards = json.loads(path.read_text())["weight_map"]
        names = {str(tensor): str(file) for tensor, file in shards.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: not an index of shards: {type(error).__name__}: {error}") from error
    for file in sorted(set(names.values())):
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ConfigError(f"{path}: shard {file!r} is not the name of a safetensors file in this folder")
        if not (folder / file).is_file():
            raise ConfigError(f"{path}: shard {file!r} is missing; fetch the checkpoint again")
    return {tensor: folder / file for tensor, file in names.items()}


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: not a safetensors file: {error}; fetch it again") from error


def _load_file(path: Path, targets: dict[str, Part], bar: "tqdm[Any]") -> None:
    with _open(path) as file:
        present = set(file.keys())
        for name, target in targets.items():
            if name not in present:
                raise ConfigError(f"{path}: {name} missing, against the index; fetch the checkpoint again")
            source = file.get_slice(name)
            shape, dtype = tuple(source.get_shape()), source.get_dtype()
            if shape != target.shape:
                raise ConfigError(f"{path}: {name} has shape {shape}; config.json makes it {target.shape}")
            if dtype not in FLOATS:
                raise ConfigError(f"{path}: {name} is {dtype}; quantized checkpoints are not supported")
            _copy(source, target)
            bar.update(target.nbytes)


def _copy(source: Any, target: Part) -> None:
    """Read what the part takes, and no more of the file than that."""
    size = max(1, _CHUNK_BYTES * target.tensor.shape[0] // max(target.nbytes, 1))
    with torch.inference_mode():
        for piece, rows in target.pieces():
            for start in range(0, len(rows), size):
                some = rows[start : start + size]
                index = slice(some.start, some.stop)
                columns = target.columns
                read = source[index] if columns is None else source[index, columns.start : columns.stop]
                piece[start : start + size].copy_(read)


def _some(names: list[str]) -> str:
    listed = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{listed} {'is' if len(names) == 1 else 'are'}"
