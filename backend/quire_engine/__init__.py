# SPDX-License-Identifier: Apache-2.0
"""The inference engine. Use `LLM` for offline generation. The processes of a pod do not use this file; they import each
module that they need.

Names are imported when they are first used. Therefore, importing the package does not import torch and does not load a
model.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_engine.api.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from quire_engine.api.engine_args import EngineArgs
    from quire_engine.api.inputs import TextPrompt, TokensPrompt
    from quire_engine.api.llm import LLM
    from quire_engine.api.outputs import (
        ClassificationOutput,
        CompletionOutput,
        EmbeddingOutput,
        Logprob,
        LoRARequest,
        PoolingOutput,
        PoolingRequestOutput,
        RequestMetrics,
        RequestOutput,
        ScoringOutput,
    )
    from quire_engine.api.sampling_params import GuidedDecodingParams, SamplingParams, StructuredOutputsParams
    from quire_spec.engine.pooling_params import PoolingParams

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineArgs",
    "GuidedDecodingParams",
    "LoRARequest",
    "Logprob",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
]

_MODULES = {
    "BeamSearchOutput": "quire_engine.api.beam_search",
    "BeamSearchParams": "quire_engine.api.beam_search",
    "BeamSearchSequence": "quire_engine.api.beam_search",
    "EngineArgs": "quire_engine.api.engine_args",
    "GuidedDecodingParams": "quire_engine.api.sampling_params",
    "LLM": "quire_engine.api.llm",
    "PoolingParams": "quire_spec.engine.pooling_params",
    "SamplingParams": "quire_engine.api.sampling_params",
    "StructuredOutputsParams": "quire_engine.api.sampling_params",
    "TextPrompt": "quire_engine.api.inputs",
    "TokensPrompt": "quire_engine.api.inputs",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "quire_engine.api.outputs")), name)
