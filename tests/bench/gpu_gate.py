# SPDX-License-Identifier: Apache-2.0
"""The gate: every form of ours that runs on the device equals its reference, or nothing is timed. Where QUIRE_KERNELS
has
another form run, ours is not judged. Forms that nobody runs unless asked for are judged too, and left out of what is
timed where they are wrong.

References compute in float32 from the same inputs. Fresh memory holds NaN, so that an output that is not written shows;
attention runs three times, since an error that moves is a race.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch
from card import Card
from torch import Tensor

import quire_kernels as ops
from quire_kernels import Op
from quire_kernels.dispatch import overrides
from quire_kernels.gpu import fused_attention

ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Largest ||found - expected|| / ||expected||: a few roundings of the type."""
MAX_OTHER_CHOICES = 0.05
"""Of drawn tokens: draws within rounding of the border between two tokens may take either. Running sums of 128,256
weights are off by some 1e-7 of the total, which is as much as most tokens weigh. Where all tokens are kept, one draw in
a hundred differs for it, two at temperature 2: 2 or 3 of the 256 rows, and twice that by chance. A sum that is wrong
changes most of them."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One comparison."""

    what: str
    error: float
    limit: float
    form: str = ""
    """As QUIRE_KERNELS has it, of a form that runs only where that asks for it."""

    @property
    def good(self) -> bool:
        """NaN is not."""
        return self.error <= self.limit


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Floats that are only allocated are NaN."""

    def poison(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = function(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() and tensor.itemsize > 1 else tensor

        return made

    with (
        mock.patch.object(torch, "empty", poison(torch.empty)),
        mock.patch.object(torch.Tensor, "new_empty", poison(torch.Tensor.new_empty)),
    ):
        yield


def own(op: Op[..., Any]) -> Callable[..., Any]:
    """The operation's form in the kernel language."""
    return op.get("cuda", "own")


def runs(op: Op[..., Any]) -> bool:
    """Whether that is the form which runs, or which does what another one leaves to it."""
    wished = _wished(op.name)
    return wished in ("own", "fused") or wished not in op.implementations("cuda")


def _wished(op: str) -> str | None:
    return overrides().get(op) or overrides().get("")


def error_of(found: Tensor, expected: Tensor) -> float:
    """||found - expected|| / ||expected||."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


@dataclass(frozen=True, slots=True)
class Share:
    """One of several processes that check side by side: most of the time goes into compiling."""

    index: int = 0
    num: int = 1

    def takes(self, index: int) -> bool:
        """Whether the case is this one's."""
        return index % self.num == self.index


FUSED, SIDE = "paged_attention=fused", "adapted_linear=side"


def check_all(card: Card, share: Share) -> Iterator[Finding]:
    """Every form in every type; the interpreter multiplies no bfloat16."""
    torch.manual_seed(7)
    for dtype in ERRORS if card.is_gpu else (torch.float32, torch.float16):
        with poisoned():
            for what, found, expected in _pairs(card, dtype) if share.index == 0 else ():
                yield Finding(f"{what}, {str(dtype).removeprefix('torch.')}", error_of(found, expected), ERRORS[dtype])
            if runs(ops.paged_attention):
                yield from _attention(card, dtype, share)
            if share.takes(share.num // 3):
                yield from _asked_for(FUSED, _fused_attention(card, dtype))
            if share.takes(share.num // 2):
                yield from _lora(card, dtype)
    if share.takes(share.num - 1):
        yield from _sampling(card)
        if runs(ops.prepare_inputs):
            yield from _prepare(card)


def _asked_for(form: str, findings: Iterator[Finding]) -> Iterator[Finding]:
    """Of a form that runs only where QUIRE_KERNELS asks for it: what it cannot do costs nobody else."""
    op, _, name = form.partition("=")
    if _wished(op) == name:
        yield from findings
        return
    try:
        for finding in findings:
            yield replace(finding, form=form)
    except Exception as error:
        yield Finding(f"{form}: {type(error).__name__}: {str(error)[:200]}", float("nan"), 0.0, form)


def _pairs(card: Card, dtype: torch.dtype) -> Iterator[tuple[str, Tensor, Tensor]]:
    rows = 37 if card.is_gpu else 3
    sizes = (64, 576, 3000, 4096, 8192) if card.is_gpu else (64, 300)
    for size in sizes:
        x, weight, stream = (card.random(n, size, dtype=dtype) for n in (rows, 1, rows))
        weight = weight[0]
        if runs(ops.rms_norm):
            yield f"rms_norm {size}", own(ops.rms_norm)(x, weight, 1e-5), ops.rms_norm.reference(x, weight, 1e-5)
        if not runs(ops.add_rms_norm):
            continue
        found, expected = stream.clone(), stream.clone()
        pair = own(ops.add_rms_norm)(x, found, weight, 1e-5), ops.add_rms_norm.reference(x, expected, weight, 1e-5)
        yield f"add_rms_norm {size}", *pair
        yield f"add_rms_norm {size}, the stream", found, expected
    for name in ("silu", "relu", "gelu", "gelu_new"):
        gate_up = card.random(rows, 2 * sizes[-1] + 2, dtype=dtype)
        if not runs(ops.get_gated_op(name)):
            continue
        yield f"gated {name}", own(ops.get_gated_op(name))(gate_up), ops.get_gated_op(name).reference(gate_up)
    for heads, kv_heads, head_dim, dim in ((32, 8, 128, 128), (9, 3, 64, 64), (32, 32, 96, 72), (14, 2, 80, 80)):
        for cache_dtype in (dtype, torch.float8_e4m3fn) if card.is_gpu else (dtype,):
            qkv = card.random(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
            angles = torch.rand(rows, dim // 2, device=card.device) * 100
            cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
            sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
            addresses = torch.randperm(16 * 5, device=card.device)[:rows]
            found, expected = (
                torch.zeros(2, 5, 16, kv_heads, head_dim, dtype=dtype, device=card.device).to(cache_dtype)
                for _ in range(2)
            )
            what = f"rotate_and_write {heads}/{kv_heads} of {head_dim}, {cache_dtype}"
            if runs(ops.rope_and_cache):
                q = own(ops.rope_and_cache)(qkv.clone(), cos, sin, found, addresses, heads)
                yield what, q, ops.rope_and_cache.reference(qkv, cos, sin, expected, addresses, heads)
                if cache_dtype == dtype:
                    yield f"{what}, the cache", found, expected
            if not runs(ops.write_kv):
                continue
            own(ops.write_kv)(qkv[:, :kv_heads], qkv[:, kv_heads : 2 * kv_heads], found, addresses)
            ops.write_kv.reference(qkv[:, :kv_heads], qkv[:, kv_heads : 2 * kv_heads], expected, addresses)
            yield f"write_kv {kv_heads} of {head_dim}, {cache_dtype}", found.float(), expected.float()


SPANS = {
    "decodes": [(3, 1), (700, 1), (1500, 1), (31, 1), (0, 1), (127, 1), (128, 1), (4095, 1)],
    "prompts": [(0, 5), (0, 16), (0, 333), (0, 1025)],
    "chunks": [(16, 160), (700, 30), (64, 2), (2000, 129)],
    "mixed": [(40, 1), (0, 333), (41, 1), (16, 200), (5, 1), (0, 33), (3000, 1), (100, 3)],
}
SMALL_SPANS = {"mixed": [(40, 1), (0, 33), (70, 1), (16, 20)]}


def _attention(card: Card, dtype: torch.dtype, share: Share) -> Iterator[Finding]:
    heads = ((32, 8), (9, 3), (14, 2), (8, 1), (4, 4)) if card.is_gpu else ((4, 2),)
    cases: list[tuple[int, int, tuple[int, int], dict[str, Any]]] = [(128, 16, h, {}) for h in heads]
    if card.is_gpu:
        cases += [(d, 16, (32, 8), {}) for d in (64, 80, 96, 256)] + [(128, b, (32, 8), {}) for b in (8, 32, 64, 128)]
        cases += [(128, 16, (32, 8), {"window": w}) for w in (1, 100, 1024)]
        cases += [(256, 16, (16, 8), {"softcap": 30.0, "window": 512}), (128, 16, (32, 8), {"softcap": 2.0})]
    for index, (head_dim, block_size, of, options) in enumerate(cases):
        if not share.takes(index + list(ERRORS).index(dtype) * len(cases)):
            continue
        for name, spans in (SPANS if card.is_gpu else SMALL_SPANS).items():
            queries, cache, batch = attention_case(card, spans, of, head_dim, block_size, dtype)
            expected = ops.paged_attention.reference(queries, cache, batch, head_dim**-0.5, **options)
            results = [
                own(ops.paged_attention)(queries, cache, batch, head_dim**-0.5, **options)
                for _ in range(3 if card.is_gpu else 1)
            ]
            what = f"paged_attention {name}, heads {of} of {head_dim}, blocks of {block_size}, {options}"
            what += f", {str(dtype).removeprefix('torch.')}"
            yield Finding(what, error_of(results[0], expected), ERRORS[dtype])
            yield Finding(f"{what}, the same bits", float(any(not torch.equal(results[0], r) for r in results)), 0.0)


def _fused_attention(card: Card, dtype: torch.dtype) -> Iterator[Finding]:
    """Prompts of 32 tokens and more by torch's."""
    form = ops.paged_attention.get("cuda", "fused")
    with mock.patch.object(fused_attention, "MIN_TOKENS", 32):
        for name, spans in (SPANS if card.is_gpu else SMALL_SPANS).items():
            queries, cache, batch = attention_case(card, spans, (32, 8) if card.is_gpu else (4, 2), 128, 16, dtype)
            expected = ops.paged_attention.reference(queries, cache, batch, 128**-0.5)
            what = f"paged_attention (fused) {name}, {str(dtype).removeprefix('torch.')}"
            yield Finding(what, error_of(form(queries, cache, batch, 128**-0.5), expected), ERRORS[dtype])


def attention_case(
    card: Card,
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, ops.AttentionMetadata]:
    """Queries, a cache in scattered blocks, and the batch. What no span has written is NaN."""
    counts = [-(-(start + length) // block_size) for start, length in spans]
    order = torch.randperm(sum(counts) + 3)
    cache = card.random(2, len(order), block_size, heads[1], head_dim, dtype=dtype)
    tables = torch.zeros(len(spans), max(counts), dtype=torch.int64)
    at = 0
    for row, count, (start, length) in zip(tables, counts, spans, strict=True):
        row[:] = order[at]
        row[:count] = order[at : at + count]
        at += count
        cache[:, int(row[count - 1]), (start + length - 1) % block_size + 1 :] = float("nan")
    queries = card.random(sum(length for _, length in spans), heads[0], head_dim, dtype=dtype)
    starts, lengths = [s for s, _ in spans], [n for _, n in spans]
    return queries, cache, ops.build_attention_metadata(starts, lengths, tables, cache, card.device)


def _lora(card: Card, dtype: torch.dtype) -> Iterator[Finding]:
    """Tokens of several adapters in any order, ranks from 1 to above what is multiplied at once."""
    features, widths, tokens = (4096, (4096, 1024, 1024), 300) if card.is_gpu else (70, (140, 33, 33), 20)
    ranks = ((16, 16, 16), (1, 0, 7), (128, 40, 64), (0, 0, 0), (64, 24, 8))
    sites = [ops.LoRATarget(features, widths), ops.LoRATarget(500, (features,), is_embedding=True)]
    like = torch.empty(0, dtype=dtype, device=card.device)
    of_model = ops.LoRASlots(sites, len(ranks), 128, like)
    for slot, own_ranks in enumerate(ranks):
        pairs = [
            [
                (torch.randn(r, features) / features**0.5, torch.randn(w, r) / 4) if r else None
                for r, w in zip(own_ranks, widths, strict=True)
            ],
            [(torch.randn(own_ranks[0], 500), torch.randn(features, own_ranks[0])) if own_ranks[0] else None],
        ]
        of_model.write(slot, of_model.pack(pairs))
    slots = torch.randint(-1, len(ranks), (tokens,), device=card.device)
    routing, expected_routing = (ops.TokenRouting.empty(tokens, len(ranks), card.device) for _ in range(2))
    ops.route_tokens.reference(slots, expected_routing)
    (own(ops.route_tokens) if runs(ops.route_tokens) else ops.route_tokens.reference)(slots, routing)
    used = expected_routing.tile_slots >= 0
    for name in ("tile_slots", "tile_rows") if runs(ops.route_tokens) else ():
        one, other = (getattr(r, name) for r in (routing, expected_routing))
        same = torch.equal(one[used], other[used]) and (name == "tile_rows" or torch.equal(one, other))
        yield Finding(f"route: {name}", float(not same), 0.0)
    batch, kind = ops.LoRABatch(slots, routing=routing), str(dtype).removeprefix("torch.")
    x, base = card.random(tokens, features, dtype=dtype), card.random(tokens, sum(widths), dtype=dtype)
    if card.is_gpu:
        yield from _asked_for(SIDE, _beside(x, of_model.modules[0], batch))
    token_ids = torch.randint(500, (tokens,), device=card.device)
    calls = {
        "add_lora": (base, lambda op, out: op(out, x, of_model.modules[0], batch)),
        "add_lora_embedding": (x, lambda op, out: op(out, token_ids, of_model.modules[1], batch)),
    }
    for name, (start, call) in calls.items():
        if not runs(getattr(ops, name)):
            continue
        results = [start.clone() for _ in range(4)]
        for form, out in zip([getattr(ops, name).reference] + [own(getattr(ops, name))] * 3, results, strict=True):
            call(form, out)
        yield Finding(f"{name}, {kind}", error_of(results[1], results[0]), ERRORS[dtype])
        moved = any(not torch.equal(results[1], r) for r in results[2:])
        yield Finding(f"{name}, {kind}, the same bits", float(moved), 0.0)


def _beside(x: Tensor, module: ops.ModuleSlots, batch: ops.LoRABatch) -> Iterator[Finding]:
    """The form that shrinks on a stream of its own, in a graph."""
    weight = torch.randn(sum(module.target.widths), x.shape[1], dtype=x.dtype, device=x.device) / x.shape[1] ** 0.5
    form, graph = ops.adapted_linear.get("cuda", "side"), torch.cuda.CUDAGraph()
    # Compiles.
    form(x, weight, None, None, module, batch)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = form(x, weight, None, None, module, batch)
    graph.replay()
    expected = ops.linear.reference(x, weight, None)
    ops.add_lora.reference(expected, x, module, batch)
    kind = str(x.dtype).removeprefix("torch.")
    yield Finding(f"adapted_linear, side stream, {kind}", error_of(found, expected), ERRORS[x.dtype])


def _sampling(card: Card) -> Iterator[Finding]:
    rows, vocab = (256, 128256) if card.is_gpu else (6, 300)
    logits = card.random(rows, vocab, dtype=torch.float32) * 3
    device = {"device": card.device}
    temperatures = torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0, 2.0], **device).repeat(rows // 6 + 1)[:rows]
    top_k = torch.tensor([0, 0, 50, 5, 0, 1000], **device).repeat(rows // 6 + 1)[:rows]
    top_p = torch.tensor([1.0, 0.9, 1.0, 0.5, 0.99, 0.95], **device).repeat(rows // 6 + 1)[:rows]
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.02, 0.0], **device).repeat(rows // 6 + 1)[:rows]
    seeds, positions = torch.arange(rows, **device), torch.arange(rows, **device) * 3
    limits = top_k, top_p, min_p
    for cuts in (True, False) if runs(ops.sample) else ():
        arguments = logits, temperatures, *limits, seeds, positions, cuts
        other = own(ops.sample)(*arguments) != ops.sample.reference(*arguments)
        yield Finding(f"choose, cuts {cuts}: greedy rows", float(other[temperatures == 0].float().mean()), 0.0)
        yield Finding(f"choose, cuts {cuts}: drawn rows", float(other.float().mean()), MAX_OTHER_CHOICES)
    for dtype in (torch.float32, torch.bfloat16) if runs(ops.argmax_first) else ():
        part = logits.to(dtype)
        wrong = own(ops.argmax_first)(part) != ops.argmax_first.reference(part)
        yield Finding(f"most_likely, {dtype}", float(wrong.float().mean()), 0.0)
    if runs(ops.uniform):
        numbers = own(ops.uniform)(seeds, positions) != ops.uniform.reference(seeds, positions)
        yield Finding("uniform", float(numbers.float().mean()), 0.0)
    if not runs(ops.apply_penalties):
        return
    counts = torch.randint(3, (rows, vocab), dtype=torch.int32, **device)
    in_prompt = torch.randint(2, (rows, vocab), **device).bool()
    params = torch.full((rows,), 0.5, **device), torch.full((rows,), 0.1, **device), torch.full((rows,), 1.2, **device)
    found, expected = logits.clone(), logits.clone()
    for form, target in ((own(ops.apply_penalties), found), (ops.apply_penalties.reference, expected)):
        form(target, torch.arange(rows, **device), in_prompt, counts, torch.arange(rows, **device).flip(0), *params)
    yield Finding("penalize", error_of(found, expected), 1e-6)


def _prepare(card: Card) -> Iterator[Finding]:
    lengths = [1, 300, 1, 17, 1]
    state = ops.SequenceState.empty(8, 40, card.device)
    state.lengths.copy_(torch.tensor([0, 5, 16, 100, 31, 200, 0, 0]))
    state.tables.copy_(torch.randperm(320).view(8, 40))
    rows = torch.tensor([5, 0, 3, 1, 2], device=card.device)
    starts = torch.tensor([0, *lengths], device=card.device).cumsum(0).to(torch.int32)
    outs = [ops.StepInputs.empty(sum(lengths), len(lengths), 32, card.device) for _ in range(2)]
    own(ops.prepare_inputs)(rows, starts, state, 16, outs[0])
    ops.prepare_inputs.reference(rows, starts, state, 16, outs[1])
    for name in ops.StepInputs.__slots__:
        same = torch.equal(getattr(outs[0], name), getattr(outs[1], name))
        yield Finding(f"prepare_inputs: {name}", float(not same), 0.0)


def eight_bit_error(card: Card) -> dict[str, float]:
    """What an e4m3 cache costs: error of attention against the same cache in the model's type."""
    dtype = torch.bfloat16 if card.is_gpu else torch.float32
    spans = SPANS["mixed"] if card.is_gpu else SMALL_SPANS["mixed"]
    queries, cache, batch = attention_case(card, spans, (32, 8) if card.is_gpu else (4, 2), 128, 16, dtype)
    exact = ops.paged_attention.reference(queries.float(), cache.float(), batch, 128**-0.5)
    eight = ops.paged_attention.reference(queries.float(), cache.to(torch.float8_e4m3fn), batch, 128**-0.5)
    found = own(ops.paged_attention)(queries, cache.to(torch.float8_e4m3fn), batch, 128**-0.5)
    return {"reference": error_of(eight, exact), "own": error_of(found, exact)}
