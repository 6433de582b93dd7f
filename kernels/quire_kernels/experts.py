# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts.

The experts that a router has chosen for each token compute their outputs; see routing.py. The LoRA adapter of a token
can change the projections of its experts.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels import cpu_native
from quire_kernels.activation import ACTIVATIONS, get_gated_op
from quire_kernels.dispatch import Op
from quire_kernels.huge_pages import HugePageArena
from quire_kernels.linear import PANEL_COLUMNS, LinearWeight, is_panel_packed, pack_weight, quantize_weight
from quire_kernels.lora import LoRABatch
from quire_kernels.lora_slots import ModuleSlots
from quire_kernels.quantized_linear import (
    QuantizedWeight,
    has_kernel_for_shape,
    has_quantized_kernel,
    quantized_linear,
)

CHUNK_ROWS = 4096
"""The compiled kernel computes at most this number of (token, expert) pairs at a time, so that it needs less memory."""


@dataclass(frozen=True, slots=True)
class SwiGLU:
    """The clamped activation of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1).

    Before that, gate is limited to at most `limit`, and up is limited to the range [-limit, limit]. Gate and up
    features alternate: feature 2 * i belongs to gate, and feature 2 * i + 1 belongs to up.
    """

    alpha: float
    limit: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Compute the gated features.

        `gate_up` has the shape [num_rows, 2 * intermediate_size] and contains the gate and up features. The result has
        the shape [num_rows, intermediate_size].
        """
        gate, up = gate_up[:, ::2].clamp(max=self.limit), gate_up[:, 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


ExpertActivation: TypeAlias = str | SwiGLU
"""Either SwiGLU, or a name that `get_gated_op` accepts. If it is a name, all gate features come before the up
features."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Weights of all experts in a layer."""

    gate_up: LinearWeight
    """[num_experts, 2 * intermediate_size, hidden_size], unless `pack_experts` has packed the weight. If the weight is
    quantized, its shape is [num_experts * 2 * intermediate_size, hidden_size]."""
    down: LinearWeight
    """[num_experts, hidden_size, intermediate_size], unless the weight is packed. If `gate_up` is quantized, this
    weight is also quantized, and its shape is [num_experts * hidden_size, intermediate_size]."""
    gate_up_bias: Tensor | None
    """[num_experts, 2 * intermediate_size]."""
    down_bias: Tensor | None
    """[num_experts, hidden_size]."""
    activation: ExpertActivation
    is_gated: bool = True
    """If it is false, there are no gate features: `gate_up` has only `intermediate_size` outputs for each expert, and
    `activation` is a name in ACTIVATIONS."""

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        if isinstance(self.down, QuantizedWeight):
            return self.down.shape[0] // self.hidden_size
        return len(self.down) * PANEL_COLUMNS // self.hidden_size if is_panel_packed(self.down) else len(self.down)

    @property
    def hidden_size(self) -> int:
        """Input and output features."""
        if isinstance(self.gate_up, QuantizedWeight):
            return self.gate_up.shape[1]
        return self.gate_up.shape[1] * 2 if is_panel_packed(self.gate_up) else self.gate_up.shape[2]

    @property
    def intermediate_size(self) -> int:
        """Number of intermediate features that an expert has."""
        if isinstance(self.down, QuantizedWeight):
            return self.down.shape[1]
        return self.down.shape[1] * 2 if is_panel_packed(self.down) else self.down.shape[2]

    @property
    def activate(self) -> Callable[[Tensor], Tensor]:
        """The activation as a function. Its argument is one tensor of shape [num_rows, 2 * intermediate_size], which
        contains gate and up. Without a gate, the argument is only up."""
        if not self.is_gated:
            assert isinstance(self.activation, str)
            return ACTIVATIONS[self.activation]
        return get_gated_op(self.activation) if isinstance(self.activation, str) else self.activation

    @property
    def activation_name(self) -> str:
        """The name that compiled kernels have for the activation: "silu", "relu", "gelu", "gelu_tanh" or "swiglu"."""
        if isinstance(self.activation, SwiGLU):
            return "swiglu"
        return get_gated_op(self.activation).name.removesuffix("_mul")


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """The adapters of a step's tokens, for the experts of a layer."""

    gate_up: ModuleSlots
    """Matrices that change `ExpertWeights.gate_up`; B has the order of its output features."""
    down: ModuleSlots
    batch: LoRABatch

    @property
    def native(self) -> "_ExpertAdapters":
        """The C struct. This object must live at least as long."""
        slots = self.batch.adapter_slots
        assert slots.dtype == torch.int64 and slots.is_contiguous() and slots.device.type == "cpu"
        return _ExpertAdapters(self.gate_up.address, self.down.address, slots.data_ptr(), len(self.down.host_entries))


@Op
def fused_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    residual: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """For each token, compute the weighted sum of its experts' outputs. Return the sum, or add it to a residual stream.

    Args:
        x: [num_tokens, hidden_size].
        ids: [num_tokens, top_k] int64, different experts in each row.
        weights: [num_tokens, top_k] float32.
        experts: weights in the dtype of x, or quantized weights.
        residual: [num_tokens, hidden_size], contiguous, dtype of x; updated in place and returned.
        adapters: adapters of the tokens, with matrices in the dtype of x; None if no token has one. To the product of
            a projection, B (A input) is added, with the matrices of the expert and of the token's adapter.

    Returns:
        [num_tokens, hidden_size], dtype of x.
    """
    out = torch.zeros(x.shape, dtype=weights.dtype, device=x.device)
    for expert in range(experts.num_experts):
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        if len(tokens):
            y = _compute_expert(x[tokens], expert, experts, adapters, tokens)
            out.index_add_(0, tokens, y.to(out.dtype) * weights[tokens, choices, None])
    return out.to(x.dtype) if residual is None else residual.add_(out)


fused_experts.register_lazy("cuda", "own", "quire_kernels.gpu.experts")


@fused_experts.register("cpu")
def _fused_experts_cpu(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    residual: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    is_quantized = isinstance(experts.gate_up, QuantizedWeight)
    if not (experts.gate_up.is_panel_packed if is_quantized else is_panel_packed(experts.gate_up)):
        return _fused_experts_sorted(x, ids, weights, experts, residual, adapters)
    (num_tokens, hidden), top_k = x.shape, ids.shape[1]
    num_experts, inner = experts.num_experts, experts.intermediate_size
    # The compiled kernel does not check its arguments.
    assert x.dtype == torch.bfloat16 and x.stride(1) == 1 and ids.dtype == torch.int64
    assert ids.is_contiguous() and weights.is_contiguous() and weights.dtype == torch.float32
    assert experts.gate_up.shape[1] == (hidden if is_quantized else hidden // 2)
    assert residual is None or (residual.is_contiguous() and residual.shape == x.shape)
    assert adapters is None or len(adapters.batch.adapter_slots) == num_tokens
    out = x.new_empty(num_tokens, hidden) if residual is None else residual
    chunk = min(num_tokens, max(1, CHUNK_ROWS // top_k))
    workspace = x.new_empty(chunk * top_k * (2 * hidden + 3 * inner))
    swiglu = experts.activation if isinstance(experts.activation, SwiGLU) else None
    biases = [None if bias is None else bias.data_ptr() for bias in (experts.gate_up_bias, experts.down_bias)]
    stacks = [_ExpertStack.of(weight, num_experts) for weight in (experts.gate_up, experts.down)]
    native = _Experts(
        *stacks,
        *biases,
        num_experts,
        hidden,
        inner,
        2 if not experts.is_gated else int(swiglu is not None),
        *((1.0, 1.0) if swiglu is None else (swiglu.alpha, swiglu.limit)),
    )
    native_adapters = None if adapters is None else adapters.native
    cpu_native.get_library().quire_experts(
        x.data_ptr(),
        x.stride(0),
        ids.data_ptr(),
        weights.data_ptr(),
        ctypes.addressof(native),
        None if native_adapters is None else ctypes.addressof(native_adapters),
        out.data_ptr(),
        num_tokens,
        top_k,
        chunk,
        residual is not None,
        workspace.data_ptr(),
    )
    return out


def _fused_experts_sorted(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    residual: Tensor | None = None,
    adapters: ExpertAdapters | None = None,
) -> Tensor:
    """Sort the (token, expert) pairs by expert, and compute all tokens of an expert together."""
    top_k = ids.shape[1]
    flat_ids = ids.flatten()
    order = flat_ids.argsort(stable=True)
    counts = torch.bincount(flat_ids, minlength=experts.num_experts).tolist()
    results = []
    for expert, tokens in enumerate((order // top_k).split(counts)):
        if len(tokens):
            results.append(_compute_expert(x[tokens], expert, experts, adapters, tokens))
    by_choice = x.new_empty(len(order), x.shape[1], dtype=torch.float32)
    by_choice[order] = torch.cat(results).float()
    out = torch.einsum("tkh,tk->th", by_choice.view(*ids.shape, -1), weights)
    return out.to(x.dtype) if residual is None else residual.add_(out)


def _compute_expert(
    x: Tensor, expert: int, experts: ExpertWeights, adapters: ExpertAdapters | None, tokens: Tensor
) -> Tensor:
    """Compute one expert. The inputs have the shape [num_rows, hidden_size], and so does the result. `tokens` are the
    indices of the rows in the batch of the adapters."""
    gate_up_bias, down_bias = (
        None if bias is None else bias[expert] for bias in (experts.gate_up_bias, experts.down_bias)
    )
    gate_up = _multiply(x, experts.gate_up, expert, experts.num_experts, gate_up_bias)
    if adapters is not None:
        _add_deltas(gate_up, x, expert, adapters.gate_up, adapters.batch.adapter_slots[tokens])
    gated = experts.activate(gate_up)
    out = _multiply(gated, experts.down, expert, experts.num_experts, down_bias)
    if adapters is not None:
        _add_deltas(out, gated, expert, adapters.down, adapters.batch.adapter_slots[tokens])
    return out


def _add_deltas(out: Tensor, x: Tensor, expert: int, adapters: ModuleSlots, slots: Tensor) -> None:
    """Add the deltas of one projection to its outputs. `slots` contains the adapter slot of each row, or -1."""
    for slot in slots.unique().tolist():
        if slot >= 0 and (pair := adapters.get_matrices(slot, 0, expert)) is not None:
            rows, (a, b) = (slots == slot).nonzero()[:, 0], pair
            out[rows] = out[rows].addmm_(x[rows] @ a.t(), b)


def _multiply(x: Tensor, weight: LinearWeight, expert: int, num_experts: int, bias: Tensor | None) -> Tensor:
    if isinstance(weight, QuantizedWeight):
        return quantized_linear.reference(x, weight.part(expert, num_experts), bias)
    return F.linear(x, weight[expert], bias)


def pack_experts(experts: ExpertWeights, arena: HugePageArena | None = None) -> ExpertWeights:
    """Pack the weights of the experts into panels for `fused_experts`.

    `pack_weight` describes the panels. Their memory comes from `arena`. If the compiled kernel does not support the
    weights, they are returned unchanged.
    """
    assert isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor)
    hidden, inner = experts.down.shape[1:]
    is_supported = (
        cpu_native.supports(experts.gate_up, experts.down)
        and cpu_native.has_fast_gemm()
        and hidden % PANEL_COLUMNS == inner % PANEL_COLUMNS == 0
        and _has_activation(experts.activation, experts.is_gated)
    )
    if not is_supported:
        return experts
    gate_up, down = (pack_weight(weight.flatten(0, 1), arena) for weight in (experts.gate_up, experts.down))
    return replace(experts, gate_up=gate_up, down=down)


def quantize_experts(experts: ExpertWeights, quantization: str, arena: HugePageArena | None = None) -> ExpertWeights:
    """Quantize the weights of the experts for `fused_experts`; see `quantize_weight`. If a CPU has compiled kernels,
    but none of them supports the quantized weights, the weights are packed instead of quantized."""
    assert isinstance(experts.gate_up, Tensor) and isinstance(experts.down, Tensor)
    sizes, (dtype, device) = (experts.hidden_size, experts.intermediate_size), (experts.down.dtype, experts.down.device)
    if cpu_native.supports(experts.down) and not has_experts_kernel(
        *sizes, experts.activation, dtype, device, experts.is_gated
    ):
        return pack_experts(experts, arena)
    gate_up, down = (quantize_weight(w.flatten(0, 1), quantization, arena) for w in (experts.gate_up, experts.down))
    return replace(experts, gate_up=gate_up, down=down)


def has_experts_kernel(
    hidden_size: int,
    intermediate_size: int,
    activation: ExpertActivation,
    dtype: torch.dtype,
    device: torch.device,
    is_gated: bool = True,
) -> bool:
    """Return whether `fused_experts` has a kernel for quantized weights of these sizes on this device. On a CPU, the
    weights of an expert must fill whole panels."""
    if device.type != "cpu" or not has_quantized_kernel(dtype, device):
        return has_quantized_kernel(dtype, device)
    width = 2 * intermediate_size if is_gated else intermediate_size
    has_shapes = has_kernel_for_shape(width, hidden_size) and has_kernel_for_shape(hidden_size, intermediate_size)
    return has_shapes and _has_activation(activation, is_gated)


def _has_activation(activation: ExpertActivation, is_gated: bool) -> bool:
    """Return whether the compiled kernel has an activation."""
    return activation == "relu2" if not is_gated else activation == "silu" or isinstance(activation, SwiGLU)


class _ExpertStack(ctypes.Structure):
    """Stack of csrc/experts.cpp."""

    _fields_ = (
        ("panels", ctypes.c_void_p),
        ("codes", ctypes.c_void_p),
        *((n, ctypes.c_int64) for n in ("bytes", "is_int8")),
    )

    @classmethod
    def of(cls, weight: LinearWeight, num_experts: int) -> Self:
        """Return a struct that points to the panels of a weight. The weight must live at least as long as the
        struct."""
        if not isinstance(weight, QuantizedWeight):
            return cls(weight.data_ptr(), None, weight.nbytes // num_experts, False)
        codes = None if weight.struct is None else weight.address
        return cls(weight.values.data_ptr(), codes, weight.values.nbytes // num_experts, codes is None)


class _Experts(ctypes.Structure):
    """The C struct QuireExperts of csrc/experts.cpp."""

    _fields_ = (
        *((name, _ExpertStack) for name in ("gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("gate_up_bias", "down_bias")),
        *((name, ctypes.c_int64) for name in ("experts", "hidden", "inner", "activation")),
        *((name, ctypes.c_float) for name in ("alpha", "limit")),
    )


class _ExpertAdapters(ctypes.Structure):
    """The C struct QuireExpertAdapters of csrc/experts.cpp."""

    _fields_ = (*((name, ctypes.c_void_p) for name in ("gate_up", "down", "slots")), ("num_slots", ctypes.c_int64))
