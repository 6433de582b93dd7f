# SPDX-License-Identifier: Apache-2.0
"""Decoder layers of a step in one compiled call, where operations called one by one would be the compiled ones too.

Each call from Python costs 14 us on a Zen 5 core, 9 of them a layer: 3.8 ms of the 54 ms that a step of 64 sequences
takes a 135M Llama of 30 layers, and of the 12 ms of a single one.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from quire_kernels import dispatch, native
from quire_kernels.attention import AttentionBatch, reads_whole_blocks
from quire_kernels.linear import PANEL, in_panels
from quire_kernels.lora import AdapterBatch
from quire_kernels.lora_slots import LinearSlots

PART_ROWS = 240
"""Rows that go through a layer together: kBlockRows of csrc/tile.h."""

_P, _N, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


@dataclass(frozen=True, slots=True)
class LinearWeights:
    """A linear: a weight as `pack_weight` gives it, and what may be added."""

    weight: Tensor
    bias: Tensor | None
    adapters: LinearSlots | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Attention and a MLP gated by silu, each on the normalised residual stream and added to it."""

    attention_norm: Tensor
    """[hidden_size]."""
    qkv: LinearWeights
    query_norm: Tensor | None
    """[head_dim], and `key_norm`: as `norm_heads` takes them; None: queries and keys stay as they are."""
    key_norm: Tensor | None
    output: LinearWeights
    mlp_norm: Tensor
    """[hidden_size]."""
    gate_up: LinearWeights
    down: LinearWeights
    window: int | None
    """As `paged_attention` takes it."""

    def products(self) -> tuple[LinearWeights, ...]:
        """Its linears."""
        return self.qkv, self.output, self.gate_up, self.down

    def norms(self) -> tuple[Tensor, ...]:
        """The scales of its norms."""
        found = (self.attention_norm, self.query_norm, self.key_norm, self.mlp_norm)
        return tuple(norm for norm in found if norm is not None)


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape and scale of attention, as `paged_attention` takes them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    softcap: float | None


class _Product(ctypes.Structure):
    """QuireProduct of csrc/decoder.cpp."""

    _fields_ = (("packed", _P), ("bias", _P), ("outputs", _N), ("adapters", _P))


class _Layer(ctypes.Structure):
    """QuireLayer of csrc/decoder.cpp."""

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
    """QuireLayers of csrc/decoder.cpp."""

    _fields_ = (
        ("layers", _P),
        *((name, _N) for name in ("num_layers", "hidden", "heads", "kv_heads", "head_dim")),
        *((name, _F) for name in ("eps", "scale", "softcap")),
    )


class _Step(ctypes.Structure):
    """QuireStep of csrc/decoder.cpp."""

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
    )


class CompiledDecoder:
    """Layers that share a shape, ready to be called; made by `compile_decoder`."""

    def __init__(self, layers: Sequence[LayerWeights], heads: Heads, eps: float) -> None:
        self._layers = tuple(layers)  # as long as there are pointers into them
        self._heads = heads
        hidden = len(layers[0].attention_norm)
        gate_up = max(_outputs(each.gate_up) for each in layers)
        self._of_all = max(_outputs(each.qkv) for each in layers) + heads.num_heads * heads.head_dim
        self._of_part = max(hidden, gate_up // 2) + gate_up
        self._table = (_Layer * len(layers))(*(map(_layer, layers)))
        sizes = (hidden, heads.num_heads, heads.num_kv_heads, heads.head_dim)
        numbers = (eps, heads.scale, heads.softcap or 0.0)
        self._native = _Layers(ctypes.addressof(self._table), len(layers), *sizes, *numbers)
        self._caches: Sequence[Tensor] = ()
        self._addresses = (_P * 0)()

    def takes(self, hidden: Tensor, caches: Sequence[Tensor]) -> bool:
        """Whether it can compute on these; the same for every step of a model."""
        fits = native.suits(hidden, caches[0]) and not reads_whole_blocks(caches[0], self._heads.num_heads)
        return fits and hidden.is_contiguous() and hidden.shape[1] == self._native.hidden

    def __call__(
        self,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        caches: Sequence[Tensor],
        addresses: Tensor,
        attention: AttentionBatch,
        adapters: AdapterBatch | None,
    ) -> Tensor:
        """All layers, one after the other.

        Args:
            hidden: [num_tokens, hidden_size], written in place; one that it takes.
            rope: cosines and sines, as `apply_rope` takes them, dtype of hidden.
            caches: a layer's each, as `write_kv` takes them.
            addresses: as `write_kv` takes them.
            attention: as `paged_attention` takes it.
            adapters: None: no token has one.

        Returns:
            hidden.
        """
        cos, sin = (angles.contiguous() for angles in rope)
        num_tokens = hidden.shape[0]
        # The compiled form takes them at their word.
        assert cos.dtype == sin.dtype == hidden.dtype and len(caches) == len(self._layers)
        assert cos.shape == sin.shape and len(cos) == len(addresses) == num_tokens
        assert adapters is None or (adapters.native is not None and len(adapters.slots) == num_tokens)
        if caches is not self._caches:
            pointers = [half.data_ptr() for cache in caches for half in cache]
            self._caches, self._addresses = caches, (_P * len(pointers))(*pointers)
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
        )
        workspace = hidden.new_empty(num_tokens * self._of_all + min(num_tokens, PART_ROWS) * self._of_part)
        native.library().quire_decode(
            hidden.data_ptr(),
            ctypes.addressof(self._native),
            ctypes.addressof(step),
            ctypes.addressof(self._addresses),
            workspace.data_ptr(),
        )
        return hidden


def compile_decoder(layers: Sequence[LayerWeights], heads: Heads, eps: float) -> CompiledDecoder | None:
    """The layers as one call; None where a form that is not compiled, or was wished for, would compute a part of it."""
    products = [product for layer in layers for product in layer.products()]
    norms = [norm for layer in layers for norm in layer.norms()]
    plain = all(
        in_panels(p.weight) and (p.bias is None or native.suits(p.bias)) and (p.adapters is None or p.adapters.packed)
        for p in products
    )
    if dispatch.wishes() or not plain or not native.suits(*norms, *(p.weight for p in products)):
        return None
    return CompiledDecoder(layers, heads, eps)


def _outputs(product: LinearWeights) -> int:
    return product.weight.shape[0] * PANEL


def _layer(layer: LayerWeights) -> _Layer:
    qkv, output, gate_up, down = map(_product, layer.products())
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


def _product(product: LinearWeights) -> _Product:
    bias, adapters = product.bias, product.adapters
    return _Product(
        product.weight.data_ptr(),
        None if bias is None else bias.data_ptr(),
        _outputs(product),
        None if adapters is None else adapters.address,
    )
