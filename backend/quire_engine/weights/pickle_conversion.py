# SPDX-License-Identifier: Apache-2.0
"""Converts a checkpoint or an adapter with pickled weights (pytorch_model.bin, adapter_model.bin) to safetensors.

A user runs the conversion with `python -m quire_engine convert`. The servers, pods and operator never run it.
The files can contain only tensors, because the unpickler rejects all other objects. After the conversion, each written
tensor is compared with its source.
"""

import json
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quire_engine.weights.conversion_report import ConversionReport
from quire_engine.weights.tensor_files import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from quire_spec.dataclass_json import read_json_object
from quire_spec.errors import ConfigError

PICKLE_NAME, PICKLE_INDEX_NAME = "pytorch_model.bin", "pytorch_model.bin.index.json"
ADAPTER_PICKLE_NAME = "adapter_model.bin"
_SAFE_NAMES = {PICKLE_NAME: SAFE_WEIGHTS_NAME, ADAPTER_PICKLE_NAME: "adapter_model.safetensors"}
MAX_FILES, MAX_TENSORS = 1000, 200_000
MAX_EXPANSION = 2
"""The total size of the tensors in a file, divided by the size of the file, must not exceed this number. Tensors can be
larger than their file if several of them share the same memory. In a real checkpoint, only tied weights share memory.
"""
_COPIED_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
_FIX = "use a checkpoint from another source"
_MAX_COPIED_BYTES = 256 * 2**20


def convert_checkpoint(source: Path, target: Path) -> ConversionReport:
    """Write a copy of the checkpoint or adapter in `source`, with its weights as safetensors, to the new folder
    `target`.

    The conversion needs memory for twice the largest file. If it fails, `target` is not created.

    Raises:
        ConfigError: `target` already exists, `source` has no pickled weights, a file contains too
            many tensors or an object that is not a tensor, or the copy differs from its source.
    """
    if target.exists():
        raise ConfigError(f"--into {str(target)!r}: already exists; give a new folder")
    weight_files = _pickle_files(source)
    partial = target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        _check_space(weight_files, partial)
        report = _convert_files(weight_files, partial)
        _copy_other_files(source, partial)
        partial.rename(target)
    except OSError as error:
        raise ConfigError(f"{error}; make room, or choose another folder with --into") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


def _pickle_files(folder: Path) -> list[Path]:
    """Return the files that contain the pickled weights. There is one file, or one for each shard."""
    names = [ADAPTER_PICKLE_NAME if (folder / ADAPTER_PICKLE_NAME).is_file() else PICKLE_NAME]
    if (index := folder / PICKLE_INDEX_NAME).is_file():
        weight_map = read_json_object(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(
                f"{index}: weight_map must be an object that maps each tensor to its file; download the index again"
            )
        names = sorted({str(name) for name in weight_map.values()})
    if len(names) > MAX_FILES:
        raise ConfigError(f"{folder}: {len(names)} files contain weights, but the limit is {MAX_FILES}")
    for name in names:
        if Path(name).name != name or not name.endswith(".bin") or not (folder / name).is_file():
            raise ConfigError(f"{folder}: {name!r} is not a .bin file in this folder; download the checkpoint again")
    return [folder / name for name in names]


def _check_space(files: list[Path], target: Path) -> None:
    needed, free = sum(file.stat().st_size for file in files), shutil.disk_usage(target).free
    if needed > free:
        raise ConfigError(
            f"--into {str(target.parent)!r}: {needed} bytes are needed, but only {free} bytes are available; "
            "make room, or choose another folder"
        )


def _convert_files(files: list[Path], target: Path) -> ConversionReport:
    weight_map: dict[str, str] = {}
    num_bytes = 0
    for index, file in enumerate(files, 1):
        tensors = _load_tensors(file)
        if repeated := sorted(tensors.keys() & weight_map.keys()):
            raise ConfigError(f"{file}: {repeated[0]} is also in another file; download the checkpoint again")
        name = f"model-{index:05}-of-{len(files):05}.safetensors"
        if len(files) == 1:
            name = _SAFE_NAMES.get(file.name, SAFE_WEIGHTS_NAME)
        # `save_file` rejects tensors that share memory, such as tied weights. Therefore, each tensor is cloned.
        save_file({key: tensor.clone() for key, tensor in tensors.items()}, target / name, {"format": "pt"})
        _compare(target / name, tensors)
        weight_map |= dict.fromkeys(tensors, name)
        num_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        document = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
        (target / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(document, indent=2))
    return ConversionReport(len(files), len(weight_map), num_bytes)


def _load_tensors(file: Path) -> dict[str, Tensor]:
    """Read all tensors of a file, and return them as contiguous tensors."""
    limit, num_bytes = MAX_EXPANSION * file.stat().st_size, 0
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            unpacked = sum(entry.file_size for entry in archive.infolist())
        if unpacked > limit:
            raise ConfigError(f"{file}: unpacks to {unpacked} bytes, more than {MAX_EXPANSION} times its size; {_FIX}")
    try:
        with warnings.catch_warnings():
            # The warnings are about sparse tensors, which are rejected below.
            warnings.simplefilter("ignore")
            content: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zipfile and torch raise many kinds of errors
        raise ConfigError(
            f"{file}: contains objects that are not tensors, or is damaged: {str(error)[:300]}"
        ) from error
    if not isinstance(content, dict) or not content:
        raise ConfigError(f"{file}: must contain a dict of tensors, but contains {type(content).__name__}; {_FIX}")
    if len(content) > MAX_TENSORS:
        raise ConfigError(f"{file}: contains {len(content)} tensors, but the limit is {MAX_TENSORS}")
    for name, tensor in content.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
            raise ConfigError(f"{file}: entry {str(name)[:80]!r} is not a dense tensor; {_FIX}")
        num_bytes += tensor.nbytes
        if num_bytes > limit:
            raise ConfigError(
                f"{file}: the tensors up to {name[:80]!r} have {num_bytes} bytes, more than {MAX_EXPANSION} times the "
                f"size of the file; {_FIX}"
            )
    return {name: tensor.detach().contiguous() for name, tensor in content.items()}


def _compare(file: Path, tensors: dict[str, Tensor]) -> None:
    """Raise ConfigError unless the file contains exactly these tensors with exactly the same bits."""
    with safe_open(file, framework="pt") as written:
        names = set(written.keys())
        different = [
            name for name in tensors if name not in names or not _same_bits(written.get_tensor(name), tensors[name])
        ]
    if different or names != tensors.keys():
        raise ConfigError(
            f"{file}: differs from its source at {', '.join(different[:3])}; check the disk and run again"
        )


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # The bytes are compared, because NaN is not equal to NaN. `reshape` gives a scalar the dimension that `view`
    # requires.
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def _copy_other_files(source: Path, target: Path) -> None:
    for file in _other_files(source):
        shutil.copyfile(file, target / file.name)


def _other_files(source: Path) -> Iterator[Path]:
    for pattern in _COPIED_PATTERNS:
        for file in sorted(source.glob(pattern)):
            if not file.name.endswith(".index.json") and file.is_file() and file.stat().st_size <= _MAX_COPIED_BYTES:
                yield file
