# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts in place of an MLP."""

import functools
import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import ClassVar

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.linear import AdapterSite, Linear, ParamFactory, build_linear
from quire_engine.models.layers.mlp import MLP, UngatedMLP
from quire_engine.models.layers.module import Module
from quire_engine.models.layers.router import Router
from quire_engine.weights.param_shard import LoadTarget, ParamShard, unsharded
from quire_engine.weights.quantized.packing import WeightPart, dequantize_experts, pack_quantized_experts
from quire_engine.weights.quantized.quantized_tensor import QuantizedTensor
from quire_kernels import (
    GROUP_SIZE,
    ExpertAdapters,
    ExpertWeights,
    HugePageArena,
    LinearWeight,
    converts_fp8,
    fused_experts,
    pack_experts,
    quantize_experts,
    supports_int4,
    weight_bytes,
)
from quire_spec.errors import ConfigError
from quire_spec.model.memory_sizing import expert_sizes
from quire_spec.model.model_config import ModelConfig

logger = logging.getLogger(__name__)


class MoE(Module):
    """A router chooses experts for each token, and the output is the weighted sum of the experts' outputs.

    Each expert is an MLP, in most architectures a gated one. With tensor parallelism, every expert is divided among the
    ranks: each rank has a part of the expert's intermediate features. Many checkpoints store one tensor for each
    projection of each expert; `ExpertNames` contains the names of these tensors. In some architectures, shared experts
    also compute every token. In some, linear layers before and after the experts change the number of features.
    """

    HAS_ROUTER_BIAS: ClassVar[bool] = False
    ROUTER: ClassVar[type[Router]] = Router

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        """Allocate the parameters.

        Args:
            shape: the configuration of this rank's shard.
            factory: allocates the parameters.

        Raises:
            ConfigError: the experts cannot be quantized as `factory` requires.
        """
        assert shape.moe is not None
        self.config, inner = shape.moe, shape.moe.intermediate_size
        hidden = shape.moe.latent_size or shape.hidden_size
        self.names = shape.architecture_info.expert_names
        _check_quantization(factory, hidden, inner)
        self.router = self.ROUTER(shape, factory, self.HAS_ROUTER_BIAS)
        num_inputs = 2 if self.names.is_gated else 1
        self.expert_sites = tuple(
            AdapterSite(d_in, {name: d_out}, self.config.num_experts)
            for name, (d_in, d_out) in expert_sizes(shape).items()
        )
        """gate_up and down."""
        self.experts = ExpertWeights(
            gate_up=factory.empty_weight(self.config.num_experts, num_inputs * inner, hidden),
            down=factory.empty_weight(self.config.num_experts, hidden, inner),
            gate_up_bias=None,
            down_bias=None,
            activation=shape.activation,
            is_gated=self.names.is_gated,
        )
        self.latent_in: Linear | None = None
        self.latent_out: Linear | None = None
        if shape.moe.latent_size:
            paths = [f"{self.names.module}.{name}" for name in self.names.latent_projections]
            self.latent_in, self.latent_out = (build_linear(shape, [path], factory, shape.mlp_bias) for path in paths)
        self.shared: SharedExperts | None = None
        if self.names.shared and self.config.shared_intermediate_size:
            self.shared = SharedExperts(shape, factory)
        self.communicator = factory.communicator
        self._factory = factory
        self._quantized_parts: tuple[list[WeightPart], list[WeightPart]] | None = None
        """The quantized parts of `gate_up`, and those of `down`. None unless `pack` reads them from the checkpoint."""

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """Compute the output for the input [num_tokens, hidden_size]. If `residual` is given, add the output to it in
        place."""
        ids, weights = self.router(x, batch)
        shared = None if self.shared is None else self.shared(x, batch)
        if self.latent_in is None or self.latent_out is None:
            out = self._compute_experts(x, ids, weights, batch, residual)
        else:
            out = self._compute_experts(self.latent_in(x, batch), ids, weights, batch, None)
            out = self.latent_out(out, batch, residual)
        return out if shared is None else out.add_(shared)

    def _compute_experts(
        self, x: Tensor, ids: Tensor, weights: Tensor, batch: ForwardBatch, residual: Tensor | None
    ) -> Tensor:
        """Return the weighted sum of the outputs of all ranks. If `residual` is given, add the sum to it in place."""
        adapters = self._expert_adapters(batch)
        if self.communicator is None:
            return fused_experts(x, ids, weights, self.experts, residual, adapters)
        # Only rank 0 adds the output bias.
        experts = replace(self.experts, down_bias=None) if self.communicator.shard.rank else self.experts
        out = self.communicator.all_reduce(fused_experts(x, ids, weights, experts, None, adapters))
        return out if residual is None else residual.add_(out)

    def adapter_sites(self) -> Iterator[Linear | AdapterSite]:
        """See Module.adapter_sites."""
        yield from self.router.adapter_sites()
        yield from self.expert_sites
        yield from (linear for linear in (self.latent_in, self.latent_out) if linear is not None)
        if self.shared is not None:
            yield from self.shared.adapter_sites()

    def _expert_adapters(self, batch: ForwardBatch) -> ExpertAdapters | None:
        """Return the adapters of the batch, or None if none of them may change the experts."""
        gate_up, down = (site.adapters for site in self.expert_sites)
        if gate_up is None or down is None or batch.adapters is None:
            return None
        is_adapted = any(site.applies_to(batch) for site in self.expert_sites)
        return ExpertAdapters(gate_up, down, batch.adapters) if is_adapted else None

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See Module.tensors."""
        prefix = prefix.removesuffix(self.names.path_of("")) + (f"{self.names.block}." if self.names.block else "")
        yield from self.router.tensors(prefix)
        yield from self.bias_tensors(prefix)
        for linear in (self.latent_in, self.latent_out):
            if linear is not None:
                yield from linear.tensors(prefix)
        if self.shared is not None:
            yield from self.shared.tensors(prefix)
        assert isinstance(self.experts.gate_up, Tensor) and isinstance(self.experts.down, Tensor)
        reads_checkpoint = self._factory.checkpoint is not None and self.experts.gate_up.is_meta
        if reads_checkpoint and self._quantized_parts is None:
            self._quantized_parts = self._find_quantized_parts(prefix)
            if self._quantized_parts is None:
                shapes = self.experts.gate_up.shape, self.experts.down.shape
                gate_up, down = (self._factory.empty(*shape) for shape in shapes)
                self.experts = replace(self.experts, gate_up=gate_up, down=down)
        if self._quantized_parts is None:
            yield from self.gate_up_tensors(prefix)
            yield from self.down_tensors(prefix)

    def bias_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the tensors that fill the biases of the experts; `prefix` is the prefix of this module's tensors."""
        yield from ()

    def gate_up_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the checkpoint tensors that fill `experts.gate_up`, in the order of the rows that they fill."""
        assert isinstance(self.experts.gate_up, Tensor) and self.names.projections is not None
        for expert, gate_up in enumerate(self.experts.gate_up):
            *names, _ = self.names.projections
            for name, weight in zip(names, gate_up.chunk(len(names)), strict=True):
                yield f"{prefix}experts.{expert}.{name}.weight", self._shard(weight, is_down=False)

    def down_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """Yield the checkpoint tensors that fill `experts.down`, in the order of the rows that they fill."""
        assert isinstance(self.experts.down, Tensor) and self.names.projections is not None
        for expert, down in enumerate(self.experts.down):
            yield f"{prefix}experts.{expert}.{self.names.projections[-1]}.weight", self._shard(down, is_down=True)

    def pack(self, arena: HugePageArena) -> None:
        """See Module.pack.

        Experts that are quantized in the checkpoint stay quantized if a kernel supports them; otherwise, they are
        dequantized. If the configuration requires it, all other experts are quantized, see `quantize_experts`.
        """
        self.router.pack(arena)
        for part in (self.latent_in, self.latent_out, self.shared):
            if part is not None:
                part.pack(arena)
        factory = self._factory
        if self._quantized_parts is None:
            self.experts = (
                pack_experts(self.experts, arena)
                if factory.quantization is None
                else quantize_experts(self.experts, factory.quantization, arena)
            )
            return
        kind, all_parts = (factory.dtype, factory.device), self._quantized_parts
        gate_up, down = (pack_quantized_experts(parts, self.experts, *kind, arena) for parts in all_parts)
        if gate_up is not None and down is not None:
            self.experts = replace(self.experts, gate_up=gate_up, down=down)
        else:
            schemes = {f"{part.tensor.scheme.layout} per {part.tensor.scheme.strategy}" for part in chain(*all_parts)}
            _log_dequantization(f"no kernel multiplies with {', '.join(sorted(schemes))} of these sizes in this dtype")
            dense_gate_up, dense_down = (dequantize_experts(p, self.config.num_experts, *kind) for p in all_parts)
            self.experts = pack_experts(replace(self.experts, gate_up=dense_gate_up, down=dense_down), arena)
        # The parts are dropped, so that the files of the checkpoint are closed after the last layer.
        self._factory, self._quantized_parts = replace(factory, checkpoint=None), None

    @property
    def packed_bytes(self) -> int:
        """See Module.packed_bytes."""
        parts = self.router.packed_bytes + (0 if self.shared is None else self.shared.packed_bytes)
        parts += sum(linear.num_bytes for linear in (self.latent_in, self.latent_out) if linear is not None)
        return parts + sum(weight_bytes(weight) for weight in (self.experts.gate_up, self.experts.down))

    @property
    def unread_bytes(self) -> int:
        """See Module.unread_bytes."""
        weights = () if self._quantized_parts is None else (self.experts.gate_up, self.experts.down)
        parts = (self.latent_in, self.latent_out, self.shared)
        return sum(map(weight_bytes, weights)) + sum(part.unread_bytes for part in parts if part is not None)

    def _find_quantized_parts(self, prefix: str) -> tuple[list[WeightPart], list[WeightPart]] | None:
        """Return the quantized parts of gate_up and of down; None if a part is not quantized in the checkpoint.

        Raises:
            ConfigError: a shape differs from config.json.
        """
        checkpoint = self._factory.checkpoint
        assert checkpoint is not None
        num_missing = 0
        all_parts: tuple[list[WeightPart], list[WeightPart]] = ([], [])
        for parts, tensors in zip(all_parts, (self.gate_up_tensors(prefix), self.down_tensors(prefix)), strict=True):
            for name, target in tensors:
                shard, tensor = unsharded(target), checkpoint.find(checkpoint.files.name_in_file(name))
                if tensor is None:
                    num_missing += 1
                    continue
                if tensor.shape != shard.checkpoint_shape:
                    raise ConfigError(f"{name} has shape {tensor.shape}; config.json implies {shard.checkpoint_shape}")
                columns = range(tensor.shape[-1]) if shard.columns is None else shard.columns
                matrices = (tensor,) if isinstance(tensor, QuantizedTensor) else tensor.matrices
                num_rows = sum(map(len, shard.rows))
                parts += (WeightPart(matrix, shard.rows, columns, num_rows) for matrix in matrices)
        if num_missing and any(all_parts):
            _log_dequantization("some of them are not quantized")
        return None if num_missing else all_parts

    def _shard(self, weight: Tensor, *, is_down: bool) -> LoadTarget:
        """Return which part of the checkpoint's projection fills `weight` on this rank."""
        if self.communicator is None:
            return weight
        shard = self.communicator.shard
        assert shard.model_config.moe is not None
        hidden = self.config.latent_size or shard.model_config.hidden_size
        inner = shard.model_config.moe.intermediate_size
        if is_down:
            return ParamShard(weight, (hidden, inner), (range(hidden),), shard.expert_range)
        return ParamShard(weight, (inner, hidden), (shard.expert_range,))


class StackedMoE(MoE):
    """Experts whose weights are one tensor for gate and up, and one for down. Up features follow gate features."""

    GATE_UP: ClassVar[str] = "experts.gate_up_proj"
    DOWN: ClassVar[str] = "experts.down_proj"

    def gate_up_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See MoE.gate_up_tensors."""
        yield f"{prefix}{self.GATE_UP}", self._matrices(self.experts.gate_up, is_down=False)

    def down_tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See MoE.down_tensors."""
        yield f"{prefix}{self.DOWN}", self._matrices(self.experts.down, is_down=True)

    def _matrices(self, weight: LinearWeight, *, is_down: bool) -> LoadTarget:
        """Return which part of the checkpoint's tensor fills `weight` on this rank."""
        assert isinstance(weight, Tensor)
        if self.communicator is None:
            return weight
        shard = self.communicator.shard
        part, hidden = shard.expert_range, self.experts.hidden_size
        inner = shard.size * len(part)
        if is_down:
            return ParamShard(weight, (len(weight), hidden, inner), (range(hidden),), part)
        rows = part, range(inner + part.start, inner + part.stop)
        return ParamShard(weight, (len(weight), 2 * inner, hidden), rows)


class SharedExperts(Module):
    """Experts that compute every token. They are one MLP, which is gated if the other experts are gated. In some
    architectures, its output is multiplied by the sigmoid of a linear layer."""

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        names = shape.architecture_info.expert_names
        path = f"{names.module}.{names.shared}"
        self.mlp = MLP(shape, factory, path=path) if names.is_gated else UngatedMLP(shape, factory, path)
        self.gate = (
            build_linear(shape, [f"{names.module}.{names.shared_gate}"], factory, False) if names.shared_gate else None
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """Compute the output for the input [num_tokens, hidden_size]."""
        out = self.mlp(x, batch)
        return out if self.gate is None else out.mul_(self.gate(x, batch).sigmoid())

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See Module.tensors. `prefix` is the prefix of the mixture, because the names of the linear layers contain the
        path of the shared experts."""
        yield from self.mlp.tensors(prefix)
        if self.gate is not None:
            yield from self.gate.tensors(prefix)


def _check_quantization(factory: ParamFactory, hidden_size: int, intermediate_size: int) -> None:
    if factory.quantization == "fp8" and not converts_fp8(factory.device):
        raise ConfigError(
            "quantization: 'fp8' is possible for experts only on a GPU of compute capability 8.9 or higher; "
            "use int8 or int4"
        )
    sizes = hidden_size, intermediate_size
    if factory.quantization == "int4" and not all(supports_int4(size, GROUP_SIZE) for size in sizes):
        num_ranks = 1 if factory.communicator is None else factory.communicator.shard.size
        raise ConfigError(
            f"quantization: 'int4' needs a multiple of {GROUP_SIZE} input features in every projection, but the "
            f"experts have {hidden_size} and {intermediate_size} on each of {num_ranks} tensor-parallel ranks; use "
            "int8 or fp8, or a smaller tensor_parallel_size"
        )


@functools.cache
def _log_dequantization(reason: str) -> None:
    """Log why experts are dequantized, but only once, not for every layer."""
    logger.info("experts dequantized reason=%r", reason)
