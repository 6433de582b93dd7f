# SPDX-License-Identifier: Apache-2.0
"""Comparison of tokens with a reference that rounds differently.

Two tokens are a near tie if their log probabilities differ by less than the rounding of float32 in a model. The order
of such tokens depends on the processor and on the build of torch, so it is not part of the contract. The values are.
"""

from collections.abc import Sequence

from torch import Tensor

NEAR_TIE = 1e-4
"""Largest difference of two log probabilities that can have either order. The differences between processors that were
seen in tests are below 1e-5."""


def assert_top_tokens(token_ids: Sequence[int], logprobs: Tensor) -> None:
    """Assert that these are the most likely tokens, the most likely one first.

    Args:
        logprobs: [vocab_size], of the reference.
    """
    assert len(set(token_ids)) == len(token_ids)
    if not token_ids:
        return
    differences = logprobs[list(token_ids)] - logprobs.topk(len(token_ids)).values
    assert differences.abs().max() < NEAR_TIE, (token_ids, logprobs.topk(len(token_ids)))


def assert_greedy_tokens(token_ids: Sequence[int], expected: Sequence[int], logprobs: Tensor) -> int:
    """Assert that the tokens equal those of the reference up to its first near tie, if they take its other side.

    Args:
        logprobs: [num_tokens, vocab_size], of the reference after each of its tokens.

    Returns:
        The number of positions at which both have the same context, so that their log probabilities can be compared.
    """
    assert len(token_ids) == len(expected)
    for i, (token, reference) in enumerate(zip(token_ids, expected, strict=True)):
        if token != reference:
            assert logprobs[i, reference] - logprobs[i, token] < NEAR_TIE, (i, token_ids, expected)
            return i + 1
    return len(token_ids)
