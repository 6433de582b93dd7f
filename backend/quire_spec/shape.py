# SPDX-License-Identifier: Apache-2.0
"""ModelShape: the numbers of a model that sizing and the model definitions need, from its config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quire_spec import capability
from quire_spec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Numbers of a decoder-only transformer."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    tie_word_embeddings: bool
    attention_bias: bool
    """Biases on q, k and v."""
    output_bias: bool
    """Bias on o."""
    mlp_bias: bool
    dtype: str
    """Of the checkpoint."""
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Self:
        """Read a Hugging Face config.json.

        Raises:
            ConfigError: the architecture is not supported (the message lists those that are), or a number is missing.
        """
        found = config.get("architectures") or ["none"]
        if found[0] not in capability.ARCHITECTURES:
            raise ConfigError(
                f"config.json: architecture {found[0]!r} is not supported; "
                f"supported are {', '.join(capability.ARCHITECTURES)}"
            )
        if config.get("use_sliding_window"):
            raise ConfigError("config.json: use_sliding_window is not supported")
        try:
            return cls._read(config, found[0])
        except KeyError as error:
            raise ConfigError(f"config.json: {error.args[0]} is missing") from error

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `folder`/config.json; raises ConfigError as `from_config` does, also when it cannot be read."""
        path = folder / "config.json"
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error
        return cls.from_config(config)

    @classmethod
    def _read(cls, config: Mapping[str, Any], architecture: str) -> Self:
        heads = config["num_attention_heads"]
        qwen2 = architecture == "Qwen2ForCausalLM"
        bias = bool(config.get("attention_bias", False))
        # transformers 5 writes rope_theta inside rope_parameters, earlier ones beside rope_scaling.
        rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
        eos = config.get("eos_token_id")
        return cls(
            architecture=architecture,
            num_layers=config["num_hidden_layers"],
            hidden_size=config["hidden_size"],
            intermediate_size=config["intermediate_size"],
            num_heads=heads,
            num_kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            vocab_size=config["vocab_size"],
            max_position_embeddings=config["max_position_embeddings"],
            rms_norm_eps=config.get("rms_norm_eps", 1e-6),
            rope_theta=rope.get("rope_theta") or config.get("rope_theta") or 10000.0,
            rope_scaling=rope if rope.get("rope_type", rope.get("type", "default")) != "default" else None,
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            attention_bias=True if qwen2 else bias,
            output_bias=False if qwen2 else bias,
            mlp_bias=bool(config.get("mlp_bias", False)),
            dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
            eos_token_ids=tuple(eos if isinstance(eos, list) else [eos] if eos is not None else []),
        )
