# SPDX-License-Identifier: Apache-2.0
"""The properties of a checkpoint that the engine core must know before it loads the weights. Torch-free; called by
`core`."""

import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from quire_engine.tokenization.tokenizer_config import read_eos_token_id
from quire_spec.dataclass_json import read_json_object, without_zero_fraction
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder and the properties of the model that the scheduler needs."""

    folder: Path
    shape: ModelConfig
    eos_token_ids: frozenset[int]
    """End-of-sequence tokens of the checkpoint, if they are in the vocabulary."""
    fingerprint: str
    """A hash that identifies the weights. It is part of the hash of each KV block, see `compute_fingerprint`."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `folder`.

        Raises:
            ConfigError: a file is missing or wrong, or the architecture is not supported.
        """
        shape = ModelConfig.load(folder)
        return cls(folder, shape, load_eos_token_ids(folder, shape), compute_fingerprint(folder))


def load_eos_token_ids(folder: Path, shape: ModelConfig) -> frozenset[int]:
    """Return those end-of-sequence tokens of config.json and generation_config.json that are in the vocabulary. If both
    name none, the token of the tokenizer is used, as in vLLM. transformers would then never stop.

    Raises:
        ConfigError: a file is wrong.
    """
    eos = frozenset(shape.eos_token_ids) | _generation_config_eos(folder / "generation_config.json")
    if not eos and (token_id := read_eos_token_id(folder)) is not None:
        eos = frozenset({token_id})
    # Some configs contain ids of another vocabulary, or -1 for no token; transformers never samples such ids.
    return frozenset(token for token in eos if 0 <= token < shape.vocab_size)


def compute_fingerprint(folder: Path) -> str:
    """Return one hash, `sampled-sha256:<hex>`.

    The hash covers config.json and, for each weight file, its name, its size and 64 samples of 4 KiB.
    Hashing a whole checkpoint would take as long as loading it. The samples differ if the weights were trained again,
    but they can be equal if only a few places were edited. That is sufficient, because the fingerprint is only used for
    KV blocks, and these never leave the process.

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
    """Return the end-of-sequence tokens of generation_config.json.

    No other file of a checkpoint contains the token that ends a turn of a chat.
    """
    if not path.exists():
        return frozenset()
    eos = read_json_object(path).get("eos_token_id")
    token_ids = [] if eos is None else list(map(without_zero_fraction, eos if isinstance(eos, list) else [eos]))
    if not all(type(token) is int for token in token_ids):
        raise ConfigError(f"{path}: eos_token_id: {eos!r} is neither an integer nor a list of integers")
    return frozenset(token_ids)
