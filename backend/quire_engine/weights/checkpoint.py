# SPDX-License-Identifier: Apache-2.0
"""The properties of a checkpoint that the engine core must know before it loads the weights. Torch-free; called by
`core`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from quire_engine.tokenization.tokenizer_config import read_eos_token_id
from quire_spec.dataclass_json import read_json_object, without_zero_fraction
from quire_spec.documents.checkpoint_digest import compute_digest, compute_fingerprint
from quire_spec.errors import ConfigError
from quire_spec.model.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model's folder and the properties of the model that the scheduler needs."""

    folder: Path
    shape: ModelConfig
    eos_token_ids: frozenset[int]
    """End-of-sequence tokens of the checkpoint, if they are in the vocabulary."""
    fingerprint: str
    """A hash that identifies the weights. It is part of the hash of each KV block."""

    @classmethod
    def load(cls, folder: Path, model_impl: str = "auto", *, full_digest: bool = False) -> Self:
        """Read `folder` for the classes that `model_impl` of EngineConfig selects.

        If `full_digest` is true, the fingerprint covers every byte of the weights (`compute_digest`). This is necessary
        if KV blocks leave the process. Otherwise, it covers samples of them (`compute_fingerprint`).

        Raises:
            ConfigError: a file is missing or wrong, or the architecture is not supported.
        """
        shape = ModelConfig.load(folder, model_impl)
        fingerprint = compute_digest(folder) if full_digest else compute_fingerprint(folder)
        return cls(folder, shape, load_eos_token_ids(folder, shape), fingerprint)


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
