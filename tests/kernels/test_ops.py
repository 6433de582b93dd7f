# SPDX-License-Identifier: Apache-2.0
"""Small operations: each implementation equals its reference, and the reference equals the formula."""

import math
import re
import sys

import pytest
import torch

import quire_kernels
from quire_kernels import (
    Op,
    apply_rope,
    dispatch,
    gelu_tanh_mul,
    linear,
    pack_weight,
    rms_norm,
    silu_mul,
    softcap,
    write_kv,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# A few roundings of the type at magnitudes around 1 to 8.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 6e-2, torch.float16: 8e-3}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(42)


def test_device_of_the_first_argument_selects_the_implementation():
    op = Op(lambda x: "reference")
    op.register("cpu")(lambda x: "cpu")
    assert op(torch.empty(1)) == "cpu"
    assert op(torch.empty(1, device="meta")) == "reference"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"": "torch"}, None),
        ({"rms_norm": "reference", "gelu_tanh_mul": "own"}, None),
        ({"rms_norn": "torch"}, "'rms_norn' is not an operation; use one of adapted_linear, .* rms_norm, "),
        (
            {"paged_attention": "fusde"},
            "'fusde' is not an implementation of paged_attention on cuda; use one of own, fused, cudnn, torch, ref",
        ),
        ({"": "flash"}, "'flash' is not an implementation of any operation on cuda; use one of .*own"),
    ],
)
def test_rejects_overrides_that_do_not_exist(overrides, message, monkeypatch):
    monkeypatch.setattr(dispatch, "overrides", lambda: overrides)
    error = dispatch.validate_overrides(dispatch.collect_ops(vars(quire_kernels)), "cuda")
    assert re.match(message, error) if message else error is None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (7, 63), (65, 576)], ids=str)
def test_rms_norm(shape, dtype):
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(shape[1], dtype=dtype)
    torch.testing.assert_close(
        rms_norm(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_rms_norm_formula():
    x = torch.tensor([[3.0, 4.0]])
    expected = [3.0 / math.sqrt(12.5 + 0.5) * 2.0, 4.0 / math.sqrt(12.5 + 0.5)]
    torch.testing.assert_close(rms_norm.reference(x, torch.tensor([2.0, 1.0]), 0.5), torch.tensor([expected]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 8), (5, 3, 64), (33, 12, 80)], ids=str)
def test_rope(shape, dtype):
    # Queries and keys are a strided view of a merged projection.
    x = torch.randn(shape[0], shape[1] + 2, shape[2], dtype=dtype)[:, : shape[1]]
    angles = torch.rand(shape[0], shape[2] // 2) * 100
    cos = torch.cat((angles.cos(), angles.cos()), -1)
    sin = torch.cat((-angles.sin(), angles.sin()), -1)
    torch.testing.assert_close(
        apply_rope(x, cos, sin), apply_rope.reference(x, cos, sin), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
    )


def test_rope_rotates_pairs():
    angle = torch.tensor([[0.3, 1.1]])
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    turned = [
        complex(1, 3) * complex(math.cos(0.3), math.sin(0.3)),
        complex(2, 4) * complex(math.cos(1.1), math.sin(1.1)),
    ]
    expected = torch.tensor([[[turned[0].real, turned[1].real, turned[0].imag, turned[1].imag]]])
    torch.testing.assert_close(apply_rope.reference(x, cos, sin), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu_mul(dtype):
    gate_up = torch.randn(9, 2 * 65, dtype=dtype)
    gate, up = gate_up.double()[:, :65], gate_up.double()[:, 65:]
    expected = (gate / (1 + (-gate).exp()) * up).to(dtype)
    torch.testing.assert_close(silu_mul(gate_up), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gelu_tanh_mul(dtype):
    gate_up = (torch.randn(9, 2 * 65) * 3).to(dtype)
    gate, up = gate_up.double()[:, :65], gate_up.double()[:, 65:]
    expected = (torch.nn.functional.gelu(gate, approximate="tanh") * up).to(dtype)
    torch.testing.assert_close(gelu_tanh_mul(gate_up), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_softcap(dtype):
    logits = (torch.randn(5, 83) * 40).to(dtype)[:, :81]
    expected = (30 * (logits.double() / 30).tanh()).to(dtype)
    capped = logits.clone()
    assert softcap(capped, 30.0) is capped
    torch.testing.assert_close(capped, expected, rtol=TOLERANCE[dtype], atol=30 * TOLERANCE[dtype])


def test_write_kv_writes_only_its_addresses():
    cache = torch.zeros(2, 4, 8, 3, 16)
    merged = torch.randn(5, 2, 3, 16)
    addresses = torch.tensor([9, 0, 31, 16, 10])
    write_kv(merged[:, 0], merged[:, 1], cache, addresses)
    expected = torch.zeros(2, 32, 3, 16)
    for i, address in enumerate(addresses.tolist()):
        expected[:, address] = merged[i]
    assert torch.equal(cache.view(2, 32, 3, 16), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("num_tokens", [1, 5, 64])
def test_packed_linear(num_tokens, bias, dtype, monkeypatch):
    monkeypatch.setattr(sys.modules["quire_kernels.linear"], "MIN_PACKED", 0)
    x, weight = torch.randn(num_tokens, 72, dtype=dtype), torch.randn(100, 72, dtype=dtype) / 8
    added = torch.randn(100, dtype=dtype) if bias else None
    with torch.inference_mode():
        torch.testing.assert_close(
            linear(x, pack_weight(weight), added),
            linear.reference(x, weight, added),
            rtol=TOLERANCE[dtype],
            atol=TOLERANCE[dtype],
        )
