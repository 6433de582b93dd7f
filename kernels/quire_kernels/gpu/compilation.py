# SPDX-License-Identifier: Apache-2.0
"""Compile kernels for a GPU that this machine does not have.

In the context `compile_only`, a launch does not run its kernel. Instead, it compiles the kernel for the requested
compute capability and writes it to Triton's cache folder. In this context, tensors on torch's meta device use the
kernels of a GPU. These tensors have no memory, so a whole model can run its steps. Such steps leave out kernels whose
results the host reads. `compile_step_ops` launches those kernels.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

import quire_kernels as ops
from quire_kernels.dispatch import Op, collect_ops
from quire_kernels.gpu import attention, kernel_cache, lora

_NUM_SMS = 132
"""Number of multiprocessors that an H100 SXM and an H200 have. The number of attention workers depends on it, and that
number is a constant in kernels."""


class _CompileOnlyDriver:
    """The part of a Triton driver that is needed to compile."""

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
    """While the context is active, a launch compiles its kernel for `capability` and does not run it.

    This applies to the launches of all threads.

    `on_kernel` is called with the compiled kernel of each launch. Use this context only in a separate process. The
    driver of Triton is not restored afterwards, because a machine without a GPU has no driver.
    """
    run, workers, supports_pdl = JITFunction.run, attention.num_workers, attention.supports_pdl

    def compile_(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        on_kernel(run(self, *args, grid=grid, warmup=True, **options))

    driver.set_active(_CompileOnlyDriver(capability))
    JITFunction.run = compile_
    attention.num_workers = lambda *_: attention.WORKERS_PER_SM * _NUM_SMS
    lora.supports_pdl = attention.supports_pdl = lambda device: capability >= (9, 0)
    try:
        with ExitStack() as stack:
            for op in collect_ops(vars(ops)):
                stack.enter_context(op.run_on("meta", "cuda", op.preferred("cuda")))
            yield
    finally:
        JITFunction.run, attention.num_workers = run, workers
        lora.supports_pdl = attention.supports_pdl = supports_pdl


def fill_cache(call_kernels: Callable[[], None], capability: tuple[int, int], folder: Path) -> set[str]:
    """Compile all kernels that `call_kernels` launches, and store them in a folder.

    Also write the key of the folder. Return the hashes of the kernels.
    """
    folder.mkdir(parents=True, exist_ok=True)
    knobs.cache.dir = str(folder.absolute())
    hashes: set[str] = set()
    with torch.inference_mode(), compile_only(capability, lambda kernel: hashes.add(kernel.hash)):
        call_kernels()
    kernel_cache.write_key(folder, capability)
    return hashes


def compile_step_ops(vocab_size: int, block_size: int, dtype: torch.dtype) -> None:
    """Launch the kernels of the sampler, and those that prepare the inputs of a captured step.

    Each is launched for several numbers of tokens.
    """
    for num_tokens in (1, 5, 16):
        _call_input_ops(num_tokens, block_size)
        _call_samplers(num_tokens, vocab_size, dtype)


def _own(op: Op[Any, Any]) -> Callable[..., Any]:
    return op.get("cuda", "own")


def _call_input_ops(num_tokens: int, block_size: int) -> None:
    rows, starts = torch.arange(num_tokens), torch.arange(num_tokens + 1, dtype=torch.int32)
    state = ops.SequenceState.empty(num_tokens, 512, torch.device("cpu"))
    out = ops.StepInputs.empty(num_tokens, num_tokens, 512, torch.device("cpu"))
    _own(ops.prepare_inputs)(rows, starts, state, block_size, out)


def _call_samplers(num_tokens: int, vocab_size: int, dtype: torch.dtype) -> None:
    positions, floats = torch.arange(num_tokens), torch.ones(num_tokens)
    logits = torch.empty(num_tokens, vocab_size, dtype=dtype)
    counts = torch.zeros(num_tokens, vocab_size, dtype=torch.int32)
    bits = torch.zeros(num_tokens, -(-vocab_size // 32), dtype=torch.int32)
    # The logits are in float32 if any row has penalties, biases or forbidden tokens.
    for row_logits in (logits, logits.float()):
        _own(ops.argmax_first)(row_logits)
        for any_filtered in (True, False):
            limits = positions, floats, floats
            for form in ("bisection", "histogram"):
                ops.sample.get("cuda", form)(row_logits, floats, *limits, positions, positions, any_filtered)
        _own(ops.apply_token_bitmask)(row_logits, bits, positions)
    _own(ops.apply_penalties)(logits.float(), positions, counts > 0, counts, positions, floats, floats, floats)
