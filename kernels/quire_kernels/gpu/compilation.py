# SPDX-License-Identifier: Apache-2.0
"""Compilation of the kernels of a model for a GPU that this machine does not have.

The operations are called with small tensors on the CPU. Each launch compiles its kernel for the requested compute
capability, in Triton's cache folder, and runs nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import quire_kernels as ops
from quire_kernels.dispatch import Op
from quire_kernels.gpu import attention, kernel_cache, lora

_NUM_SMS = 132
"""Multiprocessors of an H100 SXM and an H200. The number of attention's workers is part of a kernel."""
_SPAN_COUNTS = (1, 17, 33, 65, 129, 257)
"""One for each variant of the attention plan up to 257 spans."""


@dataclass(frozen=True, slots=True)
class KernelShape:
    """The sizes of a model that its kernels depend on."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    activation: str = "silu"
    window: int | None = None
    softcap: float | None = None
    block_size: int = 16
    max_lora_rank: int = 16


LLAMA_3_1_8B = KernelShape(32, 8, 128, 4096, 14336, 128256)
"""Mistral 7B differs in its vocabulary only, and Qwen3-8B in the MLP; most of the kernels are the same."""


class _CompileOnlyDriver:
    """The part of a Triton driver that compiling uses."""

    def __init__(self, capability: tuple[int, int]) -> None:
        major, minor = capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


@contextmanager
def compile_only(capability: tuple[int, int], on_kernel: Callable[[Any], None] = lambda kernel: None) -> Iterator[None]:
    """Make all launches in the context compile their kernel for `capability` instead, also those from other threads.

    `on_kernel` gets the compiled kernel of each launch. Use a process of its own: Triton's driver is not restored,
    because a machine without a GPU has none.
    """
    run, workers, supports_pdl = JITFunction.run, attention.num_workers, attention.supports_pdl

    def compile_(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        on_kernel(run(self, *args, grid=grid, warmup=True, **options))

    driver.set_active(_CompileOnlyDriver(capability))
    JITFunction.run = compile_
    attention.num_workers = lambda *_: attention.WORKERS_PER_SM * _NUM_SMS
    lora.supports_pdl = attention.supports_pdl = lambda device: capability >= (9, 0)
    try:
        yield
    finally:
        JITFunction.run, attention.num_workers = run, workers
        lora.supports_pdl = attention.supports_pdl = supports_pdl


def fill_cache(shapes: Sequence[KernelShape], capability: tuple[int, int], folder: Path) -> int:
    """Compile the kernels of all shapes into a folder, write its key, and return the number of different kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    knobs.cache.dir = str(folder.absolute())
    hashes = {kernel for shape in shapes for kernel in compile_kernels(shape, capability)}
    kernel_cache.write_key(folder, capability)
    return len(hashes)


def compile_kernels(shape: KernelShape, capability: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> set[str]:
    """Compile what steps of a model use; return the hashes of the kernels."""
    hashes: set[str] = set()
    with torch.inference_mode(), compile_only(capability, lambda kernel: hashes.add(kernel.hash)):
        for num_spans in _SPAN_COUNTS:
            _call_attention(shape, num_spans, dtype)
        for num_tokens in (1, 5, 16):
            _call_token_ops(shape, num_tokens, dtype)
            _call_samplers(shape, num_tokens, dtype)
        _call_lora(shape, dtype)
    return hashes


def _own(op: Op[Any, Any]) -> Callable[..., Any]:
    return op.get("cuda", "own")


def _call_attention(shape: KernelShape, num_spans: int, dtype: torch.dtype) -> None:
    """A prompt of 64 tokens, and decoding sequences."""
    lengths = [64, *[1] * (num_spans - 1)]
    starts = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    queries = torch.empty(sum(lengths), shape.num_heads, shape.head_dim, dtype=dtype)
    tables = torch.zeros(num_spans, 64, dtype=torch.int64)
    batch = ops.AttentionMetadata(starts, starts.diff(), tables, tuple, lengths)
    _own(ops.paged_attention)(queries, _cache(shape, dtype), batch, 0.1, shape.window, shape.softcap)


def _cache(shape: KernelShape, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(2, 64, shape.block_size, shape.num_kv_heads, shape.head_dim, dtype=dtype)


def _call_token_ops(shape: KernelShape, num_tokens: int, dtype: torch.dtype) -> None:
    x, weight = (torch.empty(*size, shape.hidden_size, dtype=dtype) for size in ((num_tokens,), ()))
    _own(ops.rms_norm)(x, weight, 1e-5)
    _own(ops.add_rms_norm)(x, x.clone(), weight, 1e-5)
    _own(ops.get_gated_op(shape.activation))(torch.empty(num_tokens, 2 * shape.intermediate_size, dtype=dtype))
    num_all_heads, addresses = shape.num_heads + 2 * shape.num_kv_heads, torch.arange(num_tokens)
    qkv, angles = (torch.empty(num_tokens, *size, shape.head_dim, dtype=dtype) for size in ((num_all_heads,), ()))
    _own(ops.rms_norm)(qkv[:, : shape.num_heads], weight[: shape.head_dim], 1e-5)
    _own(ops.rope_and_cache)(qkv, angles, angles, _cache(shape, dtype), addresses, shape.num_heads)
    state = ops.SequenceState.empty(num_tokens, 512, torch.device("cpu"))
    out = ops.StepInputs.empty(num_tokens, num_tokens, 512, torch.device("cpu"))
    starts = torch.arange(num_tokens + 1, dtype=torch.int32)
    _own(ops.prepare_inputs)(addresses, starts, state, shape.block_size, out)


def _call_samplers(shape: KernelShape, num_tokens: int, dtype: torch.dtype) -> None:
    positions, floats = torch.arange(num_tokens), torch.ones(num_tokens)
    logits = torch.empty(num_tokens, shape.vocab_size, dtype=dtype)
    counts = torch.zeros(num_tokens, shape.vocab_size, dtype=torch.int32)
    bits = torch.zeros(num_tokens, -(-shape.vocab_size // 32), dtype=torch.int32)
    # Logits are in float32 if a row has penalties, biases or forbidden tokens.
    for row_logits in (logits, logits.float()):
        _own(ops.argmax_first)(row_logits)
        for any_filtered in (True, False):
            limits = positions, floats, floats
            _own(ops.sample)(row_logits, floats, *limits, positions, positions, any_filtered)
        _own(ops.apply_token_bitmask)(row_logits, bits, positions)
    _own(ops.apply_penalties)(logits.float(), positions, counts > 0, counts, positions, floats, floats, floats)


def _call_lora(shape: KernelShape, dtype: torch.dtype) -> None:
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    targets = [
        ops.LoRATarget(shape.hidden_size, (heads, kv_heads, kv_heads)),
        ops.LoRATarget(heads, (shape.hidden_size,)),
        ops.LoRATarget(shape.hidden_size, (shape.intermediate_size,) * 2),
        ops.LoRATarget(shape.intermediate_size, (shape.hidden_size,)),
        ops.LoRATarget(shape.hidden_size, (shape.vocab_size,)),
        ops.LoRATarget(shape.vocab_size, (shape.hidden_size,), is_embedding=True),
    ]
    num_slots = 32
    for target in targets:
        entries = torch.zeros(num_slots, len(target.widths), 3, dtype=torch.int64)
        memory = torch.empty(num_slots, 1 << 12, dtype=dtype)
        slots = ops.ModuleSlots(target, memory, entries, entries, shape.max_lora_rank)
        for num_tokens in (1, 5, 256):
            of_tokens = torch.arange(num_tokens) % num_slots
            batch = ops.LoRABatch(of_tokens, routing=ops.TokenRouting.empty(num_tokens, num_slots, of_tokens.device))
            assert batch.routing is not None
            _own(ops.route_tokens)(of_tokens, batch.routing)
            out = torch.empty(num_tokens, sum(target.widths), dtype=dtype)
            if target.is_embedding:
                _own(ops.add_lora_embedding)(out, of_tokens, slots, batch)
            else:
                _own(ops.add_lora)(out, torch.empty(num_tokens, target.in_features, dtype=dtype), slots, batch)
