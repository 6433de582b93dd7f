# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet and Kimi Delta Attention: a short convolution, and a recurrence with one matrix per sequence and head.

Each sequence has a state of fixed size instead of keys and values: the last inputs of the convolution, and the matrices
of the recurrence. A state is a row of a tensor. An operation reads and writes the rows of the sequences of a step in
place; see `state_batch`. Sequences that decode are updated together. Prompts are computed in chunks of tokens.

Sources: Yang, Kautz, Hatamizadeh: "Gated Delta Networks", https://arxiv.org/abs/2412.06464; Kimi Team: "Kimi Linear",
https://arxiv.org/abs/2510.26692
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels import cpu_native
from quire_kernels.dispatch import Op
from quire_kernels.state_batch import StateBatch

_CHUNK = 64
"""Number of tokens of a prompt that the recurrence computes at once."""
_BLOCK = 16
"""Size of the triangular matrices that are inverted row by row."""
_DECAYS_AT_ONCE = 256
"""Number of tokens of a prompt for which the decays between the elements of the keys are in memory at once."""
_LANES = 16
"""The compiled kernel for prompts needs a multiple of this number of elements of a value."""
NORM_EPS = 1e-6
"""Added to the sums of squares of queries and keys."""


@Op
def short_convolution(
    x: Tensor, weight: Tensor, states: Tensor, batch: StateBatch, bias: Tensor | None = None, has_silu: bool = True
) -> Tensor:
    """Return the causal convolution of each feature over the last `kernel_size` tokens of its sequence, or silu of it.

    Args:
        x: [num_tokens, size], any float dtype.
        weight: [size, kernel_size], dtype of x; the last column belongs to the present token.
        states: [num_rows, kernel_size - 1, size], dtype of x: the inputs before the step, oldest first. The rows of the
            batch are replaced with the last inputs that they keep.
        batch: the states of the tokens.
        bias: [size], dtype of x, added to the convolution; None if there is none.
        has_silu: whether to apply silu.

    Returns:
        [num_tokens, size], dtype of x.
    """
    out, (taps, shift, activate) = torch.empty_like(x), _convolution_parts(weight, bias, has_silu)
    if len(batch.decode_tokens):
        earlier = states[batch.decode_rows]
        for i, (count, kept) in enumerate(batch.rounds):
            inputs = x if batch.has_all else x[batch.decode_tokens[:count] + i]
            window = torch.cat((earlier[:count], inputs[:, None]), dim=1)
            result = activate((window.float() * taps).sum(1) + shift).to(x.dtype)
            earlier = window[:, 1:]
            keep_states(states, earlier, batch.decode_rows, kept)
            if batch.has_all:
                return result
            out[batch.decode_tokens[:count] + i] = result
    convolve_prompts(x, weight, states, batch, bias, has_silu, out)
    return out


def convolve_prompts(
    x: Tensor, weight: Tensor, states: Tensor, batch: StateBatch, bias: Tensor | None, has_silu: bool, out: Tensor
) -> None:
    """Compute the prompts of `short_convolution` into `out`."""
    if not batch.prompts:
        return
    taps, shift, activate = _convolution_parts(weight, bias, has_silu)
    for span in batch.prompts:
        length = span.end - span.start
        sequence = torch.cat((states[span.row], x[span.start : span.end]))
        states[span.row] = sequence[length:]
        total = sequence[:length].float() * taps[0] + shift
        for tap in range(1, len(taps)):
            total.addcmul_(sequence[tap : tap + length].float(), taps[tap])
        out[span.start : span.end] = activate(total)


def _convolution_parts(
    weight: Tensor, bias: Tensor | None, has_silu: bool
) -> tuple[Tensor, Tensor, Callable[[Tensor], Tensor]]:
    """Return the taps [kernel_size, size] and the bias, both float32, and the activation."""
    shift = weight.new_zeros((), dtype=torch.float32) if bias is None else bias.float()
    return weight.float().t(), shift, F.silu if has_silu else torch.Tensor.contiguous


short_convolution.register_lazy("cuda", "own", "quire_kernels.gpu.states.short_convolution")


@short_convolution.register("cpu")
def _short_convolution_cpu(
    x: Tensor, weight: Tensor, states: Tensor, batch: StateBatch, bias: Tensor | None = None, has_silu: bool = True
) -> Tensor:
    if not cpu_native.supports(x, weight, states):
        return short_convolution.reference(x, weight, states, batch, bias, has_silu)
    out, taps = x.new_empty(x.shape), weight.t().contiguous()
    assert states.is_contiguous()
    cpu_native.get_library().quire_short_convolution(
        x.data_ptr(),
        x.stride(0),
        taps.data_ptr(),
        None if bias is None else bias.data_ptr(),
        states.data_ptr(),
        batch.rows.data_ptr(),
        batch.starts.data_ptr(),
        batch.kept.data_ptr(),
        out.data_ptr(),
        len(batch.rows),
        x.shape[1],
        len(taps),
        has_silu,
    )
    return out


@Op
def gated_delta_rule(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, states: Tensor, batch: StateBatch
) -> Tensor:
    """Return the output of the gated delta rule for each token and value head.

    For each token, the matrix S of a head decays, then learns that the key k has the value v, and is read with the
    query q:

        S = exp(-exp(a_log) * softplus(a + dt_bias)) * S
        S = S + k (sigmoid(b) * (v - S^T k))^T
        out = S^T q / sqrt(key_head_dim)

    Queries and keys are first divided by their norms. Each key head serves several adjacent value heads. In Kimi Delta
    Attention, each row of S, which belongs to an element of the key, has its own decay.

    Args:
        qkv: [num_tokens, 2 * num_key_heads * key_head_dim + num_value_heads * value_head_dim], any float dtype.
        a: [num_tokens, num_value_heads], or [num_tokens, num_value_heads * key_head_dim] for a decay of each row; dtype
            of qkv.
        b: [num_tokens, num_value_heads], dtype of qkv.
        a_log: [num_value_heads] float32.
        dt_bias: [num_value_heads] or [num_value_heads * key_head_dim] float32, like a.
        states: [num_rows, num_value_heads, key_head_dim, value_head_dim], float32 or bfloat16. The rows of the batch
            are updated in place by the tokens that they keep. All other values are float32.
        batch: the states of the tokens.

    Returns:
        [num_tokens, num_value_heads, value_head_dim], dtype of qkv.
    """
    _, num_heads, key_dim, value_dim = states.shape
    out = qkv.new_empty(len(qkv), num_heads, value_dim)
    if len(batch.decode_tokens):
        state = states[batch.decode_rows].float()
        for i, (count, kept) in enumerate(batch.rounds):
            tokens = slice(None) if batch.has_all else batch.decode_tokens[:count] + i
            q, k, v, log_decay, beta = _prepare(qkv[tokens], a[tokens], b[tokens], a_log, dt_bias, key_dim, value_dim)
            state = state[:count] * log_decay.exp()[..., None]
            delta = (v - torch.einsum("bhkv,bhk->bhv", state, k)) * beta[..., None]
            state += k[..., None] * delta[..., None, :]
            out[tokens] = torch.einsum("bhkv,bhk->bhv", state, q).to(out.dtype)
            state = keep_states(states, state, batch.decode_rows, kept)
    scan_prompts(qkv, a, b, a_log, dt_bias, states, batch, out)
    return out


gated_delta_rule.register_lazy("cuda", "own", "quire_kernels.gpu.states.gated_delta")


@gated_delta_rule.register("cpu")
def _gated_delta_rule_cpu(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, states: Tensor, batch: StateBatch
) -> Tensor:
    if not cpu_native.supports(qkv, a, b) or not states.is_contiguous():
        return gated_delta_rule.reference(qkv, a, b, a_log, dt_bias, states, batch)
    _, num_heads, key_dim, value_dim = states.shape
    if a.shape[1] != num_heads:
        return _kimi_delta_cpu(qkv, a, b, a_log, dt_bias, states, batch)
    if a.stride(0) != b.stride(0):
        return gated_delta_rule.reference(qkv, a, b, a_log, dt_bias, states, batch)
    num_key_heads = (qkv.shape[1] - num_heads * value_dim) // (2 * key_dim)
    out = qkv.new_empty(len(qkv), num_heads, value_dim)
    if value_dim % _LANES:
        scan_prompts(qkv, a, b, a_log, dt_bias, states, batch, out)
    for span in batch.prompts if value_dim % _LANES == 0 else ():
        # A copy if the states are bfloat16, because the scan computes in float32.
        state = states[span.row].float()
        cpu_native.get_library().quire_gated_delta_scan(
            qkv.data_ptr(),
            qkv.stride(0),
            a.data_ptr(),
            b.data_ptr(),
            a.stride(0),
            a_log.data_ptr(),
            dt_bias.data_ptr(),
            state.data_ptr(),
            out.data_ptr(),
            span.start,
            span.end,
            num_key_heads,
            num_heads,
            key_dim,
            value_dim,
        )
        if states.dtype != torch.float32:
            states[span.row] = state
    cpu_native.get_library().quire_gated_delta_update(
        qkv.data_ptr(),
        qkv.stride(0),
        a.data_ptr(),
        b.data_ptr(),
        a.stride(0),
        a_log.data_ptr(),
        dt_bias.data_ptr(),
        states.data_ptr(),
        states.dtype == torch.bfloat16,
        batch.decode_tokens.data_ptr(),
        batch.decode_rows.data_ptr(),
        batch.decode_lengths.data_ptr(),
        batch.decode_kept.data_ptr(),
        out.data_ptr(),
        len(batch.decode_tokens),
        num_key_heads,
        num_heads,
        key_dim,
        value_dim,
    )
    return out


def _kimi_delta_cpu(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, states: Tensor, batch: StateBatch
) -> Tensor:
    """Compute `gated_delta_rule` with a decay of each row. The tokens of prompts are computed one after the other, too,
    because a chunk would need the decays between each pair of its tokens for each row."""
    _, num_heads, key_dim, value_dim = states.shape
    decays, out = _log_decays(a, a_log, dt_bias).exp_(), qkv.new_empty(len(qkv), num_heads, value_dim)

    def update(states: Tensor, tokens: Tensor, rows: Tensor, lengths: Tensor, kept: Tensor) -> None:
        cpu_native.get_library().quire_kimi_delta_update(
            qkv.data_ptr(),
            qkv.stride(0),
            decays.data_ptr(),
            b.data_ptr(),
            b.stride(0),
            states.data_ptr(),
            states.dtype == torch.bfloat16,
            tokens.data_ptr(),
            rows.data_ptr(),
            lengths.data_ptr(),
            kept.data_ptr(),
            out.data_ptr(),
            len(rows),
            num_heads,
            key_dim,
            value_dim,
        )

    if states.dtype == torch.float32:
        update(states, batch.starts, batch.rows, batch.starts.diff(), batch.kept)
        return out
    update(states, batch.decode_tokens, batch.decode_rows, batch.decode_lengths, batch.decode_kept)
    for span in batch.prompts:
        # A prompt rounds its state only once.
        state, length = states[span.row, None].float(), torch.tensor([span.end - span.start])
        update(state, torch.tensor([span.start]), torch.tensor([0]), length, length)
        states[span.row] = state[0]
    return out


def keep_states(states: Tensor, updated: Tensor, rows: Tensor, kept: Tensor | None) -> Tensor:
    """Write the states of the spans `kept` to their rows; None stands for all spans.

    Returns:
        All states as the next token of their sequences reads them: float32, rounded to the dtype of the rows.
    """
    rounded = updated.to(states.dtype)
    if kept is None:
        states[rows] = rounded
    else:
        states[rows[kept]] = rounded[kept]
    return rounded.float()


def scan_prompts(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    states: Tensor,
    batch: StateBatch,
    out: Tensor,
) -> None:
    """Compute the spans with several tokens; see `gated_delta_rule`."""
    has_decay_of_heads = a.shape[1] == states.shape[1]
    for span in batch.prompts:
        state = states[span.row].float()
        step = max(span.end - span.start, 1) if has_decay_of_heads else _DECAYS_AT_ONCE
        for start in range(span.start, span.end, step):
            rows = slice(start, min(start + step, span.end))
            prepared = _prepare(qkv[rows], a[rows], b[rows], a_log, dt_bias, *states.shape[2:])
            out[rows], state = _scan_chunks(*prepared, state)
        states[span.row] = state


def _prepare(
    qkv: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, key_dim: int, value_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return q and k [num_tokens, num_value_heads, key_dim], v [num_tokens, num_value_heads, value_dim], the logarithm
    of the decay, [num_tokens, num_value_heads, 1 or key_dim], and the learning rate [num_tokens, num_value_heads]. All
    are float32."""
    num_tokens, num_heads = b.shape
    num_key_heads = (qkv.shape[1] - num_heads * value_dim) // (2 * key_dim)
    q, k, v = qkv.float().split([num_key_heads * key_dim, num_key_heads * key_dim, num_heads * value_dim], dim=1)
    q, k = (_normalize(x.view(num_tokens, num_key_heads, key_dim)) for x in (q, k))
    repeats = num_heads // num_key_heads
    q, k = (x.repeat_interleave(repeats, dim=1) for x in (q * key_dim**-0.5, k))
    log_decay = _log_decays(a, a_log, dt_bias)
    return q, k, v.view(num_tokens, num_heads, value_dim), log_decay, b.float().sigmoid()


def _log_decays(a: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
    """Return the logarithms of the decays, [num_tokens, num_value_heads, 1 or key_dim] float32."""
    return F.softplus(a.float() + dt_bias).view(len(a), len(a_log), -1) * -a_log.exp()[:, None]


def _normalize(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()


def _scan_chunks(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute the tokens of one sequence from the state [num_heads, key_dim, value_dim] before them. Return the outputs
    [num_tokens, num_heads, value_dim] and the state after them.

    Within a chunk, the corrections of all tokens are the solution of a triangular system, as in transformers'
    `torch_chunk_gated_delta_rule`.
    """
    num_tokens, has_decay_of_heads = len(log_decay), log_decay.shape[2] == 1
    sizes = (_BLOCK, 2 * _BLOCK, _CHUNK) if has_decay_of_heads else (_BLOCK,)
    size = next((n for n in sizes if num_tokens <= n), sizes[-1])
    padding = -num_tokens % size
    # [num_heads, num_chunks, size, ...]; the tokens of the padding change nothing, because their values are 0.
    q, k, v, log_decay, beta = (
        F.pad(x, (0, 0, 0, 0, 0, padding)).transpose(0, 1).unflatten(1, (-1, size))
        for x in (q, k, v, log_decay, beta[..., None])
    )
    total = log_decay.cumsum(2)
    before, k_beta = total.exp(), k * beta
    solution = _invert_unit_lower(_decayed_products(k_beta, k, total))
    new_values, known_keys = solution @ (v * beta), solution @ (k_beta * before)
    inner, q = _decayed_products(q, k, total), q * before
    k, chunk_decay = k * (total[:, :, -1:] - total).exp(), before[:, :, -1].unsqueeze(-1)
    outputs = torch.empty_like(v)
    for chunk in range(v.shape[1]):
        delta = torch.baddbmm(new_values[:, chunk], known_keys[:, chunk], state, alpha=-1)
        outputs[:, chunk] = torch.baddbmm(q[:, chunk] @ state, inner[:, chunk], delta)
        state = torch.baddbmm(state * chunk_decay[:, chunk], k[:, chunk].mT, delta)
    return outputs.flatten(1, 2)[:, :num_tokens].transpose(0, 1), state


def _decayed_products(x: Tensor, k: Tensor, total: Tensor) -> Tensor:
    """Return the products [..., size, size] of x_i and k_j [..., size, key_dim], decayed between the tokens j and i; 0
    if j is later than i. `total`: sums of logarithms of decays, [..., size, 1 or key_dim]."""
    if total.shape[-1] == 1:
        return (x @ k.mT) * (total - total.mT).tril().exp().tril()
    # Decays are at most 1, so no difference overflows. A product of exp(total_i) and exp(-total_j) would.
    decay = (total[..., :, None, :] - total[..., None, :, :]).clamp_(max=0.0).exp_()
    return torch.einsum("...id,...jd,...ijd->...ij", x, k, decay).tril()


def _invert_unit_lower(matrices: Tensor) -> Tensor:
    """Return the inverses of lower triangular matrices [..., n, n], n = 16, 32 or 64, with ones in place of the
    diagonal.

    torch.linalg.solve_triangular takes ten times as long for as many matrices of this size.
    """
    size = matrices.shape[-1]
    if size == _BLOCK:
        rows = torch.eye(size, dtype=matrices.dtype, device=matrices.device).expand(matrices.shape).clone()
        for i in range(1, size):
            rows[..., i : i + 1, :i] = -matrices[..., i : i + 1, :i] @ rows[..., :i, :i]
        return rows
    half = size // 2
    corners = torch.stack((matrices[..., :half, :half], matrices[..., half:, half:]))
    first, second = _invert_unit_lower(corners)
    below = -second @ (matrices[..., half:, :half] @ first)
    return torch.cat((F.pad(first, (0, half)), torch.cat((below, second), dim=-1)), dim=-2)


@Op
def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu") -> Tensor:
    """Return rms_norm(x) * activation(gate).

    Args:
        x: [num_tokens, num_heads, head_dim], any float dtype.
        gate: [num_tokens, num_heads, head_dim], dtype of x.
        weight: [head_dim], dtype of x.
        eps: added to the mean of squares.
        activation: silu or sigmoid.

    Returns:
        [num_tokens, num_heads, head_dim], dtype of x.
    """
    wide = x.float()
    normalized = (wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(x.dtype) * weight
    activate = F.silu if activation == "silu" else torch.sigmoid
    return (normalized * activate(gate.float())).to(x.dtype)


@gated_rms_norm.register("cpu")
def _gated_rms_norm_cpu(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu") -> Tensor:
    num_tokens, num_heads, dim = x.shape
    if not cpu_native.supports(x, gate, weight) or not x.is_contiguous() or gate.stride(1) != dim:
        return gated_rms_norm.reference(x, gate, weight, eps, activation)
    out = torch.empty_like(x)
    cpu_native.get_library().quire_gated_rms_norm(
        x.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        num_tokens,
        num_heads,
        dim,
        eps,
        activation == "sigmoid",
    )
    return out
