# SPDX-License-Identifier: Apache-2.0
"""Mamba-2 equals transformers, and compiled kernels equal the reference, for any division into spans."""

import pytest
import torch
from support.requirements_of_machine import requires_native_kernels
from support.state_layers import MAMBA2_SIZES as SIZES
from support.state_layers import Mamba2Case as Case
from transformers.models.falcon_h1 import modeling_falcon_h1
from transformers.models.nemotron_h import modeling_nemotron_h

from quire_kernels import build_state_batch

CPU = torch.device("cpu")


@pytest.mark.parametrize("sizes", SIZES)
def test_equals_transformers(sizes):
    case, params = Case(sizes, [130]), Case(sizes, [130]).params
    initial = case.states[case.rows[0]].clone()
    out, gates_first, norm_first, only_gate = case.run(build_state_batch(case.rows, [130], CPU))
    widths = [case.heads * case.head_dim, *[case.groups * case.state_dim] * 2]
    x, b, c = (
        part[None].unflatten(2, (-1, size))
        for part, size in zip(case.xbc.split(widths, 1), [case.head_dim, *[case.state_dim] * 2], strict=True)
    )
    expected, state = modeling_nemotron_h.mamba2_chunk_scan.__wrapped__(
        *(x, case.dt[None], -params.a_log.exp(), b, c),
        chunk_size=32,
        D=params.d,
        dt_bias=params.dt_bias,
        dt_softplus=True,
        dt_limit=params.dt_limits,
        initial_states=initial[None].mT,
        return_final_states=True,
    )
    torch.testing.assert_close(out, expected[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(case.states[case.rows[0]], state[0].mT, rtol=1e-3, atol=1e-3)
    norm = modeling_nemotron_h.NemotronHRMSNormGated(widths[0], widths[0] // case.groups, 1e-5)
    other = modeling_falcon_h1.FalconH1RMSNormGated(widths[0], 1e-5, case.groups, norm_before_gate=True)
    norm.weight.data = other.weight.data = case.weight
    flat = out.flatten(1)
    torch.testing.assert_close(gates_first, norm(flat, case.gate), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(norm_first, other(flat, case.gate), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(only_gate, flat * torch.nn.functional.silu(case.gate))


def test_division_into_steps_does_not_matter():
    lengths = [70, 3]
    whole, divided = Case(SIZES[0], lengths), Case(SIZES[0], lengths)
    *_, expected = whole.run(build_state_batch(whole.rows, lengths, CPU))
    outputs = torch.empty_like(expected)
    for first, second in (((0, 1), (70, 72)), ((1, 65), (72, 73)), ((65, 66), ()), ((66, 70), ())):
        bounds = [span for span in (first, second) if span]
        tokens = torch.cat([torch.arange(*span) for span in bounds])
        batch = build_state_batch(divided.rows[: len(bounds)], [end - start for start, end in bounds], CPU)
        outputs[tokens] = divided.run(batch, rows=tokens)[-1]
    torch.testing.assert_close(outputs, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(divided.states, whole.states, rtol=1e-3, atol=1e-4)


@requires_native_kernels
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("lengths", [[1, 1, 1], [5, 1, 70, 1, 2], [130]])
@pytest.mark.parametrize("sizes", SIZES)
def test_compiled_kernels_equal_the_reference(sizes, lengths, state_dtype):
    compiled, reference = (Case(sizes, lengths, torch.bfloat16, state_dtype) for _ in range(2))
    batch = build_state_batch(compiled.rows, lengths, CPU)
    for out, expected in zip(compiled.run(batch), reference.run(batch, lambda op: op.reference), strict=True):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=3e-2)
    assert compiled.states.dtype == state_dtype
    torch.testing.assert_close(compiled.states, reference.states, rtol=2e-2, atol=2e-2)
