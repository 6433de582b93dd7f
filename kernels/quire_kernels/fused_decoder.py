# SPDX-License-Identifier: Apache-2.0
"""Compute all decoder layers of a step in one call.

This is possible if every operation of the layers has a compiled kernel.

On a Zen 5 core, a call from Python takes 14 us. A layer has 9 calls, so the calls take 3.8 ms per step for a 135M Llama
with 30 layers. A whole step takes 54 ms for 64 sequences, and 12 ms for one sequence.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quire_kernels import cpu_native, dispatch
from quire_kernels.attention import AttentionMetadata, reads_whole_blocks
from quire_kernels.kv_cache_layout import is_quantized
from quire_kernels.linear import LinearWeight, is_panel_packed
from quire_kernels.lora import LoRABatch
from quire_kernels.lora_slots import ModuleSlots
from quire_kernels.quantized_linear import PANEL_COLUMNS, QuantizedWeight

CHUNK_ROWS = 240
"""A layer computes this number of rows at a time. It is equal to kBlockRows of csrc/tile.h."""

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """Weights of a linear.

    `weight` was returned by `pack_weight` or by one of the functions `pack_weight_*`. The bias and the adapters are
    optional.
    """

    weight: LinearWeight
    bias: Tensor | None
    adapters: ModuleSlots | None
    input_order: Tensor | None = None
    """See `Linear`. None means that the inputs are in the order of the checkpoint."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Weights of a decoder layer.

    The layer consists of attention and of an MLP that is gated by silu. Each of the two has a norm before it and a
    residual connection around it.
    """

    attention_norm: Tensor
    """[hidden_size]."""
    qkv: LinearWeights
    query_norm: Tensor | None
    """[head_dim], see `qk_norm`. If this field and `key_norm` are None, queries and keys are not normalised."""
    key_norm: Tensor | None
    output: LinearWeights
    mlp_norm: Tensor
    """[hidden_size]."""
    gate_up: LinearWeights
    down: LinearWeights
    window: int | None
    """See `paged_attention`."""

    def linears(self) -> tuple[LinearWeights, ...]:
        """Return the linears of the layer."""
        return self.qkv, self.output, self.gate_up, self.down

    def norms(self) -> tuple[Tensor, ...]:
        """Return the weights of all norms that the layer has."""
        scales = (self.attention_norm, self.query_norm, self.key_norm, self.mlp_norm)
        return tuple(norm for norm in scales if norm is not None)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Shape of attention, and the scale of its scores; see `paged_attention`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None


class _Product(ctypes.Structure):
    """The C struct QuireProduct of csrc/decoder.cpp."""

    _fields_ = (("packed", _P), ("bias", _P), ("outputs", _N), ("format", _N), ("adapters", _P))


class _Layer(ctypes.Structure):
    """The C struct QuireLayer of csrc/decoder.cpp."""

    _fields_ = (
        ("attention_norm", _P),
        ("qkv", _Product),
        ("output", _Product),
        ("query_norm", _P),
        ("key_norm", _P),
        ("mlp_norm", _P),
        ("gate_up", _Product),
        ("down", _Product),
        ("window", _N),
    )


class _Layers(ctypes.Structure):
    """The C struct QuireLayers of csrc/decoder.cpp."""

    _fields_ = (
        ("layers", _P),
        *((name, _N) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, _F) for name in ("eps", "scale", "softcap")),
    )


class _Step(ctypes.Structure):
    """The C struct QuireStep of csrc/decoder.cpp."""

    _fields_ = (
        ("tokens", _N),
        ("cos", _P),
        ("sin", _P),
        ("rotary_dim", _N),
        ("addresses", _P),
        ("tables", _P),
        ("max_blocks", _N),
        ("starts", _P),
        ("contexts", _P),
        ("spans", _N),
        ("block_size", _N),
        ("rows", _P),
        ("is_int8", _N),
    )


class FusedDecoder:
    """A callable that computes decoder layers, which must all have the same shape. `build_fused_decoder` creates it."""

    def __init__(self, layers: Sequence[LayerWeights], heads: AttentionShape, eps: float) -> None:
        self._layers = tuple(layers)  # keeps the tensors alive that the C structs point to
        self._heads = heads
        hidden = len(layers[0].attention_norm)
        gate_up = max(_out_features(layer.gate_up) for layer in layers)
        self._workspace_per_token = max(_out_features(each.qkv) for each in layers) + heads.num_heads * heads.head_dim
        self._workspace_per_chunk_row = max(hidden, gate_up // 2) + gate_up
        self._layer_structs = (_Layer * len(layers))(*(map(_layer_struct, layers)))
        sizes = (hidden, heads.num_heads, heads.num_kv_heads, heads.head_dim)
        numbers = (eps, heads.scale, heads.softcap or 0.0)
        self._layers_struct = _Layers(ctypes.addressof(self._layer_structs), len(layers), *sizes, *numbers)
        self._pointed_caches: Sequence[Tensor] = ()
        self._cache_pointers = (_P * 0)()

    def supports(self, hidden: Tensor, caches: Sequence[Tensor]) -> bool:
        """Return whether the decoder accepts these tensors. The result is the same in all steps of a model."""
        is_supported = cpu_native.supports(hidden) and not reads_whole_blocks(caches[0], self._heads.num_heads)
        return is_supported and hidden.is_contiguous() and hidden.shape[1] == self._layers_struct.hidden

    def __call__(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        caches: Sequence[Tensor],
        addresses: Tensor,
        attention: AttentionMetadata,
        adapters: LoRABatch | None,
    ) -> Tensor:
        """Run all layers.

        Args:
            hidden: [num_tokens, hidden_size], written in place; see `supports`.
            rope: cosines and sines, see `apply_rope`, dtype of hidden.
            caches: one per layer, see `write_kv`.
            addresses: see `write_kv`.
            attention: see `paged_attention`.
            adapters: adapters of the tokens; None if no token has an adapter.

        Returns:
            hidden.
        """
        cos, sin = (angles.contiguous() for angles in rope)
        num_tokens = hidden.shape[0]
        # The compiled kernel does not check its arguments.
        assert cos.dtype == sin.dtype == hidden.dtype and len(caches) == len(self._layers)
        assert cos.shape == sin.shape and len(cos) == len(addresses) == num_tokens
        assert adapters is None or (adapters.native is not None and len(adapters.adapter_slots) == num_tokens)
        if caches is not self._pointed_caches:
            pointers = [half.data_ptr() for cache in caches for half in cache]
            self._pointed_caches, self._cache_pointers = caches, (_P * len(pointers))(*pointers)
        step = _Step(
            num_tokens,
            cos.data_ptr(),
            sin.data_ptr(),
            cos.shape[1],
            addresses.data_ptr(),
            attention.block_tables.data_ptr(),
            attention.block_tables.shape[1],
            attention.query_starts.data_ptr(),
            attention.context_lengths.data_ptr(),
            len(attention.context_lengths),
            caches[0].shape[2],
            None if adapters is None else ctypes.addressof(adapters.native),
            is_quantized(caches[0]),
        )
        workspace = hidden.new_empty(
            num_tokens * self._workspace_per_token + min(num_tokens, CHUNK_ROWS) * self._workspace_per_chunk_row
        )
        cpu_native.get_library().quire_decode(
            hidden.data_ptr(),
            ctypes.addressof(self._layers_struct),
            ctypes.addressof(step),
            ctypes.addressof(self._cache_pointers),
            workspace.data_ptr(),
        )
        return hidden


def build_fused_decoder(layers: Sequence[LayerWeights], heads: AttentionShape, eps: float) -> FusedDecoder | None:
    """Return a callable that computes all layers.

    Return None if an operation has no compiled kernel, or if QUIRE_KERNELS selects another kernel.
    """
    linears = [linear for layer in layers for linear in layer.linears()]
    norms = [norm for layer in layers for norm in layer.norms()]
    is_supported = all(
        _is_supported_weight(p.weight)
        and p.input_order is None
        and (p.bias is None or cpu_native.supports(p.bias))
        and (p.adapters is None or p.adapters.is_panel_packed)
        for p in linears
    )
    if dispatch.overrides() or not is_supported or not cpu_native.supports(*norms):
        return None
    return FusedDecoder(layers, heads, eps)


def _is_supported_weight(weight: LinearWeight) -> bool:
    if isinstance(weight, QuantizedWeight):
        return weight.is_panel_packed
    return is_panel_packed(weight) and cpu_native.supports(weight)


def _out_features(linear: LinearWeights) -> int:
    weight = linear.weight
    return weight.shape[0] if isinstance(weight, QuantizedWeight) else weight.shape[0] * PANEL_COLUMNS


def _layer_struct(layer: LayerWeights) -> _Layer:
    qkv, output, gate_up, down = map(_linear_struct, layer.linears())
    return _Layer(
        attention_norm=layer.attention_norm.data_ptr(),
        qkv=qkv,
        output=output,
        query_norm=None if layer.query_norm is None else layer.query_norm.data_ptr(),
        key_norm=None if layer.key_norm is None else layer.key_norm.data_ptr(),
        mlp_norm=layer.mlp_norm.data_ptr(),
        gate_up=gate_up,
        down=down,
        window=layer.window or 0,
    )


def _linear_struct(linear: LinearWeights) -> _Product:
    weight, bias, adapters = linear.weight, linear.bias, linear.adapters
    is_quantized = isinstance(weight, QuantizedWeight)
    return _Product(
        weight.address if is_quantized else weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        _out_features(linear),
        # See QuireProduct.
        0 if not is_quantized else 1 if weight.struct is None else 2,
        None if adapters is None else adapters.address,
    )
