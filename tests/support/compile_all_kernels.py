# SPDX-License-Identifier: Apache-2.0
"""Compile every Triton kernel for a Hopper GPU, without a GPU, and print the required resources as JSON.

Run in a process of its own, `python tests/support/compile_all_kernels.py`: forms are called with bfloat16 tensors on
the CPU, in
the shapes of Llama-3.1-8B, and each launch compiles its kernel, unless another one has, and does nothing more.
"""

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parent.parent))

from support import quantized_experts, sass, state_layers
from support.attention_batches import make_batch

import quire_kernels as ops
from quire_kernels import lora_slots
from quire_kernels.gpu import attention, lora

BF16 = torch.bfloat16
compiled: list[dict[str, Any]] = []


class FakeHopperDriver:
    """The part of a Triton driver that compiling uses."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def _compile(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
    kernel = _original_run(self, *args, grid=grid, warmup=True, **options)
    if any(entry["hash"] == kernel.hash for entry in compiled):
        return
    uses_wgmma = "wgmma" in kernel.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _run_cuda_binary("cuobjdump", "-res-usage", file.name)
        listing = _run_cuda_binary("nvdisasm", "-c", file.name) if uses_wgmma else ""
    compiled.append(
        {
            "name": kernel.metadata.name,
            "hash": kernel.hash,
            "shared": kernel.metadata.shared,
            "registers": int(re.search(r"REG:(\d+)", usage)[1]),  # type: ignore[index]
            "stack": int(re.search(r"STACK:(\d+)", usage)[1]),  # type: ignore[index]
            "matrix": uses_wgmma,
            "from_registers": sum(bool(instruction.async_read_registers) for instruction in sass.parse(listing)[0]),
            "overwritten": sass.hazards(listing),
            "early": [word for word in ("launch_dependents", "wait") if f"griddepcontrol.{word}" in kernel.asm["ptx"]],
            "wide_copies": kernel.asm["ptx"].count("cp.async.cg.shared.global [ %"),
            # Copies that a wait leaves on their way.
            "in_flight": max(map(int, re.findall(r"cp\.async\.wait_group\s+(\d+)", kernel.asm["ptx"])), default=0),
        }
    )


def _run_cuda_binary(name: str, *args: str) -> str:
    """Return the output of one of the compiler's tools."""
    path = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    return subprocess.run([str(path), *args], capture_output=True, text=True, check=True).stdout


def _call_all() -> None:
    kernel_of = lambda op: op.get("cuda", "own")  # noqa: E731
    attention.num_workers = lambda *_: 3 * 132  # type: ignore[assignment]
    lora.supports_pdl = attention.supports_pdl = lambda device: True  # type: ignore[assignment]
    for spans in ([(1500, 1)] * 3, [(0, 700)], [(1500, 1), (0, 700)], [(40, 1)], [(3, 1)] * 16, [(0, 90)] * 5):
        queries, cache, batch = make_batch(spans, heads=(32, 8), head_dim=128, dtype=BF16)
        for separate_from in (None, 1024):
            separated = replace(batch, separate_prefill_min_tokens=separate_from)
            kernel_of(ops.paged_attention)(queries, cache, separated, 0.1)
        if len(spans) == 3:
            for fp8_cache in _fp8_caches(cache):
                kernel_of(ops.paged_attention)(queries, fp8_cache, batch, 0.1)
    for num_tokens in (5, 1, 16):
        _call_small_ops(kernel_of, cache, num_tokens)
    for num_tokens in (1, 5, 16, 17, 64, 100, 300):
        _call_quantized_linears(kernel_of, num_tokens)
    for spans in ([(1500, 1)] * 3, [(0, 700)]):
        queries, cache, batch = make_batch(spans, heads=(32, 8), head_dim=128, dtype=BF16)
        kernel_of(ops.paged_attention)(queries, cache, batch, 0.1, sinks=torch.zeros(32, dtype=BF16))
        # Latent attention of DeepSeek V3.
        queries, cache, batch = make_batch(spans, heads=(128, 1), head_dim=576, dtype=BF16)
        kernel_of(ops.paged_attention)(queries, cache, batch, 0.1, value_dim=512)
    _call_states(kernel_of)
    _call_lora(kernel_of)
    _call_experts(kernel_of)


def _fp8_caches(cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Such a cache of eight bits, and one whose values begin past 2^31 elements, of which nothing is touched."""
    num_blocks = (1 << 31) // cache[0, 0].numel() + 1
    shape = (2, num_blocks, *cache.shape[2:])
    return cache.to(torch.float8_e4m3fn), torch.empty(shape, dtype=torch.float8_e4m3fn)


def _call_small_ops(kernel_of: Any, cache: torch.Tensor, num_tokens: int) -> None:
    """What is not attention, for `num` tokens."""
    x, weight = torch.randn(num_tokens, 4096, dtype=BF16), torch.randn(4096, dtype=BF16)
    kernel_of(ops.rms_norm)(x, weight, 1e-5)
    kernel_of(ops.add_rms_norm)(x, x.clone(), weight, 1e-5)
    kernel_of(ops.silu_mul)(x)
    qkv, angles = torch.randn(num_tokens, 48, 128, dtype=BF16), torch.randn(num_tokens, 128, dtype=BF16)
    for kv_cache in (cache, *_fp8_caches(cache)):
        kernel_of(ops.rope_and_cache)(qkv, angles, angles, kv_cache, torch.arange(num_tokens), 32)
        kernel_of(ops.write_kv)(qkv[:, 32:40], qkv[:, 40:], kv_cache, torch.arange(num_tokens))
    logits, positions, floats = (
        torch.randn(num_tokens, 128256, dtype=BF16),
        torch.arange(num_tokens),
        torch.ones(num_tokens),
    )
    for form in ("bisection", "histogram"):
        ops.sample.get("cuda", form)(logits, floats, positions, floats, floats, positions, positions)
    kernel_of(ops.argmax_first)(logits)
    kernel_of(ops.uniform)(positions, positions)
    counts = torch.zeros(16, 128256, dtype=torch.int32)
    kernel_of(ops.apply_penalties)(logits.float(), positions, counts > 0, counts, positions, floats, floats, floats)
    kernel_of(ops.apply_token_bitmask)(logits, torch.zeros(16, 4008, dtype=torch.int32), positions)
    state, out = (created(num_tokens, *sizes, torch.device("cpu")) for created, *sizes in (
        (ops.SequenceState.empty, 512), (ops.StepInputs.empty, num_tokens, 512),
    ))  # fmt: skip
    starts = torch.arange(num_tokens + 1, dtype=torch.int32)
    kernel_of(ops.prepare_inputs)(positions, starts, state, 16, out)


def _call_quantized_linears(kernel_of: Any, num_tokens: int) -> None:
    """Layers of 4 bits with zero points and with a table, and of 8 bits. dtype float32 gives the layout of a GPU."""
    x, weight = torch.randn(num_tokens, 512, dtype=BF16), torch.randn(256, 512)
    codes, scales, zeros = ops.quantize_int4(weight)
    for layer in (
        ops.pack_weight_int4(codes, scales, zeros, dtype=torch.float32),
        ops.pack_weight_int4(codes, scales, None, dtype=torch.float32),
        ops.pack_weight_codebook(codes, scales, torch.arange(16.0), dtype=torch.float32, mins=scales),
        ops.pack_weight_int8(*ops.quantize_int8(weight), dtype=torch.float32),
        ops.pack_weight_fp8(*ops.quantize_fp8(weight), dtype=torch.float32),
    ):
        kernel_of(ops.quantized_linear)(x, layer, None)


def _call_states(kernel_of: Any) -> None:
    """Steps of several sizes of Qwen3-Next and of Nemotron-H, with drafts and without, and with prompts."""
    for lengths, drafts in (([1] * 4, ()), ([1], ()), ([3, 2], [2, 1]), ([64], ()), ([1, 70, 130], ())):
        cases = (
            state_layers.GatedDeltaCase((16, 32, 128, 128, 4), lengths, BF16),
            state_layers.Mamba2Case((64, 8, 128, 64), lengths, BF16),
        )
        for case in cases:
            batch = ops.build_state_batch(case.rows, lengths, torch.device("cpu"), drafts, [0] * len(drafts), 3)
            case.run(batch, lambda op: kernel_of(op) if "own" in op.implementations("cuda") else op.reference)


def _call_lora(kernel_of: Any) -> None:
    """q, k and v, and the embedding, in steps of several sizes, with slots for several ranks."""
    sites = [ops.LoRATarget(4096, (4096, 1024, 1024)), ops.LoRATarget(128256, (4096,), is_embedding=True)]
    entries, memory = torch.zeros(32, 3, 3, dtype=torch.int64), torch.empty(32, 1 << 12, dtype=BF16)
    for max_rank in (16, 64, 128):
        of_linear, of_rows = (ops.ModuleSlots(site, memory, entries, entries, max_rank) for site in sites)
        for num_tokens, num_slots in ((1, 1), (5, 32), (256, 32), (2048, 7)) if max_rank == 16 else ((256, 32),):
            slots = torch.arange(num_tokens) % num_slots
            batch = ops.LoRABatch(slots, routing=ops.TokenRouting.empty(num_tokens, num_slots, slots.device))
            x, out = (torch.randn(num_tokens, width, dtype=BF16) for width in (4096, 6144))
            kernel_of(ops.add_lora)(out, x, of_linear, batch)
            if max_rank == 16:
                kernel_of(ops.route_tokens)(slots, batch.routing)
                kernel_of(ops.add_lora_embedding)(x, slots, of_rows, batch)


def _call_experts(kernel_of: Any) -> None:
    """Experts as in Qwen3-30B-A3B and in gpt-oss, and quantized ones, in steps of several sizes."""
    gate_up, down = torch.zeros(16, 1536, 2048, dtype=BF16), torch.zeros(16, 2048, 768, dtype=BF16)
    biases, swiglu = (torch.empty(16, 1536, dtype=BF16), torch.empty(16, 2048, dtype=BF16)), ops.SwiGLU(1.702, 7.0)
    plain = ops.ExpertWeights(gate_up, down, None, None, "silu")
    quantized = [quantized_experts.quantize(plain, scheme) for scheme in ("mxfp4", "int4", "int8", "fp8, blocks")]
    quantized[0] = replace(quantized[0], gate_up_bias=biases[0], down_bias=biases[1], activation=swiglu)
    ops.route_tokens.dispatch_table["cpu"] = kernel_of(ops.route_tokens)
    for num_tokens in (1, 5, 16, 500):
        x, weights = torch.empty(num_tokens, 2048, dtype=BF16), torch.empty(num_tokens, 8)
        ids = torch.zeros(num_tokens, 8, dtype=torch.int64)
        for experts in (plain, ops.ExpertWeights(gate_up, down, *biases, swiglu), *quantized):
            kernel_of(ops.fused_experts)(x, ids, weights, experts)
    lora_slots._supports_panels = lambda *_: False  # the layout of a GPU
    ops.add_lora.dispatch_table["cpu"] = kernel_of(ops.add_lora)
    targets = [ops.LoRATarget(2048, (1536,), num_experts=16), ops.LoRATarget(768, (2048,), num_experts=16)]
    of_experts = ops.LoRASlots(targets, 8, 16, torch.empty(0, dtype=BF16)).modules
    for num_tokens in (1, 5, 16, 500):
        x, weights = torch.empty(num_tokens, 2048, dtype=BF16), torch.empty(num_tokens, 8)
        ids, batch = torch.zeros(num_tokens, 8, dtype=torch.int64), ops.LoRABatch(torch.zeros(num_tokens).long())
        for experts in (plain, replace(quantized[0], activation=swiglu), quantized[1]):
            adapters = ops.ExpertAdapters(*of_experts, batch)
            kernel_of(ops.fused_experts)(x, ids, weights, experts, None, adapters)


if __name__ == "__main__":
    driver.set_active(FakeHopperDriver())
    _original_run, JITFunction.run = JITFunction.run, _compile
    _call_all()
    print(json.dumps(compiled))
