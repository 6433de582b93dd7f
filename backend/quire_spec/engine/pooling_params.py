# SPDX-License-Identifier: Apache-2.0
"""What a request wants instead of an output: an embedding of its prompt, or the scores of a classifier."""

import math
from collections.abc import Sequence
from operator import mul
from typing import Literal

from msgspec import Struct

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
MAX_POOLED_BYTES = 64 * 2**20
"""Maximum size of the numbers that a request gets."""
NOT_FINITE, TOO_LARGE = b"", b"!"
"""Take the place of numbers that contain NaN or infinity, or that have more than MAX_POOLED_BYTES."""


class PoolingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of a request that ends after its prompt. The names are those of vLLM."""

    task: PoolingTask = "embed"
    """embed and classify return a vector for the prompt, token_embed and token_classify one for each token."""
    dimensions: int | None = None
    """Return only this number of elements of an embedding, normalized again. None: all of them."""
    use_activation: bool = True
    """Normalize the embedding, or convert the scores to probabilities, as the checkpoint does it. If false, return the
    raw numbers."""

    @property
    def is_by_token(self) -> bool:
        """Whether each token has a vector."""
        return self.task.startswith("token_")


def too_large_error(num_tokens: int) -> str:
    """Return the message for a text whose tokens have too many numbers."""
    return (
        f"input: the vectors of its {num_tokens} tokens have more than {MAX_POOLED_BYTES // 2**20} MiB in float32; "
        "send a shorter text, or use truncate_prompt_tokens"
    )


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the score of two embeddings; 0 if one of them has no direction."""
    norms = math.hypot(*a) * math.hypot(*b)
    return sum(map(mul, a, b)) / norms if norms else 0.0
