# SPDX-License-Identifier: Apache-2.0
"""Pipeline-parallel split of a model. It defines which layers each stage computes and stores. Pure arithmetic.

Stage 0 also has the embedding, the final norm and the output projection: the last stage sends hidden states back to it.
So tokens are sampled where they are scheduled, and an embedding that is tied to the output projection is stored once.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from quire_spec.errors import ConfigError
from quire_spec.model.memory_sizing import layer_bytes, weights_bytes
from quire_spec.model.model_config import ModelConfig, PipelineStage

_ELEMENT_BYTES = 2
_FORMAT_PERCENT = {"int8": 50, "fp8": 50, "int4": 31}
"""Bytes of a linear layer that the engine quantizes while it loads it, in percent of its bytes in 16 bits."""


def unsupported_reason(model_config: ModelConfig, size: int) -> str:
    """Return the reason why the layers of a model cannot be split into `size` stages. The result is empty if they
    can be split."""
    if size == 1:
        return ""
    if not model_config.is_native:
        return "model_impl transformers computes all layers in one process"
    if model_config.encoder is not None:
        return "all tokens of an encoder attend to each other, and its layers are computed in one process"
    if model_config.states is not None:
        return "this model has layers with states, which are kept in one process"
    if model_config.variants is not None:
        return "layers of this model read keys, values or embeddings of other layers"
    if model_config.num_learned_positions:
        return "this model adds learned positions outside of its layers"
    if size > model_config.num_layers:
        return f"the model has {model_config.num_layers} layers, and each stage needs one"
    return ""


def check(model_config: ModelConfig, size: int) -> None:
    """Raise ConfigError if the layers of a model cannot be split into `size` stages."""
    if reason := unsupported_reason(model_config, size):
        sizes = [each for each in range(size - 1, 0, -1) if not unsupported_reason(model_config, each)]
        fix = f"use {sizes[0]}" + (" or less" if sizes[0] > 1 else "")
        raise ConfigError(f"pipeline_parallel_size: {size} is not supported for this model: {reason}; {fix}")


def split_stages(model_config: ModelConfig, size: int, quantization: str | None = None) -> list[ModelConfig]:
    """Return the configuration of each stage. `quantization` is a value of EngineConfig.

    Each configuration describes only the layers of its stage; see ModelConfig.stage.
    """
    if size == 1:
        return [model_config]
    scheme = model_config.quantization
    percent = _FORMAT_PERCENT.get(quantization or "", 100) if scheme is None else scheme.memory_percent
    # The KV cache of a layer is assumed to need as much memory as its weights.
    layers = [
        2 * layer_bytes(model_config, layer, _ELEMENT_BYTES) * percent // 100
        for layer in range(model_config.num_layers)
    ]
    all_layers = sum(layer_bytes(model_config, layer, _ELEMENT_BYTES) for layer in range(model_config.num_layers))
    outer = weights_bytes(model_config, _ELEMENT_BYTES) - all_layers
    return [_stage(model_config, index, layers) for index, layers in enumerate(split_layers(layers, size, outer))]


def split_layers(layer_sizes: Sequence[int], num_stages: int, first_size: int = 0) -> list[range]:
    """Return the layers of each stage, which are adjacent. `first_size` is what stage 0 has besides its layers.

    The largest stage is as small as possible. The other stages are then as even as the order of the layers permits:
    what stage 0 leaves is split in the same way. There must be at least one layer for each stage.
    """
    ends, first, stages = [0, *accumulate(max(1, size) for size in layer_sizes)], 0, []
    for num_left in range(num_stages - 1, 0, -1):
        low, high = first + 1, len(layer_sizes) - num_left
        # A stage with more layers is larger, and leaves less. The best end is where the two become equal.
        while low < high:
            middle = (low + high) // 2
            if first_size + ends[middle] - ends[first] < _smallest_maximum(ends, middle, num_left):
                low = middle + 1
            else:
                high = middle
        before = low - 1
        if before > first and _smallest_maximum(ends, before, num_left) < first_size + ends[low] - ends[first]:
            low = before
        stages.append(range(first, low))
        first, first_size = low, 0
    return [*stages, range(first, len(layer_sizes))]


def _smallest_maximum(ends: Sequence[int], first: int, num_stages: int) -> int:
    """Return the size of the largest stage if the layers from `first` on are split as evenly as possible."""
    low, high = (ends[-1] - ends[first] - 1) // num_stages, ends[-1] - ends[first]
    while high - low > 1:
        middle = (low + high) // 2
        position, num_used = first, 0
        while position < len(ends) - 1 and num_used < num_stages:
            # A stage must leave a layer for each of the later ones; a smaller stage is always possible.
            position, num_used = bisect_right(ends, ends[position] + middle) - 1, num_used + 1
        low, high = (low, middle) if position == len(ends) - 1 else (middle, high)
    return high


def _stage(model_config: ModelConfig, index: int, layers: range) -> ModelConfig:
    stage = PipelineStage(index, layers.start, model_config.num_layers)
    return replace(model_config.with_layers(layers), stage=stage)
