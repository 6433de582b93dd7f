# SPDX-License-Identifier: Apache-2.0
"""Linear layers with merged outputs, LoRA adapter slots and tensor-parallel shards.

The classes of `models/layers` hold weights and call `quire_kernels`. The classes do not depend on requests. These are
plain classes, not torch modules: weights are not trained, moved or saved, and calls are typed and cheap.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire_engine.distributed.communicator import Communicator
from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.weights.param_shard import LoadTarget, ParamShard
from quire_engine.weights.quantized.packing import WeightPart, pack_quantized
from quire_engine.weights.quantized.quantized_tensors import QuantizedTensors
from quire_kernels import (
    GROUP_SIZE,
    HugePageArena,
    LinearWeight,
    LinearWeights,
    ModuleSlots,
    QuantizedWeight,
    adapted_linear,
    add_adapters,
    linear,
    pack_weight,
    quantize_weight,
    supports_int4,
    weight_bytes,
)
from quire_spec.errors import ConfigError
from quire_spec.model.architectures import module_name
from quire_spec.model.memory_sizing import linear_sizes
from quire_spec.model.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ParamFactory:
    """Allocates parameters with the dtype and device of a model."""

    dtype: torch.dtype
    device: torch.device
    communicator: Communicator | None = None
    """Connects the tensor-parallel ranks; None if there is one rank. All sizes of layers refer to this rank's shard."""
    quantization: str | None = None
    """A value of EngineConfig.quantization, or int8_weight_only for the output projection of a model that is quantized
    to int4."""
    checkpoint: QuantizedTensors | None = None
    """Quantized tensors of the checkpoint; None if the checkpoint has none, or if all weights are dequantized when they
    are loaded.
    """

    def empty(self, *size: int) -> Tensor:
        """Return an uninitialized parameter."""
        return torch.empty(size, dtype=self.dtype, device=self.device)

    def empty_weight(self, *size: int) -> Tensor:
        """Return an uninitialized weight of a linear layer; it is on the meta device if the checkpoint may contain a
        quantized weight."""
        return self.empty(*size) if self.checkpoint is None else torch.empty(size, dtype=self.dtype, device="meta")


@dataclass(slots=True)
class AdapterSite:
    """A product that adapters can change, but that is not a `Linear`: a router, or a projection of all experts."""

    in_features: int
    slices: dict[str, int]
    """Number of output features, by the name of the module in adapters."""
    num_experts: int = 0
    """Number of experts that have weights of this size; 0 for a router."""
    adapters: ModuleSlots | None = None
    is_absorbed: ClassVar[bool] = False
    """See LoRATarget."""

    def applies_to(self, batch: ForwardBatch) -> bool:
        """Return whether an adapter of the batch may change the product."""
        return batch.adapters is not None and self.adapters is not None and self.adapters.applies_to(batch.adapters)


@dataclass(frozen=True, slots=True)
class LinearShard:
    """The part of a checkpoint's linear layer that a rank needs."""

    shape: tuple[int, int]
    """Number of output features and of input features in the checkpoint."""
    rows: tuple[range, ...]
    columns: range


class Linear:
    """A linear layer, or several layers that have the same input and are merged into one. For example, q, k and v are
    merged, and so are gate and up.

    Each slice keeps its Hugging Face name, because tensor names in checkpoints and adapters contain this name.
    """

    num_experts: ClassVar[int] = 0
    """See AdapterSite."""
    is_absorbed: ClassVar[bool] = False
    """See LoRATarget."""

    def __init__(
        self,
        in_features: int,
        slices: Mapping[str, int],
        factory: ParamFactory,
        bias: bool = False,
        weight: Tensor | None = None,
        shards: Mapping[str, LinearShard] = MappingProxyType({}),
        names: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Allocate the weight.

        Args:
            in_features: number of input features; all slices have the same input.
            slices: number of output features of each slice, by name.
            factory: allocates the parameters.
            bias: whether the layer has a bias.
            weight: an existing weight, for a tied output projection; None allocates one.
            shards: parts of slices, by name. This rank needs only the given part of such a slice, and the whole of
                every other slice.
            names: names of slices in the checkpoint, if these differ.
        """
        self.in_features = in_features
        self.slices = dict(slices)
        self.shards = dict(shards)
        self._names = {name: names.get(name, name) for name in slices}
        out_features = sum(slices.values())
        self.weight: LinearWeight = factory.empty_weight(out_features, in_features) if weight is None else weight
        self.input_order: Tensor | None = None
        """[in_features] int64: column i of a quantized weight multiplies input feature input_order[i]; None if the
        columns are not reordered.
        """
        self.bias = factory.empty(out_features) if bias else None
        self.adapters: ModuleSlots | None = None
        self._factory = factory
        self._quantization = factory.quantization
        self._quantized_parts: list[WeightPart] = []
        """Parts of the weight, if it is quantized in the checkpoint; `pack` reads them."""
        if self._quantization == "int4" and not supports_int4(in_features, GROUP_SIZE):
            raise ConfigError(
                f"quantization: 'int4' needs a multiple of {GROUP_SIZE} input features in every linear layer, but the "
                f"input of {', '.join(slices)} has {in_features} features on each of {_num_ranks(factory)} "
                "tensor-parallel ranks; use int8 or fp8, or a smaller tensor_parallel_size"
            )

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """Apply the layer and the batch's adapters to [num_tokens, in_features]; return [num_tokens, out_features of
        all slices]. If `residual` is given, add the output to it in place.
        """
        return self._multiply(x, batch, self.bias, residual)

    def _multiply(self, x: Tensor, batch: ForwardBatch, bias: Tensor | None, residual: Tensor | None) -> Tensor:
        if batch.adapters is None or self.adapters is None or not self.adapters.applies_to(batch.adapters):
            return linear(self._reorder(x), self.weight, bias, residual)
        if self.input_order is None:
            return adapted_linear(x, self.weight, bias, residual, self.adapters, batch.adapters)
        return add_adapters(x, self._reorder(x), self.weight, bias, residual, self.adapters, batch.adapters)

    def _reorder(self, x: Tensor) -> Tensor:
        return x if self.input_order is None else x[:, self.input_order]

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """Yield each checkpoint tensor under `prefix`, together with the rows of the merged parameter that the tensor
        fills."""
        start = 0
        assert isinstance(self.weight, Tensor)
        if self._factory.checkpoint is not None and self.weight.is_meta and not self._quantized_parts:
            self._quantized_parts = self._find_quantized_parts(prefix)
            if not self._quantized_parts:
                self.weight = self._factory.empty(*self.weight.shape)
        for slice_name, width in self.slices.items():
            end, shard, name = start + width, self.shards.get(slice_name), self._names[slice_name]
            weight, bias = self.weight[start:end], None if self.bias is None else self.bias[start:end]
            if shard is None:
                if not weight.is_meta:
                    yield f"{prefix}{name}.weight", weight
                if bias is not None:
                    yield f"{prefix}{name}.bias", bias
            else:
                num_rows = sum(map(len, shard.rows))
                if not weight.is_meta:
                    target = ParamShard(weight[:num_rows], shard.shape, shard.rows, shard.columns)
                    yield f"{prefix}{name}.weight", target
                if bias is not None:
                    yield f"{prefix}{name}.bias", ParamShard(bias[:num_rows], shard.shape[:1], shard.rows)
            start = end

    def pack(self, arena: HugePageArena) -> None:
        """Repack the loaded weight for speed, and quantize it if the model is quantized. The old weight must not be
        used afterwards. If the machine has kernels for quantized weights, but none of them supports the shape of a
        weight, this weight is not quantized.
        """
        if isinstance(self.weight, QuantizedWeight):
            return
        if self._quantized_parts:
            factory, parts = self._factory, self._quantized_parts
            self.weight, self.input_order = pack_quantized(parts, factory.dtype, factory.device, arena)
            # The parts are dropped, so that the files of the checkpoint are closed after the last layer.
            self._factory, self._quantized_parts = replace(factory, checkpoint=None), []
        elif self._quantization is None:
            self.weight = pack_weight(self.weight, arena)
        else:
            self.weight = quantize_weight(self.weight, self._quantization, arena)

    def _find_quantized_parts(self, prefix: str) -> list[WeightPart]:
        """Return the parts of a quantized weight; an empty list if the weight is not quantized in the checkpoint.

        Raises:
            ConfigError: only some parts are quantized, parts have different schemes, or a shape differs from
                config.json.
        """
        assert self._factory.checkpoint is not None
        parts: dict[str, WeightPart] = {}
        for name, width in self.slices.items():
            size = width, self.in_features
            shard = self.shards.get(name) or LinearShard(size, (range(width),), range(self.in_features))
            tensor = self._factory.checkpoint.find_linear(f"{prefix}{self._names[name]}")
            if tensor is not None:
                if tensor.shape != shard.shape:
                    raise ConfigError(f"{tensor.module} has shape {tensor.shape}; config.json implies {shard.shape}")
                parts[name] = WeightPart(tensor, shard.rows, shard.columns, width)
        schemes = {part.tensor.scheme for part in parts.values()}
        if parts and (len(parts) < len(self.slices) or len(schemes) > 1):
            found = ", ".join(f"{name} ({_describe(parts.get(name))})" for name in self.slices)
            raise ConfigError(
                f"config.json: quantization_config: parts of {prefix}* are computed together but have different "
                f"schemes ({found}); list all of these parts or none of them in 'ignore', and likewise in 'targets'"
            )
        return list(parts.values())

    def weights(self) -> LinearWeights:
        """Return the packed weights for a fused decoder."""
        return LinearWeights(self.weight, self.bias, self.adapters, self.input_order)

    @property
    def unread_bytes(self) -> int:
        """Bytes of the weight in the model's dtype, if `pack` reads this weight from the checkpoint. Otherwise 0."""
        return weight_bytes(self.weight) if self._quantized_parts else 0

    @property
    def num_bytes(self) -> int:
        """Bytes of weight and bias."""
        return weight_bytes(self.weight) + (0 if self.bias is None else self.bias.nbytes)


class RowParallelLinear(Linear):
    """A linear layer whose input features are divided among the ranks; the partial results are summed."""

    def __init__(self, communicator: Communicator, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._communicator = communicator

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """See Linear."""
        # Each rank adds B times its part of A x. LoRA's B is linear, so the sum of the ranks contains the whole output
        # of the adapter.
        out = self._multiply(x, batch, None, None)
        self._communicator.all_reduce(out)
        if self.bias is not None:
            out.add_(self.bias)
        return out if residual is None else residual.add_(out)


def build_linear(shape: ModelConfig, paths: Sequence[str], factory: ParamFactory, bias: bool, layer: int = 0) -> Linear:
    """Build one linear layer from the given paths in a decoder layer; several paths are merged into one layer. `shape`:
    this rank's shard. `layer` is needed only if layers differ in size.
    """
    sizes = linear_sizes(shape.for_layer(layer))
    in_features = sizes[paths[0]][0]
    slices = {module_name(path): sizes[path][1] for path in paths}
    names = {module_name(path): module_name(shape.architecture_info.checkpoint_path(path)) for path in paths}
    if factory.communicator is None:
        return Linear(in_features, slices, factory, bias, names=names)
    shard = factory.communicator.shard.for_layer(layer)
    full_sizes = linear_sizes(shard.model_config)
    shards = {}
    for path in paths:
        (columns,) = shard.input_ranges(path)
        d_in, d_out = full_sizes[path]
        shards[module_name(path)] = LinearShard((d_out, d_in), shard.output_ranges(path), columns)
    if shard.needs_all_reduce(paths[0]):
        return RowParallelLinear(factory.communicator, in_features, slices, factory, bias, shards=shards, names=names)
    return Linear(in_features, slices, factory, bias, shards=shards, names=names)


def _describe(part: WeightPart | None) -> str:
    return "not quantized" if part is None else f"{part.tensor.scheme.layout}, {part.tensor.scheme.strategy}"


def _num_ranks(factory: ParamFactory) -> int:
    return 1 if factory.communicator is None else factory.communicator.shard.size
