# SPDX-License-Identifier: Apache-2.0
"""Rows of single kernels: their time, rates, and the fraction of what the card's limits allow."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from card import Card

from gpu_phases.limits import Limits
from gpu_phases.process import Context
from gpu_phases.store import Row

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a model's layer."""

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256

    @property
    def kv_bytes(self) -> int:
        """Return the bytes of keys and values of a token, in bfloat16."""
        return 2 * 2 * self.kv_heads * self.head_dim


class Timer:
    """Times calls on a card in the shapes of Llama-3.1-8B, or in tiny ones."""

    def __init__(self, context: Context) -> None:
        self.card: Card = context.card
        self.is_full = context.card.is_full
        self.limits: Limits = context.limits()
        self.shape = Shape() if self.is_full else Shape(64, 96, 4, 2, 16, 300)
        # The interpreter cannot multiply bfloat16.
        self.dtype = torch.bfloat16 if self.is_full else torch.float32

    def row(self, what: str, calls: Sequence[Call], num_bytes: float, flops: float = 0.0, key: str = "") -> Row:
        """Return the row of calls that do the same work on different inputs."""
        seconds = self.card.seconds(calls)
        rates = {"gb_per_s": num_bytes / seconds / 1e9, "tflops": flops / seconds / 1e12}
        fraction = self.limits.fraction(seconds, num_bytes, flops)
        row = {"what": what, "value": seconds * 1e6, "unit": "us", **rates, "fraction": fraction}
        return row | ({"key": key} if key else {})

    def tried(
        self, what: str, calls: Sequence[Call], num_bytes: float, flops: float = 0.0, key: str = ""
    ) -> Iterator[Row]:
        """Yield the row of an implementation that this card may not have room for, or not support."""
        try:
            yield self.row(what, calls, num_bytes, flops, key)
        except Exception as error:
            if "CUDA error" in str(error):
                raise
            yield {"what": what, "value": f"{type(error).__name__}: {str(error)[:100]}", "unit": "", "left_out": True}
