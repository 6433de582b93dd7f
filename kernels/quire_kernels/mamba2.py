# SPDX-License-Identifier: Apache-2.0
"""Mamba-2: a recurrence with one matrix per sequence and head, whose decay is the same for all elements.

States are rows of a tensor, as in `gated_delta`: sequences that decode are updated together, and prompts are computed
in chunks of tokens.

Source: Dao, Gu: "Transformers are SSMs", https://arxiv.org/abs/2405.21060
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels import cpu_native
from quire_kernels.dispatch import Op
from quire_kernels.gated_delta import keep_states
from quire_kernels.state_batch import StateBatch

_CHUNK = 64
"""Number of tokens of a prompt that the recurrence computes at once."""
_LANES = 16
"""The compiled kernel for prompts needs a multiple of this number of features of a head."""


@dataclass(frozen=True, slots=True)
class Mamba2Params:
    """Parameters of the recurrence of a layer, all float32."""

    a_log: Tensor
    """[num_heads]: the logarithm of the rate of decay."""
    dt_bias: Tensor
    """[num_heads], added to the step size before softplus."""
    d: Tensor
    """[num_heads]: factor of the input that is added to the output."""
    num_groups: int
    """Adjacent heads form groups of equal size. The heads of a group have the same B and C."""
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    """Smallest and largest step size."""


@Op
def mamba2_recurrence(xbc: Tensor, dt: Tensor, params: Mamba2Params, states: Tensor, batch: StateBatch) -> Tensor:
    """Return the output of the recurrence for each token and head.

    For each token, the matrix S of a head decays, learns x, and is read:

        step = softplus(dt + dt_bias)
        S = exp(-exp(a_log) * step) * S + B (step * x)^T
        out = S^T C + d * x

    Args:
        xbc: [num_tokens, num_heads * head_dim + 2 * num_groups * state_dim], any float dtype: x, B and C.
        dt: [num_tokens, num_heads], dtype of xbc.
        params: parameters of the layer.
        states: [num_rows, num_heads, state_dim, head_dim], float32 or bfloat16. The rows of the batch are updated in
            place by the tokens that they keep. All other values are float32.
        batch: the states of the tokens.

    Returns:
        [num_tokens, num_heads, head_dim], dtype of xbc.
    """
    out = xbc.new_empty(len(xbc), states.shape[1], states.shape[3])
    if len(batch.decode_tokens):
        state = states[batch.decode_rows].float()
        for i, (count, kept) in enumerate(batch.rounds):
            tokens = slice(None) if batch.has_all else batch.decode_tokens[:count] + i
            x, b, c, step, log_decay = _prepare(xbc[tokens], dt[tokens], params, states)
            state = state[:count] * log_decay.exp()[..., None, None]
            state += b[..., None] * (x * step[..., None])[..., None, :]
            y = torch.einsum("bhnp,bhn->bhp", state, c) + params.d[:, None] * x
            out[tokens] = y.to(out.dtype)
            state = keep_states(states, state, batch.decode_rows, kept)
    scan_prompts(xbc, dt, params, states, batch, out)
    return out


mamba2_recurrence.register_lazy("cuda", "own", "quire_kernels.gpu.states.mamba2")


@mamba2_recurrence.register("cpu")
def _mamba2_recurrence_cpu(xbc: Tensor, dt: Tensor, params: Mamba2Params, states: Tensor, batch: StateBatch) -> Tensor:
    if not cpu_native.supports(xbc, dt) or not states.is_contiguous():
        return mamba2_recurrence.reference(xbc, dt, params, states, batch)
    _, num_heads, state_dim, head_dim = states.shape
    out = xbc.new_empty(len(xbc), num_heads, head_dim)
    inputs = xbc.data_ptr(), xbc.stride(0), dt.data_ptr(), dt.stride(0)
    weights = params.a_log.data_ptr(), params.dt_bias.data_ptr(), params.d.data_ptr(), *params.dt_limits
    sizes = num_heads, params.num_groups, state_dim, head_dim
    if head_dim % _LANES:
        scan_prompts(xbc, dt, params, states, batch, out)
    for span in batch.prompts if head_dim % _LANES == 0 else ():
        # A copy if the states are bfloat16, because the scan computes in float32.
        state = states[span.row].float()
        cpu_native.get_library().quire_mamba2_scan(
            *inputs, *weights, state.data_ptr(), out.data_ptr(), span.start, span.end, *sizes
        )
        if states.dtype != torch.float32:
            states[span.row] = state
    cpu_native.get_library().quire_mamba2_update(
        *inputs,
        *weights,
        states.data_ptr(),
        states.dtype == torch.bfloat16,
        batch.decode_tokens.data_ptr(),
        batch.decode_rows.data_ptr(),
        batch.decode_lengths.data_ptr(),
        batch.decode_kept.data_ptr(),
        out.data_ptr(),
        len(batch.decode_tokens),
        *sizes,
    )
    return out


def scan_prompts(xbc: Tensor, dt: Tensor, params: Mamba2Params, states: Tensor, batch: StateBatch, out: Tensor) -> None:
    """Compute the spans with several tokens; see `mamba2_recurrence`."""
    for span in batch.prompts:
        rows = slice(span.start, span.end)
        x, b, c, step, log_decay = _prepare(xbc[rows], dt[rows], params, states)
        y, state = _scan_chunks(x * step[..., None], b, c, log_decay, states[span.row].float())
        out[rows] = (y + params.d[:, None] * x).to(out.dtype)
        states[span.row] = state.to(states.dtype)


def _prepare(
    xbc: Tensor, dt: Tensor, params: Mamba2Params, states: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return x [num_tokens, num_heads, head_dim], B and C [num_tokens, num_heads, state_dim], and the step size and the
    logarithm of the decay [num_tokens, num_heads]. All are float32."""
    _, num_heads, state_dim, head_dim = states.shape
    size = params.num_groups * state_dim
    x, *bc = xbc.float().split([num_heads * head_dim, size, size], dim=1)
    repeats = num_heads // params.num_groups
    b, c = (part.unflatten(1, (params.num_groups, state_dim)).repeat_interleave(repeats, dim=1) for part in bc)
    step = F.softplus(dt.float() + params.dt_bias).clamp(*params.dt_limits)
    return x.unflatten(1, (num_heads, head_dim)), b, c, step, -params.a_log.exp() * step


def _scan_chunks(x: Tensor, b: Tensor, c: Tensor, log_decay: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the tokens of one sequence from the state [num_heads, state_dim, head_dim] before them. Return the
    outputs [num_tokens, num_heads, head_dim] and the state after them."""
    outputs = torch.empty_like(x)
    for start in range(0, len(x), _CHUNK):
        rows = slice(start, start + _CHUNK)
        values, inputs, queries = (part[rows].transpose(0, 1) for part in (x, b, c))
        total = log_decay[rows].t().cumsum(1)
        # [num_heads, i, j]: decay of the state between the tokens j and i; 0 if j is later than i.
        decay = (total[:, :, None] - total[:, None, :]).tril().exp().tril()
        out = ((queries @ inputs.mT) * decay) @ values + (queries @ state) * total.exp()[..., None]
        outputs[rows] = out.transpose(0, 1)
        remaining = (total[:, -1:] - total).exp()[..., None]
        state = state * total[:, -1].exp()[:, None, None] + inputs.mT @ (values * remaining)
    return outputs, state


@Op
def gated_group_norm(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, num_groups: int, gates_first: bool
) -> Tensor:
    """Return the output of a recurrence with a gate, normalized in groups of features.

    It is rms_norm(x * silu(gate)) or rms_norm(x) * silu(gate), or without a weight, x * silu(gate).

    Args:
        x: [num_tokens, size], contiguous, any float dtype.
        gate: [num_tokens, size], dtype of x.
        weight: [size], dtype of x; None if there is no norm.
        eps: added to the mean of squares of a group.
        num_groups: number of groups of adjacent features.
        gates_first: whether the gate is applied before the norm.

    Returns:
        [num_tokens, size], dtype of x.
    """
    out, gates = x.float(), F.silu(gate.float())
    if gates_first or weight is None:
        out = out * gates
    if weight is not None:
        groups = out.unflatten(1, (num_groups, -1))
        out = (groups * (groups.square().mean(-1, keepdim=True) + eps).rsqrt()).flatten(1)
        out = out.to(x.dtype) * weight if gates_first else out * weight.float() * gates
    return out.to(x.dtype)


@gated_group_norm.register("cpu")
def _gated_group_norm_cpu(
    x: Tensor, gate: Tensor, weight: Tensor | None, eps: float, num_groups: int, gates_first: bool
) -> Tensor:
    if not cpu_native.supports(x, gate) or not x.is_contiguous():
        return gated_group_norm.reference(x, gate, weight, eps, num_groups, gates_first)
    out = torch.empty_like(x)
    cpu_native.get_library().quire_gated_group_norm(
        x.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        None if weight is None else weight.data_ptr(),
        out.data_ptr(),
        len(x),
        num_groups,
        x.shape[1] // num_groups,
        eps,
        gates_first,
    )
    return out
