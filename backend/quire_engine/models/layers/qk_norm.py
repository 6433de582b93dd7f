# SPDX-License-Identifier: Apache-2.0
"""Attention layers that normalize queries and keys."""

from collections.abc import Iterator
from types import MappingProxyType

from torch import Tensor

from quire_engine.models.forward_batch import ForwardBatch
from quire_engine.models.layers.attention import RotaryAttention
from quire_engine.models.layers.linear import ParamFactory
from quire_engine.models.layers.norm import RMSNorm
from quire_engine.weights.param_shard import LoadTarget, ParamShard
from quire_kernels import apply_rope, qk_norm, write_kv
from quire_spec.model.model_config import ModelConfig


class HeadNormAttention(RotaryAttention):
    """Attention that normalizes the queries and keys of each head before it rotates them."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps, factory)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps, factory)

    def project_qkv(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See Attention.project_qkv."""
        return normalize_heads(super().project_qkv(x, batch), self.q_norm, self.k_norm, self.num_heads, batch)

    @property
    def is_fusable(self) -> bool:
        """See RotaryAttention.is_fusable."""
        return type(self).project_qkv is HeadNormAttention.project_qkv


class RotatedHeadNormAttention(RotaryAttention):
    """Attention that normalizes the queries and keys of each head after it has rotated them."""

    NAMES = MappingProxyType({"q_norm": "query_layernorm", "k_norm": "key_layernorm"})

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.q_norm = RMSNorm(shape.head_dim, shape.norm_eps, factory)
        self.k_norm = RMSNorm(shape.head_dim, shape.norm_eps, factory)

    def __call__(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        kv_cache: Tensor,
        batch: ForwardBatch,
        residual: Tensor | None = None,
    ) -> Tensor:
        """See RotaryAttention."""
        qkv = self.project_qkv(x, batch)
        rotated = apply_rope(qkv[:, : self.num_rotated], *rope)
        queries, keys = rotated[:, : self.num_heads], rotated[:, self.num_heads :]
        write_kv(self.k_norm(keys, batch), qkv[:, self.num_rotated :], kv_cache, batch.addresses)
        return self.attend(self.q_norm(queries, batch), kv_cache, batch, residual)


class AllHeadsNormAttention(RotaryAttention):
    """Attention that normalizes the queries of all heads together, and the keys of all heads together, before it
    rotates them."""

    def __init__(self, shape: ModelConfig, index: int, factory: ParamFactory) -> None:
        super().__init__(shape, index, factory)
        self.q_norm = RMSNorm(shape.num_heads * shape.head_dim, shape.norm_eps, factory)
        self.k_norm = RMSNorm(shape.num_kv_heads * shape.head_dim, shape.norm_eps, factory)
        self.communicator = factory.communicator

    def project_qkv(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """See Attention.project_qkv."""
        qkv = super().project_qkv(x, batch)
        heads = slice(self.num_heads), slice(self.num_heads, self.num_rotated)
        for norm, part in zip((self.q_norm, self.k_norm), heads, strict=True):
            flat = qkv[:, part].flatten(1)
            normalized = norm(flat, batch) if self.communicator is None else self._normalize_shard(flat, norm)
            qkv[:, part] = normalized.view(qkv[:, part].shape)
        return qkv

    def _normalize_shard(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Normalize the heads of this rank with the mean square of the heads of all ranks. If several ranks have a copy
        of the same head, all heads have the same number of copies, which does not change the mean."""
        assert self.communicator is not None
        x_float = x.float()
        sums = self.communicator.all_reduce(x_float.square().sum(-1, keepdim=True))
        mean = sums / (x.shape[-1] * self.communicator.shard.size)
        return (x_float * (mean + norm.eps).rsqrt() * norm.weight.float()).to(x.dtype)

    def tensors(self, prefix: str) -> Iterator[tuple[str, LoadTarget]]:
        """See Module.tensors."""
        shards = {} if self.communicator is None else {id(self.q_norm.weight): "q", id(self.k_norm.weight): "kv"}
        for name, target in super().tensors(prefix):
            if isinstance(target, Tensor) and id(target) in shards:
                assert self.communicator is not None
                shard, is_query = self.communicator.shard, shards[id(target)] == "q"
                rows = shard.output_ranges(f"{self.PATH}.{self.QKV[0 if is_query else 1]}")
                config = shard.model_config
                num_heads = config.num_heads if is_query else config.num_kv_heads
                yield name, ParamShard(target, (num_heads * config.head_dim,), rows)
            else:
                yield name, target


def normalize_heads(qkv: Tensor, q_norm: RMSNorm, k_norm: RMSNorm, num_heads: int, batch: ForwardBatch) -> Tensor:
    """Normalize the queries and keys of each head in place, and return `qkv`, [num_tokens, all heads, head_dim]."""
    replaced = [norm for norm in (q_norm, k_norm) if norm.is_replaced(batch)]
    inputs = qkv.clone() if replaced else qkv
    qk_norm(qkv, q_norm.weight, k_norm.weight, num_heads, q_norm.eps)
    num_rotated = (qkv.shape[1] + num_heads) // 2
    for norm in replaced:
        heads = slice(num_heads) if norm is q_norm else slice(num_heads, num_rotated)
        norm.replace_rows(qkv[:, heads], inputs[:, heads], batch)
    return qkv
