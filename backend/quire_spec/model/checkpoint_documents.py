# SPDX-License-Identifier: Apache-2.0
"""Parses the JSON documents of a checkpoint in bounded memory: config.json, the index of the weights, and the header of
a safetensors file.

Other people write these documents, and the operator reads those of all services. Parsed JSON needs up to 25 times the
memory of its text. Therefore, only config.json is parsed completely, and its values are counted before. Pure.
"""

import json
import re
from typing import Any

import msgspec

from quire_spec.errors import ConfigError
from quire_spec.model.safetensors_header import tensor_bytes

MAX_CONFIG_BYTES = 8 * 2**20
"""Maximum size of config.json. The largest known ones have some hundred kilobytes, for example with a list of the
layers that are not quantized."""
MAX_INDEX_BYTES = 16 * 2**20
"""Maximum size of the index of the weights. The largest known ones have about 10 MB."""
MAX_HEADER_BYTES = 8 * 2**20
"""Maximum size of the header of a safetensors file whose size is read from its header: about 70,000 tensors."""
MAX_CONFIG_VALUES = 250_000
"""Maximum number of values in config.json. They need at most about 60 MB."""
_MAX_HEADER_FIELDS = 400_000
"""Each tensor has four."""
_EMBEDDING = re.compile(rb'"((?:model\.)?embed_tokens\.weight)"\s*:')


class _Metadata(msgspec.Struct):
    total_size: int | float | None = None


class _Index(msgspec.Struct):
    metadata: _Metadata | None = None
    weight_map: msgspec.Raw = msgspec.Raw(b"{}")


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int]


def parse_config(data: bytes) -> Any:
    """Return the content of a config.json. `data` has at most MAX_CONFIG_BYTES + 1 bytes.

    Raises:
        ConfigError: the document is too large or is not JSON. The message does not contain any of its content.
    """
    _check_size(data, MAX_CONFIG_BYTES)
    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > MAX_CONFIG_VALUES:
        raise ConfigError(f"has more than {MAX_CONFIG_VALUES} values; remove the keys that transformers does not need")
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        raise ConfigError(f"not JSON: {error.msg} in line {error.lineno}, column {error.colno}") from error
    except ValueError as error:
        raise ConfigError("not JSON: not UTF-8") from error
    except RecursionError as error:
        raise ConfigError("not JSON: nested too deeply") from error


def parse_index(data: bytes) -> dict[str, Any]:
    """Return the parts of a model.safetensors.index.json that a plan needs: the total size, and the embedding in the
    weight map if there is one. `data` has at most MAX_INDEX_BYTES + 1 bytes.

    Raises:
        ConfigError: as for `parse_config`.
    """
    _check_size(data, MAX_INDEX_BYTES)
    try:
        index = msgspec.json.decode(data, type=_Index)
    except msgspec.ValidationError:
        # The total size has another type. The planner rejects an index without a total size.
        return {}
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError("not JSON") from error
    embeddings = {match[1].decode(): "" for match in _EMBEDDING.finditer(bytes(index.weight_map))}
    return {
        "metadata": {"total_size": index.metadata.total_size if index.metadata else None},
        "weight_map": embeddings,
    }


def parse_header(data: bytes) -> dict[str, Any]:
    """Return a short substitute for the header of a safetensors file: a tensor that ends where the last one ends, and
    the embedding if there is one. `data` has at most MAX_HEADER_BYTES + 1 bytes.

    Raises:
        ConfigError: as for `parse_config`, or the header has no tensors.
    """
    _check_size(data, MAX_HEADER_BYTES)
    if data.count(b":") > _MAX_HEADER_FIELDS:
        raise ConfigError(f"its header has more than {_MAX_HEADER_FIELDS} fields; save the weights as several files")
    try:
        header = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        ends = [
            msgspec.json.decode(tensor, type=_Tensor).data_offsets[1]
            for name, tensor in header.items()
            if name != "__metadata__"
        ]
    except msgspec.ValidationError:
        ends = []
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError("its header is not JSON") from error
    last = {"data_offsets": [0, max(ends, default=None)]}
    tensor_bytes({"last": last})
    return {"last": last, **{match[1].decode(): last for match in _EMBEDDING.finditer(data)}}


def _check_size(data: bytes, max_bytes: int) -> None:
    if len(data) > max_bytes:
        raise ConfigError(f"is larger than {max_bytes} bytes; check that it is the file of a model")
