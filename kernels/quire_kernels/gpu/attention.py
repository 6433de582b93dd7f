# SPDX-License-Identifier: Apache-2.0
"""Paged attention of a mixed batch.

Short spans are computed with split-KV, and long spans with tiles of queries. Each of the two has its own launch.

A program multiplies a key by all query heads that share the key's KV head (packed GQA). Therefore, it reads the key
only once for all of them. Row m of its tile belongs to token m // group. The query head of the row has the number m %
group among the heads that share the KV head.

For short spans (decoding, or a few tokens), the limit is the bandwidth with which keys and values are read. The key
tiles of all short spans are put in order, by span and then by head. They are divided into equal shares, one for each
worker (Stream-K). The number of workers is fixed. Therefore, a captured graph can be used for every batch. How many
workers process a span depends on the length of its context. A worker that processes only a part of a (span, KV head)
pair writes a partial result. A worker has at most two such parts: one at the start of its share, and one at the end.
`_combine` merges the partial results of each pair. The kernels do not use atomics, so the result of a batch is
deterministic.

For long spans (prompts and chunks), the limit is compute. Each program processes one tile of queries. The tiles that
contain the last queries are processed first, because they have the most keys. Only key tiles on the diagonal are
masked.

Short and long spans have separate kernels. A common kernel would have a branch for each of them. It would always need
the registers and the shared memory of the larger branch. One program of the kernel for long spans already fills a
multiprocessor. Therefore, a common kernel would have only one worker per multiprocessor for short spans, instead of
three.

Sources: the equal shares are those of Stream-K (Osama et al. 2023, arXiv 2301.03598). Here they are applied to the
split of the keys in Flash-Decoding (Dao et al. 2023). Packed GQA works as in vLLM's triton_unified_attention.py.
"""

import functools
import logging
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire_kernels.attention import AttentionMetadata
from quire_kernels.gpu.launch_math import next_power_of_2
from quire_kernels.gpu.occupancy import programs_per_sm
from quire_kernels.gpu.pdl import supports_pdl

logger = logging.getLogger(__name__)

WORKERS_PER_SM = 3
"""Planned number of workers per multiprocessor. While one worker starts a pair, the others read. A worker needs 73 KB
of shared memory with a head size of 128 in bfloat16 (compiled for sm_90). There is enough for three workers."""
_checked_kernels: set[str] = set()
"""Hashes of the compiled kernels for which `_check_occupancy` has run."""
_measured_workers_per_sm: dict[tuple[torch.device, int, int], int] = {}
"""Measured number of workers that fit on a multiprocessor. A number is stored only if it is lower than planned. The key
is the device, the head size and the element size."""
_WORKERS_PER_SM_WIDEST = 1
"""The same for keys of more than 256 elements. A worker loads tiles of 18 to 36 KB, and two of them are on their way
while it computes."""
MAX_LATENT_HEADS = 32
"""Maximum number of query heads of latent attention (MLA) in a tile; see `_select_widest_tiles`."""
MIN_SHARE = 2
"""A worker's share has at least this number of key tiles. With a smaller share, splitting the work would save less time
than it takes to write, read and merge a partial result."""
NUM_INTERPRETED_WORKERS = 5
_NO_LENGTH = (1 << 31) - 1
"""A number of tokens that is greater than the length of any span."""
_PARTIALS_PER_ROUND = 16


@dataclass(frozen=True, slots=True)
class AttentionTiles:
    """Sizes of the tiles of a launch. tests/bench/gpu.py finds the best sizes for a GPU."""

    short_keys: int
    """Number of keys that a worker processes in each iteration."""
    long_rows: int
    """Number of rows in a tile of a long span. It is the number of queries times the number of query heads per KV
    head."""
    long_keys: int
    num_warps: int
    num_stages: int
    """Number of stages in the pipeline that the compiler builds.

    For 16-bit types, the number is odd, because reading addresses from the block table takes as many stages as reading
    keys and values. With 3 stages, a tile is requested at the end of an iteration, and the next iteration begins by
    waiting for this tile. With 5 stages, a request can take as long as one iteration. 4 stages behave like 3.

    For short spans, shared memory contains one or two tiles. For long spans, it contains one tile more: the tile that
    wgmma is still reading (compiled for sm_90).
    """
    max_registers: int | None = None
    """Maximum number of registers per thread. None: the compiler decides."""


def paged_attention(
    queries: Tensor,
    cache: Tensor,
    batch: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """See attention.paged_attention.

    A short span moves 2 * context * num_kv_heads * head_dim elements of the cache. In comparison, the queries, the
    output and the partial results are small. A long span takes 4 * num_heads * head_dim operations for each pair of a
    token and a key to which the token attends. With `value_dim`, a tile of keys is also the tile of values, and is read
    once. Programs divide the query heads among them if a tile of all heads would be too large, as in FlashMLA.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_spans, (block_size, num_kv_heads) = len(batch.context_lengths), cache.shape[2:4]
    group = num_heads // num_kv_heads
    if value_dim is not None:
        assert num_kv_heads == 1 and value_dim < head_dim
        group = max(size for size in range(1, MAX_LATENT_HEADS + 1) if num_heads % size == 0)
        num_kv_heads = num_heads // group
    assert queries.stride(1) == head_dim and queries.stride(2) == 1
    short_rows = max(16, next_power_of_2(group))
    max_short_tokens = short_rows // group
    has_short, has_long = batch.min_query_len <= max_short_tokens, batch.max_query_len > max_short_tokens
    short_tiles, long_tiles = (select_tiles(head_dim, queries.element_size(), long, group) for long in (False, True))
    long_tokens = long_tiles.long_rows // group
    work = _get_work_plan(batch, window or 0, max_short_tokens, short_tiles.short_keys, long_tokens)
    out_dim = value_dim or head_dim
    out = queries.new_empty(num_tokens, num_heads, out_dim)
    arguments = (
        *(queries, cache, out, batch.query_starts, batch.context_lengths, batch.block_tables, work, num_spans),
        *(batch.block_tables.shape[1], queries.stride(0), cache.stride(0), scale, window or 0, softcap or 1.0, sinks),
    )
    sizes = {"NUM_KV_HEADS": num_kv_heads, "GROUP": group, "OUT_DIM": out_dim}
    sizes |= {"DIM": max(next_power_of_2(out_dim), 16)}
    variant = {"BLOCK_SIZE": block_size, "WINDOWED": window is not None, "CAPPED": softcap is not None}
    variant |= {"HEAD_DIM": head_dim, "REST": 0 if value_dim is None else max(next_power_of_2(head_dim - out_dim), 16)}
    if has_short:
        num_rows = group * min(batch.max_query_len, max_short_tokens)
        _attend_short_spans(arguments, sizes, variant, short_tiles, short_rows, num_rows)
    if has_long:
        max_blocks = num_tokens // long_tokens + min(num_spans, num_tokens // (max_short_tokens + 1))
        _prefill[(max_blocks * num_kv_heads,)](
            *arguments,
            ROWS=long_tiles.long_rows,
            KEYS=long_tiles.long_keys,
            num_warps=long_tiles.num_warps,
            num_stages=long_tiles.num_stages,
            maxnreg=long_tiles.max_registers,
            **sizes,
            **variant,
        )
    return out


def _attend_short_spans(
    arguments: tuple[Any, ...],
    sizes: dict[str, int],
    variant: dict[str, Any],
    tiles: AttentionTiles,
    rows: int,
    num_rows: int,
) -> None:
    """Launch `_split_kv_decode` and `_combine`. A tile has `rows` rows, of which at most the first `num_rows` are
    used."""
    queries, _, out, query_starts, _, _, work, num_spans = arguments[:8]
    head_dim, element_size = queries.shape[2], queries.element_size()
    workers = num_workers(queries.device, head_dim, element_size)
    partials, stats = _allocate_partials(queries, workers, rows, sizes["DIM"])
    use_pdl = supports_pdl(queries.device)
    common = {"WORKERS": workers, "MIN_SHARE": MIN_SHARE, "EARLY": use_pdl, "ROWS": rows, **sizes}
    kernel = _split_kv_decode[(workers,)](
        *arguments,
        partials,
        stats,
        KEYS=tiles.short_keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        maxnreg=tiles.max_registers,
        **common,
        **variant,
    )
    if kernel is not None and kernel.hash not in _checked_kernels:
        _check_occupancy(kernel, queries.device, head_dim, element_size)
        if num_workers(queries.device, head_dim, element_size) < workers:
            # Compute again with the number of workers that later launches use. Shares of another size give other bits.
            _attend_short_spans(arguments, sizes, variant, tiles, rows, num_rows)
            return
    _combine[(workers, num_rows)](
        out,
        partials,
        stats,
        query_starts,
        work,
        num_spans,
        PARTS=_PARTIALS_PER_ROUND,
        num_warps=2,
        launch_pdl=use_pdl,
        **common,
    )


@functools.cache
def select_tiles(head_dim: int, element_size: int, has_long: bool, group: int = 1) -> AttentionTiles:
    """Return the sizes of the tiles.

    They are chosen so that the shared memory of a multiprocessor has room for the queries, and for the keys and values
    of all stages.
    """
    is_wide, is_float32 = next_power_of_2(head_dim) > 128, element_size > 2
    if next_power_of_2(head_dim) > 256:
        return _select_widest_tiles(is_float32, has_long, max(next_power_of_2(group), 16))
    short_keys = 32 if is_wide or is_float32 else 64
    rows = max(32 if is_wide and is_float32 else 64 if is_wide or is_float32 else 128, next_power_of_2(group))
    if not has_long:
        # With this limit, WORKERS_PER_SM workers of 128 threads fit into 65,536 registers. Without it, Triton 3.9 would
        # use 177 registers per thread. With it, Triton 3.9 does not spill registers.
        return AttentionTiles(
            short_keys,
            rows,
            short_keys,
            num_warps=4,
            num_stages=5,
            max_registers=None if is_wide or is_float32 else 168,
        )
    # A multiprocessor has enough registers for only one program of 8 warps. This program needs many stages to hide the
    # memory latency by itself. Two programs of 4 warps hide the latency for each other, and would not fit with more
    # stages. In float32, more stages never fit.
    return AttentionTiles(
        short_keys,
        rows,
        short_keys,
        num_warps=8 if rows > 64 else 4,
        num_stages=2 if is_float32 else 3 if is_wide else 5,
    )


def _select_widest_tiles(is_float32: bool, has_long: bool, group: int) -> AttentionTiles:
    """Return the sizes of the tiles for keys of more than 256 elements.

    The sums of 32 rows take 64 registers of each thread of 8 warps. With 64 rows, which wgmma needs, each thread would
    spill 80 to 200 bytes (Triton 3.9, compiled for sm_90).
    """
    keys, rows = 16 if is_float32 else 32, max(32, group)
    num_warps = 8 if has_long or group > 16 else 4
    return AttentionTiles(keys, rows, keys, num_warps, num_stages=2 if is_float32 else 5)


def num_workers(device: torch.device, head_dim: int, element_size: int) -> int:
    """Return the number of workers for short spans.

    If the number that fits on the device was measured, the result is that number. Otherwise, it is the planned number.
    """
    if device.type != "cuda":
        return NUM_INTERPRETED_WORKERS
    measured = _measured_workers_per_sm.get((device, head_dim, element_size), _planned_workers_per_sm(head_dim))
    return measured * _num_sms(device)


def _planned_workers_per_sm(head_dim: int) -> int:
    return _WORKERS_PER_SM_WIDEST if next_power_of_2(head_dim) > 256 else WORKERS_PER_SM


@functools.cache
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _check_occupancy(kernel: Any, device: torch.device, head_dim: int, element_size: int) -> None:
    """Check how many workers a compiled kernel can run at the same time. Later launches use no more than that.

    All shares are equal. If some workers had to wait for a multiprocessor, the launch would take twice as long. How
    many registers and how much shared memory a kernel uses depends on the version of the compiler. The warm-up launches
    each kernel, and the first launch of a kernel runs this check. In later launches, the check is only a look-up.
    """
    _checked_kernels.add(kernel.hash)
    found = max(programs_per_sm(kernel, device), 1)
    key, planned = (device, head_dim, element_size), _planned_workers_per_sm(head_dim)
    if found < _measured_workers_per_sm.get(key, planned):
        _measured_workers_per_sm[key] = found
        logger.warning(
            "attention occupancy lower than planned programs_per_sm=%d planned=%d head_dim=%d registers=%d shared=%d",
            found,
            planned,
            head_dim,
            kernel.n_regs,
            kernel.metadata.shared,
        )


def _get_work_plan(batch: AttentionMetadata, window: int, max_short: int, short_keys: int, long_tokens: int) -> Tensor:
    """Return where the work of each span begins.

    The result is an int32 tensor of shape [2, num_spans + 1]. Its first row counts the key tiles of short spans. Its
    second row counts the query tiles of long spans. The first layer of a step computes this plan. It does so on the
    device, because the lengths may be known only there.
    """
    separate_from = batch.separate_prefill_min_tokens, batch.separate_chunk_min_tokens
    key = window, max_short, short_keys, long_tokens, separate_from
    work = batch.work_plans.get(key)
    if work is None:
        num_spans = len(batch.context_lengths)
        work = batch.work_plans[key] = batch.context_lengths.new_empty(2, num_spans + 1)
        _build_work_plan[(1,)](
            batch.query_starts,
            batch.context_lengths,
            work,
            num_spans,
            window,
            *(_NO_LENGTH if length is None else length for length in separate_from),
            MAX_SHORT=max_short,
            SHORT_KEYS=short_keys,
            LONG_TOKENS=long_tokens,
            BLOCK=min(max(next_power_of_2(num_spans), 16), 1024),
            num_warps=4,
        )
    return work


def _allocate_partials(queries: Tensor, workers: int, rows: int, dim: int) -> tuple[Tensor, Tensor]:
    """Allocate float32 memory for two partial results per worker.

    The sums have the shape [2 * workers, rows, dim]. The maxima and the weights have the shape [2, 2 * workers, rows].
    """
    like = {"dtype": torch.float32, "device": queries.device}
    return torch.empty(2 * workers, rows, dim, **like), torch.empty(2, 2 * workers, rows, **like)


# If the lengths from which spans are computed separately were constants, the first long prompt in a batch would compile
# another variant for each BLOCK.
@triton.jit(do_not_specialize=["num_spans", "separate_prompts_from", "separate_chunks_from"])
def _build_work_plan(
    query_starts,
    context_lengths,
    work,
    num_spans,
    window,
    separate_prompts_from,
    separate_chunks_from,
    MAX_SHORT: tl.constexpr,
    SHORT_KEYS: tl.constexpr,
    LONG_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    short_sum = 0
    long_sum = 0
    tl.store(work, 0)
    tl.store(work + num_spans + 1, 0)
    for first in range(0, num_spans, BLOCK):
        spans = first + tl.arange(0, BLOCK)
        mask = spans < num_spans
        start = tl.load(query_starts + spans, mask=mask, other=0)
        length = tl.load(query_starts + spans + 1, mask=mask, other=0) - start
        context = tl.load(context_lengths + spans, mask=mask, other=0)
        skipped = tl.where(window > 0, tl.maximum(context - length - window + 1, 0) // SHORT_KEYS, 0)
        tiles = tl.where(length <= MAX_SHORT, (context + SHORT_KEYS - 1) // SHORT_KEYS - skipped, 0)
        separate_from = tl.where(length < context, separate_chunks_from, separate_prompts_from)
        long = (length > MAX_SHORT) & (length < separate_from)
        blocks = tl.where(long, (length + LONG_TOKENS - 1) // LONG_TOKENS, 0)
        tl.store(work + spans + 1, short_sum + tl.cumsum(tiles, 0), mask=mask)
        tl.store(work + num_spans + 1 + spans + 1, long_sum + tl.cumsum(blocks, 0), mask=mask)
        short_sum += tl.sum(tiles, 0)
        long_sum += tl.sum(blocks, 0)


@triton.jit
def _span_of(starts, num_spans, value):
    """Return the span that contains work item `value`. This is the last span that begins at or before the item."""
    low = 0
    high = num_spans
    while high - low > 1:
        middle = (low + high) // 2
        is_before = tl.load(starts + middle) <= value
        low = tl.where(is_before, middle, low)
        high = tl.where(is_before, high, middle)
    return low


@triton.jit
def _tiles_per_worker(total, WORKERS: tl.constexpr, MIN_SHARE: tl.constexpr):
    """Return the number of key tiles in a worker's share."""
    return tl.maximum((total + WORKERS - 1) // WORKERS, MIN_SHARE)


# `kind_stride`: see kv_cache_write.py.
@triton.jit(do_not_specialize=["num_spans", "table_width"])
def _split_kv_decode(
    queries, cache, out, query_starts, context_lengths, tables, work, num_spans,
    table_width, query_stride, kind_stride: tl.int64, scale, window, softcap, sinks, partials, stats,
    WORKERS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    OUT_DIM: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr, MIN_SHARE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Process one worker's share."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    worker = tl.program_id(0)
    total = tl.load(work + num_spans) * NUM_KV_HEADS
    share = _tiles_per_worker(total, WORKERS, MIN_SHARE)
    first = worker * share
    end = tl.minimum(first + share, total)
    offset_in_work = first
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    span = _span_of(work, num_spans, offset_in_work // NUM_KV_HEADS)
    span_start = tl.load(work + span)
    tiles = tl.load(work + span + 1) - span_start
    # A worker after the last share has no work. Without the maximum, it would divide by 0 tiles.
    offset = offset_in_work - span_start * NUM_KV_HEADS
    head = offset // tl.maximum(tiles, 1)
    tile = offset - head * tiles
    while offset_in_work < end:
        last = tl.minimum(tile + end - offset_in_work, tiles)
        start = tl.load(query_starts + span)
        length = tl.load(query_starts + span + 1) - start
        context = tl.load(context_lengths + span)
        row_mask = rows < length * GROUP
        # A padding row never attends to a key.
        position = tl.where(row_mask, context - length + rows // GROUP, -1)
        query_head = head * GROUP + rows % GROUP
        token = (start + rows // GROUP).to(tl.int64)
        mask = row_mask[:, None] & (dims < OUT_DIM)[None, :]
        query_rows = queries + (token * query_stride + query_head * HEAD_DIM)[:, None]
        q = tl.load(query_rows + dims[None, :], mask=mask, other=0.0)
        q_rest = _load_rest(q, query_rows, row_mask, HEAD_DIM, OUT_DIM, REST)
        skipped = 0
        if WINDOWED:
            skipped = tl.maximum(context - length - window + 1, 0) // KEYS
        acc = tl.zeros([ROWS, DIM], dtype=tl.float32)
        row_max, row_sum = _start_softmax(sinks, query_head, tile == 0, ROWS)
        acc, row_max, row_sum = _accumulate(
            acc, row_max, row_sum, q, q_rest, position, cache, tables + span.to(tl.int64) * table_width,
            skipped + tile, skipped + last, context, kind_stride, scale, window, softcap, head,
            NUM_KV_HEADS, HEAD_DIM, OUT_DIM, DIM, REST, BLOCK_SIZE, KEYS, WINDOWED, CAPPED, True,
        )  # fmt: skip
        if last - tile == tiles:
            out_ptrs = out + ((token * (NUM_KV_HEADS * GROUP) + query_head) * OUT_DIM)[:, None] + dims[None, :]
            tl.store(out_ptrs, (acc / tl.maximum(row_sum, 1.0)[:, None]).to(out.dtype.element_ty), mask=mask)
        else:
            partial_row = (2 * worker + tl.where(offset_in_work > first, 1, 0)) * ROWS
            tl.store(partials + (partial_row + rows)[:, None] * DIM + dims[None, :], acc, mask=mask)
            tl.store(stats + partial_row + rows, row_max, mask=row_mask)
            tl.store(stats + 2 * WORKERS * ROWS + partial_row + rows, row_sum, mask=row_mask)
        offset_in_work += last - tile
        tile = 0
        head += 1
        if head == NUM_KV_HEADS:
            head = 0
            span_start += tiles
            span += 1
            tiles = 0
            # Skip the long spans, which have no tiles. Stop after the last tile, because many empty spans can follow
            # it.
            while (tiles == 0) & (span_start * NUM_KV_HEADS < total):
                tiles = tl.load(work + span + 1) - span_start
                span += tl.where(tiles == 0, 1, 0)


@triton.jit(do_not_specialize=["num_spans", "table_width"])
def _prefill(
    queries, cache, out, query_starts, context_lengths, tables, work, num_spans,
    table_width, query_stride, kind_stride: tl.int64, scale, window, softcap, sinks,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, OUT_DIM: tl.constexpr, DIM: tl.constexpr,
    REST: tl.constexpr, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):  # fmt: skip
    """Process one tile of queries for one KV head."""
    TOKENS: tl.constexpr = ROWS // GROUP
    pid = tl.program_id(0)
    blocks = work + num_spans + 1
    block = tl.load(blocks + num_spans) - 1 - pid // NUM_KV_HEADS
    # There can be more programs than tiles.
    if block >= 0:
        head = pid % NUM_KV_HEADS
        span = _span_of(blocks, num_spans, block)
        start = tl.load(query_starts + span)
        length = tl.load(query_starts + span + 1) - start
        context = tl.load(context_lengths + span)
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, DIM)
        offset = (block - tl.load(blocks + span)) * TOKENS
        tokens = offset + rows // GROUP
        row_mask = (tokens < length) & (rows < TOKENS * GROUP)
        first_position = context - length + offset
        last_position = tl.minimum(first_position + TOKENS, context) - 1
        position = tl.where(row_mask, context - length + tokens, -1)
        query_head = head * GROUP + rows % GROUP
        token = (start + tokens).to(tl.int64)
        mask = row_mask[:, None] & (dims < OUT_DIM)[None, :]
        query_rows = queries + (token * query_stride + query_head * HEAD_DIM)[:, None]
        q = tl.load(query_rows + dims[None, :], mask=mask, other=0.0)
        q_rest = _load_rest(q, query_rows, row_mask, HEAD_DIM, OUT_DIM, REST)
        table = tables + span.to(tl.int64) * table_width
        acc = tl.zeros([ROWS, DIM], dtype=tl.float32)
        row_max, row_sum = _start_softmax(sinks, query_head, True, ROWS)
        masked_from = 0
        if WINDOWED:
            masked_from = tl.maximum(first_position - window + 1, 0) // KEYS
        else:
            # The key tiles before `masked_from` need no mask.
            masked_from = (first_position + 1) // KEYS
            acc, row_max, row_sum = _accumulate(
                acc, row_max, row_sum, q, q_rest, position, cache, table, 0, masked_from, context, kind_stride,
                scale, window, softcap, head, NUM_KV_HEADS, HEAD_DIM, OUT_DIM, DIM, REST, BLOCK_SIZE, KEYS, WINDOWED,
                CAPPED, False,
            )  # fmt: skip
        acc, row_max, row_sum = _accumulate(
            acc, row_max, row_sum, q, q_rest, position, cache, table, masked_from, last_position // KEYS + 1, context,
            kind_stride, scale, window, softcap, head, NUM_KV_HEADS, HEAD_DIM, OUT_DIM, DIM, REST, BLOCK_SIZE, KEYS,
            WINDOWED, CAPPED, True,
        )  # fmt: skip
        out_ptrs = out + ((token * (NUM_KV_HEADS * GROUP) + query_head) * OUT_DIM)[:, None] + dims[None, :]
        tl.store(out_ptrs, (acc / tl.maximum(row_sum, 1.0)[:, None]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _load_rest(
    q, query_rows, row_mask, HEAD_DIM: tl.constexpr, OUT_DIM: tl.constexpr, REST: tl.constexpr
):  # fmt: skip
    """Return the elements of the queries after the first OUT_DIM, [ROWS, REST]. If there are none, return q, which is
    then not used."""
    if REST > 0:
        rest = tl.arange(0, REST)
        mask = row_mask[:, None] & (rest < HEAD_DIM - OUT_DIM)[None, :]
        return tl.load(query_rows + OUT_DIM + rest[None, :], mask=mask, other=0.0)
    else:  # noqa: RET505 - without it, Triton compiles both returns
        return q


@triton.jit
def _start_softmax(sinks, heads, has_sink, ROWS: tl.constexpr):
    """Return the values with which the online softmax of each row starts: the maximum, and the sum of the weights. If
    there are sinks, and the sink belongs to this part of the keys, the values include the sink of the row's head."""
    row_max = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    if sinks is not None:
        row_max = tl.where(has_sink, tl.load(sinks + heads).to(tl.float32) * 1.4426950408889634, row_max)
        row_sum = tl.where(has_sink, 1.0, row_sum)
    return row_max, row_sum


@triton.jit
def _accumulate(
    acc, row_max, row_sum, q, q_rest, position, cache, table, first, last, context, kind_stride, scale, window, softcap,
    head, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, OUT_DIM: tl.constexpr, DIM: tl.constexpr,
    REST: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, WINDOWED: tl.constexpr, CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the key tiles [first, last) to an online softmax.

    `acc` is the sum of the values, each multiplied by its weight 2^(score - row_max). `row_sum` is the sum of these
    weights. The scores and their maximum `row_max` are logarithms to base 2. If REST > 0, all heads share the row of a
    token, whose first OUT_DIM elements are the value.
    """
    dims = tl.arange(0, DIM)
    TOKEN_STRIDE: tl.constexpr = HEAD_DIM if REST > 0 else NUM_KV_HEADS * HEAD_DIM
    head_offset = 0 if REST > 0 else head * HEAD_DIM
    # The default, tf32, rounds float32 inputs to 10 bits. Three tf32 products are as exact as one float32 product and
    # use the tensor cores. "ieee" uses no tensor cores, spills kilobytes of registers, and takes a minute to compile.
    EXACT: tl.constexpr = "tf32x3" if q.dtype == tl.float32 else "tf32"
    to_log2 = (1.0 if CAPPED else scale) * 1.4426950408889634
    for tile in range(first, last):
        keys = tile * KEYS + tl.arange(0, KEYS)
        key_mask = keys < context
        if MASKED:
            block = tl.load(table + keys // BLOCK_SIZE, mask=key_mask, other=0)
            mask = key_mask[:, None] & (dims < OUT_DIM)[None, :]
        else:
            block = tl.load(table + keys // BLOCK_SIZE)
            mask = (keys >= 0)[:, None] & (dims < OUT_DIM)[None, :]
        row = cache + (block.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE) * TOKEN_STRIDE + head_offset
        # Masked loads return 0, so that NaN in unused memory does not spread.
        if MASKED or OUT_DIM < DIM:
            k = tl.load(row[:, None] + dims[None, :], mask=mask, other=0.0).to(q.dtype)
        else:
            k = tl.load(row[:, None] + dims[None, :]).to(q.dtype)
        scores = tl.dot(q, tl.trans(k), input_precision=EXACT)
        if REST > 0:
            v = k
            rest = tl.arange(0, REST)
            rest_mask = (keys < context)[:, None] & (rest < HEAD_DIM - OUT_DIM)[None, :]
            k_rest = tl.load(row[:, None] + OUT_DIM + rest[None, :], mask=rest_mask, other=0.0).to(q.dtype)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=EXACT)
        elif MASKED or OUT_DIM < DIM:
            v = tl.load(row[:, None] + kind_stride + dims[None, :], mask=mask, other=0.0).to(q.dtype)
        else:
            v = tl.load(row[:, None] + kind_stride + dims[None, :]).to(q.dtype)
        if CAPPED:
            # tanh(z) is 2 sigmoid(2 z) - 1.
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scale / softcap * scores) - 1.0)
        if MASKED:
            is_visible = keys[None, :] <= position[:, None]
            if WINDOWED:
                is_visible = is_visible & (keys[None, :] > position[:, None] - window)
            scores = tl.where(is_visible, scores, float("-inf"))
        # `to_log2` is positive, so the scores can be multiplied by it after the maximum is computed. This takes only
        # one fused multiply-add for each score.
        new_row_max = tl.maximum(row_max, tl.max(scores, axis=1) * to_log2)
        # For a row without any key, the code below would otherwise compute -inf - -inf.
        base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
        factors = tl.exp2(tl.fma(scores, to_log2, -base[:, None]))
        rescale = tl.exp2(row_max - base)
        row_sum = row_sum * rescale + tl.sum(factors, axis=1)
        acc = tl.dot(factors.to(q.dtype), v, acc * rescale[:, None], input_precision=EXACT)
        row_max = new_row_max
    return acc, row_max, row_sum


@triton.jit(do_not_specialize=["num_spans"])
def _combine(
    out,
    partials,
    stats,
    query_starts,
    work,
    num_spans,
    WORKERS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    OUT_DIM: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    MIN_SHARE: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge the partial results of one row of a (span, KV head) pair.

    The pair is the one that workers `program_id(0) - 1` and `program_id(0)` share. A program does nothing if these are
    not the first two workers of the pair.
    """
    worker = tl.program_id(0)
    row = tl.program_id(1)
    total = tl.load(work + num_spans) * NUM_KV_HEADS
    share = _tiles_per_worker(total, WORKERS, MIN_SHARE)
    cut = worker * share
    span = _span_of(work, num_spans, cut // NUM_KV_HEADS)
    span_start = tl.load(work + span)
    # A worker after the last share has no work. Without the maximum, it would divide by 0 tiles.
    tiles = tl.maximum(tl.load(work + span + 1) - span_start, 1)
    head = (cut - span_start * NUM_KV_HEADS) // tiles
    first = span_start * NUM_KV_HEADS + head * tiles
    start = tl.load(query_starts + span)
    length = tl.load(query_starts + span + 1) - start
    if EARLY:
        # Every program must wait for the previous kernel, which had work even if no pair was divided between workers.
        tl.extra.cuda.gdc_wait()
    if (cut < total) & (first < cut) & (first >= cut - share) & (row < length * GROUP):
        dims = tl.arange(0, DIM)
        acc = tl.zeros([DIM], dtype=tl.float32)
        row_max = float("-inf")
        row_sum = 0.0
        last_worker = (first + tiles - 1) // share
        for first_worker in range(worker - 1, last_worker + 1, PARTS):
            workers = first_worker + tl.arange(0, PARTS)
            mask = workers <= last_worker
            # A worker stores its first partial result for the pair with which its share begins. It stores its second
            # partial result for a pair that begins later in the share.
            partial_rows = (2 * workers + tl.where(first > workers * share, 1, 0)) * ROWS + row
            peaks = tl.load(stats + partial_rows, mask=mask, other=float("-inf"))
            weights = tl.load(stats + 2 * WORKERS * ROWS + partial_rows, mask=mask, other=0.0)
            readable = mask[:, None] & (dims < OUT_DIM)[None, :]
            sums = tl.load(partials + partial_rows[:, None] * DIM + dims[None, :], mask=readable, other=0.0)
            new_row_max = tl.maximum(row_max, tl.max(peaks, axis=0))
            base = tl.where(new_row_max == float("-inf"), 0.0, new_row_max)
            factors = tl.exp2(peaks - base)
            rescale = tl.exp2(row_max - base)
            row_sum = row_sum * rescale + tl.sum(weights * factors, axis=0)
            acc = acc * rescale + tl.sum(sums * factors[:, None], axis=0)
            row_max = new_row_max
        token = (start + row // GROUP).to(tl.int64)
        out_ptrs = out + (token * NUM_KV_HEADS * GROUP + head * GROUP + row % GROUP) * OUT_DIM + dims
        tl.store(out_ptrs, (acc / tl.maximum(row_sum, 1.0)).to(out.dtype.element_ty), mask=dims < OUT_DIM)
