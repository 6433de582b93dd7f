# SPDX-License-Identifier: Apache-2.0
"""Paged attention of a mixed batch: one call computes whole prompts, chunks of prompts and decoding sequences."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire_kernels import cpu_native
from quire_kernels.dispatch import Op
from quire_kernels.host_device_copy import to_device_async
from quire_kernels.kv_cache_layout import dequantize_rows, is_quantized, row_size
from quire_kernels.kv_cache_write import as_indexable

# A batched call gathers at most this many bytes of keys. The limit was measured on one Zen 5 core with 64 sequences of
# 1024 tokens, 3 KV heads, a head size of 64 and bf16. The attention takes 10.1 ms with a limit of 6 MiB or less. With
# 24 MiB, it takes 15.5 ms, because the gathered keys leave the CPU cache before they are read.
GATHER_BYTES = 4 << 20
# A batched call has at most this many padded keys. To compute this many keys takes about as long as another call.
MAX_PADDED_KEYS = 1024
# Limits for decoding in a single GEMM; see `_prefers_single_gemm`. They were measured with 9 to 32 heads.
MAX_SINGLE_GEMM_HEADS = 24
MIN_SINGLE_GEMM_KEYS = 1024
# Head dimensions and query heads per KV head that csrc/attention.cpp supports.
_HEAD_DIMS = range(16, 577, 16)
_MAX_HEADS_PER_KV_HEAD = 48
# CUDA implementations that never load anything after the end of a sequence's context.
_MASKING_IMPLEMENTATIONS = ("own", "fused")


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Spans of the same length. The gathering implementation computes them in one call."""

    rows: slice | Tensor
    """The rows in the batch that contain the tokens of these spans. They are ordered by span. If they are contiguous,
    this is a slice."""
    num_spans: int
    length: int
    """Tokens of each span."""
    blocks: Tensor
    """[num_spans * blocks per span] int64: the KV blocks of all spans. A span with fewer blocks is padded with one of
    its own blocks."""
    num_keys: int
    """Number of keys that are read for each span. A decoding span reads whole blocks; a prompt reads exactly its
    keys."""
    positions: Tensor
    """[num_spans or 1, length] int64: the position of each token in its sequence. The prompts of a group all use the
    same row."""
    first_position: int
    """The smallest position that a token of the group has."""
    masks: dict[int | None, Tensor]
    """Results that `get_mask` has computed in this step. The key is the window."""

    @property
    def is_prompts(self) -> bool:
        """Whether the spans are whole prompts or first chunks. The tokens of such a span attend only to tokens of the
        same span."""
        return 1 < self.length == self.num_keys

    def num_skipped_keys(self, window: int | None, block_size: int) -> int:
        """Count the keys in blocks that are completely outside the windows of all tokens. No token needs these keys."""
        return 0 if window is None else max(self.first_position - window + 1, 0) // block_size * block_size

    def get_mask(self, window: int | None, block_size: int, dtype: torch.dtype) -> Tensor:
        """Return the mask in `dtype`.

        Its shape is [num_spans or 1, 1, length, num_keys - num_skipped]. It is 0 where a token attends to a key, and
        -inf elsewhere.

        The mask is computed once per step, and all layers with the same window use it.
        """
        if window not in self.masks:
            first = self.num_skipped_keys(window, block_size)
            query_positions = self.positions[..., None]
            key_positions = torch.arange(first, self.num_keys, device=self.positions.device)
            is_masked = key_positions > query_positions
            if window is not None:
                is_masked |= key_positions <= query_positions - window
            mask = torch.zeros(is_masked.shape, dtype=dtype, device=is_masked.device)
            self.masks[window] = mask.masked_fill_(is_masked, float("-inf"))[:, None]
        return self.masks[window]


class BidirectionalTokens(NamedTuple):
    """Adjacent tokens that attend to each other in both directions, such as those of an image. The tokens at their
    start can be in the cache already; the others are in one span."""

    span_index: int
    first_row: int
    """Row in the batch of the first token that is not in the cache."""
    first_position: int
    """Position of this token in its sequence."""
    start: int
    """Position of the first token of all."""
    end: int
    """Position after the last token."""


class PrefillSpan(NamedTuple):
    """A span that consists of tokens of a prompt. If it is the first span of its sequence, its tokens attend only to
    each other."""

    span_index: int
    first_row: int
    """Row of the span's first token in the batch."""
    length: int


@dataclass(frozen=True)
class AttentionMetadata:
    """Describes the spans of a step.

    The attention of every layer uses it; `build_attention_metadata` builds it once per step.
    """

    query_starts: Tensor
    """[num_spans + 1] int32: span i consists of the tokens [query_starts[i], query_starts[i + 1])."""
    context_lengths: Tensor
    """[num_spans] int32: number of keys to which the last token of a span attends. Its own key is counted."""
    block_tables: Tensor
    """[num_spans, max_blocks] int64: the KV blocks of each span. A span with fewer blocks is padded with one of its own
    blocks."""
    build_groups: Callable[[], tuple[AttentionGroup, ...]]
    """Builds `groups` when they are used for the first time."""
    lengths: Sequence[int]
    """Tokens of each span."""
    prefill_spans: tuple[PrefillSpan, ...] = ()
    """Spans that begin their sequences. They are whole prompts or first chunks. In a captured step, this is empty."""
    chunk_spans: tuple[PrefillSpan, ...] = ()
    """Spans that continue their sequences and have more than one token. In a captured step, this is empty."""
    separate_prefill_min_tokens: int | None = None
    """Another kernel computes the prefill spans that have at least this number of tokens. This kernel skips them."""
    separate_chunk_min_tokens: int | None = None
    """Another kernel computes the chunk spans that have at least this number of tokens. This kernel skips them."""
    work_plans: dict[object, Tensor] = field(default_factory=dict)
    """Work plans on the device. An implementation stores its plan here, so that all layers of the step can use it."""
    by_chunk_size: dict[int, "AttentionMetadata"] = field(default_factory=dict)
    """Results that `within_chunks` has computed in this step."""
    host_spans: tuple[Sequence[int], Tensor] = ((), torch.empty(0, 0, dtype=torch.int64))
    """For each span, the number of tokens of its sequence that come before it, and `block_tables` on the CPU, so that
    `within_chunks` need not wait for a device. In a captured step, they are empty."""

    @functools.cached_property
    def groups(self) -> tuple[AttentionGroup, ...]:
        """The spans in groups, as the gathering implementation needs them."""
        return self.build_groups()

    @functools.cached_property
    def min_query_len(self) -> int:
        """Number of tokens of the shortest span."""
        return min(self.lengths)

    @functools.cached_property
    def max_query_len(self) -> int:
        """Number of tokens in the longest span that this kernel computes. It is 0 if the kernel computes no span."""
        separate_spans = {
            span.span_index
            for spans, min_tokens in (
                (self.prefill_spans, self.separate_prefill_min_tokens),
                (self.chunk_spans, self.separate_chunk_min_tokens),
            )
            for span in spans
            if min_tokens is not None and span.length >= min_tokens
        }
        return max((length for span, length in enumerate(self.lengths) if span not in separate_spans), default=0)


def build_attention_metadata(
    starts: list[int], lengths: list[int], block_tables: Tensor, cache: Tensor, device: torch.device
) -> AttentionMetadata:
    """Build the metadata that `paged_attention` needs for the spans of a step.

    Args:
        starts: for each span, the number of tokens of its sequence that come before it.
        lengths: number of tokens of each span.
        block_tables: [num_spans, max_blocks] int64 on the CPU. Each row is padded with a block of its own span.
            Otherwise, a sequence would read keys and values of another sequence, although these are masked.
        cache: cache of any layer; see `write_kv`. Its contents are not read.
        device: device of the batch.
    """
    query_starts = [0]
    for length in lengths:
        query_starts.append(query_starts[-1] + length)
    contexts = [start + length for start, length in zip(starts, lengths, strict=True)]
    spans = [PrefillSpan(i, query_starts[i], length) for i, length in enumerate(lengths)]

    def build_groups() -> tuple[AttentionGroup, ...]:
        groupings = _group_spans(starts, lengths, cache)
        return tuple(_build_group(m, starts, lengths, query_starts, block_tables, cache) for m in groupings)

    return AttentionMetadata(
        to_device_async(torch.tensor(query_starts, dtype=torch.int32), device),
        to_device_async(torch.tensor(contexts, dtype=torch.int32), device),
        to_device_async(block_tables, device),
        build_groups,
        lengths,
        tuple(span for span in spans if starts[span.span_index] == 0),
        tuple(span for span in spans if starts[span.span_index] > 0 and span.length > 1),
        host_spans=(starts, block_tables),
    )


def within_chunks(metadata: AttentionMetadata, chunk_size: int, cache: Tensor) -> AttentionMetadata:
    """Return the metadata for layers in which each token attends only to tokens of the same chunk of its sequence.

    A span is divided where a chunk ends, and each part is like a sequence of its own that begins with its chunk. This
    needs no other kernels. vLLM does the same. Not possible in a captured step.

    Args:
        metadata: describes the spans of the step.
        chunk_size: tokens of a chunk, a multiple of the block size.
        cache: cache of any layer; see `write_kv`.
    """
    if (found := metadata.by_chunk_size.get(chunk_size)) is None:
        found = metadata.by_chunk_size[chunk_size] = _divide_at_chunks(metadata, chunk_size, cache)
    return found


def _divide_at_chunks(metadata: AttentionMetadata, chunk_size: int, cache: Tensor) -> AttentionMetadata:
    span_starts, block_tables = metadata.host_spans
    contexts = [start + length for start, length in zip(span_starts, metadata.lengths, strict=True)]
    if max(contexts) <= chunk_size:
        return metadata
    starts, lengths, tables = list[int](), list[int](), list[Tensor]()
    blocks_per_chunk = chunk_size // cache.shape[2]
    for end, length, table in zip(contexts, metadata.lengths, block_tables, strict=True):
        position = end - length
        while position < end:
            chunk = position // chunk_size
            stop = min(end, (chunk + 1) * chunk_size)
            starts.append(position - chunk * chunk_size)
            lengths.append(stop - position)
            # The end of the table is padded with a block of the span, which may belong to another chunk: it is masked.
            tables.append(table[chunk * blocks_per_chunk :][:blocks_per_chunk])
            position = stop
    width = max(map(len, tables))
    padded = [torch.cat((table, table[-1:].expand(width - len(table)))) for table in tables]
    return build_attention_metadata(starts, lengths, torch.stack(padded), cache, metadata.query_starts.device)


def _group_spans(starts: list[int], lengths: list[int], cache: Tensor) -> list[list[int]]:
    """Divide the spans into groups. A group consists of decoding spans with similar context lengths, or of prompts with
    the same shape. Return the indices of the spans in each group."""
    max_keys = GATHER_BYTES // (cache.shape[3] * cache.shape[4] * cache.element_size())
    prompts: dict[tuple[int, int], list[int]] = {}
    decodes: list[tuple[int, int]] = []
    for i, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if length == 1:
            decodes.append((_round_up_to_blocks(start + 1, cache), i))
        else:
            prompts.setdefault((start, length), []).append(i)
    groupings: list[list[int]] = []
    max_group_keys = num_padded_keys = 0
    for num_keys, i in sorted(decodes, reverse=True):
        num_padded_keys += max_group_keys - num_keys
        if not groupings or num_padded_keys > MAX_PADDED_KEYS or (len(groupings[-1]) + 1) * max_group_keys > max_keys:
            groupings.append([])
            max_group_keys, num_padded_keys = num_keys, 0
        groupings[-1].append(i)
    for (start, length), members in prompts.items():
        size = max(1, max_keys // (start + length))
        groupings += [members[i : i + size] for i in range(0, len(members), size)]
    return [sorted(members) for members in groupings]


def _round_up_to_blocks(num_keys: int, cache: Tensor) -> int:
    block_size = cache.shape[2]
    return -(-num_keys // block_size) * block_size


def _build_group(
    members: list[int],
    starts: list[int],
    lengths: list[int],
    query_starts: list[int],
    block_tables: Tensor,
    cache: Tensor,
) -> AttentionGroup:
    length, device = lengths[members[0]], cache.device
    num_keys = max(starts[i] for i in members) + length
    num_blocks = _round_up_to_blocks(num_keys, cache) // cache.shape[2]
    if length == 1:
        # Gather whole blocks. If only a slice of the gathered keys was used, it would be copied for the GEMM.
        num_keys = num_blocks * cache.shape[2]
    first_rows = torch.tensor([query_starts[i] for i in members])
    rows: slice | Tensor
    if members[-1] - members[0] == len(members) - 1:
        rows = slice(int(first_rows[0]), int(first_rows[0]) + len(members) * length)
    else:
        rows = (first_rows[:, None] + torch.arange(length)).flatten().to(device)
    blocks = block_tables[torch.tensor(members), :num_blocks].flatten().to(device)
    # The prompts of a group start at the same position, so they share one mask.
    mask_members = members if length == 1 else members[:1]
    positions = torch.tensor([starts[i] for i in mask_members], device=device)[:, None] + torch.arange(
        length, device=device
    )
    first_position = min(starts[i] for i in members)
    return AttentionGroup(rows, len(members), length, blocks, num_keys, positions, first_position, {})


def reads_whole_blocks(cache: Tensor, num_heads: int) -> bool:
    """Return whether `paged_attention` may read beyond the context of a sequence, up to the end of its last block.

    If it may, the values in this part of the block must be finite.

    Args:
        cache: see `paged_attention`.
        num_heads: number of query heads.
    """
    if cache.device.type == "cuda":
        return paged_attention.preferred("cuda") not in _MASKING_IMPLEMENTATIONS
    head_dim = cache.shape[4] - row_size(0, cache.dtype)
    is_supported = head_dim in _HEAD_DIMS and num_heads <= _MAX_HEADS_PER_KV_HEAD * cache.shape[3]
    return not (cache.device.type == "cpu" and is_supported and cpu_native.supports_cache(cache))


@Op
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
    """Compute causal attention of each span over its own context.

    Args:
        queries: [num_tokens, num_heads, head_dim]; head h reads KV head h // (num_heads / num_kv_heads).
        cache: see `write_kv`; contains every key and value of the spans' contexts, including those of this step.
        batch: the spans.
        scale: positive number by which the scores are multiplied, usually 1 / sqrt(head_dim).
        window: a token at position p attends only to positions above p - window; at least 1. None: no limit.
        softcap: scaled scores s become softcap * tanh(s / softcap), before the mask; None: no soft cap.
        sinks: [num_heads], dtype of the queries: for each head, the score of an additional key with value 0, to which
            every token attends; None: no sinks.
        value_dim: the cache has one KV head whose values are the first `value_dim` elements of its keys, as in latent
            attention (MLA): cache[0] and cache[1] are the same memory. None: keys and values differ.

    Returns:
        [num_tokens, num_heads, value_dim or head_dim], dtype of the queries.
    """
    out = torch.empty_like(queries[..., :value_dim])
    for i, context in enumerate(batch.context_lengths.tolist()):
        start, end = batch.query_starts[i : i + 2].tolist()
        blocks = as_indexable(cache)[:, batch.block_tables[i]].view(cache.dtype)
        kv = blocks.flatten(1, 2)[:, :context]
        kv = dequantize_rows(kv, torch.float32) if is_quantized(kv) else kv.float()
        kv = kv.repeat_interleave(queries.shape[1] // kv.shape[2], dim=2)
        scores = torch.einsum("qhd,khd->hqk", queries[start:end].float(), kv[0]) * scale
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        query_positions, key_positions = torch.arange(context - (end - start), context)[:, None], torch.arange(context)
        is_masked = (key_positions > query_positions) | (key_positions <= query_positions - (window or context))
        scores = scores.masked_fill(is_masked.to(scores.device), float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.float()[:, None, None].expand(-1, end - start, -1)), dim=-1)
        weights = scores.softmax(dim=-1)[..., :context]
        out[start:end] = torch.einsum("hqk,khd->qhd", weights, kv[1][..., :value_dim]).to(out.dtype)
    return out


def attend_in_both_directions(
    out: Tensor,
    queries: Tensor,
    cache: Tensor,
    batch: AttentionMetadata,
    tokens: BidirectionalTokens,
    scale: float,
    window: int | None,
) -> None:
    """Replace the attention of some tokens in `out` [num_tokens, num_heads, head_dim], which is causal, by attention
    that also reads the keys of the tokens after them in `tokens`.

    As in transformers, a window limits the keys before a token and not those after it. The other arguments are those of
    `paged_attention`. Runs on any device by operations of PyTorch.
    """
    first_key = 0 if window is None else max(tokens.first_position - window + 1, 0)
    block_size = cache.shape[2]
    first_block, num_blocks = first_key // block_size, -(-tokens.end // block_size)
    blocks = as_indexable(cache)[:, batch.block_tables[tokens.span_index, first_block:num_blocks]].view(cache.dtype)
    kv = blocks.flatten(1, 2)[:, : tokens.end - first_block * block_size]
    kv = dequantize_rows(kv, queries.dtype) if is_quantized(kv) else kv.to(queries.dtype)
    rows = slice(tokens.first_row, tokens.first_row + tokens.end - tokens.first_position)
    positions = torch.arange(tokens.first_position, tokens.end, device=out.device)[:, None]
    keys = torch.arange(first_block * block_size, tokens.end, device=out.device)
    is_read = (keys <= positions) | (keys >= tokens.start)
    if window is not None:
        is_read &= keys > positions - window
    query, key, value = (each.transpose(0, 1)[None] for each in (queries[rows], kv[0], kv[1]))
    attended = F.scaled_dot_product_attention(query, key, value, is_read, scale=scale, enable_gqa=True)
    out[rows] = attended[0].transpose(0, 1)


@paged_attention.register("cpu")
def _paged_attention_cpu(
    queries: Tensor,
    cache: Tensor,
    batch: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """Read keys and values where they are, without gathering them; see csrc/attention.cpp."""
    num_tokens, num_heads, head_dim = queries.shape
    num_kv_heads = cache.shape[3]
    has_kernel = cpu_native.supports(queries) and (is_quantized(cache) or queries.dtype == cache.dtype)
    if reads_whole_blocks(cache, num_heads) or not has_kernel:
        return _paged_attention_gathered(queries, cache, batch, scale, window, softcap, sinks, value_dim)
    if queries.stride(1) != head_dim or queries.stride(2) != 1:
        queries = queries.contiguous()
    out = queries.new_empty(num_tokens, num_heads, head_dim)
    cpu_native.get_library().quire_attention(
        queries.data_ptr(),
        queries.stride(0),
        cache[0].data_ptr(),
        cache[1].data_ptr(),
        batch.block_tables.data_ptr(),
        batch.block_tables.shape[1],
        batch.query_starts.data_ptr(),
        batch.context_lengths.data_ptr(),
        out.data_ptr(),
        len(batch.context_lengths),
        num_heads,
        num_kv_heads,
        head_dim,
        cache.shape[2],
        scale,
        window or 0,
        softcap or 0.0,
        None if sinks is None else sinks.data_ptr(),
        is_quantized(cache),
    )
    return out[..., :value_dim]


paged_attention.register_lazy("cuda", "own", "quire_kernels.gpu.attention")
paged_attention.register_lazy("cuda", "fused", "quire_kernels.gpu.fused_attention")
paged_attention.register_lazy("cuda", "cudnn", "quire_kernels.gpu.candidates.cudnn_attention")


@paged_attention.register("cuda")
def _paged_attention_gathered(
    queries: Tensor,
    cache: Tensor,
    batch: AttentionMetadata,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    value_dim: int | None = None,
) -> Tensor:
    """For each group, gather the blocks and compute one batched attention. No Python code runs for single tokens."""
    out = torch.empty_like(queries)
    for group in batch.groups:
        effective_window = window if window is not None and window < group.num_keys else None
        keys, values = _gather_kv(cache, group, effective_window, queries.dtype)
        q = queries[group.rows].view(group.num_spans, group.length, *queries.shape[1:])
        if softcap is None and sinks is None and effective_window is None and group.is_prompts:
            output = _prefill_attention(q, keys, values, None, scale)
        else:
            mask = group.get_mask(effective_window, cache.shape[2], q.dtype)
            if softcap is not None or sinks is not None:
                output = _unfused_attention(q, keys, values, mask, scale, softcap, sinks)
            elif group.length > 1:
                output = _prefill_attention(q, keys, values, mask, scale)
            elif _prefers_single_gemm(q, keys):
                output = _single_gemm_decode(q, keys, values, mask, scale)
            else:
                output = _decode_attention(q, keys, values, mask, scale)
        out[group.rows] = output.reshape(-1, *queries.shape[1:])
    return out[..., :value_dim]


def _prefill_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    output = F.scaled_dot_product_attention(
        q.transpose(1, 2), keys, values, attn_mask=mask, is_causal=mask is None, scale=scale, enable_gqa=True
    )
    return output.transpose(1, 2)


def _decode_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    # The query heads of a KV head are passed as if they were query tokens, so the keys need not be repeated. With bf16,
    # 64 sequences of 128 tokens, 9 query heads and 3 KV heads, this takes 0.9 ms on one Zen 5 core. With enable_gqa, it
    # takes 5.6 ms.
    q = q.view(q.shape[0], keys.shape[1], -1, keys.shape[3])
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, scale=scale)


def _unfused_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Compute attention in float32, with the scores in memory.

    torch's fused attention supports neither a soft cap nor sinks.
    """
    num_spans, length, _, head_dim = q.shape
    heads = q.view(num_spans, length, keys.shape[1], -1, head_dim).permute(0, 2, 3, 1, 4)
    scores = heads.flatten(2, 3).float() @ (keys.float().transpose(2, 3) * (scale / (softcap or 1.0)))
    if softcap is not None:
        scores = scores.tanh_().mul_(softcap)
    scores = scores.view(*heads.shape[:4], -1).add_(mask[:, None])
    if sinks is None:
        weights = scores.softmax(dim=-1)
    else:
        column = sinks.float().view(1, *heads.shape[1:3], 1, 1).expand(num_spans, -1, -1, length, -1)
        weights = torch.cat((scores, column), dim=-1).softmax(dim=-1)[..., :-1]
    output = weights.flatten(2, 3) @ values.float()
    return output.view(heads.shape).permute(0, 3, 1, 2, 4).to(q.dtype)


def _prefers_single_gemm(q: Tensor, keys: Tensor) -> bool:
    """Return whether a single GEMM over all heads is faster than torch's fused attention.

    One operand of the single GEMM consists mostly of zeros.

    On a CPU, fused attention uses one bf16 GEMM for each KV head, which contains only the queries of that head. A
    single GEMM is faster if there are enough keys. There must also be few heads, or only one query head for each KV
    head.
    """
    if q.device.type != "cpu" or q.dtype != torch.bfloat16 or keys.shape[0] * keys.shape[2] < MIN_SINGLE_GEMM_KEYS:
        return False
    return q.shape[2] <= MAX_SINGLE_GEMM_HEADS or q.shape[2] == keys.shape[1]


def _single_gemm_decode(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute the scores of all heads with one GEMM per sequence.

    The operand has a row for each query. The query is in the columns of its KV head, and all other columns are zero.

    The GEMM rounds the scores to bf16, and therefore it runs twice. The first run finds the maximum of each row. The
    second run subtracts this maximum before it rounds. The scores that matter to the softmax are then near zero, and
    are as accurate as those of fused attention. For 64 sequences of 128 tokens, this takes 0.5 ms; fused attention
    takes 1.0 ms. These times were measured without the gather, on one Zen 5 core, with bf16, 9 query heads and 3 KV
    heads.
    """
    num_spans, num_kv_heads, _, head_dim = keys.shape
    heads = q.view(num_spans, num_kv_heads, -1, head_dim)
    block_diagonal = heads.new_zeros((*heads.shape[:3], num_kv_heads, head_dim))
    block_diagonal.diagonal(dim1=1, dim2=3).copy_(heads.permute(0, 2, 3, 1))
    wide_queries = block_diagonal.view(num_spans, -1, num_kv_heads * head_dim)
    keys_t = keys.transpose(1, 2).flatten(2).transpose(1, 2)
    mask = mask[:, 0]
    scores = torch.baddbmm(mask, wide_queries, keys_t, alpha=scale)
    scores = torch.baddbmm(mask - scores.amax(dim=-1, keepdim=True), wide_queries, keys_t, alpha=scale)
    wide_output = torch.bmm(scores.softmax(dim=-1), values.transpose(1, 2).flatten(2))
    output = wide_output.view(block_diagonal.shape).diagonal(dim1=1, dim2=3)
    return output.permute(0, 3, 1, 2)


def _gather_kv(cache: Tensor, group: AttentionGroup, window: int | None, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of a group in `dtype`. The skipped keys are left out. Both tensors are strided and
    have the shape [num_spans, num_kv_heads, num_keys, head_dim]."""
    block_size, num_kv_heads, size = cache.shape[2:]
    rows, blocks = cache.flatten(2), group.blocks
    num_skipped = group.num_skipped_keys(window, block_size)
    if num_skipped:
        blocks = blocks.view(group.num_spans, -1)[:, num_skipped // block_size :].flatten()

    def gather_blocks(kv_index: int) -> Tensor:
        flat = as_indexable(rows[kv_index]).index_select(0, blocks).view(cache.dtype)
        flat = flat.view(group.num_spans, -1, num_kv_heads, size)
        flat = dequantize_rows(flat, dtype) if is_quantized(flat) else flat.to(dtype)
        return flat[:, : group.num_keys - num_skipped].transpose(1, 2)

    return gather_blocks(0), gather_blocks(1)
