# SPDX-License-Identifier: Apache-2.0
"""The comparisons of both gates: each implementation in the kernel language against its reference.

References compute in float32 from the same inputs. Fresh memory contains NaN, so that an unwritten output is visible.
Attention and adapters run three times, because an error that changes between runs is a race.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from card import Card
from torch import Tensor

import quire_kernels as ops
from gpu_phases import state_kernels
from quire_kernels import Op
from quire_kernels.dispatch import overrides
from quire_kernels.gpu import fused_attention
from quire_kernels.gpu.candidates import cudnn_attention

ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}
"""Largest ||found - expected|| / ||expected||: a few roundings of the type."""
MAX_OTHER_CHOICES = 0.05
"""Fraction of drawn tokens that may differ: a draw within rounding of the border between two tokens may take either.
Sums of 128,256 weights are off by some 1e-7 of the total, as much as most tokens weigh. 2 or 3 of 256 rows differ for
it, and twice that by chance; a wrong sum changes most of them."""

Finding = tuple[str, float, float]
"""What was compared, its error, and the largest permitted error."""


@dataclass(frozen=True, slots=True)
class Case:
    """Comparisons of one operation."""

    op: str
    what: str
    is_timed: bool
    """Return whether tier A contains it: shapes and types that the bars time."""
    check: Callable[[], Iterator[Finding]]


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fill memory that is only allocated with NaN."""

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
    """Return the operation's implementation in the kernel language."""
    return op.get("cuda", "own")


def runs(op: str) -> bool:
    """Return whether that is the implementation that runs, or that computes what another one leaves to it."""
    selected = overrides().get(op) or overrides().get("")
    return selected in (None, "own", "fused", "cudnn", "bisection", "histogram")


def error_of(found: Tensor, expected: Tensor) -> float:
    """Return ||found - expected|| / ||expected||."""
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def cases(card: Card) -> Iterator[Case]:
    """Return all comparisons of both tiers."""
    # The interpreter cannot multiply bfloat16.
    timed = torch.bfloat16 if card.is_full else torch.float32
    for dtype in ERRORS if card.is_full else (torch.float32, torch.float16):
        is_timed, kind = dtype == timed, str(dtype).removeprefix("torch.")
        for size in (64, 576, 3000, 4096, 8192) if card.is_full else (64, 300):
            first = is_timed and size in (64, 4096)
            yield Case("rms_norm", f"{size}, {kind}", first, lambda s=size, d=dtype: _norm(card, s, d))
            yield Case("add_rms_norm", f"{size}, {kind}", first, lambda s=size, d=dtype: _add_norm(card, s, d))
        for name in ("silu", "relu", "gelu", "gelu_new"):
            op = ops.get_gated_op(name)
            yield Case(op.name, kind, is_timed and name == "silu", lambda o=op, d=dtype: _gated(card, o, d))
        for shape in ((32, 8, 128, 128), (9, 3, 64, 64), (32, 32, 96, 72), (14, 2, 80, 80)):
            first = is_timed and shape[2] == 128
            for cache in (dtype, torch.float8_e4m3fn) if card.is_full else (dtype,):
                what = f"{shape}, {kind}, cache {cache}"
                check = lambda s=shape, d=dtype, c=cache: _rope(card, s, d, c)  # noqa: E731
                yield Case("rope_and_cache", what, first and cache == dtype, check)
        for index, (head_dim, block_size, heads, options) in enumerate(_attention_shapes(card)):
            for name, spans in (SPANS if card.is_full else SMALL_SPANS).items():
                what = f"{name}, heads {heads} of {head_dim}, blocks of {block_size}, {options}, {kind}"
                shape = spans, heads, head_dim, block_size
                check = lambda s=shape, o=options, d=dtype: _attention(card, s, o, d)  # noqa: E731
                yield Case("paged_attention", what, is_timed and not index, check)
        yield Case("paged_attention=fused", kind, False, lambda d=dtype: _fused_attention(card, d))
        yield Case("paged_attention=cudnn", kind, False, lambda d=dtype: _cudnn_attention(card, d))
        yield Case("add_lora", kind, is_timed, lambda d=dtype: _lora(card, d))
        yield Case("quantized_linear", kind, False, lambda d=dtype: _quantized_linears(card, d))
        yield Case("fused_experts", kind, False, lambda d=dtype: _experts(card, d))
        yield Case("fused_experts", f"quantized, {kind}", False, lambda d=dtype: _quantized_experts(card, d))
        # For float16, the kernels multiply parts in bfloat16, which Triton's interpreter cannot.
        for layer in state_kernels.layers(card) if card.is_full or dtype == torch.float32 else ():
            check = lambda x=layer, d=dtype: state_kernels.findings(card, x, d, ERRORS[d])  # noqa: E731
            yield Case(layer.name, kind, is_timed, check)
        check = lambda d=dtype: state_kernels.convolution_findings(card, d, ERRORS[d])  # noqa: E731
        yield Case("short_convolution", kind, is_timed, check)
        if is_timed:
            yield Case("paged_attention", "e4m3 cache", False, lambda d=dtype: _eight_bit(card, d))
    yield Case("sample", "and penalties", True, lambda: _sampling(card))
    yield Case("sample=histogram", "", False, lambda: _histogram_sampling(card))
    yield Case("prepare_inputs", "mixed", True, lambda: _prepare(card))
    yield Case("graphs", "greedy tokens", True, lambda: _tokens(card, False))
    yield Case("graphs", "greedy tokens on adapters", True, lambda: _tokens(card, True))


def run(case: Case) -> Iterator[Finding]:
    """Compare, unless another implementation runs."""
    if not runs(case.op):
        return
    torch.manual_seed(7)
    with contextlib.nullcontext() if case.op == "graphs" else poisoned():
        yield from case.check()


def _norm(card: Card, size: int, dtype: torch.dtype) -> Iterator[Finding]:
    x, weight = card.random(_rows(card), size, dtype=dtype), card.random(size, dtype=dtype)
    found, expected = own(ops.rms_norm)(x, weight, 1e-5), ops.rms_norm.reference(x, weight, 1e-5)
    yield "output", error_of(found, expected), ERRORS[dtype]


def _add_norm(card: Card, size: int, dtype: torch.dtype) -> Iterator[Finding]:
    x, stream = (card.random(_rows(card), size, dtype=dtype) for _ in range(2))
    weight, expected = card.random(size, dtype=dtype), stream.clone()
    pair = own(ops.add_rms_norm)(x, stream, weight, 1e-5), ops.add_rms_norm.reference(x, expected, weight, 1e-5)
    yield "output", error_of(*pair), ERRORS[dtype]
    yield "residual stream", error_of(stream, expected), ERRORS[dtype]


def _gated(card: Card, op: Op[..., Any], dtype: torch.dtype) -> Iterator[Finding]:
    gate_up = card.random(_rows(card), 2 * (14336 if card.is_full else 301), dtype=dtype)
    yield "output", error_of(own(op)(gate_up), op.reference(gate_up)), ERRORS[dtype]


def _rope(card: Card, shape: tuple[int, ...], dtype: torch.dtype, cache_dtype: torch.dtype) -> Iterator[Finding]:
    (heads, kv_heads, head_dim, dim), rows = shape, _rows(card)
    qkv = card.random(rows, heads + 2 * kv_heads, head_dim, dtype=dtype)
    angles = torch.rand(rows, dim // 2, device=card.device) * 100
    cos = torch.cat((angles.cos(), angles.cos()), -1).to(dtype)
    sin = torch.cat((-angles.sin(), angles.sin()), -1).to(dtype)
    addresses = torch.randperm(16 * 5, device=card.device)[:rows]
    empty = torch.zeros(2, 5, 16, kv_heads, head_dim, dtype=dtype, device=card.device).to(cache_dtype)
    found, expected = empty.clone(), empty.clone()
    q = own(ops.rope_and_cache)(qkv.clone(), cos, sin, found, addresses, heads)
    yield "queries", error_of(q, ops.rope_and_cache.reference(qkv, cos, sin, expected, addresses, heads)), ERRORS[dtype]
    if cache_dtype == dtype:
        yield "cache", error_of(found, expected), ERRORS[dtype]
    own(ops.write_kv)(qkv[:, :kv_heads], qkv[:, kv_heads : 2 * kv_heads], found, addresses)
    ops.write_kv.reference(qkv[:, :kv_heads], qkv[:, kv_heads : 2 * kv_heads], expected, addresses)
    yield "write_kv", error_of(found.float(), expected.float()), ERRORS[dtype]


def _rows(card: Card) -> int:
    return 37 if card.is_full else 3


def _attention_shapes(card: Card) -> list[tuple[int, int, tuple[int, int], dict[str, Any]]]:
    """Return head size, block size, heads and options; the first shape is the one of tier A."""
    if not card.is_full:
        return [(128, 16, (4, 2), {})]
    shapes: list[tuple[int, int, tuple[int, int], dict[str, Any]]] = [(128, 16, (32, 8), {})]
    shapes += [(128, 16, heads, {}) for heads in ((9, 3), (14, 2), (8, 1), (4, 4))]
    shapes += [(d, 16, (32, 8), {}) for d in (64, 80, 96, 256)] + [(128, b, (32, 8), {}) for b in (8, 32, 64, 128)]
    shapes += [(128, 16, (32, 8), {"window": w}) for w in (1, 100, 1024)]
    return [*shapes, (256, 16, (16, 8), {"softcap": 30.0, "window": 512}), (128, 16, (32, 8), {"softcap": 2.0})]


def _attention(card: Card, shape: Any, options: dict[str, Any], dtype: torch.dtype) -> Iterator[Finding]:
    spans, heads, head_dim, block_size = shape
    queries, cache, batch = attention_case(card, spans, heads, head_dim, block_size, dtype)
    expected = ops.paged_attention.reference(queries, cache, batch, head_dim**-0.5, **options)
    form, times = own(ops.paged_attention), 3 if card.is_full else 1
    results = [form(queries, cache, batch, head_dim**-0.5, **options) for _ in range(times)]
    yield "output", error_of(results[0], expected), ERRORS[dtype]
    yield "the same bits", float(any(not torch.equal(results[0], result) for result in results)), 0.0


def _fused_attention(card: Card, dtype: torch.dtype) -> Iterator[Finding]:
    """Prompts of 32 tokens and more by PyTorch's fused attention."""
    form, heads = ops.paged_attention.get("cuda", "fused"), (32, 8) if card.is_full else (4, 2)
    with mock.patch.object(fused_attention, "MIN_TOKENS", 32):
        for name, spans in (SPANS if card.is_full else SMALL_SPANS).items():
            queries, cache, batch = attention_case(card, spans, heads, 128, 16, dtype)
            expected = ops.paged_attention.reference(queries, cache, batch, 128**-0.5)
            yield name, error_of(form(queries, cache, batch, 128**-0.5), expected), ERRORS[dtype]


def _cudnn_attention(card: Card, dtype: torch.dtype) -> Iterator[Finding]:
    """Chunks of 32 tokens and more by cuDNN on the KV blocks; three times, because no other test has run it."""
    heads = (32, 8) if card.is_full else (4, 2)
    with mock.patch.object(fused_attention, "MIN_TOKENS", 32), mock.patch.object(cudnn_attention, "MIN_TOKENS", 32):
        for name, spans in (SPANS if card.is_full else SMALL_SPANS).items():
            queries, cache, batch = attention_case(card, spans, heads, 128, 16, dtype)
            # The engine clears the blocks of this implementation, which may read past a context.
            cache.nan_to_num_()
            try:
                prepare_cudnn(cache, batch, heads[0], dtype)
            except ImportError as error:
                yield f"left out: {error}", 0.0, 0.0
                return
            expected = ops.paged_attention.reference(queries, cache, batch, 128**-0.5)
            form = ops.paged_attention.get("cuda", "cudnn")
            results = [form(queries, cache, batch, 128**-0.5) for _ in range(3)]
            yield name, error_of(results[0], expected), ERRORS[dtype]
            yield f"{name}, the same bits", float(any(not torch.equal(results[0], r) for r in results)), 0.0


def prepare_cudnn(cache: Tensor, batch: ops.AttentionMetadata, num_heads: int, dtype: torch.dtype) -> None:
    """Build cuDNN's plans for the chunks of a batch.

    Raises:
        ImportError: cuDNN or its package is missing, or has no kernels for this type or device.
    """
    if dtype == torch.float32 or cache.device.type != "cuda":
        raise ImportError(f"cuDNN computes no {dtype} on {cache.device}")
    width, scale = batch.block_tables.shape[1], cache.shape[4] ** -0.5
    cudnn_attention.rehearse(cache, num_heads, scale, dtype, max(batch.lengths), width)


SPANS = {
    "decodes": [(3, 1), (700, 1), (1500, 1), (31, 1), (0, 1), (127, 1), (128, 1), (4095, 1)],
    "prompts": [(0, 5), (0, 16), (0, 333), (0, 1025)],
    "chunks": [(16, 160), (700, 30), (64, 2), (2000, 129)],
    "mixed": [(40, 1), (0, 333), (41, 1), (16, 200), (5, 1), (0, 33), (3000, 1), (100, 3)],
}
SMALL_SPANS = {"mixed": [(40, 1), (0, 33), (70, 1), (16, 20)]}


def attention_case(
    card: Card,
    spans: list[tuple[int, int]],
    heads: tuple[int, int],
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, ops.AttentionMetadata]:
    """Return queries, a cache in scattered blocks, and the batch. Memory that no span has written contains NaN."""
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
    """Tokens of several adapters in any order; ranks from 1 to more than one product takes."""
    features, widths, tokens = (4096, (4096, 1024, 1024), 300) if card.is_full else (70, (140, 33, 33), 20)
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
    own(ops.route_tokens)(slots, routing)
    used = expected_routing.tile_slots >= 0
    for name in ("tile_slots", "tile_rows"):
        one, other = (getattr(r, name) for r in (routing, expected_routing))
        same = torch.equal(one[used], other[used]) and (name == "tile_rows" or torch.equal(one, other))
        yield f"route: {name}", float(not same), 0.0
    batch = ops.LoRABatch(slots, routing=routing)
    x, base = card.random(tokens, features, dtype=dtype), card.random(tokens, sum(widths), dtype=dtype)
    token_ids = torch.randint(500, (tokens,), device=card.device)
    calls = {
        "add_lora": (base, lambda op, out: op(out, x, of_model.modules[0], batch)),
        "add_lora_embedding": (x, lambda op, out: op(out, token_ids, of_model.modules[1], batch)),
    }
    for name, (start, call) in calls.items():
        results = [start.clone() for _ in range(4)]
        for form, out in zip([getattr(ops, name).reference] + [own(getattr(ops, name))] * 3, results, strict=True):
            call(form, out)
        yield name, error_of(results[1], results[0]), ERRORS[dtype]
        moved = any(not torch.equal(results[1], r) for r in results[2:])
        yield f"{name}, the same bits", float(moved), 0.0


QUANTIZED: dict[str, Callable[[Tensor, torch.dtype], Any]] = {
    "int4": lambda weight, dtype: ops.pack_weight_int4(*ops.quantize_int4(weight), dtype=dtype),
    "int8": lambda weight, dtype: ops.pack_weight_int8(*ops.quantize_int8(weight), dtype=dtype, weight_only=True),
    "fp8": lambda weight, dtype: ops.pack_weight_fp8(*ops.quantize_fp8(weight), dtype=dtype),
}
"""A quantized weight of a plain one, by scheme."""


def _quantized_linears(card: Card, dtype: torch.dtype) -> Iterator[Finding]:
    """Against the reference, which multiplies the dequantized weight; fp8 on the card quantizes inputs as well."""
    inputs, outputs = (4096, 6144) if card.is_full else (128, 64)
    plain = card.random(outputs, inputs, dtype=dtype) / inputs**0.5
    for name, make in QUANTIZED.items():
        weight = make(plain, dtype)
        for num_tokens in (1, 300) if card.is_full else (1, 20):
            x = card.random(num_tokens, inputs, dtype=dtype)
            found, expected = (
                form(x, weight, None) for form in (own(ops.quantized_linear), ops.quantized_linear.reference)
            )
            yield f"{name}, {num_tokens} tokens", error_of(found, expected), 0.05 if name == "fp8" else ERRORS[dtype]


def _experts(card: Card, dtype: torch.dtype) -> Iterator[Finding]:
    hidden, inner, num_experts, top_k = (2048, 768, 128, 8) if card.is_full else (48, 40, 6, 2)
    gate_up = card.random(num_experts, 2 * inner, hidden, dtype=dtype) / hidden**0.5
    down = card.random(num_experts, hidden, inner, dtype=dtype) / inner**0.5
    experts = ops.ExpertWeights(gate_up, down, None, None, "silu")
    for num_tokens in (1, 300) if card.is_full else (1, 9):
        x = card.random(num_tokens, hidden, dtype=dtype)
        ids = torch.rand(num_tokens, num_experts, device=card.device).topk(top_k).indices
        weights = torch.rand(num_tokens, top_k, device=card.device)
        found = [own(ops.fused_experts)(x, ids, weights, experts) for _ in range(3)]
        expected = ops.fused_experts.reference(x, ids, weights, experts)
        yield f"{num_tokens} tokens", error_of(found[0], expected), 2 * ERRORS[dtype]
        moved = any(not torch.equal(found[0], other) for other in found[1:])
        yield f"{num_tokens} tokens, the same bits", float(moved), 0.0


def quantized_experts(card: Card, name: str, sizes: tuple[int, int, int], dtype: torch.dtype) -> ops.ExpertWeights:
    """Return random experts of (num_experts, hidden_size, intermediate_size): name is mxfp4 or of QUANTIZED."""
    num_experts, hidden, inner = sizes

    def pack(rows: int, columns: int) -> ops.QuantizedWeight:
        if name != "mxfp4":
            return QUANTIZED[name](card.random(rows, columns, dtype=dtype) / columns**0.5, dtype)
        codes = torch.randint(0, 16, (rows, columns), dtype=torch.uint8, device=card.device)
        exponents = torch.full((rows, columns // 32), 121, dtype=torch.uint8, device=card.device)
        # float32 selects the layout of a GPU in the rehearsal on a CPU, too.
        return ops.pack_weight_fp4(codes, exponents.view(torch.float8_e8m0fnu), dtype=torch.float32)

    gate_up, down = pack(num_experts * 2 * inner, hidden), pack(num_experts * hidden, inner)
    return ops.ExpertWeights(gate_up, down, None, None, "silu")


def _quantized_experts(card: Card, dtype: torch.dtype) -> Iterator[Finding]:
    sizes, top_k = ((32, 2880, 2880), 4) if card.is_full else ((6, 96, 64), 2)
    for name in ("mxfp4", *QUANTIZED):
        experts = quantized_experts(card, name, sizes, dtype)
        for num_tokens in (1, 300) if card.is_full else (1, 9):
            x = card.random(num_tokens, sizes[1], dtype=dtype)
            ids = torch.rand(num_tokens, sizes[0], device=card.device).topk(top_k).indices
            weights = torch.rand(num_tokens, top_k, device=card.device)
            found, expected = (
                form(x, ids, weights, experts) for form in (own(ops.fused_experts), ops.fused_experts.reference)
            )
            yield f"{name}, {num_tokens} tokens", error_of(found, expected), 2 * ERRORS[dtype]


def _histogram_sampling(card: Card) -> Iterator[Finding]:
    arguments = _sampling_arguments(card)
    kernel = ops.sample.get("cuda", "histogram")
    for cuts in (True, False):
        found = kernel(*arguments, cuts)
        other = found != ops.sample.reference(*arguments, cuts)
        yield f"cuts {cuts}: greedy rows", float(other[arguments[1] == 0].float().mean()), 0.0
        yield f"cuts {cuts}: drawn rows", float(other.float().mean()), MAX_OTHER_CHOICES
        yield f"cuts {cuts}: the same tokens", float(not torch.equal(found, kernel(*arguments, cuts))), 0.0


def _sampling_arguments(card: Card) -> tuple[Tensor, ...]:
    rows, vocab = (256, 128256) if card.is_full else (6, 300)
    logits = card.random(rows, vocab, dtype=torch.float32) * 3
    device = {"device": card.device}
    temperatures = torch.tensor([0.0, 1.0, 0.7, 1.3, 1.0, 2.0], **device).repeat(rows // 6 + 1)[:rows]
    top_k = torch.tensor([0, 0, 50, 5, 0, 1000], **device).repeat(rows // 6 + 1)[:rows]
    top_p = torch.tensor([1.0, 0.9, 1.0, 0.5, 0.99, 0.95], **device).repeat(rows // 6 + 1)[:rows]
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.02, 0.0], **device).repeat(rows // 6 + 1)[:rows]
    seeds, positions = torch.arange(rows, **device), torch.arange(rows, **device) * 3
    return logits, temperatures, top_k, top_p, min_p, seeds, positions


def _sampling(card: Card) -> Iterator[Finding]:
    logits, temperatures, *limits, seeds, positions = _sampling_arguments(card)
    rows, vocab = logits.shape
    device = {"device": card.device}
    for cuts in (True, False):
        arguments = logits, temperatures, *limits, seeds, positions, cuts
        other = own(ops.sample)(*arguments) != ops.sample.reference(*arguments)
        yield f"choose, cuts {cuts}: greedy rows", float(other[temperatures == 0].float().mean()), 0.0
        yield f"choose, cuts {cuts}: drawn rows", float(other.float().mean()), MAX_OTHER_CHOICES
    for dtype in (torch.float32, torch.bfloat16):
        part = logits.to(dtype)
        wrong = own(ops.argmax_first)(part) != ops.argmax_first.reference(part)
        yield f"most_likely, {dtype}", float(wrong.float().mean()), 0.0
    numbers = own(ops.uniform)(seeds, positions) != ops.uniform.reference(seeds, positions)
    yield "uniform", float(numbers.float().mean()), 0.0
    counts = torch.randint(3, (rows, vocab), dtype=torch.int32, **device)
    in_prompt = torch.randint(2, (rows, vocab), **device).bool()
    params = torch.full((rows,), 0.5, **device), torch.full((rows,), 0.1, **device), torch.full((rows,), 1.2, **device)
    found, expected = logits.clone(), logits.clone()
    for form, target in ((own(ops.apply_penalties), found), (ops.apply_penalties.reference, expected)):
        form(target, torch.arange(rows, **device), in_prompt, counts, torch.arange(rows, **device).flip(0), *params)
    yield "penalize", error_of(found, expected), 1e-6


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
        yield f"prepare_inputs: {name}", float(not same), 0.0


def _eight_bit(card: Card, dtype: torch.dtype) -> Iterator[Finding]:
    """Attention over an e4m3 cache against a cache in the model's type. Rounding to 3 bits after the point is wrong by
    2^-4 at most, and by half of that on average, in keys and values."""
    spans = SPANS["mixed"] if card.is_full else SMALL_SPANS["mixed"]
    queries, cache, batch = attention_case(card, spans, (32, 8) if card.is_full else (4, 2), 128, 16, dtype)
    exact = ops.paged_attention.reference(queries.float(), cache.float(), batch, 128**-0.5)
    found = own(ops.paged_attention)(queries, cache.to(torch.float8_e4m3fn), batch, 128**-0.5)
    yield "relative error", error_of(found, exact), 0.05


def _tokens(card: Card, has_adapters: bool) -> Iterator[Finding]:
    """Greedy tokens with graphs and own kernels against those of references in steps without graphs."""
    from gpu_phases import greedy_check

    other, num_tokens = greedy_check.check_graphs(card, has_adapters)
    yield f"of {num_tokens} tokens", float(other), 0.0
