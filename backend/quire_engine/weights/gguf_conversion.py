# SPDX-License-Identifier: Apache-2.0
"""Converts a GGUF file to the folder of a checkpoint.

The folder contains config.json, the tokenizer, and the weights as safetensors. Quantized tensors keep their bytes, so
the folder is as large as the file, and `weights/quantized/gguf.py` reads them. The tensor of all experts becomes one
tensor for each expert. Only the rows of q and k of Llama change their order, and the weights of Gemma's norms become
smaller by 1, because llama.cpp had changed them.
"""

import json
import mmap
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from quire_engine.tokenization.gguf_tokenizer import TOKENIZER_FILES, write_tokenizer
from quire_engine.weights.conversion_report import ConversionReport
from quire_engine.weights.quantized.gguf import gguf_suffix
from quire_engine.weights.tensor_files import SAFE_WEIGHTS_INDEX_NAME
from quire_spec.errors import ConfigError
from quire_spec.model.gguf.config import (
    EXPERT,
    ROPE_FACTORS,
    GGUFArchitecture,
    architecture_of,
    checkpoint_name,
    config_from_header,
)
from quire_spec.model.gguf.header import GGUFHeader, GGUFTensorInfo, read_header
from quire_spec.model.model_config import ModelConfig

_SHARD_BYTES = 2 << 30
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def convert_gguf(source: Path, target: Path) -> ConversionReport:
    """Write the model in the GGUF file `source` to the new folder `target`.

    If files of a tokenizer are beside `source`, they are copied. Otherwise, the tokenizer is built from the metadata.

    Raises:
        ConfigError: `target` exists, `source` is not a complete GGUF file, or the model, a type or the tokenizer is not
            supported.
    """
    if target.exists():
        raise ConfigError(f"--into {str(target)!r}: already exists; give a new folder")
    header, partial = read_header(source), target.with_name(f"{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir(parents=True)
        with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as data:
            report = _convert(header, memoryview(data), partial)
        if not _copy_tokenizer(source.parent, partial):
            write_tokenizer(header.metadata, partial)
        partial.rename(target)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from error
    except OSError as error:
        raise ConfigError(f"{error}; make room, or choose another folder with --into") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return report


def _convert(header: GGUFHeader, data: memoryview, folder: Path) -> ConversionReport:
    """Write config.json and the weights."""
    factors = header.tensors.get(ROPE_FACTORS)
    rope_factors = None if factors is None else _read(factors, data).float().tolist()
    config, architecture = config_from_header(header, rope_factors), architecture_of(header)
    ModelConfig.from_config(config)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    shards: list[dict[str, str]] = []
    for tensors in _shards(header, data, architecture, config["num_attention_heads"], config["num_key_value_heads"]):
        name = f"model-{len(shards) + 1:05}.safetensors"
        save_file(tensors, folder / name, {"format": "pt"})
        shards.append(dict.fromkeys(tensors, name))
    weight_map = {key: name for shard in shards for key, name in shard.items()}
    document = {"metadata": {"total_size": header.num_bytes}, "weight_map": weight_map}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(document, indent=1))
    return ConversionReport(len(shards), len(weight_map), header.num_bytes)


def _shards(
    header: GGUFHeader, data: memoryview, architecture: GGUFArchitecture, num_heads: int, num_kv_heads: int
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors of each file of the checkpoint."""
    shard: dict[str, Tensor] = {}
    for name, info in header.tensors.items():
        if name == ROPE_FACTORS:
            continue
        tensor, key = _read(info, data), checkpoint_name(name, architecture)
        if architecture.has_permuted_heads and ".attn_q." in name:
            tensor = _in_halves(tensor, num_heads)
        elif architecture.has_permuted_heads and ".attn_k." in name:
            tensor = _in_halves(tensor, num_kv_heads)
        elif architecture.has_shifted_norms and key.endswith("norm.weight"):
            tensor = tensor.float() - 1
        elif architecture.mixture and tensor.ndim == 1 and not key.endswith("norm.weight") and key.endswith(".weight"):
            # llama.cpp stores a matrix with one row as a vector: the gate of the shared expert.
            tensor = tensor[None]
        if not info.type.is_float:
            key = key.removesuffix(".weight") + gguf_suffix(info.type)
        if sum(t.nbytes for t in shard.values()) + tensor.nbytes > _SHARD_BYTES and shard:
            yield shard
            shard = {}
        shard |= _split_experts(key, tensor, info) if EXPERT in key else {key: tensor}
    yield shard


def _split_experts(name: str, tensor: Tensor, info: GGUFTensorInfo) -> dict[str, Tensor]:
    """Return the tensor of each expert."""
    parts = tensor.view(info.shape[0], -1, tensor.shape[-1])
    return {name.replace(EXPERT, str(expert)): part.clone() for expert, part in enumerate(parts)}


def _read(info: GGUFTensorInfo, data: memoryview) -> Tensor:
    """Return a tensor. If it is quantized, it is [rows, bytes of a row] uint8."""
    content = torch.frombuffer(data, dtype=torch.uint8, count=info.num_bytes, offset=info.offset).clone()
    if info.type.is_float:
        return content.view(_FLOATS[info.type.name]).view(info.shape)
    return content.view(-1, info.row_bytes)


def _in_halves(tensor: Tensor, num_heads: int) -> Tensor:
    """Reorder the rows of each head: in transformers, the elements that are rotated together are in two halves."""
    if len(tensor) % (2 * num_heads):
        raise ConfigError(f"the {len(tensor)} rows of q or k cannot be divided among {num_heads} heads")
    return tensor.view(num_heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).flatten(0, 2).contiguous()


def _copy_tokenizer(source: Path, target: Path) -> bool:
    """Copy the files of a tokenizer, and return whether there are any."""
    found = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    for name in found:
        shutil.copyfile(source / name, target / name)
    return bool(found)
