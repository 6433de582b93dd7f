# SPDX-License-Identifier: Apache-2.0
"""Shapes for which there is a CUDA graph, and the choice of a shape for a step. Pure arithmetic.

A graph of single tokens computes steps in which each sequence has one token. A mixed graph computes steps in which
sequences have prompts, chunks of prompts, or a token with drafts. Only the number of tokens of a mixed graph is fixed:
the lengths of the spans are inputs of the graph.
"""

from typing import NamedTuple

SIZES_PER_DOUBLING = 4
ADAPTER_SIZES_PER_DOUBLING = 2
"""Graphs with adapters have fewer sizes, so that they add at most 60 % to the capture time. A row of padding reads no
weights, no adapter and almost no keys, so it costs little if memory bandwidth is the limit.
"""
MAX_MIXED_TOKENS = 512
"""Maximum tokens of a mixed graph. Larger steps need no graph: the host launches them faster than the device computes
them (Llama-3.1-8B: the matrix products of 512 tokens take about 17 ms on an H200).
"""
_SMALL_MIXED_SIZES = (16, 32, 64)
"""Below 64 tokens the time to read the weights dominates, so few sizes are enough; 16 and 32 are for drafts."""


class GraphShape(NamedTuple):
    """Shape of the steps that one graph computes."""

    num_tokens: int
    is_mixed: bool
    """Whether spans can have several tokens."""
    has_adapters: bool

    def num_spans(self, max_num_seqs: int) -> int:
        """Return the number of spans. The last span of a mixed graph contains the padding; unused spans are empty."""
        return min(self.num_tokens - 1, max_num_seqs) + 1 if self.is_mixed else self.num_tokens


class GraphShapes:
    """All shapes of an engine."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int, has_adapters: bool) -> None:
        """Choose the shapes for steps of at most `max_num_seqs` sequences and `max_num_tokens` tokens."""
        self._shapes = {
            (is_mixed, adapters): [
                GraphShape(size, is_mixed, adapters)
                for size in (
                    mixed_sizes(max_num_tokens, per_doubling) if is_mixed else decode_sizes(max_num_seqs, per_doubling)
                )
            ]
            for is_mixed in (True, False)
            for adapters, per_doubling in ((True, ADAPTER_SIZES_PER_DOUBLING), (False, SIZES_PER_DOUBLING))
            if has_adapters or not adapters
        }

    @property
    def kinds(self) -> list[list[GraphShape]]:
        """One ascending list of shapes for each kind of graph. The kind that needs the most memory comes first."""
        return [shapes for shapes in self._shapes.values() if shapes]

    def select(self, num_tokens: int, *, is_mixed: bool, has_adapters: bool) -> GraphShape | None:
        """Return the smallest shape for a step; None if the step has too many tokens, or adapters although no graph
        supports adapters."""
        shapes = self._shapes.get((is_mixed, has_adapters), [])
        return next((shape for shape in shapes if shape.num_tokens >= num_tokens), None)


def decode_sizes(max_num_seqs: int, sizes_per_doubling: int = SIZES_PER_DOUBLING) -> tuple[int, ...]:
    """Return the batch sizes that get a graph of single tokens: 1, 2, 4, 8, then `sizes_per_doubling` per doubling.

    With 4 sizes per doubling, at most a fifth of a batch is padding, and there are 24 sizes up to 256. With 2 sizes per
    doubling, at most a third is padding, and there are 14 sizes.
    """
    return _limit((1, 2, 4, *_double(8, max_num_seqs, sizes_per_doubling)), max_num_seqs)


def mixed_sizes(max_num_tokens: int, sizes_per_doubling: int = SIZES_PER_DOUBLING) -> tuple[int, ...]:
    """Return the numbers of tokens that get a mixed graph: 16, 32, 64, then `sizes_per_doubling` per doubling up to
    512. Empty if a step has at most one token."""
    largest = min(max_num_tokens, MAX_MIXED_TOKENS)
    sizes = (*_SMALL_MIXED_SIZES[:-1], *_double(_SMALL_MIXED_SIZES[-1], largest, sizes_per_doubling))
    return _limit(sizes, largest) if largest > 1 else ()


def _double(base: int, largest: int, sizes_per_doubling: int) -> list[int]:
    """Return ascending sizes from `base` to at least `largest`: between a size and its double there are
    `sizes_per_doubling` equal steps."""
    sizes = [base]
    while base < largest:
        sizes += [base + base * step // sizes_per_doubling for step in range(1, sizes_per_doubling + 1)]
        base *= 2
    return sizes


def _limit(sizes: tuple[int, ...], largest: int) -> tuple[int, ...]:
    return (*(size for size in sizes if size < largest), largest)
