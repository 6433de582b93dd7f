# SPDX-License-Identifier: Apache-2.0
"""Layers with states in interpreted Triton: decoding sequences equal the reference, beside prompts and with drafts."""

import pytest
import torch
from support.requirements_of_machine import interpreted_kernel, requires_interpreter
from support.state_layers import GATED_DELTA_SIZES, KIMI_SIZES, MAMBA2_SIZES, GatedDeltaCase, Mamba2Case

from quire_kernels import build_state_batch

pytestmark = requires_interpreter

# Lengths of spans, drafts at their ends, and tokens that are computed again.
STEPS = [([1, 1, 1], (), ()), ([3, 70, 1, 2], [2, 0, 0, 0], [1, 0, 0, 1]), ([9], (), ())]
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
