# SPDX-License-Identifier: Apache-2.0
"""The compiled CPU kernels equal the references, computed in float64 from the same bfloat16 numbers; and the behaviour
without them."""

import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from support.requirements_of_machine import requires_native_kernels
from torch import Tensor

from quire_kernels import (
    QuantizedWeight,
    argmax_first,
    build_attention_metadata,
    cpu_build,
    cpu_native,
    embedding,
    linear,
    pack_weight,
    pack_weight_codebook,
    pack_weight_fp4,
    pack_weight_fp8,
    pack_weight_int4,
    pack_weight_int8,
    paged_attention,
    qk_norm,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
    rms_norm,
    rope_and_cache,
    row_size,
    silu_mul,
    supports_embedding,
    write_kv,
)
from quire_kernels.kv_cache_layout import dequantize_rows


@pytest.fixture(autouse=True)
def no_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Test our GEMM also on processors where oneDNN's is used."""
    monkeypatch.setattr(cpu_native, "has_fast_gemm", lambda: True)


EPS = 2.0**-8
"""Half a unit in the last place of bfloat16, relative."""


def _close(found: Tensor, wanted: Tensor, slack: float) -> None:
    """Allow one rounding to bfloat16, and `slack` for intermediate roundings."""
    assert found.dtype == torch.bfloat16
    bound = EPS * wanted.abs() + slack
    worst = ((found.double() - wanted).abs() - bound).max().item()
    assert worst <= 0, f"off by {worst} more than rounding explains"


def _random(*size: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(size) * scale).bfloat16()


@requires_native_kernels
def test_library_is_available() -> None:
    """The kernels are used on a supported processor; otherwise the tests below would test torch."""
    assert cpu_native.load_library() is not None
    assert pack_weight(_random(64, 32)).shape == (2, 16, 32, 2)


@requires_native_kernels
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 10, 11, 64, 240, 241, 500])
@pytest.mark.parametrize(("out_features", "in_features"), [(32, 2), (64, 30), (96, 576), (576, 128)])
def test_linear(num_tokens: int, out_features: int, in_features: int) -> None:
    torch.manual_seed(num_tokens + out_features)
    x, weight, bias = _random(num_tokens, in_features), _random(out_features, in_features), _random(out_features)
    packed = pack_weight(weight)
    wanted = x.double() @ weight.double().t()
    # float32 sums of in_features products.
    slack = in_features * 2.0**-23 * wanted.abs().max().item() + 1e-5
    _close(linear(x, packed, None), wanted, slack)
    _close(linear(x, packed, bias), wanted + bias.double(), slack)
    residual = _random(num_tokens, out_features)
    expected = wanted + bias.double() + residual.double()
    assert linear(x, packed, bias, residual) is residual
    _close(residual, expected, slack)


def _pack(scheme: str, weight: Tensor, dtype: torch.dtype) -> QuantizedWeight:
    """Quantize a weight; float32 gives the reference's layout, bfloat16 that of the compiled kernel."""
    out_features, in_features = weight.shape
    bits, _, group_size = scheme.partition("/")
    if bits == "fp8":
        values, scales = quantize_fp8(weight)
        if group_size == "tensor":
            scales = scales[:1]
        elif group_size:
            scales = torch.linspace(0.5, 2, -(-out_features // 128) * -(-in_features // 128)).view(
                -(-out_features // 128), -1
            )
        return pack_weight_fp8(values, scales, dtype=dtype)
    if bits == "int8":
        return pack_weight_int8(*quantize_int8(weight), dtype=dtype, weight_only=group_size == "weight")
    quantizes, group_size = group_size.endswith("a8"), group_size.removesuffix("a8")
    codes, scales, zeros = quantize_int4(weight, int(group_size.removesuffix("s")) if group_size else in_features)
    if bits == "mxfp4":
        return pack_weight_fp4(codes, scales.to(torch.float8_e8m0fnu), dtype=dtype)
    if bits == "nvfp4":
        return pack_weight_fp4(codes, scales, dtype=dtype)
    if bits == "mins":
        mins = scales * 7.3
        return pack_weight_codebook(codes, scales, torch.arange(16.0), mins=mins, dtype=dtype)
    if bits == "int8mins":
        mins = scales * 7.3
        return pack_weight_int8(codes.to(torch.int8), scales, mins=mins, dtype=dtype, weight_only=True)
    if bits == "codebook":
        return pack_weight_codebook(codes, scales, torch.linspace(-1, 1, 16).bfloat16().float(), dtype=dtype)
    zeros = None if group_size.endswith("s") else zeros
    return pack_weight_int4(codes, scales, zeros, dtype=dtype, int8_activations=quantizes)


@requires_native_kernels
@pytest.mark.parametrize("num_tokens", [1, 9, 17, 241])
@pytest.mark.parametrize(("out_features", "in_features"), [(32, 64), (160, 192), (576, 1536)])
@pytest.mark.parametrize(
    "scheme",
    [
        "int8",
        "int8/weight",
        "fp8",
        "fp8/tensor",
        "fp8/block",
        "int4",
        "int4/32",
        "int4/64",
        "int4/32s",
        "int4/32a8",
        "int4/64sa8",
        "mxfp4/32",
        "nvfp4/16",
        "codebook/64",
        "mins/32",
        "int8mins/16",
    ],
)
def test_quantized_linear(scheme: str, out_features: int, in_features: int, num_tokens: int) -> None:
    torch.manual_seed(num_tokens + out_features)
    x, weight = _random(num_tokens, in_features + 8)[:, :in_features], _random(out_features, in_features)
    x[0, :] = 0.0  # has no scale
    weight[3] = 0.0
    if num_tokens == 1:
        weight[4:] *= 1e-7  # scales that float16 cannot represent
    bias, residual = _random(out_features), _random(num_tokens, out_features)
    packed, reference = _pack(scheme, weight, torch.bfloat16), _pack(scheme, weight, torch.float32)
    assert packed.is_panel_packed and not reference.is_panel_packed
    # A scale of mxfp4 has one byte in the reference, and two or four in panels.
    scale_bytes = 3 * out_features * in_features // 32 if scheme.startswith("mxfp4") else 0
    assert packed.num_bytes <= reference.num_bytes + 4 * out_features + scale_bytes
    wanted = linear(x.float(), reference, None).double()
    # The order of the sums differs. In w8a8 a product near .5 can be rounded to either side, and the reference of
    # 4 bits does not quantize activations.
    slack = (1e-2 if scheme == "int8" or scheme.endswith("a8") else 1e-5) * wanted.abs().max().item() + 1e-30
    found = linear(x, packed, None)
    _close(found, wanted, slack)
    # A row does not depend on the rows beside it.
    assert torch.equal(linear(x[-1:], packed, None), found[-1:])
    expected = wanted + bias.double() + residual.double()
    assert linear(x, packed, bias, residual) is residual
    _close(residual, expected, slack)


@pytest.mark.parametrize(
    ("scheme", "error"), [("int8/weight", 0.01), ("fp8", 0.04), ("int4/32", 0.1), ("int4/64", 0.12)]
)
def test_rounding_of_normally_distributed_weights(scheme: str, error: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 576)
    assert (_pack(scheme, weight, torch.float32).dequantize() - weight).norm() <= error * weight.norm()


@requires_native_kernels
@pytest.mark.parametrize("num_tokens", [1, 4, 8, 64])
def test_nan_in_fp8_weights(num_tokens: int) -> None:
    """A NaN code or a NaN scale makes its column NaN, and no other."""
    values, scales = quantize_fp8(torch.randn(64, 96))
    values.view(torch.uint8)[3, 5], values.view(torch.uint8)[40, 95] = 0x7F, 0xFF
    scales[9] = float("nan")
    is_nan = linear(_random(num_tokens, 96), pack_weight_fp8(values, scales, dtype=torch.bfloat16), None).isnan()
    assert is_nan.all(0).nonzero().flatten().tolist() == [3, 9, 40] and is_nan.sum() == 3 * num_tokens


@requires_native_kernels
def test_linear_reads_strided_rows() -> None:
    x, weight = _random(7, 100), _random(32, 40)
    wanted = x[:, :40].double() @ weight.double().t()
    _close(linear(x[:, :40], pack_weight(weight), None), wanted, 1e-4)


@pytest.mark.parametrize(("out_features", "in_features"), [(33, 64), (64, 33)])
def test_shapes_that_do_not_fit_into_panels(out_features: int, in_features: int) -> None:
    x, weight = _random(5, in_features), _random(out_features, in_features)
    _close(linear(x, pack_weight(weight), None), x.double() @ weight.double().t(), 1e-4)


@requires_native_kernels
@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="oneDNN multiplies bfloat16 with AVX-512 only"
)
def test_onednn_multiplies_with_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_native, "has_fast_gemm", lambda: False)
    x, weight, residual = _random(5, 64), _random(96, 64), _random(5, 96)
    packed = pack_weight(weight)
    assert packed.is_mkldnn and not supports_embedding(packed)
    wanted = x.double() @ weight.double().t()
    _close(linear(x, packed, None), wanted, 1e-4)
    # Two roundings: the product, then the sum.
    expected = wanted + residual.double()
    _close(linear(x, packed, None, residual), expected, EPS * wanted.abs().max().item() + 1e-4)


@requires_native_kernels
def test_embedding_reads_packed_rows() -> None:
    table = _random(96, 30)
    token_ids = torch.tensor([0, 95, 31, 32, 31])
    assert torch.equal(embedding(token_ids, pack_weight(table)), table[token_ids])


@requires_native_kernels
@pytest.mark.parametrize("size", [1, 16, 30, 576])
def test_rms_norm(size: int) -> None:
    x, weight = _random(5, size, scale=3.0), _random(size)
    wide = x.double()
    wanted = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    _close(rms_norm(x, weight, 1e-5), wanted, 1e-6)


@requires_native_kernels
@pytest.mark.parametrize("head_dim", [24, 64])
def test_qk_norm(head_dim: int) -> None:
    whole = torch.randn(5, 7, head_dim).bfloat16()
    weights = [torch.randn(head_dim).bfloat16() for _ in range(2)]
    qk_norm(qkv := whole.clone(), *weights, 3, 1e-5)  # 3 heads of queries, 2 each of keys and values
    assert torch.equal(qkv[:, 5:], whole[:, 5:])
    for heads, weight in zip((slice(3), slice(3, 5)), weights, strict=True):
        _close(qkv[:, heads], rms_norm.reference(whole[:, heads].double(), weight.double(), 1e-5), 1e-6)


@requires_native_kernels
@pytest.mark.parametrize("size", [1, 40, 1536])
def test_silu_mul(size: int) -> None:
    gate_up = _random(7, 2 * size, scale=20.0)
    gate, up = gate_up.double().chunk(2, dim=-1)
    wanted = torch.nn.functional.silu(gate) * up
    _close(silu_mul(gate_up), wanted, 1e-5 * wanted.abs().max().item())


@requires_native_kernels
def test_silu_mul_of_extreme_values() -> None:
    gate = torch.tensor([[-1e30, -200.0, 200.0, 1e30, float("nan")]])
    found = silu_mul(torch.cat((gate, torch.ones(1, 5)), dim=-1).bfloat16())[0]
    assert found[:2].tolist() == [0.0, 0.0]
    assert torch.equal(found[2:4], gate[0, 2:4].bfloat16())
    assert found[4].isnan()


@requires_native_kernels
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "rotary"), [(9, 3, 64, 64), (2, 2, 80, 32), (4, 1, 16, 16)])
def test_rope_and_cache(heads: int, kv_heads: int, head_dim: int, rotary: int) -> None:
    num_tokens = 11
    qkv = _random(num_tokens, heads + 2 * kv_heads, head_dim)
    angles = torch.rand(num_tokens, rotary // 2) * 6
    cos = torch.cat((angles.cos(), angles.cos()), dim=-1).bfloat16()
    sin = torch.cat((-angles.sin(), angles.sin()), dim=-1).bfloat16()
    addresses = torch.randperm(5 * 8)[:num_tokens]
    wide = torch.zeros(2, 5, 8, kv_heads, head_dim, dtype=torch.float64)
    found = torch.zeros_like(wide).bfloat16()
    wanted = rope_and_cache.reference(qkv.double(), cos, sin, wide, addresses, heads)
    queries = rope_and_cache(qkv, cos, sin, found, addresses, heads)
    # The reference rotates in float32.
    _close(queries, wanted, 1e-5)
    _close(found, wide, 1e-5)
    assert torch.equal(found[1].double(), wide[1])


@requires_native_kernels
@pytest.mark.parametrize("block_size", [8, 16, 128])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "window", "softcap"),
    [
        (9, 3, 64, None, None),
        (8, 8, 80, None, None),
        (8, 1, 128, 20, None),
        (48, 1, 16, None, None),
        (4, 2, 256, None, 5.0),
        (8, 1, 576, 20, None),
        (4, 2, 96, 3, 5.0),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_attention(
    heads: int, kv_heads: int, head_dim: int, window: int | None, softcap: float | None, block_size: int, count: int
) -> None:
    """Batches of prompts, chunks and decoding tokens in scattered blocks; with many spans and with few."""
    torch.manual_seed(head_dim)
    lengths, starts = [1, 5, 64, 130, 1, 2] * count, [200, 0, 33, 7, 0, 63] * count
    counts = [-(-(s + n) // block_size) for s, n in zip(starts, lengths, strict=True)]
    blocks = torch.randperm(sum(counts))
    tables = torch.stack([part[torch.arange(max(counts)) % len(part)] for part in blocks.split(counts)])
    cache = _random(2, len(blocks), block_size, kv_heads, head_dim)
    # Queries are a view of the merged projection.
    queries = _random(sum(lengths), heads + 2 * kv_heads, head_dim)[:, :heads]
    batch = build_attention_metadata(starts, lengths, tables, cache, torch.device("cpu"))
    sinks = None if window is None else _random(heads, scale=3)
    found = paged_attention(queries, cache, batch, head_dim**-0.5, window, softcap, sinks)
    assert "groups" not in batch.__dict__, "the gathering implementation ran"
    wanted = paged_attention.reference(queries.double(), cache, batch, head_dim**-0.5, window, softcap, sinks)
    # Probabilities are rounded to bfloat16 before the multiplication with values, which are at most 6 here.
    _close(found, wanted, EPS * cache.abs().max().item())


@requires_native_kernels
def test_attention_reads_no_block_of_another_sequence() -> None:
    """NaN in all blocks and tokens of other sequences does not change the output."""
    cache = torch.full((2, 4, 16, 1, 16), float("nan")).bfloat16()
    cache[:, 2, :5] = _random(2, 5, 1, 16)
    batch = build_attention_metadata([4], [1], torch.tensor([[2]]), cache, torch.device("cpu"))
    assert paged_attention(_random(1, 1, 16), cache, batch, 0.25).isfinite().all()


@requires_native_kernels
@pytest.mark.parametrize("head_dim", [16, 64, 96, 256, 576])
def test_int8_keys_and_values(head_dim: int) -> None:
    """The compiled write stores the bytes of the reference; attention reads them without another error."""
    torch.manual_seed(head_dim)
    heads, kv_heads, block_size, (starts, lengths) = 6, 2, 16, ([200, 0, 33, 7], [1, 70, 5, 1])
    scales = torch.logspace(-3, 2, 24)[torch.randint(24, (15, block_size, kv_heads, 1))]
    content = (
        _random(2, 15 * block_size, kv_heads, head_dim).view(2, 15, block_size, kv_heads, -1) * scales
    ).bfloat16()
    content[:, 3, 2] = 0
    addresses = torch.randperm(15 * block_size)
    rows = content.flatten(1, 2)[:, addresses]
    cache = torch.empty(2, 15, block_size, kv_heads, row_size(head_dim, torch.int8), dtype=torch.int8)
    wanted_cache = torch.empty_like(cache)
    write_kv(rows[0], rows[1], wanted_cache, addresses)
    qkv = torch.cat((_random(len(addresses), heads, head_dim), rows[0], rows[1]), dim=1)
    angles = torch.zeros(len(addresses), head_dim).bfloat16()
    rope_and_cache(qkv, angles + 1, angles, cache, addresses, heads)
    assert torch.equal(cache, wanted_cache)
    error = (dequantize_rows(cache, torch.float32) - content.float()).abs()
    assert (error <= content.abs().amax(dim=-1, keepdim=True).float() * (0.5001 / 127)).all()

    values = _random(2, len(addresses), kv_heads, head_dim)
    write_kv(values[0], values[1], cache, addresses)
    tables = torch.stack([torch.arange(i, i + 13) % 15 for i in range(4)])
    queries = _random(sum(lengths), heads, head_dim)
    batch = build_attention_metadata(starts, lengths, tables, cache, torch.device("cpu"))
    for window, softcap in ((None, None), (20, 5.0)):
        sinks = None if window is None else _random(heads)
        found = paged_attention(queries, cache, batch, head_dim**-0.5, window, softcap, sinks)
        assert "groups" not in batch.__dict__, "the gathering implementation ran"
        wanted = paged_attention.reference(queries.double(), cache, batch, head_dim**-0.5, window, softcap, sinks)
        _close(found, wanted, EPS * 6)
    gathered = paged_attention(queries.float(), cache, batch, head_dim**-0.5)
    torch.testing.assert_close(gathered, paged_attention.reference(queries.float(), cache, batch, head_dim**-0.5))


@requires_native_kernels
def test_nan_in_int8_keys_stays_in_its_row() -> None:
    cache = torch.zeros(2, 1, 8, 2, row_size(16, torch.int8), dtype=torch.int8)
    qkv = _random(3, 6, 16)
    qkv[1, 2, 5], qkv[2, 5, 0] = float("nan"), float("-inf")
    angles = torch.zeros(3, 16).bfloat16()
    rope_and_cache(qkv, angles + 1, angles, cache, torch.arange(3), 2)
    is_nan = dequantize_rows(cache, torch.float32).isnan()
    assert is_nan[0, 0, 1, 0].all() and is_nan[1, 0, 2, 1].any() and is_nan.any(dim=-1).sum() == 2


@requires_native_kernels
def test_argmax_takes_the_first_of_equal_logits() -> None:
    logits = _random(9, 1000)
    logits[0, [3, 700]] = 50.0
    logits[1] = float("-inf")
    logits[2, 999] = 60.0
    logits[3, 555] = float("nan")
    found = argmax_first(logits)
    assert found.tolist() == logits.float().argmax(dim=-1).tolist()
    assert found[0] == 3 and found[2] == 999 and found[3] == 555


def _run(code: str, tmp_path: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", "import logging; logging.basicConfig(level=logging.INFO)\n" + code],
        env=os.environ | {"QUIRE_NATIVE_CACHE": str(tmp_path / "cache")} | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


_LINEAR = """
import torch
from quire_kernels import cpu_native, linear, pack_weight
x, w = torch.ones(2, 32).bfloat16(), torch.ones(64, 32).bfloat16()
assert (linear(x, pack_weight(w), None) == 32).all()
print("native" if cpu_native.load_library() else "torch")
"""


@pytest.mark.parametrize(
    "environment", [{"QUIRE_NATIVE": "0"}, {"QUIRE_NATIVE": "MMX"}, {"CXX": "false"}, {"CXX": "/nowhere/c++"}]
)
def test_torch_runs_without_the_library(tmp_path: Path, environment: dict[str, str]) -> None:
    assert "\ntorch" in "\n" + _run(_LINEAR, tmp_path, **environment)


@requires_native_kernels
def test_rejects_a_folder_writable_by_others(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    assert "only this user can write to" in _run(_LINEAR, tmp_path)


@requires_native_kernels
def test_damaged_library_does_not_crash(tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir(mode=0o700)
    instructions = cpu_build.supported_instructions()
    assert instructions is not None
    library = Path(shutil.copy(cpu_build.build(instructions), tmp_path / "cache"))
    assert "\nnative" in "\n" + _run(_LINEAR, tmp_path, QUIRE_NATIVE=instructions.name)
    library.write_bytes(b"no library")
    assert "torch" in _run(_LINEAR, tmp_path, QUIRE_NATIVE=instructions.name)


@requires_native_kernels
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "instructions", cpu_build.instruction_sets(platform.machine()), ids=lambda instructions: instructions.name
)
def test_every_instruction_set_is_built_on_any_processor(instructions: cpu_build.InstructionSet) -> None:
    """In the cache of this machine, so that unchanged sources are built only once."""
    assert cpu_build.build(instructions).stat().st_size > 100_000


@requires_native_kernels
@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "instructions",
    [each for each in cpu_build.instruction_sets(platform.machine()) if each.cpu_flags <= cpu_build.cpu_flags()],
    ids=lambda instructions: instructions.name,
)
def test_every_build_of_this_processor_equals_the_references(
    instructions: cpu_build.InstructionSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The other tests use the fastest build only."""
    caplog.set_level("INFO", "quire_kernels.cpu_native")
    monkeypatch.setenv("QUIRE_NATIVE", instructions.name)
    library = cpu_native.load_library.__wrapped__()
    assert caplog.messages[-1] == f"native kernels on build={instructions.name}"
    monkeypatch.setattr(cpu_native, "load_library", lambda: library)
    for num_tokens in (1, 8, 11, 24):
        test_linear(num_tokens, 96, 576)
        test_nan_in_fp8_weights(num_tokens)
        for scheme in ("int8", "int8/weight", "fp8/block", "int4/32", "int4/64sa8", "mxfp4/32", "mins/32"):
            test_quantized_linear(scheme, 160, 192, num_tokens)
    test_attention(9, 3, 64, None, None, 16, 1)
    test_int8_keys_and_values(96)
    test_silu_mul_of_extreme_values()


@requires_native_kernels
def test_concurrent_processes_build_once(tmp_path: Path) -> None:
    """With one small source. All sources would take a minute."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources/one.cpp").write_text('extern "C" int one() { return 1; }')
    # The others find no library while the first one waits.
    (tmp_path / "slow").write_text(f'#!/bin/sh\nsleep 2\nexec {os.environ.get("CXX", "c++")} "$@"\n')
    (tmp_path / "slow").chmod(0o700)
    code = "import pathlib, sys; from quire_kernels import cpu_build; cpu_build._SOURCE_DIR = pathlib.Path(sys.argv[1])"
    command = [sys.executable, "-c", f"{code}; sys.exit(cpu_build.main([]))", str(tmp_path / "sources")]
    environment = os.environ | {"QUIRE_NATIVE_CACHE": str(tmp_path), "CXX": str(tmp_path / "slow")}
    together = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=100) for process in together]
    assert sum(err.count("compiling") for _, err in outputs) == len(cpu_build.instruction_sets(platform.machine()))
    assert all(set(out.split()) == set(map(str, tmp_path.glob("*.so"))) for out, _ in outputs)


def test_stale_builds_of_other_versions_are_removed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("QUIRE_NATIVE_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_build, "_compile", lambda sources, flags, library: library.write_bytes(b""))
    for name, days in {"native-old.so": 31, "native-recent.so": 29, "preload-old.so": 31, "adapters": 31}.items():
        (tmp_path / name).write_bytes(b"")
        os.utime(tmp_path / name, (time.time() - days * 24 * 3600,) * 2)
    (tmp_path / "native-killed").mkdir()
    (tmp_path / "native-killed/one.o").write_bytes(b"")
    os.utime(tmp_path / "native-killed", (1, 1))
    library = cpu_build.build(cpu_build.AVX2)
    kept = {"native-recent.so", "preload-old.so", "adapters", "native.lock", library.name}
    assert {path.name for path in tmp_path.iterdir()} == kept
    os.utime(library, (1, 1))
    assert cpu_build.build(cpu_build.AVX2) == library
    assert library.stat().st_mtime > time.time() - 60, "loading updates the modification time"


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_builds_of_any_architecture_need_neither_torch_nor_its_processor(tmp_path: Path, monkeypatch, machine) -> None:
    """As the images are built. The compiler here only makes files, because the real one would take a minute."""
    (tmp_path / "compiler").write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; touch "$2"\n')
    (tmp_path / "compiler").chmod(0o700)
    monkeypatch.setenv("CXX", str(tmp_path / "compiler"))
    monkeypatch.setenv("QUIRE_NATIVE_CACHE", str(tmp_path / "cache"))
    # -S: without site-packages
    command = [sys.executable, "-I", "-S", cpu_build.__file__, f"--machine={machine}"]
    paths = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    monkeypatch.setenv("CXX", "no compiler")  # at run time, the images have none
    assert paths == [str(cpu_build.build(each)) for each in cpu_build.instruction_sets(machine)]
    assert len(paths) == {"x86_64": 4, "aarch64": 1}[machine]
