# SPDX-License-Identifier: Apache-2.0
"""What `quire simulate run -f` writes for the simulator: the planned engine of an LLMService."""

from dataclasses import dataclass
from typing import Any

from quire_spec.model.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class SimulatedService:
    """The engine of each pod, and the number of pods."""

    engine: dict[str, Any]
    """Fields of EngineConfig."""
    shape: ModelConfig
    kv_tokens: int
    """Tokens whose keys and values of all layers fit into the KV cache of each core."""
    replicas: int
