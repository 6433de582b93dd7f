# SPDX-License-Identifier: Apache-2.0
"""Random inputs of the operations of layers with one state per sequence."""

import torch

from quire_kernels import (
    Mamba2Params,
    gated_delta_rule,
    gated_group_norm,
    gated_rms_norm,
    mamba2_recurrence,
    short_convolution,
)
from quire_kernels.state_batch import StateBatch

# Key heads, value heads, key size, value size, taps.
GATED_DELTA_SIZES = [(2, 4, 16, 24, 4), (1, 2, 128, 128, 4), (1, 1, 8, 48, 3)]
KIMI_SIZES = [(3, 3, 24, 24, 4), (2, 2, 128, 128, 4)]
# Heads, groups, size of the state, size of a head.
MAMBA2_SIZES = [(4, 2, 24, 16), (6, 1, 128, 80), (2, 2, 8, 12)]
NUM_ROWS = 8


class GatedDeltaCase:
    """Random inputs of a layer for `lengths` tokens of several sequences."""

    def __init__(self, sizes, lengths, dtype=torch.float32, state_dtype=torch.float32, is_kimi=False):
        self.key_heads, self.heads, self.key_dim, self.value_dim, taps = sizes
        self.size = 2 * self.key_heads * self.key_dim + self.heads * self.value_dim
        torch.manual_seed(len(lengths))
        num_tokens = sum(lengths)
        merged = torch.randn(num_tokens, self.size + self.heads * self.value_dim).to(dtype)
        self.qkv, self.gate = merged[:, : self.size], merged[:, self.size :].unflatten(1, (self.heads, self.value_dim))
        self.a, self.b = torch.randn(num_tokens, 2 * self.heads).to(dtype).chunk(2, dim=1)
        self.a_log, self.dt_bias = torch.randn(self.heads) - 2, torch.randn(self.heads)
        self.gate_activation = "sigmoid" if is_kimi else "silu"
        if is_kimi:
            self.a = torch.randn(num_tokens, self.heads * self.key_dim).to(dtype)
            # Some elements are forgotten at once.
            self.dt_bias = torch.randn(self.heads * self.key_dim) * 3
        # LFM2 and Mamba-2 have biases, and LFM2 has no silu.
        self.bias = torch.randn(self.size).to(dtype) if taps == 3 else None
        self.activation = "silu" if taps == 4 else None
        self.weight, self.norm = torch.randn(self.size, taps).to(dtype), torch.randn(self.value_dim).to(dtype)
        self.convolution = torch.randn(NUM_ROWS, taps - 1, self.size).to(dtype)
        self.states = torch.randn(NUM_ROWS, self.heads, self.key_dim, self.value_dim).to(state_dtype)
        self.rows = torch.randperm(NUM_ROWS)[: len(lengths)].tolist()

    def run(self, batch: StateBatch, get=lambda op: op, rows=slice(None)):
        """Return the outputs and the states after the tokens `rows`."""
        convolution, states = self.convolution.clone(), self.states.clone()
        qkv = get(short_convolution)(
            self.qkv[rows], self.weight, convolution, batch, self.bias, has_silu=self.activation is not None
        )
        out = get(gated_delta_rule)(qkv, self.a[rows], self.b[rows], self.a_log, self.dt_bias, states, batch)
        self.convolution, self.states = convolution, states
        return qkv, out, get(gated_rms_norm)(out, self.gate[rows], self.norm, 1e-6, self.gate_activation)


class Mamba2Case:
    """Random inputs of a layer for `lengths` tokens of several sequences."""

    def __init__(self, sizes, lengths, dtype=torch.float32, state_dtype=torch.float32):
        self.heads, self.groups, self.state_dim, self.head_dim = sizes
        inner, bc = self.heads * self.head_dim, self.groups * self.state_dim
        torch.manual_seed(len(lengths))
        merged = torch.randn(sum(lengths), 2 * inner + 2 * bc + self.heads).to(dtype)
        self.gate, self.xbc, self.dt = merged.split([inner, inner + 2 * bc, self.heads], dim=1)
        limits = (0.0, float("inf")) if self.groups == 1 else (0.3, 1.5)
        a_log, dt_bias, d = torch.randn(3, self.heads)
        self.params = Mamba2Params(a_log - 2, dt_bias, d, self.groups, limits)
        self.weight = torch.randn(inner).to(dtype)
        self.states = torch.randn(NUM_ROWS, self.heads, self.state_dim, self.head_dim).to(state_dtype)
        self.rows = torch.randperm(NUM_ROWS)[: len(lengths)].tolist()

    def run(self, batch: StateBatch, get=lambda op: op, rows=slice(None)):
        """Return the outputs for the tokens `rows`, and with each kind of gate."""
        states = self.states.clone()
        out = get(mamba2_recurrence)(self.xbc[rows], self.dt[rows], self.params, states, batch)
        self.states, flat = states, out.flatten(1)
        kinds = (self.weight, True), (self.weight, False), (None, False)
        return out, *(
            get(gated_group_norm)(flat, self.gate[rows], weight, 1e-5, self.groups, gates_first)
            for weight, gates_first in kinds
        )
