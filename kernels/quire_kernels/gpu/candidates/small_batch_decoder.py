# SPDX-License-Identifier: Apache-2.0
"""Decoder layers for small numbers of tokens on a GPU.

Each layer takes six launches instead of ten. Each launch requests its weights before the previous kernel has ended.

This decoder is used only if QUIRE_KERNELS selects `rms_norm_linear=small`, because its effect has not been measured.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from quire_kernels.attention import AttentionMetadata, paged_attention
from quire_kernels.fused_decoder import AttentionShape, LayerWeights
from quire_kernels.gpu.candidates.norm_linear import rms_norm_linear
from quire_kernels.linear import linear
from quire_kernels.norm import qk_norm
from quire_kernels.rope import rope_and_cache

SMALL_BATCH_TOKENS = 8
"""Maximum number of tokens in a step.

A tile has room for 16 rows. However, with more than 8 tokens, the matrix product of the library is as fast, and the
norm is a smaller part of the time (estimated).
"""


class SmallBatchDecoder:
    """Decoder layers whose weights are not quantized. `build_small_batch_decoder` builds them."""

    def __init__(self, layers: Sequence[LayerWeights], heads: AttentionShape, eps: float) -> None:
        self._layers, self._heads, self._eps = tuple(layers), heads, eps

    def __call__(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        caches: Sequence[Tensor],
        addresses: Tensor,
        attention: AttentionMetadata,
    ) -> Tensor:
        """Run all layers, without adapters. `FusedDecoder` describes the arguments. The result is `hidden`, which is
        changed in place.
        """
        heads, eps = self._heads, self._eps
        for layer, cache in zip(self._layers, caches, strict=True):
            qkv = rms_norm_linear(hidden, layer.attention_norm, eps, layer.qkv.weight, layer.qkv.bias)
            qkv = qkv.view(len(hidden), -1, heads.head_dim)
            if layer.query_norm is not None and layer.key_norm is not None:
                qk_norm(qkv, layer.query_norm, layer.key_norm, heads.num_heads, eps)
            queries = rope_and_cache(qkv, *rope, cache, addresses, heads.num_heads)
            outputs = paged_attention(queries, cache, attention, heads.scale, layer.window, heads.softcap)
            linear(outputs.view(len(hidden), -1), layer.output.weight, layer.output.bias, hidden)
            gated = rms_norm_linear(hidden, layer.mlp_norm, eps, layer.gate_up.weight, layer.gate_up.bias, True)
            linear(gated, layer.down.weight, layer.down.bias, hidden)
        return hidden


def build_small_batch_decoder(
    layers: Sequence[LayerWeights], heads: AttentionShape, eps: float
) -> SmallBatchDecoder | None:
    """Return the layers, or None if they cannot be used.

    They can be used if QUIRE_KERNELS selects their kernel for the device, and if all weights are plain bfloat16 or
    float32. float16 is not supported: the inputs are multiplied before they are normalised, and float16 does not have
    enough range for that.
    """
    weights = [product.weight for layer in layers for product in layer.linears()]
    is_plain = all(
        isinstance(weight, Tensor) and weight.dim() == 2 and weight.dtype in (torch.bfloat16, torch.float32)
        for weight in weights
    )
    if not is_plain or rms_norm_linear.preferred(layers[0].attention_norm.device.type) != "small":
        return None
    return SmallBatchDecoder(layers, heads, eps)
