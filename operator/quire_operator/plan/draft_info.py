# SPDX-License-Identifier: Apache-2.0
"""Facts that a plan needs about a draft model, an EAGLE-3 head, Medusa heads or an MTP layer.

The facts are the memory that the draft model or the heads need, and whether they match the served model. The functions
are pure; checkpoint_files.py reads the files.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from quire_operator.api.engine_spec import SpeculativeConfigSpec
from quire_operator.plan.checkpoint import CheckpointInfo
from quire_spec.engine.speculative_config import draft_model_problem
from quire_spec.errors import ConfigError
from quire_spec.model.eagle3_config import Eagle3Config
from quire_spec.model.medusa_config import MedusaConfig
from quire_spec.model.model_config import ModelConfig
from quire_spec.model.mtp_config import MTPConfig


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """Weights that propose drafts."""

    method: str
    config_digest: str
    """Digest of the content of config.json."""
    checkpoint: CheckpointInfo | None
    """The draft model; None for heads."""
    num_elements: int
    """Number of weights of the heads; 0 for a draft model. If the files of the heads contain an embedding, its weights
    are included."""
    kv_shape: ModelConfig | None
    """Shape of the KV cache; None if there is no KV cache."""
    has_embedding: bool = False
    """Whether the files of the heads contain an embedding. If it is equal to the embedding of the model, the engine
    does not keep it."""

    @classmethod
    def from_model(cls, spec: SpeculativeConfigSpec | None, model: CheckpointInfo) -> Self | None:
        """Return the facts about the MTP layer in the model's own files. None: `spec` does not use it, or the model has
        none."""
        layer = MTPConfig.from_model(model.shape) if spec is not None and spec.method == "mtp" else None
        if spec is None or layer is None:
            return None
        return cls(spec.method, model.config_digest, None, layer.num_elements, layer.layer)

    @classmethod
    def from_files(
        cls,
        spec: SpeculativeConfigSpec,
        target: ModelConfig,
        config: object,
        index: object = None,
        header: object = None,
    ) -> Self:
        """Return the facts from the parsed files. `target` is the shape of the served model.
        `CheckpointInfo.from_files` describes the files.

        Raises:
            ConfigError: a file is invalid, or the weights do not fit the model; the message names the key.
        """
        try:
            return cls._from_files(spec, target, config, index, header)
        except ConfigError as error:
            message = str(error).replace("speculative_config.num_speculative_tokens", "numSpeculativeTokens")
            raise ConfigError(f"spec.engine.speculativeConfig: {message}") from error

    @classmethod
    def _from_files(
        cls, spec: SpeculativeConfigSpec, target: ModelConfig, config: object, index: object, header: object
    ) -> Self:
        digest = f"sha256:{hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()}"
        if spec.method == "eagle3":
            head = Eagle3Config.from_config(config, target)
            has_embedding = _has_tensor("embed_tokens.weight", index, header)
            embedding = target.vocab_size * target.embedding_size if has_embedding else 0
            return cls(spec.method, digest, None, head.num_elements(target) + embedding, head.layer, has_embedding)
        if spec.method == "medusa":
            num_tokens = spec.numSpeculativeTokens
            heads = MedusaConfig.from_config(config, num_tokens)
            return cls(spec.method, digest, None, heads.num_elements(target, num_tokens), None)
        checkpoint = CheckpointInfo.from_files(config, index, header, model_impl="quire")
        if problem := draft_model_problem(checkpoint.shape, target):
            raise ConfigError(f"config.json: {problem}")
        return cls(spec.method, digest, checkpoint, 0, checkpoint.shape)

    @property
    def file_bytes(self) -> int:
        """Number of bytes of the files with the weights. For heads, it is estimated as 2 bytes for each weight. The
        files of the model contain an MTP layer."""
        if self.method == "mtp":
            return 0
        return self.checkpoint.weights_bytes if self.checkpoint is not None else 2 * self.num_elements


def _has_tensor(name: str, index: object, header: object) -> bool:
    """Return whether the files contain a tensor with this name. In the files, the name can have the prefix `model.`."""
    names = index.get("weight_map") if isinstance(index, Mapping) else header
    return isinstance(names, Mapping) and any(f"{prefix}{name}" in names for prefix in ("", "model."))
