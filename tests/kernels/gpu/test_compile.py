# SPDX-License-Identifier: Apache-2.0
"""Every Triton kernel compiles for a Hopper GPU in bfloat16 and fits its resources; this needs no GPU."""

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from support import sass

SCRIPT = Path(__file__).parents[2] / "support/compile_all_kernels.py"
# All kernels take 90 s on two idle cores, and several times as long beside other tests.
pytestmark = pytest.mark.timeout(1500)
MAX_SHARED = 227 << 10
REGISTERS = 64 << 10
MAX_STACK = 64
"""Bytes that a thread may spill: a few registers."""

EARLY = ("_split_kv_decode", "_combine", "_shrink", "_expand")


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("kernels"))
    done = subprocess.run([sys.executable, str(SCRIPT)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_all_compile(kernels):
    names = {kernel["name"] for kernel in kernels}
    assert names == {
        "_split_kv_decode", "_prefill", "_combine", "_build_work_plan", "_rms_norm", "_gated", "_rope_and_cache",
        "_write_kv", "_sample", "_argmax_first",
        "_uniforms", "_apply_penalties", "_apply_token_bitmask", "_prepare", "_count_tokens", "_fill_tiles",
        "_shrink", "_expand", "_part_maxima", "_filter", "_draw", "_gate_up", "_down",
        "_linear_codes", "_dequantize_weight", "_convolve", "_gated_delta_update", "_mamba2_update",
        "_convolve_prompts", "_gated_delta_chunks", "_gated_delta_scan", "_mamba2_scan",
    }  # fmt: skip


def test_kernels_fit_into_shared_memory_and_registers(kernels):
    too_large = [k for k in kernels if k["shared"] > MAX_SHARED or k["stack"] > MAX_STACK]
    assert not too_large


def test_lora_kernels_do_not_use_wgmma(kernels):
    """Their tiles are too small for wgmma, so the bug of ptxas before CUDA 13.3 with operands in registers
    (https://github.com/triton-lang/triton/pull/11781) cannot affect them. Matrices are loaded 16 bytes at a time."""
    of_lora = [k for k in kernels if k["name"] in ("_shrink", "_expand")]
    assert not any(k["matrix"] for k in of_lora)
    assert all(k["wide_copies"] for k in of_lora)


def test_kernels_with_early_launch_call_gdc_wait(kernels):
    """Embedding lookups have no shrink before them."""
    found = {name: {tuple(k["early"]) for k in kernels if k["name"] == name} for name in EARLY}
    first, second = ("launch_dependents",), ("wait",)
    assert found == {
        "_split_kv_decode": {first},
        "_combine": {second},
        "_shrink": {first},
        "_expand": {second, ()},
    }
    assert not any(k["early"] for k in kernels if k["name"] not in EARLY)


def test_steps_of_other_sizes_reuse_compiled_kernels(kernels):
    """Compiling takes a second and blocks all requests: the number of tokens, spans or slots must not create a
    variant."""
    several = {name: num for name, num in Counter(k["name"] for k in kernels).items() if num > 1}
    # Attention: with sinks, and latent, with tiles of other sizes. Decode attention and writes to the cache: of eight
    # bits too; a mixed step adds none. Norms: alone and with the sum. Adapters: by the room that slots have for ranks,
    # and of the embedding. A cache of more than 2^31 elements adds none: the engine warms up on one of a block.
    # Filters: by stage. Experts: two activations, and four schemes of quantized weights, each with tiles of few rows
    # and of many; three of these six also with adapters. Quantized weights: five schemes; those of 8 bits with tiles of
    # few tokens and of many.
    assert several == {
        "_split_kv_decode": 4,
        "_prefill": 3,
        "_combine": 2,
        "_build_work_plan": 2,
        "_rope_and_cache": 2,
        "_write_kv": 2,
        "_rms_norm": 2,
        "_shrink": 2,
        "_expand": 4,
        "_filter": 6,
        "_gate_up": 18,
        "_down": 18,
        "_fill_tiles": 2,
        "_linear_codes": 7,
        "_dequantize_weight": 5,
    }


LISTING = """
.L_x_1:
        /*0010*/                   HGMMA.64x16x16.F32.BF16 R24, R40, gdesc[UR4].tnspB, R24, gsb0 ;
        /*0020*/                   LDS.64 {free}, [R2] ;
        /*0030*/              @!P0 BRA `(.L_x_2) ;
        /*0040*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0050*/                   IMAD.WIDE R42, R3, 0x2, R4 ;
        /*0060*/                   BRA `(.L_x_1) ;
.L_x_2:
        /*0070*/                   ISETP.GE.AND P0, PT, R41, R5, PT ;
        /*0080*/                   IADD3 {later}, P1, R3, R4, RZ ;
        /*0090*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*00a0*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("free", "later", "expected"),
    [("R44", "R39", []), ("R38", "R43", ["IADD3"]), ("R39", "R0", ["LDS.64"]), ("R42", "R0", ["LDS.64"])],
)
def test_finds_registers_that_wgmma_still_reads(free, later, expected):
    """A wgmma result in R40 to R43, with a wait on both sides of a branch."""
    found = sass.hazards(LISTING.format(free=free, later=later))
    assert [re.split(r"\s+", text)[1] for text in found] == expected


def test_no_register_is_overwritten_while_wgmma_reads_it(kernels):
    """Attention weights and products of tokens are in registers, which wgmma reads after it was issued; see
    support/sass.py."""
    from_registers = [k for k in kernels if k["from_registers"]]
    assert {k["name"] for k in from_registers} == {"_prefill", "_gated_delta_chunks", "_mamba2_scan"}
    assert not [k["overwritten"] for k in from_registers if k["overwritten"]]


def test_next_key_tile_is_loaded_during_the_multiplication(kernels):
    """Nothing else hides the memory latency of prompts: one program occupies a multiprocessor."""
    assert all(k["in_flight"] > 0 for k in kernels if k["name"] in ("_split_kv_decode", "_prefill"))


def test_long_spans_use_wgmma(kernels):
    decode, decode_of_eight_bits, decode_with_sinks, _ = (k for k in kernels if k["name"] == "_split_kv_decode")
    # Not with the tiles of latent attention.
    assert [k["matrix"] for k in kernels if k["name"] == "_prefill"] == [True, True, False]
    # A tile of 16 rows is too small for wgmma; three workers share a multiprocessor.
    assert 3 * decode["shared"] <= MAX_SHARED
    assert all(
        3 * 128 * (-(-k["registers"] // 8) * 8) <= REGISTERS for k in (decode, decode_of_eight_bits, decode_with_sinks)
    )
    assert decode_of_eight_bits["shared"] <= decode["shared"]
