# SPDX-License-Identifier: Apache-2.0
"""The other kernels by themselves: norms, activations, RoPE, sampler, penalties, layers with states, and adapters."""

import functools
from collections.abc import Iterator, Sequence

import torch

import quire_kernels as ops
from gpu_phases import gate_cases, lora_kernels, state_kernels
from gpu_phases.gate_cases import own
from gpu_phases.process import Context
from gpu_phases.store import Row
from gpu_phases.timing import Call, Timer


def rows(context: Context) -> Iterator[Row]:
    """The small operations by own kernels and by PyTorch; inputs rotate, so that the L2 cache does not contain them."""
    timer = Timer(context)
    card, shape = timer.card, timer.shape
    for tokens in (256, 8192) if timer.is_full else (3,):
        norm = 4.0 * tokens * shape.hidden
        sets = card.num_sets(int(norm))
        weight = card.random(shape.hidden)
        xs = [card.random(tokens, shape.hidden) for _ in range(sets)]
        streams = [card.random(tokens, shape.hidden) for _ in range(sets)]
        for name in ("own", "torch"):
            form = ops.rms_norm.get("cuda", name)
            calls = [functools.partial(form, x, weight, 1e-5) for x in xs]
            yield from _of_form(timer, name, f"rms_norm ({name}), {tokens} tokens", calls, norm)
        form = own(ops.add_rms_norm)
        calls = [functools.partial(form, *pair, weight, 1e-5) for pair in zip(xs, streams, strict=True)]
        yield timer.row(f"add_rms_norm (own), {tokens} tokens", calls, 2 * norm)
        gate_ups = [
            card.random(tokens, 2 * shape.intermediate) for _ in range(card.num_sets(6 * tokens * shape.intermediate))
        ]
        for name, form in (("own", own(ops.silu_mul)), ("torch", ops.silu_mul.reference)):
            calls = [functools.partial(form, gate_up) for gate_up in gate_ups]
            num_bytes = 6.0 * tokens * shape.intermediate
            yield from _of_form(timer, name, f"silu_mul ({name}), {tokens} tokens", calls, num_bytes)
        yield from _rope_rows(timer, tokens)
    for num_rows in (256, 1) if timer.is_full else (3,):
        yield from _sampler_rows(timer, num_rows)
    yield from _expert_rows(timer)
    yield from _quantized_expert_rows(timer)
    yield from _quantized_rows(timer)
    yield from state_kernels.rows(timer)
    yield from lora_kernels.rows(timer)


def _rope_rows(timer: Timer, tokens: int) -> Iterator[Row]:
    card, shape = timer.card, timer.shape
    all_heads = shape.heads + 2 * shape.kv_heads
    num_bytes = 4.0 * tokens * all_heads * shape.head_dim
    cache = card.random(2, tokens // 16 + 1, 16, shape.kv_heads, shape.head_dim)
    cos, sin = card.random(tokens, shape.head_dim), card.random(tokens, shape.head_dim)
    addresses = torch.randperm(tokens, device=card.device)
    qkvs = [card.random(tokens, all_heads, shape.head_dim) for _ in range(card.num_sets(int(num_bytes)))]
    for name, form in (("own", own(ops.rope_and_cache)), ("torch", ops.rope_and_cache.reference)):
        calls = [functools.partial(form, qkv, cos, sin, cache, addresses, shape.heads) for qkv in qkvs]
        yield from _of_form(timer, name, f"rope_and_cache ({name}), {tokens} tokens", calls, num_bytes)


def _expert_rows(timer: Timer) -> Iterator[Row]:
    """A layer of experts in the shape of Qwen3-30B-A3B; the bytes are those of the experts that have tokens."""
    card = timer.card
    hidden, inner, num_experts, top_k = (2048, 768, 128, 8) if timer.is_full else (32, 16, 8, 2)
    gate_up = card.random(num_experts, 2 * inner, hidden, dtype=timer.dtype)
    down = card.random(num_experts, hidden, inner, dtype=timer.dtype)
    experts = ops.ExpertWeights(gate_up, down, None, None, "silu")
    for num_tokens in (1, 16, 256, 2048) if timer.is_full else (3,):
        calls: list[Call] = []
        num_bytes = 0.0
        # Other experts in each call, so that the L2 cache does not contain them.
        for _ in range(8 if timer.is_full else 1):
            logits = torch.rand(num_tokens, num_experts, device=card.device)
            ids, weights = logits.topk(top_k).indices, torch.full((num_tokens, top_k), 1 / top_k, device=card.device)
            x = card.random(num_tokens, hidden, dtype=timer.dtype)
            calls.append(functools.partial(own(ops.fused_experts), x, ids, weights, experts))
            num_bytes += len(ids.unique()) * 3.0 * hidden * inner * timer.dtype.itemsize
        flops = 6.0 * num_tokens * top_k * hidden * inner
        what = f"{num_experts} experts, {top_k} for each of {num_tokens} tokens"
        yield timer.row(what, calls, num_bytes / len(calls), flops)


def _quantized_expert_rows(timer: Timer) -> Iterator[Row]:
    """A layer of experts in the shape of gpt-oss-20b; the bytes are those of the packed experts that have tokens."""
    card = timer.card
    sizes, top_k = ((32, 2880, 2880), 4) if timer.is_full else ((6, 96, 64), 2)
    num_experts, hidden, inner = sizes
    for name in ("mxfp4", *gate_cases.QUANTIZED):
        experts = gate_cases.quantized_experts(card, name, sizes, timer.dtype)
        assert isinstance(experts.gate_up, ops.QuantizedWeight) and isinstance(experts.down, ops.QuantizedWeight)
        expert_bytes = (experts.gate_up.num_bytes + experts.down.num_bytes) / num_experts
        for num_tokens in (1, 16, 256, 2048) if timer.is_full else (3,):
            calls: list[Call] = []
            num_bytes = 0.0
            # Other experts in each call, so that the L2 cache does not contain them.
            for _ in range(8 if timer.is_full else 1):
                ids = torch.rand(num_tokens, num_experts, device=card.device).topk(top_k).indices
                weights = torch.full((num_tokens, top_k), 1 / top_k, device=card.device)
                x = card.random(num_tokens, hidden, dtype=timer.dtype)
                calls.append(functools.partial(own(ops.fused_experts), x, ids, weights, experts))
                num_bytes += len(ids.unique()) * expert_bytes
            flops = 6.0 * num_tokens * top_k * hidden * inner
            what = f"{name}: {num_experts} experts, {top_k} for each of {num_tokens} tokens"
            yield from timer.tried(what, calls, num_bytes / len(calls), flops)


def _quantized_rows(timer: Timer) -> Iterator[Row]:
    """Gate and up with weights of 4 and 8 bits; the bytes are those of the quantized weight."""
    card, shape = timer.card, timer.shape
    inputs, outputs = (shape.hidden, 2 * shape.intermediate) if timer.is_full else (128, 64)
    plain = card.random(outputs, inputs, dtype=timer.dtype) / inputs**0.5
    for name, make in gate_cases.QUANTIZED.items():
        weights = [make(plain, timer.dtype) for _ in range(card.num_sets(inputs * outputs // 2))]
        for num_tokens in (1, 16, 64, 256, 2048) if timer.is_full else (3,):
            x = card.random(num_tokens, inputs, dtype=timer.dtype)
            calls = [functools.partial(own(ops.quantized_linear), x, weight, None) for weight in weights]
            num_bytes = inputs * outputs * (0.5 if name == "int4" else 1.0)
            flops = 2.0 * num_tokens * inputs * outputs
            yield from timer.tried(f"{name} gate_up {inputs} x {outputs}, {num_tokens} rows", calls, num_bytes, flops)


def _sampler_rows(timer: Timer, num_rows: int) -> Iterator[Row]:
    card, shape = timer.card, timer.shape
    logits = card.random(num_rows, shape.vocab)
    ones, zeros = torch.ones(num_rows, device=card.device), torch.zeros(num_rows, device=card.device)
    integers = torch.arange(num_rows, device=card.device)
    num_bytes = 2.0 * num_rows * shape.vocab
    cases = {
        "greedy": (zeros, integers * 0, ones, zeros, False),
        "drawn": (ones, integers * 0, ones, zeros, False),
        "top_p 0.9": (ones, integers * 0, ones * 0.9, zeros, True),
        "top_k 50": (ones, integers * 0 + 50, ones, zeros, True),
    }
    # Thresholds take the interpreter seconds.
    for what, (temperatures, top_k, top_p, min_p, cuts) in list(cases.items())[: None if timer.is_full else 2]:
        forms = {name: ops.sample.get("cuda", name) for name in ("bisection", "histogram")}
        for name, form in (forms | ({"torch": ops.sample.reference} if timer.is_full else {})).items():
            arguments = logits, temperatures, top_k, top_p, min_p, integers, integers, cuts
            calls = [functools.partial(form, *arguments)]
            yield from _of_form(timer, name, f"sample {what} ({name}), {num_rows} rows", calls, num_bytes)
    counts = torch.zeros(num_rows, shape.vocab, dtype=torch.int32, device=card.device)
    counts[:, :1000] = 1
    tallied, weights = torch.arange(num_rows, device=card.device), torch.ones(num_rows, device=card.device)
    arguments = logits.float(), tallied, counts < 0, counts, tallied, weights, weights, weights
    call = functools.partial(own(ops.apply_penalties), *arguments)
    yield timer.row(f"penalties, {num_rows} rows, 1,000 tokens each", [call], 5.0 * counts.numel())


def _of_form(timer: Timer, name: str, what: str, calls: Sequence[Call], num_bytes: float) -> Iterator[Row]:
    """Yield a row; PyTorch's implementations are for comparison only, so one that cannot be captured is left out."""
    if name == "own":
        yield timer.row(what, calls, num_bytes)
    else:
        yield from timer.tried(what, calls, num_bytes)
