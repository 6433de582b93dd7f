# SPDX-License-Identifier: Apache-2.0
"""Input tensors of a forward pass: all inputs except the weights and the KV cache. Built by `build_forward_batch`.

All spans are flattened into one batch. The tokens of an adapter are contiguous. Therefore, LoRA can be applied to
slices of the batch.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import torch
from torch import Tensor

from quire_engine.kv_cache.device_cache import KVCache
from quire_engine.step.input import StepInput
from quire_kernels import (
    AdapterSegment,
    AttentionMetadata,
    BidirectionalTokens,
    LoRABatch,
    StateBatch,
    build_attention_metadata,
    build_encoder_metadata,
    build_lora_batch,
    build_state_batch,
    to_device_async,
)


@dataclass(frozen=True, slots=True)
class ImageFeatures:
    """Embeddings of tokens of images, which a vision tower has computed."""

    embeddings: Tensor
    """[num_image_tokens, hidden_size]."""
    deepstack: tuple[Tensor, ...] = ()
    """[num_image_tokens, hidden_size] each: added to the outputs of the first layers. Only Qwen3-VL has them."""
    rows: Tensor | None = None
    """[num_image_tokens] int64: indices of the tokens in the batch."""


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Tokens of a step, on the device."""

    token_ids: Tensor
    """[num_tokens] int64."""
    positions: Tensor
    """[num_tokens] int64: position of each token in its sequence."""
    long_rope: Tensor | None
    """[num_tokens] bool: which tokens use the rotary embedding for long sequences; None if all tokens use the normal
    one."""
    addresses: Tensor
    """[num_tokens] int64: addresses of keys and values in the cache (the slot mapping of vLLM)."""
    attention: AttentionMetadata
    adapters: LoRABatch | None
    """Adapters of the tokens; None if no span has an adapter."""
    logit_rows: Tensor | None
    """[num_logits] int64: indices of the tokens that need logits. Tokens for sampling come first, then tokens for
    prompt log probabilities. If None, all tokens need logits, in the order of the batch.
    """
    num_logits: int
    logit_adapter_slots: tuple[int, ...] = ()
    """Adapter slot of each token that needs logits, -1 if the token has no adapter; empty if no span has an adapter."""
    states: StateBatch | None = None
    """The states of the spans; None if no layer has a state."""
    rope_positions: Tensor | None = None
    """[3, num_tokens] int64: time, row and column of each token; None if all three are the position."""
    images: ImageFeatures | None = None
    """Embeddings of the tokens of images; None if the batch contains only text."""
    bidirectional: Sequence[BidirectionalTokens] = ()
    """Tokens that attend to each other in both directions."""
    token_types: Tensor | None = None
    """[num_tokens] int64: 1 for the tokens of the second text of a pair, otherwise 0. None if all are 0."""
    hidden: Tensor | None = None
    """[num_tokens, hidden_size]: what the previous pipeline stage has computed; None in the first stage."""
    groups: tuple["ForwardBatch", ...] = ()
    """Copies of the batch, one for each group of layers (see KVLayout). Each copy has the addresses and the attention
    of its group. Empty if there is only one group."""

    def for_logit_rows(self, rows: slice) -> "ForwardBatch":
        """Return the batch for the output projection of some tokens.

        `rows` is a slice of the tokens that need logits.
        """
        if self.adapters is None or (self.logit_rows is None and rows == slice(self.num_logits)):
            return self
        slots, device = self.logit_adapter_slots[rows], self.token_ids.device
        segments = _adapter_segments(slots, [1] * len(slots), ())
        return replace(self, adapters=build_lora_batch(segments, len(slots), device) if segments else None)


def build_forward_batch(
    step_input: StepInput, kv_cache: KVCache, device: torch.device, images: ImageFeatures | None = None
) -> ForwardBatch:
    """Build the batch of a step, and zero the KV blocks whose first token the step writes, and the states of sequences
    that begin. `images` are the embeddings of the tokens `image_rows` of the step."""
    if not kv_cache.groups:
        return _build_encoder_batch(step_input, device)
    starts, lengths, num_tokens = step_input.starts, step_input.lengths, len(step_input.token_ids)
    block_tables = kv_cache.pad_tables(
        step_input.block_ids, [start + length for start, length in zip(starts, lengths, strict=True)]
    )
    rows, positions = _positions(starts, lengths)
    addresses = kv_cache.addresses(block_tables, rows, positions)
    kv_cache.zero_new_blocks(addresses)
    if kv_cache.states is not None:
        kv_cache.states.zero([row for row, start in zip(step_input.state_rows, starts, strict=True) if start == 0])
    group_addresses = to_device_async(addresses, device).unbind()
    attentions = [
        build_attention_metadata(starts, lengths, table, group.layer, device)
        for table, group in zip(block_tables, kv_cache.groups, strict=True)
    ]
    segments = _adapter_segments(step_input.adapter_slots, step_input.lengths, step_input.num_base_tokens)
    long_rope = torch.tensor(step_input.long_rope, dtype=torch.bool)[rows] if step_input.long_rope else None
    all_rows = step_input.logit_rows == list(range(num_tokens))
    batch = ForwardBatch(
        token_ids=to_device_async(step_input.token_ids, device),
        positions=to_device_async(positions, device),
        long_rope=None if long_rope is None else to_device_async(long_rope, device),
        addresses=group_addresses[0],
        attention=attentions[0],
        adapters=build_lora_batch(segments, num_tokens, device) if segments else None,
        logit_rows=None if all_rows else to_device_async(step_input.logit_rows, device),
        num_logits=len(step_input.logit_rows),
        logit_adapter_slots=_logit_adapter_slots(segments, step_input.logit_rows) if segments else (),
        states=None
        if kv_cache.states is None
        else build_state_batch(
            *(step_input.state_rows, lengths, device),
            *(step_input.num_drafts, step_input.num_replayed, kv_cache.states.max_drafts),
        ),
        rope_positions=None
        if step_input.rope_positions is None
        else to_device_async(step_input.rope_positions, device).view(3, -1),
        bidirectional=step_input.bidirectional,
        images=None if images is None else replace(images, rows=to_device_async(step_input.image_rows, device)),
    )
    if len(attentions) == 1:
        return batch
    groups = [replace(batch, addresses=a, attention=m) for a, m in zip(group_addresses, attentions, strict=True)]
    return replace(batch, groups=tuple(groups))


def _build_encoder_batch(step_input: StepInput, device: torch.device) -> ForwardBatch:
    """Build the batch of a step of an encoder, whose spans are whole sequences."""
    lengths, num_tokens = step_input.lengths, len(step_input.token_ids)
    rows, positions = _positions(step_input.starts, lengths)
    segments = _adapter_segments(step_input.adapter_slots, lengths, step_input.num_base_tokens)
    token_types = None
    if step_input.second_text_starts:
        starts = torch.tensor(step_input.second_text_starts)[rows]
        token_types = to_device_async(((starts > 0) & (positions >= starts)).long(), device)
    all_rows = step_input.logit_rows == list(range(num_tokens))
    positions = to_device_async(positions, device)
    return ForwardBatch(
        token_ids=to_device_async(step_input.token_ids, device),
        positions=positions,
        long_rope=None,
        addresses=positions[:0],
        attention=build_encoder_metadata(lengths, device),
        adapters=build_lora_batch(segments, num_tokens, device) if segments else None,
        logit_rows=None if all_rows else to_device_async(step_input.logit_rows, device),
        num_logits=len(step_input.logit_rows),
        logit_adapter_slots=_logit_adapter_slots(segments, step_input.logit_rows) if segments else (),
        token_types=token_types,
    )


def _positions(starts: list[int], lengths: list[int]) -> tuple[Tensor, Tensor]:
    """Return two tensors, [num_tokens] int64. For each token, they contain the index of its span and its position in
    the sequence."""
    counts = torch.tensor(lengths)
    rows = torch.repeat_interleave(torch.arange(len(lengths)), counts)
    # Difference between a token's position in its sequence and its index in the batch.
    shifts = torch.tensor(starts) - (counts.cumsum(0) - counts)
    return rows, torch.arange(len(rows)) + shifts[rows]


def _adapter_segments(
    slots: Sequence[int], lengths: Sequence[int], num_base_tokens: Sequence[int]
) -> list[AdapterSegment]:
    """Return ranges of adjacent tokens with the same adapter slot. `slots`, `lengths` and, if it is not empty,
    `num_base_tokens` have one value per span."""
    segments: list[AdapterSegment] = []
    end = 0
    for slot, length, num_base in zip(slots, lengths, num_base_tokens or repeat(0, len(slots)), strict=True):
        start, end = end + num_base, end + length
        if slot < 0:
            continue
        if segments and (segments[-1].adapter_slot, segments[-1].end) == (slot, start):
            start = segments.pop().start
        segments.append(AdapterSegment(slot, start, end))
    return segments


def _logit_adapter_slots(segments: Sequence[AdapterSegment], logit_rows: Sequence[int]) -> tuple[int, ...]:
    """Return the adapter slot of each token that needs logits, -1 if it has no adapter."""
    starts = [segment.start for segment in segments]
    found = (segments[max(bisect_right(starts, row) - 1, 0)] for row in logit_rows)
    return tuple(
        segment.adapter_slot if segment.start <= row < segment.end else -1
        for segment, row in zip(found, logit_rows, strict=True)
    )
