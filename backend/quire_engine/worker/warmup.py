# SPDX-License-Identifier: Apache-2.0
"""Warm-up steps that run at startup.

They are used to measure peak memory and to compile kernels. The steps use dummy sequences whose block tables contain
only block 0. Their results are discarded. Called by `startup.py`.
"""

from collections.abc import Iterator

from quire_engine.sequence import BlockId, Sequence, SlotId
from quire_engine.step.plan import ScheduledSpan
from quire_spec.engine.config import EngineConfig
from quire_spec.engine.sampling_params import MAX_BAD_WORDS, MAX_BIASED_TOKENS, MAX_STOP_TOKENS, SamplingParams

_GREEDY = SamplingParams(temperature=0.0)
_SAMPLING_VARIANTS = (
    _GREEDY,
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.0, presence_penalty=1.0),
    SamplingParams(temperature=1.0, presence_penalty=1.0),
    SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=1.0),
)
_PROMPT_TOKENS = 64
"""Number of tokens in a dummy prompt. It is so large that the attention kernel does not treat the prompt as a decoding
sequence."""


def peak_memory_steps(config: EngineConfig, max_model_len: int, vocab_size: int) -> Iterator[list[ScheduledSpan]]:
    """Yield the three steps that can need the most memory.

    These are a large step, a prompt chunk at the end of the longest context, and a prompt chunk at position 0. Another
    attention kernel can be used for the chunk at position 0. The large step has `max_num_seqs` sequences. One of them
    decodes at the end of the longest context, so that all block tables have their maximum width. The others are
    prompts. All sequences use every sampling parameter, and the prompts need log probabilities of all their tokens. If
    LoRA is enabled, the sequences use adapter slots, but the slots are empty.
    """
    max_length = max(max_model_len - 1, 1)
    # On ranks other than 0, the sampler runs on logits of the rank's own vocabulary shard.
    vocab_size //= config.tensor_parallel_size
    slots = [SlotId(i % config.max_loras) if config.enable_lora else None for i in range(config.max_num_seqs)]
    num_prompts = config.max_num_seqs - 1
    tokens_per_prompt, remainder = divmod(config.max_num_batched_tokens - 1, num_prompts or 1)
    lengths = [1, *(min(tokens_per_prompt + (i < remainder), max_length) for i in range(num_prompts))]
    starts = [max_length - 1, *[0] * num_prompts]
    base_params = _all_sampling_params(vocab_size, min(config.max_logprobs, 1) if config.max_logprobs >= 0 else 1)
    spans = [
        _with_all_masks(dummy_span(start, length, config.block_size, slot, base_params), vocab_size)
        for start, length, slot in zip(starts, lengths, slots, strict=True)
    ]
    # The memory of each row depends on the largest `logprobs` of all rows. In this step, only the last tokens of the
    # last prompt have the largest value.
    last_sequence = spans[-1].sequence
    last_sequence.params = _all_sampling_params(vocab_size, config.max_logprobs)
    last_sequence.num_computed_prompt_logprobs = max(len(last_sequence.prompt_token_ids) - 2, 0)
    yield spans
    chunk = min(config.max_num_batched_tokens, max_length)
    # The last prompt is one token shorter than the maximum, because attention kernels pad prompts of most lengths. Only
    # attention can need more memory here than in the first step. Therefore, these steps have no sampling parameters.
    # Otherwise, the log probabilities of 8,190 tokens would take 0.3 s on a Zen 3 core.
    for start, length in ((max_length - chunk, chunk), (0, max(chunk - 1, 1))):
        yield [dummy_span(start, length, config.block_size, slots[0])]


def compile_steps(config: EngineConfig, max_model_len: int) -> Iterator[list[ScheduledSpan]]:
    """Yield small steps that compile a GPU's kernels before the first request.

    There is a decode step, a step with a prompt, and one step for each sampling variant. The steps for the variants
    contain a decoding sequence and a prompt. If `max_num_seqs` is 1, they contain only the decoding sequence.
    """
    max_length, slot = max(max_model_len - 1, 1), SlotId(0) if config.enable_lora else None
    decoding, prompt = (max_length - 1, 1), (0, min(max_length, _PROMPT_TOKENS))
    # The sampler has rows for `max_num_seqs` sequences only.
    mixed_batch = [decoding, prompt][: config.max_num_seqs]
    for bounds, params in (
        ([decoding], _GREEDY),
        ([prompt], _GREEDY),
        *((mixed_batch, variant) for variant in _SAMPLING_VARIANTS),
    ):
        yield [dummy_span(start, length, config.block_size, slot, params) for start, length in bounds]


def dummy_span(
    start: int, length: int, block_size: int, adapter_slot: SlotId | None = None, params: SamplingParams = _GREEDY
) -> ScheduledSpan:
    """Return a span that samples a token. The block table of its sequence contains only block 0."""
    sequence = Sequence(0, [0] * (start + length), params, seed=0, max_output_tokens=1)
    span = ScheduledSpan(sequence, start, length, adapter_slot)
    set_block_tables([span], block_size, 1)
    return span


def set_block_tables(spans: list[ScheduledSpan], block_size: int, num_groups: int) -> None:
    """Set the block tables of dummy sequences.

    `num_groups` is the number of groups of layers (see KVLayout).
    """
    for span in spans:
        span.sequence.block_table = [BlockId(0)] * (-(-span.end // block_size) * num_groups)
        span.sequence.state_row = 0


def _all_sampling_params(vocab_size: int, num_logprobs: int) -> SamplingParams:
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


def _with_all_masks(span: ScheduledSpan, vocab_size: int) -> ScheduledSpan:
    """Give a span the maximum number of forbidden tokens and bad words, and return it.

    Each bad word has two entries, one with and one without a leading space.
    """
    span.sequence.suppressed_token_ids = frozenset(range(1, min(MAX_STOP_TOKENS + 2, vocab_size)))
    span.sequence.bad_words = tuple((1 + token % (vocab_size - 1),) for token in range(2 * MAX_BAD_WORDS))
    return span
