# SPDX-License-Identifier: Apache-2.0
"""Rehearsal: the steps that are run before there are requests, to measure what the largest takes and to have kernels
compiled. What they compute is of no interest: their sequences are nobody's, and all their blocks are block 0."""

from collections.abc import Iterator

from quire_engine.request import BlockId, Sequence, SlotId
from quire_engine.step import Span
from quire_spec.config import EngineConfig
from quire_spec.sampling import SamplingParams

_CHOICE = SamplingParams(temperature=1.0, top_p=0.9, prompt_logprobs=1)
_OTHER_CHOICES = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.0, presence_penalty=1.0),
    SamplingParams(temperature=1.0, presence_penalty=1.0),
    SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0),
)
_MIXED_TOKENS = 64
"""Of a prompt: more than attention computes like a decoding sequence's."""


def largest_steps(config: EngineConfig, max_model_len: int) -> Iterator[list[Span]]:
    """A step of as many prompts as may be, all sampled, and one of a chunk at the end of the longest context; where
    there are slots for adapters, with some, which are empty."""
    room = max(max_model_len - 1, 1)
    even, more = divmod(config.max_num_batched_tokens, config.max_num_seqs)
    slots = [SlotId(i % config.max_loras) if config.enable_lora else None for i in range(config.max_num_seqs)]
    lengths = [min(even + (i < more), room) for i in range(config.max_num_seqs)]
    yield [spare_span(0, length, config.block_size, slot) for length, slot in zip(lengths, slots, strict=True)]
    chunk = min(config.max_num_batched_tokens, room)
    yield [spare_span(room - chunk, chunk, config.block_size, slots[0])]


def mixed_steps(config: EngineConfig, max_model_len: int) -> Iterator[list[Span]]:
    """A prompt beside a decoding sequence, for each other way of choosing: a GPU's kernels are compiled before anyone
    waits for them. What decodes alone is in graphs."""
    room, slot = max(max_model_len - 1, 1), SlotId(0) if config.enable_lora else None
    for params in _OTHER_CHOICES:
        places = ((room - 1, 1), (0, min(room, _MIXED_TOKENS)))
        yield [spare_span(start, length, config.block_size, slot, params) for start, length in places]


def spare_span(
    start: int, length: int, block_size: int, slot: SlotId | None = None, params: SamplingParams = _CHOICE
) -> Span:
    """A span that samples, of a sequence whose blocks are all block 0."""
    sequence = Sequence(0, [0] * (start + length), params, seed=0, max_output_tokens=1)
    sequence.block_table = [BlockId(0)] * -(-(start + length) // block_size)
    return Span(sequence, start, length, slot)
