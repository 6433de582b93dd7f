# SPDX-License-Identifier: Apache-2.0
"""Checkpoint: what the engine knows of a model before any weight is read. Torch-free; engine.py calls it."""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from quire_spec.dataclass_json import read_json_object
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder, read as far as scheduling needs it."""

    folder: Path
    shape: ModelConfig
    eos_token_ids: frozenset[int]
    """End-of-sequence tokens of config.json and generation_config.json together, those that the vocabulary has."""
    fingerprint: str
    """Tells this checkpoint's KV blocks from another's: see `fingerprint_of`."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `folder`.

        Raises:
            ConfigError: a file is missing or wrong, or the architecture is not supported.
        """
        shape = ModelConfig.load(folder)
        eos = frozenset(shape.eos_token_ids) | _generation_config_eos(folder / "generation_config.json")
        # transformers never meets the others: ids of another vocabulary, or -1 for none.
        valid_token_ids = frozenset(token for token in eos if 0 <= token < shape.vocab_size)
        return cls(folder, shape, valid_token_ids, compute_fingerprint(folder))


def compute_fingerprint(folder: Path) -> str:
    """`sampled-sha256:<hex>` over config.json and, of each weight file, name, size and 64 samples of 4 KiB.

    Reading all of a checkpoint would cost a start as much as loading it does. Samples tell retrained weights apart,
    but not ones edited in a few places: good for blocks that never leave a process, which is all that uses it.

    Raises:
        ConfigError: a file cannot be read.
    """
    sha = hashlib.sha256()
    try:
        _update_length_prefixed(sha, (folder / "config.json").read_bytes())
        for path in sorted(folder.glob("*.safetensors")):
            size = path.stat().st_size
            _update_length_prefixed(sha, path.name.encode())
            _update_length_prefixed(sha, struct.pack("<Q", size))
            with path.open("rb") as file:
                for i in range(_NUM_SAMPLES):
                    file.seek(max(0, size - _SAMPLE_BYTES) * i // (_NUM_SAMPLES - 1))
                    _update_length_prefixed(sha, file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(f"model: {error}") from error
    return f"sampled-sha256:{sha.hexdigest()}"


def _update_length_prefixed(sha: "hashlib._Hash", data: bytes) -> None:
    sha.update(struct.pack("<Q", len(data)) + data)


def _generation_config_eos(path: Path) -> frozenset[int]:
    """Chat models end their turn with tokens that only generation_config.json names."""
    if not path.exists():
        return frozenset()
    eos = read_json_object(path).get("eos_token_id")
    token_ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(token) is int for token in token_ids):
        raise ConfigError(f"{path}: eos_token_id: {eos!r} is neither an integer nor a list of integers")
    return frozenset(token_ids)
