# SPDX-License-Identifier: Apache-2.0
"""Batch: a step's spans as tensors, everything a forward needs besides weights and KV cache. Built by `build_batch`.

All spans are flattened into one batch, tokens of one adapter side by side and base tokens first, so that an adapter's
delta works on a slice; within that, decoding sequences of similar context are neighbours, so that attention does too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire_engine.kv import KVCache
from quire_engine.step import Span
from quire_kernels import AdapterBatch, AttentionBatch, SlotRows, plan_adapters, plan_attention


@dataclass(frozen=True, slots=True)
class Batch:
    """Tokens of a step, on the device."""

    token_ids: Tensor
    """[num_tokens] int64."""
    positions: Tensor
    """[num_tokens] int64, each in its sequence."""
    beyond_switch: Tensor | None
    """[num_tokens] bool: tokens of sequences whose keys are rotated as those of long ones; None: there are none."""
    addresses: Tensor
    """[num_tokens] int64: where keys and values go in the cache."""
    attention: AttentionBatch
    adapters: AdapterBatch | None
    """None when no span has an adapter."""
    logit_rows: Tensor | None
    """[num_logits] int64: tokens whose logits are wanted, first those that choose the next token of each span, then
    those that tell how likely prompt tokens are; None: all, in order."""
    num_logits: int


def order_spans(spans: Sequence[Span]) -> list[int]:
    """Indices of spans in the order in which `build_batch` wants them."""

    def key(i: int) -> tuple[int, bool, int]:
        span = spans[i]
        return (-1 if span.slot is None else span.slot, span.length > 1, -span.start)

    return sorted(range(len(spans)), key=key)


def build_batch(
    spans: Sequence[Span], cache: KVCache, num_slots: int, device: torch.device, rope_switch: int | None = None
) -> Batch:
    """Flatten ordered spans, and clear the blocks that they begin to fill.

    `num_slots`: adapter slots there are; `rope_switch`: the model's, see ModelShape.
    """
    starts, lengths = [span.start for span in spans], [span.length for span in spans]
    ends = [span.end for span in spans]
    tables = cache.tables([span.sequence.block_table for span in spans], ends)
    token_ids: list[int] = []
    for span in spans:
        token_ids += span.sequence.tokens(span.start, span.end)
    rows, positions = _positions(starts, lengths)
    addresses = cache.addresses(tables, rows, positions)
    cache.clear_started(addresses)
    logit_rows = _logit_rows(spans, lengths)
    segments = _segments(spans)
    return Batch(
        token_ids=torch.tensor(token_ids).to(device, non_blocking=True),
        positions=positions.to(device, non_blocking=True),
        beyond_switch=_beyond_switch(spans, rows, rope_switch, device),
        addresses=addresses.to(device, non_blocking=True),
        attention=plan_attention(starts, lengths, tables, cache.layers[0], device),
        adapters=plan_adapters(segments, len(token_ids), num_slots, device) if segments else None,
        logit_rows=None if logit_rows == list(range(len(token_ids))) else torch.tensor(logit_rows, device=device),
        num_logits=len(logit_rows),
    )


def _beyond_switch(spans: Sequence[Span], rows: Tensor, rope_switch: int | None, device: torch.device) -> Tensor | None:
    if rope_switch is None:
        return None
    long = [span.sequence.num_tokens > rope_switch for span in spans]
    return torch.tensor(long)[rows].to(device, non_blocking=True) if any(long) else None


def _positions(starts: list[int], lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Each token's span and its position in the sequence, both [num_tokens] int64."""
    counts = torch.tensor(lengths)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    # What to add to a token's index in the batch to get its position in its sequence.
    shifts = torch.tensor(starts) - (counts.cumsum(0) - counts)
    return rows, torch.arange(len(rows)) + shifts[rows]


def _logit_rows(spans: Sequence[Span], lengths: list[int]) -> list[int]:
    sampled, scored, end = [], [], 0
    for span, length in zip(spans, lengths, strict=True):
        end += length
        if span.samples:
            sampled.append(end - 1)
        scored += [end - span.end + position for position in span.scored]
    return sampled + scored


def _segments(spans: Sequence[Span]) -> list[SlotRows]:
    """Tokens by adapter slot."""
    segments: list[SlotRows] = []
    end = 0
    for span in spans:
        start, end = end, end + span.length
        if span.slot is None:
            continue
        if segments and segments[-1].slot == span.slot:
            start = segments.pop().start
        segments.append(SlotRows(span.slot, start, end))
    return segments
