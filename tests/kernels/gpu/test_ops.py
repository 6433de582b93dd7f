# SPDX-License-Identifier: Apache-2.0
"""Small operations in interpreted Triton: they equal their references on sizes that do not fill a tile."""

import pytest
import torch
from support.requirements_of_machine import interpreted_kernel, requires_interpreter

from quire_kernels import add_rms_norm, get_gated_op, rms_norm, rope_and_cache, write_kv

pytestmark = requires_interpreter

TOLERANCE = {torch.float32: 1e-5, torch.float16: 8e-3}
DTYPES = list(TOLERANCE)
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(42)


def _close(found, expected):
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (7, 63), (5, 3000)], ids=str)
def test_rms_norm(shape, dtype):
    x, weight = torch.randn(shape, dtype=dtype), torch.randn(shape[1], dtype=dtype)
    _close(interpreted_kernel(rms_norm)(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5))


def test_rms_norm_of_heads():
    """Queries and keys are a strided view of a merged projection."""
    x, weight = torch.randn(9, 7, 24)[:, 1:6], torch.randn(24)
    _close(interpreted_kernel(rms_norm)(x, weight, 1e-5), rms_norm.reference(x, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_add_rms_norm(dtype):
    x, residual, weight = torch.randn(7, 63, dtype=dtype), torch.randn(7, 63, dtype=dtype), torch.randn(63, dtype=dtype)
    stream = residual.clone()
    _close(interpreted_kernel(add_rms_norm)(x, stream, weight, 1e-5), add_rms_norm.reference(x, residual, weight, 1e-5))
    _close(stream, residual)


# numpy, which the interpreter uses, warns when a number becomes infinite; a GPU does not, and 1 / infinity is intended.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "relu", "gelu", "gelu_new"])
def test_gated(name, dtype):
    gate_up = 3 * torch.randn(3, 2 * 1300, dtype=dtype)
    _close(interpreted_kernel(get_gated_op(name))(gate_up), get_gated_op(name).reference(gate_up))


def _cache(like, blocks=5, block_size=8):
    return torch.zeros(2, blocks, block_size, *like.shape[1:], dtype=like.dtype)


@pytest.mark.parametrize("cache_dtype", [torch.float32, E4M3], ids=str)
@pytest.mark.parametrize("heads", [(1, 64), (3, 80), (17, 96)], ids=str)
def test_write_kv(heads, cache_dtype):
    # Numbers that e4m3 represents exactly: the interpreter rounds without carrying into the exponent (1.99 to 1).
    # One number is larger than its maximum.
    merged = torch.randn(5, 2 * heads[0], heads[1]).to(cache_dtype).float()
    merged[2, :, 3] = 1e4
    merged[3, :, 5], merged[4, :, 7] = float("nan"), -float("nan")
    keys, values = merged[:, : heads[0]], merged[:, heads[0] :]
    addresses = torch.tensor([9, 0, 31, 16, 10])
    found, expected = (_cache(keys).to(cache_dtype) for _ in range(2))
    interpreted_kernel(write_kv)(keys, values, found, addresses)
    write_kv.reference(keys, values, expected, addresses)
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0, equal_nan=True)
    assert expected.float().isnan().sum() == 4 * heads[0]
    assert expected.float().nan_to_num(0.0).max() == (448.0 if cache_dtype == E4M3 else 1e4)


@pytest.mark.parametrize("cache_dtype", [None, E4M3], ids=["same", "e4m3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(9, 3, 64, 64), (4, 4, 80, 80), (1, 1, 96, 72), (14, 2, 24, 24)], ids=str)
def test_rope_and_cache(sizes, dtype, cache_dtype):
    num_heads, num_kv_heads, head_dim, dim = sizes
    qkv = torch.randn(6, num_heads + 2 * num_kv_heads, head_dim).to(cache_dtype or dtype).to(dtype)
    angles = torch.rand(6, dim // 2) * 100
    if cache_dtype is not None:
        # A rotation by 90 degrees keeps numbers that e4m3 represents exactly; see test_write_kv.
        cos, sin = torch.zeros(6, dim), torch.ones(6, dim)
        sin[:, : dim // 2] = -1.0
    else:
        cos = torch.cat((angles.cos(), angles.cos()), -1)
        sin = torch.cat((-angles.sin(), angles.sin()), -1)
    addresses = torch.tensor([9, 0, 31, 16, 10, 39])
    like = qkv[:, num_heads : num_heads + num_kv_heads]
    found, expected = (_cache(like).to(cache_dtype or dtype) for _ in range(2))
    q = interpreted_kernel(rope_and_cache)(qkv.clone(), cos.to(dtype), sin.to(dtype), found, addresses, num_heads)
    _close(q, rope_and_cache.reference(qkv, cos.to(dtype), sin.to(dtype), expected, addresses, num_heads))
    _close(found.to(dtype), expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_stays_nan_in_an_eight_bit_cache(dtype):
    """Otherwise an overflow of the model would be hidden. Keys are rotated; values and the heads' ends are not."""
    qkv = torch.ones(3, 4, 24, dtype=dtype)
    qkv[0, 2, 3], qkv[1, 3, 5], qkv[1, 2, 20], qkv[2, 3, 1] = (float(x) for x in ("nan", "nan", "nan", "6e4"))
    cos, sin = torch.ones(3, 16, dtype=dtype), torch.zeros(3, 16, dtype=dtype)
    found, expected = (_cache(qkv[:, 2:3]).to(E4M3) for _ in range(2))
    for form, cache in ((interpreted_kernel(rope_and_cache), found), (rope_and_cache.reference, expected)):
        form(qkv.clone(), cos, sin, cache, torch.tensor([0, 9, 39]), 2)
    rows = found.float().view(2, -1, 24)
    assert torch.equal(rows.isnan(), expected.float().view(2, -1, 24).isnan())
    # One number is half of a rotated pair.
    assert rows.isnan().sum() == 4 and rows.nan_to_num(0.0).max() == 448.0
