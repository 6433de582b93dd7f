# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet and Kimi Delta Attention equal transformers, and compiled kernels equal the reference, for any
division into spans."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from support.requirements_of_machine import requires_native_kernels
from support.state_layers import GATED_DELTA_SIZES as SIZES
from support.state_layers import KIMI_SIZES
from support.state_layers import GatedDeltaCase as Case
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from quire_kernels import build_state_batch

CPU = torch.device("cpu")


@pytest.mark.parametrize("sizes", SIZES)
def test_equals_transformers(sizes):
    case = Case(sizes, [130])
    initial = case.convolution[case.rows[0]].clone(), case.states[case.rows[0]].clone()
    qkv, out, normed = case.run(build_state_batch(case.rows, [130], CPU))
    inputs = torch.cat((initial[0], case.qkv)).t()[None]
    convolve = modeling_qwen3_next.causal_conv1d_fn
    expected = convolve(inputs, case.weight, case.bias, activation=case.activation)[0, :, sizes[4] - 1 :].t()
    torch.testing.assert_close(qkv, expected, rtol=1e-4, atol=1e-5)
    widths = [case.key_heads * case.key_dim] * 2 + [case.heads * case.value_dim]
    q, k, v = (
        x[None].unflatten(2, (-1, n)) for x, n in zip(qkv.split(widths, 1), [sizes[2], *sizes[2:4]], strict=True)
    )
    decay, beta = -case.a_log.exp() * F.softplus(case.a + case.dt_bias), case.b.sigmoid()
    for function in ("torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"):
        expected, state = getattr(modeling_qwen3_next, function).__wrapped__(
            *(q, k, v),
            g=decay[None],
            beta=beta[None],
            initial_state=initial[1][None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        torch.testing.assert_close(out, expected[0], rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(case.states[case.rows[0]], state[0], rtol=1e-3, atol=1e-4)
    norm = modeling_qwen3_next.Qwen3NextRMSNormGated(sizes[3])
    norm.weight.data = case.norm
    torch.testing.assert_close(normed, norm(out, case.gate), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 300])
def test_kimi_delta_attention_equals_transformers(num_tokens):
    case = Case(KIMI_SIZES[0], [num_tokens], is_kimi=True)
    initial = case.states[case.rows[0]].clone()[None]
    qkv, out, normed = case.run(build_state_batch(case.rows, [num_tokens], CPU))
    q, k, v = (x[None].unflatten(2, (case.heads, -1)) for x in qkv.chunk(3, dim=1))
    decays = (case.a + case.dt_bias)[None].unflatten(2, (case.heads, -1))
    expected, state = modeling_kimi_linear.recurrent_kimi_delta_attention.__wrapped__(
        *(q, k, v),
        g=-case.a_log.exp()[:, None] * F.softplus(decays),
        beta=case.b.sigmoid()[None],
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(out, expected[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(case.states[case.rows[0]], state[0], rtol=1e-3, atol=1e-4)
    norm = modeling_kimi_linear.KimiLinearRMSNormGated(KIMI_SIZES[0][3])
    norm.weight.data = case.norm
    torch.testing.assert_close(normed, norm(out, case.gate), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("is_kimi", [False, True])
def test_division_into_steps_does_not_matter(is_kimi):
    lengths, sizes = [70, 3], KIMI_SIZES[0] if is_kimi else SIZES[0]
    whole, divided = (Case(sizes, lengths, is_kimi=is_kimi) for _ in range(2))
    *_, expected = whole.run(build_state_batch(whole.rows, lengths, CPU))
    outputs = torch.empty_like(expected)
    for first, second in (((0, 1), (70, 72)), ((1, 65), (72, 73)), ((65, 66), ()), ((66, 70), ())):
        bounds = [span for span in (first, second) if span]
        tokens = torch.cat([torch.arange(*span) for span in bounds])
        batch = build_state_batch(divided.rows[: len(bounds)], [end - start for start, end in bounds], CPU)
        outputs[tokens] = divided.run(batch, rows=tokens)[-1]
    torch.testing.assert_close(outputs, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(divided.states, whole.states, rtol=1e-3, atol=1e-4)
    assert torch.equal(divided.convolution, whole.convolution)


@pytest.mark.parametrize("is_kimi", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_drafts_change_no_state(dtype, is_kimi):
    """With drafts in a span, outputs and kept states have the same bits as token by token. In float32, PyTorch computes
    the recurrence, and the bits of its products depend on their number with some libraries (MKL on Intel)."""
    assert_equal = partial(torch.testing.assert_close, **({"rtol": 0, "atol": 0} if dtype == torch.bfloat16 else {}))
    lengths, drafts, replayed = [4, 70, 1, 3], [2, 0, 0, 0], [1, 0, 0, 2]
    spans = [(sum(lengths[:i]), n) for i, n in enumerate(lengths)]
    sizes = KIMI_SIZES[1] if is_kimi else SIZES[1]
    whole, single = (Case(sizes, lengths, dtype, is_kimi=is_kimi) for _ in range(2))
    steps = [n - r for n, r in zip(lengths, replayed, strict=True)]
    *_, outputs = whole.run(build_state_batch(whole.rows, steps, CPU, drafts, replayed, 3))
    for i in (0, 2, 3):
        (start, length), row = spans[i], single.rows[i]
        for token in range(length):
            *_, expected = single.run(build_state_batch([row], [1], CPU), rows=slice(start + token, start + token + 1))
            assert_equal(outputs[start + token], expected[0])
            if token == length - drafts[i] - 1:
                assert_equal(whole.states[row], single.states[row])
                assert torch.equal(whole.convolution[row], single.convolution[row])


@requires_native_kernels
@pytest.mark.parametrize("lengths", [[1, 1, 1], [5, 1, 70, 1, 2], [130]])
@pytest.mark.parametrize(("sizes", "is_kimi"), [(s, False) for s in SIZES] + [(s, True) for s in KIMI_SIZES])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_kernels_equal_the_reference(sizes, is_kimi, lengths, state_dtype):
    compiled, reference = (Case(sizes, lengths, torch.bfloat16, state_dtype, is_kimi) for _ in range(2))
    batch = build_state_batch(compiled.rows, lengths, CPU)
    for out, expected in zip(compiled.run(batch), reference.run(batch, lambda op: op.reference), strict=True):
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(compiled.convolution, reference.convolution)
    torch.testing.assert_close(compiled.states, reference.states, rtol=2e-2, atol=2e-2)
