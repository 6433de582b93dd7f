# SPDX-License-Identifier: Apache-2.0
"""The layers that model definitions are made of: holders of weights over quire_kernels, unaware of requests.

Plain classes, not torch modules: nothing here trains, moves or is saved, and calls are typed and cheap.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

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
    get_gated_op,
    linear,
    pack_weight,
    paged_attention,
    rms_norm,
    rope_and_cache,
)
from quire_spec.model.memory_sizing import linear_sizes
from quire_spec.model.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class ParamFactory:
    """Type and place of a model's parameters."""

    dtype: torch.dtype
    device: torch.device
    communicator: Communicator | None = None
    """Those that share the layers; None: there is one. Shapes of layers are the rank's own."""

    def empty(self, *size: int) -> Tensor:
        """A parameter that is allocated and not filled."""
        return torch.empty(size, dtype=self.dtype, device=self.device)


@dataclass(frozen=True, slots=True)
class LinearShard:
    """What a rank holds of a linear in the checkpoint."""

    shape: tuple[int, int]
    """Output and input features there."""
    rows: tuple[range, ...]
    columns: range


class Linear:
    """A linear layer, or several with the same input merged into one product: q, k, v or gate, up.

    Slices keep their Hugging Face names, by which the checkpoint's tensors and adapters find them.
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
        """`weight`: one that is there already, of a tied projection; `splits`: of the slices that the rank has not
        all of."""
        self.in_features = in_features
        self.slices = dict(slices)
        self.shards = dict(shards)
        out_features = sum(slices.values())
        self.weight = factory.empty(out_features, in_features) if weight is None else weight
        self.bias = factory.empty(out_features) if bias else None
        self.adapters: ModuleSlots | None = None

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, in_features] to [num_tokens, out_features of all slices], adapters of the batch included; with a
        residual stream, added to it in place."""
        if batch.adapters is None or self.adapters is None or not self.adapters.applies_to(batch.adapters):
            return linear(x, self.weight, self.bias, residual)
        return adapted_linear(x, self.weight, self.bias, residual, self.adapters, batch.adapters)

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The checkpoint's tensors under `prefix`, each as the rows of the merged parameter that it fills."""
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
        """Lay the loaded weight out for speed; it cannot be read or written any more."""
        self.weight = pack_weight(self.weight, arena)

    def weights(self) -> LinearWeights:
        """What it computes with, once it is packed."""
        return LinearWeights(self.weight, self.bias, self.adapters)


class RowParallelLinear(Linear):
    """A linear of whose input each rank has a part: what the ranks make of theirs is added up."""

    def __init__(self, communicator: Communicator, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._communicator = communicator

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """See Linear."""
        if batch.adapters is None or self.adapters is None or not self.adapters.applies_to(batch.adapters):
            out = linear(x, self.weight, None)
        else:
            # B is linear: the ranks' deltas, each of its part of A x, add up too.
            out = adapted_linear(x, self.weight, None, None, self.adapters, batch.adapters)
        self._communicator.all_reduce(out)
        if self.bias is not None:
            out.add_(self.bias)
        return out if residual is None else residual.add_(out)


def build_linear(shape: ModelConfig, paths: Sequence[str], factory: ParamFactory, bias: bool) -> Linear:
    """A layer's linear, or several with the same input as one, by their paths in the layer; `shape` is the rank's."""
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


class RMSNorm:
    """Root-mean-square normalisation with a learnt scale."""

    def __init__(self, size: int, eps: float, factory: ParamFactory) -> None:
        self.eps = eps
        self.weight = factory.empty(size)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., size] to the same."""
        return rms_norm(x, self.weight, self.eps)

    def tensors(self, name: str) -> Iterator[tuple[str, LoadTarget]]:
        """The checkpoint's tensors of the module `name`."""
        yield f"{name}.weight", self.weight


class Attention:
    """Grouped-query attention over the paged cache. Families vary it by subclasses: how positions come in, the names of
    its linears, and `project`."""

    QKV: ClassVar[tuple[str, ...]] = ("q_proj", "k_proj", "v_proj")
    """The linears that make queries, keys and values; one where a checkpoint has them fused."""
    OUTPUT: ClassVar[str] = "o_proj"

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        self.num_heads = shape.num_heads
        self.num_rotated = shape.num_heads + shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.scale = shape.attention_scale
        self.window = shape.sliding_windows[index]
        self.softcap = shape.attention_softcap
        self.qkv_proj = build_linear(shape, [f"self_attn.{name}" for name in self.QKV], factory, shape.attention_bias)
        self.o_proj = build_linear(shape, [f"self_attn.{self.OUTPUT}"], factory, shape.output_bias)

    def project_qkv(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """[num_tokens, hidden_size] to queries, keys and values, [num_tokens, all heads of them, head_dim]."""
        return self.qkv_proj(x, batch).view(x.shape[0], -1, self.head_dim)

    def attend(self, queries: Tensor, kv_cache: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, num_heads, head_dim] to [num_tokens, hidden_size], or that added to a residual stream."""
        attention_output = paged_attention(queries, kv_cache, batch.attention, self.scale, self.window, self.softcap)
        return self.o_proj(attention_output.view(queries.shape[0], -1), batch, residual)

    def linears(self) -> tuple[Linear, ...]:
        """The linears that adapters can change."""
        return (self.qkv_proj, self.o_proj)

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The checkpoint's tensors under `prefix`."""
        for module in self.linears():
            yield from module.tensors(prefix)


class RotaryAttention(Attention):
    """Attention with rotary positions."""

    def __call__(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        batch: ForwardBatch,
        residual: Tensor | None = None,
    ) -> Tensor:
        """[num_tokens, hidden_size] to the same, or that added to a residual stream; writes the tokens' keys and values
        to `cache`, one layer's."""
        qkv = self.project_qkv(x, batch)
        queries = rope_and_cache(qkv, *rope, kv_cache, batch.addresses, self.num_heads)
        return self.attend(queries, kv_cache, batch, residual)


class MLP:
    """Gated feed-forward layer. Families vary the names of its linears."""

    GATE_UP: ClassVar[tuple[str, ...]] = ("gate_proj", "up_proj")
    """One name where a checkpoint has them fused."""

    def __init__(self, shape: ModelConfig, factory: ParamFactory) -> None:
        self.gate_up_proj = build_linear(shape, [f"mlp.{name}" for name in self.GATE_UP], factory, shape.mlp_bias)
        self.down_proj = build_linear(shape, ["mlp.down_proj"], factory, shape.mlp_bias)
        self.activate = get_gated_op(shape.activation)

    def __call__(self, x: Tensor, batch: ForwardBatch, residual: Tensor | None = None) -> Tensor:
        """[num_tokens, hidden_size] to the same, or that added to a residual stream."""
        return self.down_proj(self.activate(self.gate_up_proj(x, batch)), batch, residual)

    def linears(self) -> tuple[Linear, ...]:
        """The linears that adapters can change."""
        return (self.gate_up_proj, self.down_proj)

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """The checkpoint's tensors under `prefix`."""
        for module in self.linears():
            yield from module.tensors(prefix)
