# SPDX-License-Identifier: Apache-2.0
"""Every form in the kernel language compiles for a Hopper GPU in bfloat16, and fits there; that needs no GPU."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "support/compiled.py"
MAX_SHARED = 227 << 10
REGISTERS = 64 << 10
MAX_STACK = 64
"""Bytes that a thread may spill: a few registers."""


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
        "_attend", "_combine", "_plan", "_rms_norm", "_gated", "_rotate_write", "_write", "_choose", "_most_likely",
        "_uniforms", "_penalized", "_scatter", "_prepare", "_advance", "_count", "_fill", "_shrink", "_expand",
    }  # fmt: skip


def test_they_fit(kernels):
    too_large = [k for k in kernels if k["shared"] > MAX_SHARED or k["stack"] > MAX_STACK]
    assert not too_large


def test_deltas_are_multiplied_without_the_matrix_units_of_hopper(kernels):
    """Their tiles are too small for those, so the fault that ptxas before CUDA 13.3 has with operands in registers
    (https://github.com/triton-lang/triton/pull/11781) cannot reach them. Matrices come in 16 bytes at a time."""
    of_lora = [k for k in kernels if k["name"] in ("_shrink", "_expand")]
    assert not any(k["matrix"] for k in of_lora)
    assert all(k["wide_copies"] for k in of_lora)


def test_a_step_of_another_size_finds_its_kernels_compiled(kernels):
    """Compiling takes a second, in which nobody gets a token: no number of tokens, spans or slots makes another one."""
    several = {name: num for name, num in Counter(k["name"] for k in kernels).items() if num > 1}
    # Attention: decoding, the same of eight bits, prompts, both. Norms: alone and with the sum. Adapters: by the room
    # that slots have for ranks, and of the embedding.
    assert several == {"_attend": 4, "_rms_norm": 2, "_shrink": 2, "_expand": 4}


def test_long_spans_use_the_matrix_units_of_hopper(kernels):
    decode, decode_of_eight_bits, prefill, mixed = (k for k in kernels if k["name"] == "_attend")
    assert prefill["matrix"]
    assert mixed["matrix"]
    # A tile of 16 rows is too small for them; three workers share a multiprocessor.
    assert 3 * decode["shared"] <= MAX_SHARED
    assert all(3 * 128 * (-(-k["registers"] // 8) * 8) <= REGISTERS for k in (decode, decode_of_eight_bits))
    assert decode_of_eight_bits["shared"] <= decode["shared"]
