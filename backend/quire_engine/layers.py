# SPDX-License-Identifier: Apache-2.0
"""The layers that model definitions are made of: holders of weights over quire_kernels, unaware of requests.

Plain classes, not torch modules: nothing here trains, moves or is saved, and calls are typed and cheap.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.batch import Batch
from quire_engine.lora import SlotWeights
from quire_kernels import apply_rope, linear, pack_weight, paged_attention, rms_norm, silu_mul, write_kv
from quire_spec.shape import ModelShape


@dataclass(frozen=True, slots=True)
class Placement:
    """Type and place of a model's parameters."""

    dtype: torch.dtype
    device: torch.device

    def empty(self, *size: int) -> Tensor:
        """A parameter that is allocated and not filled."""
        return torch.empty(size, dtype=self.dtype, device=self.device)


class Linear:
    """A linear layer, or several with the same input merged into one product: q, k, v or gate, up.

    Slices keep their Hugging Face names, by which the checkpoint's tensors and adapters find them.
    """

    def __init__(self, in_features: int, slices: Mapping[str, int], place: Placement, bias: bool = False) -> None:
        self.in_features = in_features
        self.slices = dict(slices)
        out_features = sum(slices.values())
        self.weight = place.empty(out_features, in_features)
        self.bias = place.empty(out_features) if bias else None
        self.adapters: SlotWeights | None = None

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """[num_tokens, in_features] to [num_tokens, out_features of all slices], adapters of the batch included."""
        out = linear(x, self.weight, self.bias)
        if batch.adapters is not None and self.adapters is not None:
            self.adapters.add(out, x, batch.adapters)
        return out

    def tensors(self, prefix: str) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors under `prefix`, each as the rows of the merged parameter that it fills."""
        start = 0
        for name, width in self.slices.items():
            yield f"{prefix}{name}.weight", self.weight[start : start + width]
            if self.bias is not None:
                yield f"{prefix}{name}.bias", self.bias[start : start + width]
            start += width

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def pack(self) -> None:
        """Lay the loaded weight out for speed; it cannot be read or written any more."""
        self.weight = pack_weight(self.weight)


class RMSNorm:
    """Root-mean-square normalisation with a learnt scale."""

    def __init__(self, size: int, eps: float, place: Placement) -> None:
        self.eps = eps
        self.weight = place.empty(size)

    def __call__(self, x: Tensor) -> Tensor:
        """[num_tokens, size] to the same."""
        return rms_norm(x, self.weight, self.eps)


class Attention:
    """Grouped-query attention with rotary positions over the paged cache."""

    def __init__(self, shape: ModelShape, place: Placement) -> None:
        self.num_heads = shape.num_heads
        self.num_rotated = shape.num_heads + shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.scale = shape.head_dim**-0.5
        q, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        slices = {"q_proj": q, "k_proj": kv, "v_proj": kv}
        self.qkv_proj = Linear(shape.hidden_size, slices, place, bias=shape.attention_bias)
        self.o_proj = Linear(q, {"o_proj": shape.hidden_size}, place, bias=shape.output_bias)

    def __call__(self, x: Tensor, rope: tuple[Tensor, Tensor], cache: Tensor, batch: Batch) -> Tensor:
        """[num_tokens, hidden_size] to the same; writes the tokens' keys and values to `cache`, one layer's."""
        num_tokens = x.shape[0]
        qkv = self.qkv_proj(x, batch).view(num_tokens, -1, self.head_dim)
        # Queries and keys lie side by side, so that one call rotates both.
        rotated = apply_rope(qkv[:, : self.num_rotated], *rope)
        write_kv(rotated[:, self.num_heads :], qkv[:, self.num_rotated :], cache, batch.addresses)
        attended = paged_attention(rotated[:, : self.num_heads], cache, batch.attention, self.scale)
        return self.o_proj(attended.view(num_tokens, -1), batch)


class MLP:
    """Gated feed-forward layer."""

    def __init__(self, shape: ModelShape, place: Placement) -> None:
        slices = {"gate_proj": shape.intermediate_size, "up_proj": shape.intermediate_size}
        self.gate_up_proj = Linear(shape.hidden_size, slices, place, bias=shape.mlp_bias)
        self.down_proj = Linear(shape.intermediate_size, {"down_proj": shape.hidden_size}, place, bias=shape.mlp_bias)

    def __call__(self, x: Tensor, batch: Batch) -> Tensor:
        """[num_tokens, hidden_size] to the same."""
        return self.down_proj(silu_mul(self.gate_up_proj(x, batch)), batch)
