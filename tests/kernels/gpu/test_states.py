# SPDX-License-Identifier: Apache-2.0
"""Layers with states in interpreted Triton: decoding sequences equal the reference, beside prompts and with drafts."""

import numpy as np
import pytest
import torch
import triton.language as tl
from support.requirements_of_machine import interpreted_kernel, requires_interpreter
from support.state_layers import GATED_DELTA_SIZES, KIMI_SIZES, MAMBA2_SIZES, GatedDeltaCase, Mamba2Case
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from quire_kernels import build_state_batch, short_convolution

pytestmark = requires_interpreter

# Lengths of spans, drafts at their ends, and tokens that are computed again.
STEPS = [
    ([1, 1, 1], (), ()),
    ([3, 70, 1, 2], [2, 0, 0, 0], [1, 0, 0, 1]),
    # A prompt without tokens, one of whole chunks, one of several chunks.
    ([0, 64, 1, 150], (), ()),
]
LAYERS = [
    *((GatedDeltaCase, (sizes,), {}) for sizes in GATED_DELTA_SIZES),
    *((GatedDeltaCase, (sizes,), {"is_kimi": True}) for sizes in KIMI_SIZES),
    *((Mamba2Case, (sizes,), {}) for sizes in MAMBA2_SIZES),
]


def _get(op):
    return interpreted_kernel(op) if "own" in op.implementations("cuda") else op.reference


@pytest.mark.parametrize(("lengths", "drafts", "replayed"), STEPS)
@pytest.mark.parametrize(("layer", "sizes", "options"), LAYERS)
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_reference(layer, sizes, options, lengths, drafts, replayed, state_dtype):
    total = [n + r for n, r in zip(lengths, replayed or [0] * len(lengths), strict=True)]
    own, reference = (layer(*sizes, total, state_dtype=state_dtype, **options) for _ in range(2))
    batch = build_state_batch(own.rows, lengths, torch.device("cpu"), drafts, replayed, 3)
    found, expected = own.run(batch, _get), reference.run(batch, lambda op: op.reference)
    # A state in bfloat16 is rounded after each token, and a rounding that differs remains.
    tolerance = 1e-5 if state_dtype == torch.float32 else 1e-2
    for out, right in zip((*found, own.states), (*expected, reference.states), strict=True):
        assert (out - right).float().norm() <= tolerance * right.float().norm()
    if layer is GatedDeltaCase:
        assert torch.equal(own.convolution, reference.convolution)


def _multiply_bfloat16(monkeypatch):
    """Correct the interpreter, which multiplies the bits of bfloat16 as integers."""
    create_dot = InterpreterBuilder.create_dot

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_exact_dot(self, a, b, *args):
        return create_dot(self, widened(a), widened(b), *args)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_exact_dot)


@pytest.mark.parametrize("is_repeated", [False, True])
@pytest.mark.parametrize(("layer", "sizes"), [(GatedDeltaCase, (1, 2, 24, 40, 4)), (Mamba2Case, (2, 1, 24, 40))])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_prompts_of_half_precision_are_as_exact_as_the_reference(monkeypatch, layer, sizes, dtype, is_repeated):
    """Also if each token is the same and nothing decays, so that all tokens of a chunk correct each other."""
    _multiply_bfloat16(monkeypatch)
    own, reference = layer(sizes, [150, 40], dtype), layer(sizes, [150, 40], dtype)
    for case in (own, reference) if is_repeated else ():
        inputs = case.qkv if layer is GatedDeltaCase else case.xbc
        inputs.copy_(inputs[:1])
        case.__dict__.update(a=case.a * 0 - 20, b=case.b * 0 + 20) if layer is GatedDeltaCase else case.dt.fill_(-9)
    batch = build_state_batch(own.rows, [150, 40], torch.device("cpu"))
    # The convolution has no products, and the interpreter cuts bfloat16 instead of rounding it.
    get = lambda op: op.reference if op is short_convolution else _get(op)  # noqa: E731
    outputs = own.run(batch, get), reference.run(batch, lambda op: op.reference)
    found, expected = (each[1 if layer is GatedDeltaCase else 0] for each in outputs)
    assert (found - expected).float().norm() <= 6e-3 * expected.float().norm()
    assert (own.states - reference.states).norm() <= 1e-4 * reference.states.norm()
