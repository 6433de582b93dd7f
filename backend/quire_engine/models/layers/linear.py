# SPDX-License-Identifier: Apache-2.0
"""Linear layers with merged outputs, LoRA adapter slots and tensor-parallel shards.

The classes of `models/layers` hold weights and call `quire_kernels`. They know no requests. They are plain classes and
not torch modules, because nothing is trained, moved or saved; so calls are typed and cheap.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from quire_engine.distributed.communicator import Communicator
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.weights.param_shard import LoadTarget, ParamShard
from quire_kernels import (
    HugePageArena,
    LinearWeights,
    ModuleSlots,
    adapted_linear,
    linear,
    pack_weight,
    pack_weight_int8,
    quantize_int8,
    supports_int8,
)
from quire_spec.model.memory_sizing import linear_sizes
from quire_spec.model.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ParamFactory:
    """Allocates parameters with the dtype and device of a model."""

    dtype: torch.dtype
    device: torch.device
    communicator: Communicator | None = None
    """Connects the tensor-parallel ranks; None if there is one. Layer sizes are those of this rank's shard."""
    quantization: str | None = None
    """See EngineConfig."""

    def empty(self, *size: int) -> Tensor:
        """Return an uninitialized parameter."""
        return torch.empty(size, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class LinearShard:
    """The part of a checkpoint's linear layer that a rank contains."""

    shape: tuple[int, int]
    """Output and input features in the checkpoint."""
    rows: tuple[range, ...]
    columns: range


class Linear:
    """A linear layer, or several with the same input merged into one: q, k, v or gate, up.

    Slices keep their Hugging Face names, which the tensors of checkpoints and adapters refer to.
    """

    def __init__(
        self,
        in_features: int,
        slices: Mapping[str, int],
        factory: ParamFactory,
        bias: bool = False,
        weight: Tensor | None = None,
        shards: Mapping[str, LinearShard] = MappingProxyType({}),
    ) -> None:
        """Allocate the weight.

        Args:
            in_features: input features of all slices.
            slices: output features by name.
            factory: allocates the parameters.
            bias: whether there is a bias.
            weight: an existing weight, for a tied output projection; None allocates one.
            shards: of the slices that this rank contains only in part.
        """
        self.in_features = in_features
        self.slices = dict(slices)
        self.shards = dict(shards)
        out_features = sum(slices.values())
        self.weight = factory.empty(out_features, in_features) if weight is None else weight
        self.bias = factory.empty(out_features) if bias else None
        self.adapters: ModuleSlots | None = None
        self._quantization = factory.quantization

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """Map [num_tokens, in_features] to [num_tokens, out_features of all slices], including the batch's adapters. If
        `residual` is given, add the result to it in place."""
        if batch.adapters is None or self.adapters is None or not self.adapters.applies_to(batch.adapters):
            return linear(x, self.weight, self.bias, residual)
        return adapted_linear(x, self.weight, self.bias, residual, self.adapters, batch.adapters)

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the checkpoint tensors under `prefix`, each with the rows of the merged parameter that it fills."""
        start = 0
        for name, width in self.slices.items():
            end, shard = start + width, self.shards.get(name)
            weight, bias = self.weight[start:end], None if self.bias is None else self.bias[start:end]
            if shard is None:
                yield f"{prefix}{name}.weight", weight
                if bias is not None:
                    yield f"{prefix}{name}.bias", bias
            else:
                num_rows = sum(map(len, shard.rows))
                yield f"{prefix}{name}.weight", ParamShard(weight[:num_rows], shard.shape, shard.rows, shard.columns)
                if bias is not None:
                    yield f"{prefix}{name}.bias", ParamShard(bias[:num_rows], shard.shape[:1], shard.rows)
            start = end

    def pack(self, arena: HugePageArena) -> None:
        """Repack the loaded weight for speed, quantized if the model is; it must not be read or written afterwards. A
        weight whose shape has no int8 kernel is not quantized."""
        if self._quantization == "int8" and supports_int8(self.weight):
            self.weight = pack_weight_int8(*quantize_int8(self.weight), arena)
        else:
            self.weight = pack_weight(self.weight, arena)

    def weights(self) -> LinearWeights:
        """Return the packed weights for a fused decoder."""
        return LinearWeights(self.weight, self.bias, self.adapters)


class RowParallelLinear(Linear):
    """A linear layer whose input features are divided among the ranks; the partial results are summed."""

    def __init__(self, communicator: Communicator, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._communicator = communicator

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """See Linear."""
        if batch.adapters is None or self.adapters is None or not self.adapters.applies_to(batch.adapters):
            out = linear(x, self.weight, None)
        else:
            # The adapter's B is linear, so the deltas of the ranks, each from its part of A x, are summed as well.
            out = adapted_linear(x, self.weight, None, None, self.adapters, batch.adapters)
        self._communicator.all_reduce(out)
        if self.bias is not None:
            out.add_(self.bias)
        return out if residual is None else residual.add_(out)


def build_linear(shape: ModelConfig, paths: Sequence[str], factory: ParamFactory, bias: bool) -> Linear:
    """Build one linear layer from the given paths in a decoder layer, merged if several; `shape` is the rank's."""
    sizes = linear_sizes(shape)
    in_features = sizes[paths[0]][0]
    slices = {_last_component(path): sizes[path][1] for path in paths}
    if factory.communicator is None:
        return Linear(in_features, slices, factory, bias)
    shard = factory.communicator.shard
    full_sizes = linear_sizes(shard.model_config)
    shards = {}
    for path in paths:
        (columns,) = shard.input_ranges(path)
        d_in, d_out = full_sizes[path]
        shards[_last_component(path)] = LinearShard((d_out, d_in), shard.output_ranges(path), columns)
    if shard.needs_all_reduce(paths[0]):
        return RowParallelLinear(factory.communicator, in_features, slices, factory, bias, shards=shards)
    return Linear(in_features, slices, factory, bias, shards=shards)


def _last_component(path: str) -> str:
    return path.rpartition(".")[2]
