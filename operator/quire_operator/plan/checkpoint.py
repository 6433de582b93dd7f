# SPDX-License-Identifier: Apache-2.0
"""Facts about a model that the planner needs: its config.json and the size of its weights.

Pure; checkpoint_files.py reads the files. The size is read from the safetensors index, or from the header if the
weights are a single file. If neither exists, the size is estimated from config.json.
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
    """Source of the size of the weights."""

    INDEX = "safetensors index"
    HEADER = "safetensors header"
    SHAPE = "shape"


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """Configuration and size of a model."""

    shape: ModelConfig
    weights_bytes: int
    """Number of bytes of all tensors in the files with the weights."""
    size_source: SizeSource
    config_digest: str
    """Digest (sha256:...) of the values in config.json; the formatting of the file does not change the digest."""

    @property
    def dtype(self) -> str:
        """Dtype of the tensors according to config.json, normally float32, bfloat16 or float16."""
        return self.shape.dtype

    @classmethod
    def from_files(
        cls, config: object, index: object = None, header: object = None, *, model_impl: str | None = None
    ) -> Self:
        """Return the facts from the parsed config.json and, if present, the parsed index or header. `model_impl` is the
        value of spec.engine.modelImpl.

        Raises:
            ConfigError: the engine does not support config.json, or another file is invalid.
        """
        shape = ModelConfig.from_config(cast(Mapping[str, Any], config), model_impl or "auto")
        digest = f"sha256:{hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()}"
        if index is not None:
            return cls(shape, index_total_bytes(index), SizeSource.INDEX, digest)
        if header is not None:
            return cls(shape, _header_total_bytes(header), SizeSource.HEADER, digest)
        return cls(shape, weights_bytes(shape, capabilities.DTYPE_BYTES.get(shape.dtype, 2)), SizeSource.SHAPE, digest)


def index_total_bytes(index: object) -> int:
    """Read the number of bytes of all tensors from a parsed model.safetensors.index.json.

    Raises:
        ConfigError: the index does not contain a valid total size.
    """
    metadata = index.get("metadata") if isinstance(index, Mapping) else None
    total = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    # Some tools write it as a float.
    if isinstance(total, bool) or not isinstance(total, int | float) or not math.isfinite(total) or total <= 0:
        raise ConfigError(f"{INDEX_FILE}: metadata.total_size must be the size of all tensors in bytes, got {total!r}")
    return int(total)


def _header_total_bytes(header: object) -> int:
    try:
        return tensor_bytes(header)
    except ConfigError as error:
        raise ConfigError(f"{WEIGHTS_FILE}: {error}") from error
