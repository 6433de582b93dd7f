# SPDX-License-Identifier: Apache-2.0
"""Attention by itself: decoding, prompts, chunks and mixed steps, by own kernels and by PyTorch's; other tile sizes."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch.nn.attention import SDPBackend

import quire_kernels as ops
from gpu_phases import lora_kernels
from gpu_phases.gate_cases import attention_case, own, prepare_cudnn
from gpu_phases.process import Context
from gpu_phases.store import Row
from gpu_phases.timing import Call, Timer
from quire_kernels.gpu import attention as forms
from quire_kernels.gpu import fused_attention
from quire_kernels.gpu.candidates import cudnn_attention
from quire_kernels.gpu.occupancy import programs_per_sm

EVEN = [(batch, context) for batch in (1, 8, 64, 256) for context in (1024, 8192)] + [(1, 32768)]
"""Sequences and their context."""
RAGGED = (64, 128, 256)
PREFILLS: dict[str, list[tuple[int, int]]] = {
    "prefill, 8,192 tokens": [(0, 8192)],
    "prefill, 4 x 2,048 tokens": [(0, 2048)] * 4,
    "prefill, 2,048 tokens behind 30,000": [(30000, 2048)],
    "mixed, 1,800 tokens and 248 decodes at 1,000": [(0, 1800)] + [(999, 1)] * 248,
}
TINY_PREFILLS: dict[str, list[tuple[int, int]]] = {"prefill, 40 tokens": [(0, 40)], "mixed": [(0, 33), (20, 1)]}


def rows(context: Context) -> Iterator[Row]:
    """Decoding over ragged and even contexts, then prompts, chunks and a mixed step; then the loaded kernels."""
    timer = Timer(context)
    for batch in RAGGED if timer.is_full else (3,):
        yield from _decode(timer, f"decode, {batch} x 512 to 8,192", _ragged(timer, batch), "decode_attention")
    prefills = PREFILLS if timer.is_full else TINY_PREFILLS
    for index, (what, spans) in enumerate(prefills.items()):
        call, num_bytes, flops = _span_call(timer, spans, own(ops.paged_attention))
        yield timer.row(what, [call], num_bytes, flops, "prefill_attention" if not index else "")
    for batch, length in EVEN if timer.is_full else [(2, 40)]:
        yield from _decode(timer, f"decode, {batch} x {length:,}", [length] * batch)
    yield from _loaded_kernels()


def fused_rows(context: Context) -> Iterator[Row]:
    """Prompts by cuDNN and by flash attention through PyTorch; keys, values and outputs are copied."""
    timer = Timer(context)
    form = ops.paged_attention.get("cuda", "fused")
    for index, (what, spans) in enumerate((PREFILLS if timer.is_full else TINY_PREFILLS).items()):
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION) if spans[0][0] == 0 else ():
            call, num_bytes, flops = _span_call(timer, spans, form)
            with mock.patch.object(fused_attention, "BACKENDS", (backend,)):
                key = "" if index else "prefill_attention"
                yield from timer.tried(f"{what}, {backend.name.lower()}", [call], num_bytes, flops, key)
    yield from _paged_cudnn_rows(timer)


def _paged_cudnn_rows(timer: Timer) -> Iterator[Row]:
    """The same prompts and chunks by cuDNN on the KV blocks, without copies, if nvidia-cudnn-frontend is installed."""
    shape = timer.shape
    for what, spans in (PREFILLS if timer.is_full else TINY_PREFILLS).items():
        if min(length for _, length in spans) == 1:
            continue

        def form(queries: Any, cache: Any, batch: Any, scale: float) -> None:
            if not batch.work_plans:
                prepare_cudnn(cache, batch, shape.heads, timer.dtype)
            plans = cudnn_attention._plans[cache.device]
            for span in (*batch.prefill_spans, *batch.chunk_spans):
                plans.attend(queries, cache, batch, span, scale, torch.empty_like(queries))

        call, num_bytes, flops = _span_call(timer, spans, form)
        yield from timer.tried(f"{what}, cudnn on KV blocks", [call], num_bytes, flops)


def tune_rows(context: Context) -> Iterator[Row]:
    """Other sizes of tiles; the fastest belong in select_tiles and WORKERS_PER_SM of gpu/attention.py."""
    timer = Timer(context)
    contexts = _ragged(timer, 128 if timer.is_full else 2)
    num_bytes, base = sum(contexts) * timer.shape.kv_bytes, forms.select_tiles(timer.shape.head_dim, 2, False)
    call = _decode_call(timer, contexts)
    shorts = [(k, s, w, n) for k in (32, 64, 128) for s in (3, 5, 7) for w in (4, 8) for n in (2, 3, 4)]
    for keys, stages, warps, per_sm in shorts if timer.is_full else shorts[:1]:
        room = (1 << 16) // (per_sm * 32 * warps) // 8 * 8
        tiles = replace(base, short_keys=keys, num_stages=stages, num_warps=warps, max_registers=min(room, 248))
        what = f"tune decode: keys {keys}, stages {stages}, warps {warps}, workers {per_sm} per multiprocessor"
        yield from _tuned(timer, what, tiles, per_sm, call, num_bytes, 0.0)
    with mock.patch.object(forms, "supports_pdl", lambda _: False):
        yield timer.row("tune decode: no early launch", [call], num_bytes)
    call, long_bytes, flops = _span_call(timer, [(0, 8192 if timer.is_full else 40)], own(ops.paged_attention))
    longs = [(r, k, w, s) for r in (64, 128) for k in (32, 64, 128) for w in (4, 8) for s in (3, 5, 7)]
    for tile_rows, keys, warps, stages in longs if timer.is_full else longs[:1]:
        tiles = replace(
            base, long_rows=tile_rows, long_keys=keys, num_warps=warps, num_stages=stages, max_registers=None
        )
        what = f"tune prefill: rows {tile_rows}, keys {keys}, warps {warps}, stages {stages}"
        yield from _tuned(timer, what, tiles, 3, call, long_bytes, flops)
    yield from lora_kernels.tune_rows(timer)


def _tuned(
    timer: Timer, what: str, tiles: forms.AttentionTiles, per_sm: int, call: Call, num_bytes: float, flops: float
) -> Iterator[Row]:
    sms = torch.cuda.get_device_properties(timer.card.device).multi_processor_count if timer.card.is_gpu else 2
    with (
        mock.patch.object(forms, "select_tiles", lambda *_: tiles),
        mock.patch.object(forms, "num_workers", lambda *_: per_sm * sms),
    ):
        yield from timer.tried(what, [call], num_bytes, flops)


def _ragged(timer: Timer, batch: int) -> list[int]:
    draw, longest = random.Random(batch), 8192 if timer.is_full else 60
    return [draw.randint(longest // 16, longest) for _ in range(batch)]


def _decode(timer: Timer, what: str, contexts: Sequence[int], key: str = "") -> Iterator[Row]:
    num_bytes = sum(contexts) * timer.shape.kv_bytes
    sets = timer.card.num_sets(num_bytes)
    if num_bytes * sets > 0.8 * timer.card.free_bytes:
        return
    calls = [_decode_call(timer, contexts) for _ in range(sets)]
    yield timer.row(what, calls, num_bytes, 4.0 * timer.shape.heads * timer.shape.head_dim * sum(contexts), key)


def _decode_call(timer: Timer, contexts: Sequence[int]) -> Call:
    card, shape = timer.card, timer.shape
    counts = [-(-context // 16) for context in contexts]
    cache = card.random(2, sum(counts), 16, shape.kv_heads, shape.head_dim, dtype=timer.dtype)
    order, tables, at = torch.randperm(sum(counts)), torch.zeros(len(counts), max(counts), dtype=torch.int64), 0
    for row, count in zip(tables, counts, strict=True):
        row[:] = order[at]
        row[:count] = order[at : at + count]
        at += count
    batch = ops.build_attention_metadata([c - 1 for c in contexts], [1] * len(contexts), tables, cache, card.device)
    queries = card.random(len(contexts), shape.heads, shape.head_dim, dtype=timer.dtype)
    return functools.partial(own(ops.paged_attention), queries, cache, batch, shape.head_dim**-0.5)


def _span_call(timer: Timer, spans: list[tuple[int, int]], form: Callable[..., Any]) -> tuple[Call, float, float]:
    """Return a call, its bytes and its operations."""
    shape, heads = timer.shape, (timer.shape.heads, timer.shape.kv_heads)
    queries, cache, batch = attention_case(timer.card, spans, heads, shape.head_dim, 16, timer.dtype)
    pairs = sum(length * start + length * (length + 1) / 2 for start, length in spans)
    num_bytes = sum(start + length for start, length in spans) * shape.kv_bytes + 4.0 * queries.numel()
    call = functools.partial(form, queries, cache, batch, shape.head_dim**-0.5)
    return call, num_bytes, 4.0 * shape.heads * shape.head_dim * pairs


def _loaded_kernels() -> Iterator[Row]:
    """Registers, shared memory and programs per multiprocessor of the attention kernels that were loaded."""
    caches = [getattr(function, "device_caches", {}) for function in (forms._split_kv_decode, forms._prefill)]
    for cache in (cache for by_device in caches for cache in by_device.values()):
        for kernel in cache[0].values():
            used = {"registers": kernel.n_regs, "spills": kernel.n_spills, "shared": kernel.metadata.shared}
            name = f"{kernel.metadata.name}, {kernel.metadata.num_warps} warps"
            row = {"what": f"{name}: programs per multiprocessor", "value": programs_per_sm(kernel), "unit": ""}
            yield row | used
