# SPDX-License-Identifier: Apache-2.0
"""Layers with one state per sequence: their inputs, their comparisons for the gates, and their times."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from card import Card
from torch import Tensor

import quire_kernels as ops
from gpu_phases.timing import Call, Timer

_CHUNK = 64
_CONVOLUTION_TAPS = 4


@dataclass(frozen=True, slots=True)
class Layer:
    """The sizes of a layer: of Qwen3-Next and Qwen3.5-35B-A3B, and of Nemotron-H 8B, unless they are tiny.

    Both kinds of layers have the same sizes: keys are B and C, and values are x.
    """

    name: str
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    @property
    def width(self) -> int:
        """Return the number of inputs of a token, without gates."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    def flops(self, num_tokens: int) -> float:
        """Return the operations of prompts, each product counted once. The kernels need several for some products."""
        within, of_state = 2.0 * _CHUNK, 2.0 * self.key_dim * self.value_dim
        if self.name == "gated_delta_rule":
            # Products of keys; four for the inverse; corrections and outputs; reads, reads and an update of the state.
            within *= 2 * self.key_dim + 4 * _CHUNK + 2 * self.value_dim
            return num_tokens * self.heads * (within + 3 * of_state)
        return num_tokens * self.heads * (within * (self.key_dim + self.value_dim) + 2 * of_state)

    def num_bytes(self, num_tokens: int, num_sequences: int, element: int) -> float:
        """Return the bytes that any kernel moves: inputs, gates, outputs, and each state in float32 twice."""
        numbers = self.width + self.heads * (self.value_dim + (2 if self.name == "gated_delta_rule" else 1))
        states = 2.0 * 4 * num_sequences * self.heads * self.key_dim * self.value_dim
        return float(element * num_tokens * numbers) + states


@dataclass(slots=True)
class Inputs:
    """Random inputs of a layer for a step. `states` are updated by each call."""

    card: Card
    layer: Layer
    lengths: list[int]
    dtype: torch.dtype
    arguments: tuple[Any, ...] = field(init=False)
    states: Tensor = field(init=False)
    batch: ops.StateBatch = field(init=False)

    def __post_init__(self) -> None:
        card, layer, num = self.card, self.layer, sum(self.lengths)
        random = functools.partial(card.random, dtype=self.dtype)
        a_log, bias, skip = card.random(3, layer.heads, dtype=torch.float32)
        x = random(num, layer.width)
        if layer.name == "gated_delta_rule":
            self.arguments = x, random(num, layer.heads), random(num, layer.heads), a_log - 2, bias
        else:
            self.arguments = x, random(num, layer.heads), ops.Mamba2Params(a_log - 2, bias, skip, layer.key_heads)
        shape = len(self.lengths), layer.heads, layer.key_dim, layer.value_dim
        self.states = card.random(*shape, dtype=torch.float32)
        self.batch = ops.build_state_batch(range(len(self.lengths)), self.lengths, card.device)

    def call(self, form: Callable[..., Tensor], states: Tensor | None = None) -> Tensor:
        """Return the outputs."""
        return form(*self.arguments, self.states if states is None else states, self.batch)


def layers(card: Card) -> tuple[Layer, Layer]:
    """Return a Gated DeltaNet layer and a Mamba-2 layer."""
    if not card.is_full:
        return Layer("gated_delta_rule", 1, 2, 16, 24), Layer("mamba2_recurrence", 1, 2, 24, 16)
    return Layer("gated_delta_rule", 16, 32, 128, 128), Layer("mamba2_recurrence", 8, 128, 128, 64)


def findings(card: Card, layer: Layer, dtype: torch.dtype, error: float) -> Iterator[tuple[str, float, float]]:
    """Compare prompts and sequences that decode, and their states, with the reference. Run three times, because an
    error that changes between runs is a race."""
    inputs = Inputs(card, layer, [1, 300, 64, 0, 1, 130] if card.is_full else [1, 70, 0], dtype)
    op = getattr(ops, layer.name)
    states = [inputs.states.clone() for _ in range(4)]
    found = [inputs.call(op.get("cuda", "own"), each) for each in states[:3]]
    expected = inputs.call(op.reference, states[3])
    yield "outputs", _error_of(found[0], expected), error
    # Products have 16 significant bits or more, and their errors add up over the chunks of a prompt.
    yield "states", _error_of(states[0], states[3]), min(error, 1e-4)
    moved = any(not torch.equal(found[0], other) for other in found[1:])
    yield "outputs of three runs differ", float(moved), 0.0


def convolution_findings(card: Card, dtype: torch.dtype, error: float) -> Iterator[tuple[str, float, float]]:
    """Compare the short convolution and the inputs that it keeps with the reference."""
    lengths, size = ([1, 300, 64, 0, 1, 130], 8192) if card.is_full else ([1, 70, 0], 40)
    x, weight = card.random(sum(lengths), size, dtype=dtype), card.random(size, _CONVOLUTION_TAPS, dtype=dtype)
    states = [card.random(len(lengths), _CONVOLUTION_TAPS - 1, size, dtype=dtype)]
    states.append(states[0].clone())
    batch = ops.build_state_batch(range(len(lengths)), lengths, card.device)
    forms = ops.short_convolution.get("cuda", "own"), ops.short_convolution.reference
    found, expected = (form(x, weight, each, batch) for form, each in zip(forms, states, strict=True))
    yield "outputs", _error_of(found, expected), error
    yield "states", _error_of(*states), 0.0


def rows(timer: Timer) -> Iterator[dict[str, Any]]:
    """Prompts and decode steps by own kernels and by PyTorch. The fraction refers to the bytes that any kernel moves,
    and to operations of bfloat16, each product counted once."""
    card, element = timer.card, timer.dtype.itemsize
    steps = ([2048], [512] * 16, [8192], [1] * 256) if timer.is_full else ([70], [1] * 2)
    for layer in layers(card):
        op = getattr(ops, layer.name)
        for lengths in steps:
            inputs = Inputs(card, layer, lengths, timer.dtype)
            num_bytes = layer.num_bytes(sum(lengths), len(lengths), element)
            flops = layer.flops(sum(lengths)) if lengths[0] > 1 else 0.0
            yield from _compared(timer, op, f"{len(lengths)} x {lengths[0]} tokens", inputs.call, num_bytes, flops)
    size = layers(card)[0].width
    for lengths in steps:
        x = card.random(sum(lengths), size, dtype=timer.dtype)
        weight = card.random(size, _CONVOLUTION_TAPS, dtype=timer.dtype)
        states = card.random(len(lengths), _CONVOLUTION_TAPS - 1, size, dtype=timer.dtype)
        batch = ops.build_state_batch(range(len(lengths)), lengths, card.device)
        call = lambda form, a=(x, weight, states, batch): form(*a)  # noqa: E731
        num_bytes = 2.0 * element * (x.numel() + states.numel())
        what = f"{len(lengths)} x {lengths[0]} tokens"
        yield from _compared(timer, ops.short_convolution, what, call, num_bytes, 0.0)


def _compared(
    timer: Timer, op: Any, what: str, call: Callable[[Any], object], num_bytes: float, flops: float
) -> Iterator[dict[str, Any]]:
    """Yield the rows of both implementations; one that cannot be captured is left out."""
    for name, form in (("own", op.get("cuda", "own")), ("torch", op.reference)):
        calls: list[Call] = [functools.partial(call, form)]
        yield from timer.tried(f"{op.name} ({name}), {what}", calls, num_bytes, flops)


def _error_of(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))
