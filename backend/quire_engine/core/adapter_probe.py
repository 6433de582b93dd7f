# SPDX-License-Identifier: Apache-2.0
"""The checks of a loaded adapter: the effect probe and the canary. Pure: requests, and the evaluation of their results.

The effect probe runs fixed prompts with and without the adapter in one batch. The prompts contain the tokens that the
adapter was trained for, because some adapters change nothing else. A canary is a prompt of the adapter's author with
the output that is expected. Called by adapter_verifier.py.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.constants import AdapterDigest
from quire_spec.documents.adapter_catalog import Canary
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import InvalidArgument
from quire_spec.protocol.messages import RankedToken, SequenceDelta, SequenceRequest

CLIENT = "adapter checks"
"""The client of these sequences for the scheduler, which divides the steps fairly between clients."""
_NUM_PROMPTS = 2
_PROMPT_TOKENS = 8
"""Short prompts: all sequences of a probe together have about as many tokens as a decode step of 32 sequences."""
_NUM_LOGPROBS = 20
_EXTRA_TOKENS = 4
"""An `expect` without maxTokens is compared with its number of tokens and this many more, because the same text can
have several token sequences."""


def trained_tokens(folder: Path) -> list[list[int]]:
    """Return the token sequences that an adapter was trained for: its invocation and the tokens with trained rows."""
    config = json.loads((folder / "adapter_config.json").read_bytes())
    invocation, rows = config.get("alora_invocation_tokens"), config.get("trainable_token_indices")
    by_module = rows.values() if isinstance(rows, dict) else [rows]
    tokens = sorted({token for row in by_module for token in row or ()})
    return [*([list(invocation)] if invocation else []), *_chunks(tokens)]


def probe_requests(
    digest: AdapterDigest, special_tokens: Sequence[list[int]], vocab_size: int, max_length: int, ids: Iterator[int]
) -> list[SequenceRequest]:
    """Return the sequences of an effect probe: for each prompt one without the adapter, and one with it.

    Args:
        digest: the adapter.
        special_tokens: result of `trained_tokens`; each gets a prompt of its own.
        vocab_size: number of token ids of the model.
        max_length: the largest number of tokens of a sequence.
        ids: the ids of the sequences.
    """
    fixed = [index * 2654435761 % vocab_size for index in range(1, _NUM_PROMPTS * _PROMPT_TOKENS + 1)]
    prompts = _chunks(fixed)
    # Tokens follow the invocation, because an activated adapter has an effect only on them.
    prompts += [[fixed[0], *tokens, *fixed[1:3]] for tokens in special_tokens]
    last = SamplingParams(temperature=0.0, max_tokens=1, logprobs=_NUM_LOGPROBS)
    # A trained row of the output projection shows where its token is predicted. The output projection takes most of the
    # time of a small step, so other prompts compute it only for their last token.
    every = SamplingParams(temperature=0.0, max_tokens=1, logprobs=_NUM_LOGPROBS, prompt_logprobs=_NUM_LOGPROBS)
    return [
        SequenceRequest(
            next(ids), prompt[-max_length + 1 :], every if i >= _NUM_PROMPTS else last, adapter_digest, client=CLIENT
        )
        for i, prompt in enumerate(prompts)
        for adapter_digest in (None, digest)
    ]


def _chunks(tokens: list[int]) -> list[list[int]]:
    return [tokens[start : start + _PROMPT_TOKENS] for start in range(0, len(tokens), _PROMPT_TOKENS)]


def measure_effect(results: Sequence[list[SequenceDelta]]) -> float:
    """Return the largest change of a log probability that the adapter causes.

    `results` contains the results of `probe_requests`, in the same order.

    Raises:
        InvalidArgument: with the adapter, the model returns NaN or infinity.
    """
    changes = [
        # A token that one of the results lacks is at most as likely as the last one that it contains.
        abs(adapted.get(token, min(adapted.values())) - base.get(token, min(base.values())))
        for base_result, adapted_result in zip(results[::2], results[1::2], strict=True)
        for base, adapted in zip(_logprobs(base_result), _logprobs(adapted_result), strict=True)
        for token in base.keys() | adapted.keys()
        if base.get(token) != adapted.get(token)
    ]
    if not all(map(math.isfinite, changes)):
        raise InvalidArgument("Diverged: with the adapter, the effect probe returns NaN or infinity; train it again")
    return max(changes, default=0.0)


def _logprobs(deltas: list[SequenceDelta]) -> list[dict[int, float]]:
    """Return the log probabilities by token, at each position."""
    positions: list[list[RankedToken]] = []
    for delta in deltas:
        positions += [*(delta.prompt_logprobs or ()), *(delta.logprobs or ())]
    return [{token: logprob for token, logprob, _ in position} for position in positions]


def canary_request(
    digest: AdapterDigest, canary: Canary, tokenizer: Tokenizer, max_length: int, ids: Iterator[int]
) -> SequenceRequest:
    """Return the sequence of a canary.

    Raises:
        InvalidArgument: it is longer than `max_length` tokens.
    """
    prompt = tokenizer.encode(canary.prompt)
    params: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1}
    if canary.expect is not None:
        num_expected = len(tokenizer.encode(canary.expect, None, False))
        params["max_tokens"] = canary.maxTokens or num_expected + _EXTRA_TOKENS
    else:
        prompt = tokenizer.encode(canary.prompt + (canary.completion or ""))
        params["prompt_logprobs"] = 0
    if len(prompt) + params["max_tokens"] > max_length:
        raise InvalidArgument(
            f"canary: has {len(prompt)} prompt and {params['max_tokens']} output tokens, and the model can have "
            f"{max_length} in total; shorten prompt, or lower maxTokens"
        )
    return SequenceRequest(next(ids), prompt, SamplingParams(**params), digest, client=CLIENT)


def check_canary(canary: Canary, tokenizer: Tokenizer, deltas: list[SequenceDelta]) -> float | None:
    """Check the result of `canary_request`. Return the mean log probability of `completion`; None if there is none.

    Raises:
        InvalidArgument: the adapter fails the canary. The message contains the output, or the figure.
    """
    if canary.expect is not None:
        output = tokenizer.decode([token for delta in deltas for token in delta.token_ids])
        # Some tokenizers drop a space at the start of a text, and others do not.
        if not output.lstrip().startswith(canary.expect.lstrip()):
            raise InvalidArgument(
                f"CanaryFailed: the output is {output[:200]!r}, and must start with {canary.expect[:200]!r}"
            )
        return None
    num_prompt_tokens = len(tokenizer.encode(canary.prompt))
    positions = next(delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None)
    logprobs = [position[0][1] for position in positions[num_prompt_tokens - 1 :]]
    if not logprobs:
        raise InvalidArgument("canary.completion: has no tokens; use a longer text")
    mean = sum(logprobs) / len(logprobs)
    if not mean >= (canary.minLogprob or 0.0):
        raise InvalidArgument(
            f"CanaryFailed: the completion has the mean log probability {mean:.4g}, and at least "
            f"{canary.minLogprob:g} is required"
        )
    return mean
