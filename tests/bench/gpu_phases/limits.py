# SPDX-License-Identifier: Apache-2.0
"""The card by itself: what it is, its clocks, its copy bandwidth, and matrix products of the model's shapes."""

import functools
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from card import Card

from gpu_phases.process import Context
from gpu_phases.store import Row

CLOCKS = "clocks.sm,clocks.mem,power.draw,temperature.gpu,driver_version,clocks_event_reasons.active"
ROWS = (1, 8, 64, 128, 256, 512, 2048, 8192)
"""Tokens of a matrix product."""
SHAPES = {
    "qkv": (4096, 6144), "o": (4096, 4096), "gate_up": (4096, 28672), "down": (14336, 4096), "lm_head": (4096, 128256),
}  # fmt: skip
"""Inputs and outputs of each linear of Llama-3.1-8B."""


MEMORY = {"copy": "copy, bytes read and written", "copy_kernel": "copy by a kernel", "read": "sum, bytes read"}
"""Keys and contents of the rows that measure the memory."""
WARM_UP_S = 0.5
"""An idle card raises its clocks only some tenths of a second after the first work."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The rates of this card, as measured in this run; fractions refer to them."""

    bytes_per_s: float
    """The highest rate of MEMORY."""
    flops_per_s: float

    @classmethod
    def from_rows(cls, rates: Mapping[str, float]) -> "Limits | None":
        """Return the rates of the rows of `limits`, by their keys; None: a row is missing."""
        if not rates.keys() >= {"matrix", *MEMORY}:
            return None
        return cls(max(rates[key] for key in MEMORY) * 1e12, rates["matrix"] * 1e12)

    def fraction(self, seconds: float, num_bytes: float, flops: float = 0.0) -> float:
        """Return the fraction of the limit that binds: bytes or operations, the one that takes longer."""
        return max(num_bytes / self.bytes_per_s, flops / self.flops_per_s) / seconds


def facts(context: Context) -> Iterator[Row]:
    """The card, the libraries, and the clocks at rest and after a second of products."""
    for name, value in context.card.about().items():
        yield {"what": name, "value": value, "unit": ""}
    yield {"what": "processors", "value": platform.machine(), "unit": ""}
    yield from _clocks("clocks and power at rest")
    _matrix_rate(context.card)
    yield from _clocks("clocks and power after products")


def _clocks(what: str) -> Iterator[Row]:
    if shutil.which("nvidia-smi") is None:
        return
    command = ["nvidia-smi", f"--query-gpu={CLOCKS}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    yield {"what": what, "value": (done.stdout or done.stderr).strip(), "unit": f"({CLOCKS})"}


def limits(context: Context) -> Iterator[Row]:
    """Matrix rate and rates of the memory."""
    for key, rate in _rates(context.card).items():
        what = MEMORY.get(key, "bf16 product of 8192 x 8192 x 8192")
        yield {"what": what, "key": key, "value": rate, "unit": "TB/s" if key in MEMORY else "TFLOP/s"}


def measure(card: Card) -> Limits:
    """Return the rates, measured now."""
    found = Limits.from_rows(_rates(card))
    assert found is not None
    return found


def product_rows(context: Context) -> Iterator[Row]:
    """Products of the model's linears by cuBLAS and cuBLASLt, over weights and inputs that the L2 cache cannot hold."""
    card, found = context.card, context.limits()
    shapes = SHAPES if card.is_full else {"qkv": (64, 96), "o": (64, 64)}
    dtype = torch.bfloat16 if card.is_full else torch.float32
    for library in ("cublas", "cublaslt") if card.is_full else ("default",):
        if card.is_full:
            torch.backends.cuda.preferred_blas_library(library)
        for rows in ROWS if card.is_full else ROWS[:2]:
            for name, (inputs, outputs) in shapes.items():
                if name == "lm_head" and rows > 512:
                    continue
                num_bytes = dtype.itemsize * (inputs * outputs + rows * (inputs + outputs))
                sets = card.num_sets(num_bytes)
                pairs = [
                    (card.random(rows, inputs, dtype=dtype), card.random(outputs, inputs, dtype=dtype))
                    for _ in range(sets)
                ]
                seconds = card.seconds([functools.partial(torch.nn.functional.linear, *pair) for pair in pairs])
                flops = 2.0 * rows * inputs * outputs
                yield {
                    "what": f"{name} {inputs} x {outputs}, {rows} rows, {library}",
                    "value": seconds * 1e6,
                    "unit": "us",
                    "gb_per_s": num_bytes / seconds / 1e9,
                    "tflops": flops / seconds / 1e12,
                    "fraction": found.fraction(seconds, num_bytes, flops),
                }


def _rates(card: Card) -> dict[str, float]:
    """Return the rate of each row of `limits` in units of 1e12 per second. The product comes first: it raises the
    clocks."""
    deadline = time.monotonic() + (WARM_UP_S if card.is_full else 0.0)
    while (matrix := _matrix_rate(card)) and time.monotonic() < deadline:
        pass
    size = 1 << (32 if card.is_full else 20)
    source = torch.randint(-(2**31), 2**31 - 1, (size // 4,), dtype=torch.int32, device=card.device)
    target = torch.empty_like(source)
    numbers = source.view(torch.float32).nan_to_num_(posinf=0.0, neginf=0.0)
    rates = {
        "copy": 2 * size / card.seconds([lambda: target.copy_(source)]),
        "copy_kernel": 2 * size / card.seconds([lambda: torch.bitwise_not(source, out=target)]),
        "read": size / card.seconds([lambda: numbers.sum()]),
    }
    return {key: rate / 1e12 for key, rate in ({"matrix": matrix} | rates).items()}


def _matrix_rate(card: Card) -> float:
    size, dtype = (8192, torch.bfloat16) if card.is_full else (128, torch.float32)
    a, b = card.random(size, size, dtype=dtype), card.random(size, size, dtype=dtype)
    return 2 * size**3 / card.seconds([lambda: a @ b])
