# SPDX-License-Identifier: Apache-2.0
"""Kernels by themselves, in the shapes of Llama-3.1-8B: time, and the fraction of what the card's limits allow."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from unittest import mock

import torch
from card import Card
from gpu_gate import attention_case, own
from torch.nn.attention import SDPBackend

import quire_kernels as ops
from quire_kernels.gpu import attention as forms
from quire_kernels.gpu import fused_attention


@dataclass(frozen=True, slots=True)
class Limits:
    """As measured on this card, in this run."""

    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    what: str
    seconds: float
    bytes: float
    flops: float
    fraction: float
    """Of the limit that binds: bytes or operations, whichever takes longer."""

    @classmethod
    def of(cls, what: str, seconds: float, limits: Limits, num_bytes: float, flops: float = 0.0) -> "Row":
        """The limit that binds is the one that takes longer."""
        floor = max(num_bytes / limits.bytes_per_s, flops / limits.flops_per_s)
        return cls(what, seconds, num_bytes, flops, floor / seconds)


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a model's layer."""

    hidden: int = 4096
    intermediate: int = 14336
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocab: int = 128256

    @property
    def kv_bytes(self) -> int:
        """Of a token, keys and values, in bfloat16."""
        return 2 * 2 * self.kv_heads * self.head_dim


LLAMA_8B = Shape()
TINY = Shape(hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, vocab=300)


def decode_rows(card: Card, limits: Limits, shape: Shape, quick: bool) -> Iterator[Row]:
    """Decode attention over even and ragged contexts."""
    batches, contexts = ((1, 8, 32, 64, 128, 256), (128, 1024, 8192, 32768)) if card.is_gpu else ((2,), (40,))
    if quick:
        batches, contexts = (1, 64, 256), (1024, 8192)
    for batch in batches:
        for context in contexts:
            yield from _decode(card, limits, shape, f"decode, {batch} x {context:,}", [context] * batch)
    for batch in (64, 128, 256) if card.is_gpu else (3,):
        draw = random.Random(batch)
        longest = 8192 if card.is_gpu else 60
        lengths = [draw.randint(longest // 16, longest) for _ in range(batch)]
        yield from _decode(card, limits, shape, f"decode, {batch} x 512 to 8,192", lengths)


def _decode(card: Card, limits: Limits, shape: Shape, what: str, contexts: Sequence[int]) -> Iterator[Row]:
    num_bytes = sum(contexts) * shape.kv_bytes
    sets = card.num_sets(num_bytes)
    if num_bytes * sets > 0.8 * card.free_bytes:
        return
    calls = [_decode_call(card, shape, contexts) for _ in range(sets)]
    yield Row.of(what, card.seconds(calls), limits, num_bytes, 4.0 * shape.heads * shape.head_dim * sum(contexts))


def _decode_call(card: Card, shape: Shape, contexts: Sequence[int]) -> Callable[[], object]:
    # The interpreter multiplies no bfloat16.
    dtype = torch.bfloat16 if card.is_gpu else torch.float32
    counts = [-(-context // 16) for context in contexts]
    cache = card.random(2, sum(counts), 16, shape.kv_heads, shape.head_dim, dtype=dtype)
    order, tables, at = torch.randperm(sum(counts)), torch.zeros(len(counts), max(counts), dtype=torch.int64), 0
    for row, count in zip(tables, counts, strict=True):
        row[:] = order[at]
        row[:count] = order[at : at + count]
        at += count
    batch = ops.build_attention_metadata([c - 1 for c in contexts], [1] * len(contexts), tables, cache, card.device)
    queries = card.random(len(contexts), shape.heads, shape.head_dim, dtype=dtype)
    return functools.partial(own(ops.paged_attention), queries, cache, batch, shape.head_dim**-0.5)


def prefill_rows(card: Card, limits: Limits, shape: Shape, quick: bool, fused: bool) -> Iterator[Row]:
    """Attention of prompts, of a chunk behind a long context, and of a mixed step; those with whole prompts by the form
    that leaves them to torch's fused attention too, by each kernel that it may take, unless `fused` is not right."""
    cases = {
        "prefill, 8,192 tokens": [(0, 8192)],
        "prefill, 4 x 2,048 tokens": [(0, 2048)] * 4,
        "prefill, 2,048 tokens behind 30,000": [(30000, 2048)],
        "mixed, 1,800 tokens and 248 decodes at 1,000": [(0, 1800)] + [(999, 1)] * 248,
    }
    if not card.is_gpu:
        cases = {"prefill, 40 tokens": [(0, 40)], "mixed": [(0, 33), (20, 1)]}
    form = ops.paged_attention.get("cuda", "fused")
    for what, spans in list(cases.items())[: 1 if quick else None]:
        call, num_bytes, flops = _span_call(card, shape, spans)
        yield Row.of(what, card.seconds([call]), limits, num_bytes, flops)
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) if fused and spans[0][0] == 0 else ():
            call, *_ = _span_call(card, shape, spans, form)
            with mock.patch.object(fused_attention, "BACKENDS", (backend,)):
                yield from _tried(card, limits, f"{what}, fused ({backend.name.lower()})", [call], num_bytes, flops)


def _span_call(
    card: Card, shape: Shape, spans: list[tuple[int, int]], form: Callable[..., object] | None = None
) -> tuple[Callable[[], object], float, float]:
    dtype = torch.bfloat16 if card.is_gpu else torch.float32
    queries, cache, batch = attention_case(card, spans, (shape.heads, shape.kv_heads), shape.head_dim, 16, dtype)
    seen = sum(length * start + length * (length + 1) / 2 for start, length in spans)
    num_bytes = sum(start + length for start, length in spans) * shape.kv_bytes + 4.0 * queries.numel()
    call = functools.partial(form or own(ops.paged_attention), queries, cache, batch, shape.head_dim**-0.5)
    return call, num_bytes, 4.0 * shape.heads * shape.head_dim * seen


def fused_rows(card: Card, limits: Limits, shape: Shape, quick: bool) -> Iterator[Row]:
    """The small operations, ours and torch's; inputs rotate so that the cache does not hold them."""
    for tokens in (256, 8192) if card.is_gpu else (3,):
        norm = 4.0 * tokens * shape.hidden
        sets = card.num_sets(int(norm))
        weight = card.random(shape.hidden)
        xs = [card.random(tokens, shape.hidden) for _ in range(sets)]
        streams = [card.random(tokens, shape.hidden) for _ in range(sets)]
        for name in ("own", "torch"):
            form = ops.rms_norm.get("cuda", name)
            calls = [functools.partial(form, x, weight, 1e-5) for x in xs]
            yield from _of_form(card, limits, name, f"rms_norm ({name}), {tokens} tokens", calls, norm)
        form = own(ops.add_rms_norm)
        calls = [functools.partial(form, *pair, weight, 1e-5) for pair in zip(xs, streams, strict=True)]
        yield Row.of(f"add_rms_norm (own), {tokens} tokens", card.seconds(calls), limits, 2 * norm)
        gate_ups = [
            card.random(tokens, 2 * shape.intermediate) for _ in range(card.num_sets(6 * tokens * shape.intermediate))
        ]
        for name, form in (("own", own(ops.silu_mul)), ("torch", ops.silu_mul.reference)):
            calls = [functools.partial(form, gate_up) for gate_up in gate_ups]
            num_bytes = 6.0 * tokens * shape.intermediate
            yield from _of_form(card, limits, name, f"silu_mul ({name}), {tokens} tokens", calls, num_bytes)
        yield from _rope_rows(card, limits, shape, tokens)
    yield from _sampler_rows(card, limits, shape, quick)


def _rope_rows(card: Card, limits: Limits, shape: Shape, tokens: int) -> Iterator[Row]:
    all_heads = shape.heads + 2 * shape.kv_heads
    num_bytes = 4.0 * tokens * all_heads * shape.head_dim
    cache = card.random(2, tokens // 16 + 1, 16, shape.kv_heads, shape.head_dim)
    cos, sin = card.random(tokens, shape.head_dim), card.random(tokens, shape.head_dim)
    addresses = torch.randperm(tokens, device=card.device)
    qkvs = [card.random(tokens, all_heads, shape.head_dim) for _ in range(card.num_sets(int(num_bytes)))]
    for name, form in (("own", own(ops.rope_and_cache)), ("torch", ops.rope_and_cache.reference)):
        calls = [functools.partial(form, qkv, cos, sin, cache, addresses, shape.heads) for qkv in qkvs]
        yield from _of_form(card, limits, name, f"rotate_and_write ({name}), {tokens} tokens", calls, num_bytes)


def _sampler_rows(card: Card, limits: Limits, shape: Shape, quick: bool) -> Iterator[Row]:
    rows = 256 if card.is_gpu else 3
    logits = card.random(rows, shape.vocab)
    ones, zeros = torch.ones(rows, device=card.device), torch.zeros(rows, device=card.device)
    integers = torch.arange(rows, device=card.device)
    num_bytes = 2.0 * rows * shape.vocab
    cases = {
        "greedy": (zeros, integers * 0, ones, zeros, False),
        "drawn": (ones, integers * 0, ones, zeros, False),
        "top_p 0.9": (ones, integers * 0, ones * 0.9, zeros, True),
        "top_k 50": (ones, integers * 0 + 50, ones, zeros, True),
    }
    # Thresholds take the interpreter seconds.
    for what, (temperatures, top_k, top_p, min_p, cuts) in list(cases.items())[: None if card.is_gpu else 2]:
        for name, form in (("own", own(ops.sample)), ("torch", ops.sample.reference)):
            if name == "torch" and (quick or not card.is_gpu):
                continue
            arguments = logits, temperatures, top_k, top_p, min_p, integers, integers, cuts
            calls = [functools.partial(form, *arguments)]
            yield from _of_form(card, limits, name, f"choose {what} ({name}), {rows} rows", calls, num_bytes)
    counts = torch.zeros(rows, shape.vocab, dtype=torch.int32, device=card.device)
    counts[:, :1000] = 1
    tallied, weights = torch.arange(rows, device=card.device), torch.ones(rows, device=card.device)
    arguments = logits.float(), tallied, counts < 0, counts, tallied, weights, weights, weights
    seconds = card.seconds([functools.partial(own(ops.apply_penalties), *arguments)])
    yield Row.of(f"penalize, {rows} rows, 1,000 tokens each", seconds, limits, 5.0 * counts.numel())


def tune_rows(card: Card, limits: Limits, shape: Shape) -> Iterator[Row]:
    """Other sizes of tiles: what the constants of gpu/attention.py should be on this card."""
    draw = random.Random(1)
    contexts = [draw.randint(512, 8192) for _ in range(128)] if card.is_gpu else [40, 50]
    num_bytes, base = sum(contexts) * shape.kv_bytes, forms.select_tiles(shape.head_dim, 2, False)
    call = _decode_call(card, shape, contexts)
    shorts = [(k, s, w, n) for k in (32, 64, 128) for s in (3, 5, 7) for w in (4, 8) for n in (2, 3, 4)]
    for keys, stages, warps, per_sm in shorts if card.is_gpu else shorts[:1]:
        room = (1 << 16) // (per_sm * 32 * warps) // 8 * 8
        tiles = replace(base, short_keys=keys, num_stages=stages, num_warps=warps, max_registers=min(room, 248))
        what = f"tune decode: keys {keys}, stages {stages}, warps {warps}, workers {per_sm} a multiprocessor"
        yield from _tuned(card, limits, what, tiles, per_sm, call, num_bytes, 0.0)
    with mock.patch.object(forms, "supports_pdl", lambda _: False):
        yield Row.of("tune decode: no early launch", card.seconds([call]), limits, num_bytes)
    spans = [(0, 8192)] if card.is_gpu else [(0, 40)]
    call, long_bytes, flops = _span_call(card, shape, spans)
    longs = [(r, k, w, s) for r in (64, 128) for k in (32, 64, 128) for w in (4, 8) for s in (3, 5, 7)]
    for rows, keys, warps, stages in longs if card.is_gpu else longs[:1]:
        tiles = replace(base, long_rows=rows, long_keys=keys, num_warps=warps, num_stages=stages, max_registers=None)
        what = f"tune prefill: rows {rows}, keys {keys}, warps {warps}, stages {stages}"
        yield from _tuned(card, limits, what, tiles, 3, call, long_bytes, flops)


def _tuned(
    card: Card,
    limits: Limits,
    what: str,
    tiles: forms.AttentionTiles,
    per_sm: int,
    call: Callable[[], object],
    num_bytes: float,
    flops: float,
) -> Iterator[Row]:
    sms = torch.cuda.get_device_properties(card.device).multi_processor_count if card.is_gpu else 2
    with (
        mock.patch.object(forms, "select_tiles", lambda *_: tiles),
        mock.patch.object(forms, "num_workers", lambda _: per_sm * sms),
    ):
        yield from _tried(card, limits, what, [call], num_bytes, flops)


def _of_form(
    card: Card, limits: Limits, name: str, what: str, calls: Sequence[Callable[[], object]], num_bytes: float
) -> Iterator[Row]:
    """Torch's forms are only compared: where one cannot be captured, the others are measured all the same."""
    if name == "own":
        yield Row.of(what, card.seconds(calls), limits, num_bytes)
    else:
        yield from _tried(card, limits, what, calls, num_bytes)


def _tried(
    card: Card, limits: Limits, what: str, calls: Sequence[Callable[[], object]], num_bytes: float, flops: float = 0.0
) -> Iterator[Row]:
    """A row of what this card may not have room for, or not know."""
    try:
        yield Row.of(what, card.seconds(calls), limits, num_bytes, flops)
    except Exception as error:
        print(f"  {what}: {type(error).__name__}: {str(error)[:100]}", flush=True)
