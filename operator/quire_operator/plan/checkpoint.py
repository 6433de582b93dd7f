# SPDX-License-Identifier: Apache-2.0
"""Checkpoint: what a plan needs to know of a model, from its config.json and the sizes of its weights.

Pure; files.py reads the files. The size comes from the safetensors index where there is one, else from the header of
the one file, and only without both from the shape.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self, cast

from quire_spec.errors import ConfigError
from quire_spec.model import capabilities
from quire_spec.model.memory_sizing import weights_bytes
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.safetensors_header import tensor_bytes

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
WEIGHTS_FILE = "model.safetensors"


class SizeSource(StrEnum):
    """Where the size of the weights is known from."""

    INDEX = "safetensors index"
    HEADER = "safetensors header"
    SHAPE = "shape"


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A model's files, as far as memory goes."""

    shape: ModelConfig
    weights_bytes: int
    """All tensors of the files."""
    size_source: SizeSource
    config_digest: str
    """sha256:... of config.json's content, however it is written."""

    @property
    def dtype(self) -> str:
        """Type of the tensors: float32, bfloat16 or float16, or what config.json says instead."""
        return self.shape.dtype

    @classmethod
    def from_files(cls, config: object, index: object = None, header: object = None) -> Self:
        """From the parsed config.json, and the parsed index or header where there is one.

        Raises:
            ConfigError: config.json is not one that the engine runs, or another file does not say what it should.
        """
        shape = ModelConfig.from_config(cast(Mapping[str, Any], config))
        digest = f"sha256:{hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()}"
        if index is not None:
            return cls(shape, index_total_bytes(index), SizeSource.INDEX, digest)
        if header is not None:
            return cls(shape, _header_total_bytes(header), SizeSource.HEADER, digest)
        return cls(shape, weights_bytes(shape, capabilities.DTYPE_BYTES.get(shape.dtype, 2)), SizeSource.SHAPE, digest)


def index_total_bytes(index: object) -> int:
    """Bytes of all tensors, from a parsed model.safetensors.index.json; raises ConfigError when it does not tell."""
    metadata = index.get("metadata") if isinstance(index, Mapping) else None
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    # Some tools write it as a float.
    if isinstance(total, bool) or not isinstance(total, int | float) or not math.isfinite(total) or total <= 0:
        raise ConfigError(f"{INDEX_FILE}: metadata.total_size is {total!r}; it must be the bytes of all tensors")
    return int(total)


def _header_total_bytes(header: object) -> int:
    try:
        return tensor_bytes(header)
    except ConfigError as error:
        raise ConfigError(f"{WEIGHTS_FILE}: {error}") from error
