# SPDX-License-Identifier: Apache-2.0
"""Rehearsal: the steps that are run before there are requests, to measure what the largest takes and to have kernels
compiled. What they compute is of no interest: their sequences are nobody's, and all their blocks are block 0."""

from collections.abc import Iterator

from quire_engine.request import BlockId, Sequence, SlotId
from quire_engine.step import Span
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import MAX_BAD_WORDS, MAX_BIASED_TOKENS, MAX_STOP_TOKENS, SamplingParams

_GREEDY = SamplingParams(temperature=0.0)
_CHOICES = (
    _GREEDY,
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.0, presence_penalty=1.0),
    SamplingParams(temperature=1.0, presence_penalty=1.0),
    SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0),
)
_MIXED_TOKENS = 64
"""Of a prompt: more than attention computes like a decoding sequence's."""


def largest_steps(config: EngineConfig, max_model_len: int, vocab_size: int) -> Iterator[list[Span]]:
    """A step that takes as much memory as any, and one of a chunk at the end of the longest context.

    The first has as many sequences as may be, one that decodes at the end of the longest context, which makes all block
    tables as wide, beside prompts. All of them ask for everything that a sampler can do, all of the prompts' tokens for
    log probabilities, and where there are slots for adapters, those have some, which are empty.
    """
    room = max(max_model_len - 1, 1)
    # All ranks choose, those after the first from logits of their own tokens.
    vocab_size //= config.tensor_parallel_size
    slots = [SlotId(i % config.max_loras) if config.enable_lora else None for i in range(config.max_num_seqs)]
    prompts = config.max_num_seqs - 1
    even, more = divmod(config.max_num_batched_tokens - 1, prompts or 1)
    lengths = [1, *(min(even + (i < more), room) for i in range(prompts))]
    starts = [room - 1, *[0] * prompts]
    few = _everything(vocab_size, min(config.max_logprobs, 1) if config.max_logprobs >= 0 else 1)
    spans = [
        _asking(spare_span(start, length, config.block_size, slot, few), vocab_size)
        for start, length, slot in zip(starts, lengths, slots, strict=True)
    ]
    # What a row of logits takes follows from the most that any row asks for; a prompt may ask for that of some tokens.
    most, last = _everything(vocab_size, config.max_logprobs), spans[-1].sequence
    last.params, last.num_scored_tokens = most, max(len(last.prompt_token_ids) - 2, 0)
    yield spans
    chunk = min(config.max_num_batched_tokens, room)
    yield [_asking(spare_span(room - chunk, chunk, config.block_size, slots[0], few), vocab_size)]


def small_steps(config: EngineConfig, max_model_len: int) -> Iterator[list[Span]]:
    """A decoding sequence, a prompt, and both, if there may be two, for each other way of choosing: a GPU's kernels are
    compiled before anyone waits for them."""
    room, slot = max(max_model_len - 1, 1), SlotId(0) if config.enable_lora else None
    decoding, prompt = (room - 1, 1), (0, min(room, _MIXED_TOKENS))
    # The sampler has room for as many as may be, and no more.
    both = [decoding, prompt][: config.max_num_seqs]
    for places, params in (([decoding], _GREEDY), ([prompt], _GREEDY), *((both, choice) for choice in _CHOICES)):
        yield [spare_span(start, length, config.block_size, slot, params) for start, length in places]


def spare_span(
    start: int, length: int, block_size: int, slot: SlotId | None = None, params: SamplingParams = _GREEDY
) -> Span:
    """A span that samples, of a sequence whose blocks are all block 0."""
    sequence = Sequence(0, [0] * (start + length), params, seed=0, max_output_tokens=1)
    sequence.block_table = [BlockId(0)] * -(-(start + length) // block_size)
    return Span(sequence, start, length, slot)


def _everything(vocab_size: int, num_logprobs: int) -> SamplingParams:
    return SamplingParams(
        temperature=1.0,
        top_k=1,
        top_p=0.9,
        presence_penalty=1.0,
        logit_bias=dict.fromkeys(range(min(MAX_BIASED_TOKENS, vocab_size)), 1.0),
        allowed_token_ids=(0,),
        min_tokens=1,
        logprobs=num_logprobs,
        prompt_logprobs=num_logprobs,
    )


def _asking(span: Span, vocab_size: int) -> Span:
    """With as many tokens forbidden as there may be: bad words come with a space before them and without."""
    span.sequence.held_token_ids = frozenset(range(1, min(MAX_STOP_TOKENS + 2, vocab_size)))
    span.sequence.bad_words = tuple((1 + token % (vocab_size - 1),) for token in range(2 * MAX_BAD_WORDS))
    return span
