# SPDX-License-Identifier: Apache-2.0
"""Speed of the CPU kernels compared with plain torch: `python tests/bench/ops.py`. Best of many runs, one thread.

The rows are those of kernels/README.md: shapes of a 135M Llama (hidden 576, 9 heads on 3 KV heads of 64).
"""

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from quire_engine.worker.device import retain_freed_memory
from quire_kernels import (
    GROUP_SIZE,
    AdapterSegment,
    LoRABatch,
    LoRASlots,
    LoRATarget,
    ModuleSlots,
    adapted_linear,
    attention,
    build_attention_metadata,
    build_lora_batch,
    filter_top_k_top_p_min_p,
    linear,
    pack_weight,
    paged_attention,
    quantize_int4,
    quantize_weight,
)

CPU = torch.device("cpu")
NUM_LAYERS = 20
"""71 MB in bfloat16."""


def best_ms(function: Callable[[], object], num_runs: int = 30) -> float:
    """Milliseconds of processor time of the fastest of `num_runs` runs, after two that do not count."""
    times = []
    for _ in range(num_runs + 2):
        start = time.thread_time()
        function()
        times.append(time.thread_time() - start)
    return min(times[2:]) * 1e3


def linear_row(dtype: torch.dtype, num_tokens: int) -> None:
    weight, x = torch.randn(3072, 576, dtype=dtype), torch.randn(num_tokens, 576, dtype=dtype)
    packed = pack_weight(weight)
    reference = best_ms(lambda: F.linear(x, weight))
    print_comparison(
        f"linear 576 x 3072, {dtype}, {num_tokens} tokens", reference, best_ms(lambda: linear(x, packed, None))
    )


def quantized_row(quantization: str, num_tokens: int) -> None:
    """Compare layers that together exceed the caches with the same layers in bfloat16, and int4 with torch's kernel."""
    weight, x = torch.randn(3072, 576, dtype=torch.bfloat16), torch.randn(num_tokens, 576, dtype=torch.bfloat16)
    packed = [pack_weight(weight) for _ in range(NUM_LAYERS)]
    quantized = [quantize_weight(weight, quantization) for _ in range(NUM_LAYERS)]
    milliseconds = best_ms(lambda: [linear(x, layer, None) for layer in quantized])
    label = f"{NUM_LAYERS} linears 576 x 3072, {num_tokens} tokens: {quantization} after"
    print_comparison(f"{label} bfloat16", best_ms(lambda: [linear(x, layer, None) for layer in packed]), milliseconds)
    if quantization == "int4":
        codes, scales, zeros = quantize_int4(weight)
        layers = [torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 2) for _ in range(NUM_LAYERS)]
        pairs = torch.stack((scales, (8 - zeros.float()) * scales), 2).transpose(0, 1).contiguous().bfloat16()
        multiply = torch.ops.aten._weight_int4pack_mm_for_cpu
        of_torch = best_ms(lambda: [multiply(x, layer, GROUP_SIZE, pairs) for layer in layers])
        print_comparison(f"{label} torch's", of_torch, milliseconds)


def attention_row(dtype: torch.dtype, num_spans: int, context: int) -> None:
    blocks = num_spans * context // 16
    cache = torch.randn(2, blocks, 16, 3, 64, dtype=dtype)
    tables = torch.randperm(blocks).view(num_spans, -1)
    batch = build_attention_metadata([context - 1] * num_spans, [1] * num_spans, tables, cache, CPU)
    queries = torch.randn(num_spans, 9, 64, dtype=dtype)
    fused = run_with_setting(
        attention, "MAX_SINGLE_GEMM_HEADS", 0, lambda: paged_attention(queries, cache, batch, 0.125)
    )
    optimized = best_ms(lambda: paged_attention(queries, cache, batch, 0.125))
    print_comparison(f"decode attention, {dtype}, {num_spans} x {context} tokens", fused, optimized)


def adapter_row(dtype: torch.dtype) -> None:
    site, num_slots, rank = LoRATarget(576, (576, 192, 192)), 8, 16
    slots = LoRASlots([site], num_slots, rank, torch.empty(0, dtype=dtype))
    for slot in range(num_slots):
        slots.write(slot, slots.pack([[(torch.randn(rank, 576), torch.randn(width, rank)) for width in site.widths]]))
    batch = build_lora_batch([AdapterSegment(s, 8 * s, 8 * s + 8) for s in range(num_slots)], 64, CPU)
    weight, x = torch.randn(960, 576, dtype=dtype), torch.randn(64, 576, dtype=dtype)
    packed, module = pack_weight(weight), slots.modules[0]
    linears = best_ms(lambda: linear(x, packed, None))
    optimized = best_ms(lambda: adapted_linear(x, packed, None, None, module, batch))
    out = linear(x, packed, None)
    print_comparison(
        f"8 adapters of rank 16 on q, k, v, {dtype}",
        best_ms(lambda: add_lora_unbatched(out, x, module, batch)),
        optimized - linears,
    )


def add_lora_unbatched(out: torch.Tensor, x: torch.Tensor, module: ModuleSlots, batch: LoRABatch) -> None:
    """Pair by pair, as torch comes, on matrices that lie as torch likes them."""
    pairs = MATRIX_SHAPES.setdefault(
        id(module), [[module.get_matrices(s.adapter_slot, i) for i in range(3)] for s in batch.segments]
    )
    for s, rows in zip(batch.segments, pairs, strict=True):
        column = 0
        for a, b in rows:
            out[s.start : s.end, column : column + b.shape[1]].addmm_(x[s.start : s.end] @ a.t(), b)
            column += b.shape[1]


MATRIX_SHAPES: dict[int, list[list[tuple[torch.Tensor, torch.Tensor]]]] = {}


def sampling_row() -> None:
    probs = (torch.randn(8, 49152) * 4).softmax(-1)
    limits = torch.zeros(8, dtype=torch.int64), torch.full((8,), 0.9), torch.zeros(8)
    sort = best_ms(lambda: filter_top_k_top_p_min_p.reference(probs, *limits), 5)
    print_comparison("top-p of 8 rows of 49,152", sort, best_ms(lambda: filter_top_k_top_p_min_p(probs, *limits)))


def run_with_setting(module: object, name: str, value: object, function: Callable[[], object]) -> float:
    """`best_ms` with a module's constant changed for the time."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        return best_ms(function)
    finally:
        setattr(module, name, before)


def print_comparison(name: str, plain_ms: float, optimized_ms: float) -> None:
    print(f"{name:<52} {plain_ms:8.3f} ms {optimized_ms:8.3f} ms  {plain_ms / optimized_ms:5.1f} x", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    retain_freed_memory()  # as the engine does: without it, long contexts measure the system's page faults
    print(f"torch {torch.__version__}, one thread{'plain':>38} {'as it is':>14}")
    with torch.inference_mode():
        for dtype in (torch.bfloat16, torch.float32):
            linear_row(dtype, 1)
            linear_row(dtype, 64)
            attention_row(dtype, 64, 128)
            attention_row(dtype, 64, 1024)
            adapter_row(dtype)
        for quantization in ("int8", "int4", "fp8"):
            quantized_row(quantization, 1)
            quantized_row(quantization, 64)
        sampling_row()


if __name__ == "__main__":
    main()
