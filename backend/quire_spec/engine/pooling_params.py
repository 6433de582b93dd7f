# SPDX-License-Identifier: Apache-2.0
"""What a request wants instead of an output: an embedding of its prompt, or the scores of a classifier."""

import math
from collections.abc import Sequence
from operator import mul
from typing import Literal

from msgspec import Struct

PoolingTask = Literal["embed", "classify"]


class PoolingParams(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Parameters of a request that ends after its prompt. The names are those of vLLM."""

    task: PoolingTask = "embed"
    dimensions: int | None = None
    """Return only this number of elements of an embedding, normalized again. None: all of them."""
    use_activation: bool = True
    """Normalize the embedding, or convert the scores to probabilities, as the checkpoint does it. If false, return the
    raw numbers."""


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the score of two embeddings; 0 if one of them has no direction."""
    norms = math.hypot(*a) * math.hypot(*b)
    return sum(map(mul, a, b)) / norms if norms else 0.0
