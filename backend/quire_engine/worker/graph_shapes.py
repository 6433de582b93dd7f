# SPDX-License-Identifier: Apache-2.0
"""Defines the shapes for which there are CUDA graphs, and chooses the shape for a step. Pure arithmetic.

A graph of single tokens computes steps in which each sequence has one token. A mixed graph computes steps in which
sequences have prompts, chunks of prompts, or a token that is followed by draft tokens. The number of tokens in a mixed
graph is fixed. The lengths of its spans are not fixed, because they are inputs of the graph.
"""

from typing import NamedTuple

SIZES_PER_DOUBLING = 4
ADAPTER_SIZES_PER_DOUBLING = 2
"""Number of sizes per doubling for graphs with adapters. It is lower than for other graphs, so that adapters add at
most 60 % to the capture time. Fewer sizes lead to more padding. If memory bandwidth is the limit, padding costs little,
because a row of padding does not read weights or adapters, and it reads almost no keys.
"""
MAX_MIXED_TOKENS = 512
"""Maximum number of tokens in a mixed graph. Larger steps do not need a graph, because the host launches them faster
than the device computes them. For example, the matrix products of Llama-3.1-8B for 512 tokens take about 17 ms on an
H200.
"""
_SMALL_MIXED_SIZES = (16, 32, 64)
"""With fewer than 64 tokens, most of the time is spent on reading the weights. Therefore, few sizes are enough. The
sizes 16 and 32 are meant for drafts."""


class GraphShape(NamedTuple):
    """The shape of the steps that one graph can compute."""

    num_tokens: int
    is_mixed: bool
    """True if spans can have several tokens."""
    has_adapters: bool

    def num_spans(self, max_num_seqs: int) -> int:
        """Return the number of spans.

        In a mixed graph, the last span contains the padding. Unused spans are empty.
        """
        return min(self.num_tokens - 1, max_num_seqs) + 1 if self.is_mixed else self.num_tokens


class GraphShapes:
    """All shapes of an engine."""

    def __init__(self, max_num_seqs: int, max_num_tokens: int, has_adapters: bool) -> None:
        """Choose shapes for steps with at most `max_num_seqs` sequences and `max_num_tokens` tokens."""
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
        """Lists of shapes, one for each kind of graph.

        Each list is in ascending order. The kind that needs the most memory is first.
        """
        return [shapes for shapes in self._shapes.values() if shapes]

    def select(self, num_tokens: int, *, is_mixed: bool, has_adapters: bool) -> GraphShape | None:
        """Return the smallest shape that can compute a step.

        Return None if the step has too many tokens, or if it has adapters and there are no graphs with adapters.
        """
        shapes = self._shapes.get((is_mixed, has_adapters), [])
        return next((shape for shape in shapes if shape.num_tokens >= num_tokens), None)


def decode_sizes(max_num_seqs: int, sizes_per_doubling: int = SIZES_PER_DOUBLING) -> tuple[int, ...]:
    """Return the batch sizes for which a graph of single tokens is captured.

    The sizes are 1, 2, 4 and 8. Above 8, there are `sizes_per_doubling` equal steps from a size to its double. With 4
    sizes per doubling, at most a fifth of a batch is padding, and there are 24 sizes up to 256. With 2 sizes per
    doubling, at most a third is padding, and there are 14 sizes.
    """
    return _limit((1, 2, 4, *_double(8, max_num_seqs, sizes_per_doubling)), max_num_seqs)


def mixed_sizes(max_num_tokens: int, sizes_per_doubling: int = SIZES_PER_DOUBLING) -> tuple[int, ...]:
    """Return the numbers of tokens for which a mixed graph is captured.

    The numbers are 16, 32 and 64. Above 64, there are `sizes_per_doubling` equal steps from a number to its double, up
    to 512. The result is empty if a step has at most one token.
    """
    largest = min(max_num_tokens, MAX_MIXED_TOKENS)
    sizes = (*_SMALL_MIXED_SIZES[:-1], *_double(_SMALL_MIXED_SIZES[-1], largest, sizes_per_doubling))
    return _limit(sizes, largest) if largest > 1 else ()


def _double(base: int, largest: int, sizes_per_doubling: int) -> list[int]:
    """Return ascending sizes from `base` to at least `largest`.

    Between a size and its double, the sizes increase in `sizes_per_doubling` equal steps.
    """
    sizes = [base]
    while base < largest:
        sizes += [base + base * step // sizes_per_doubling for step in range(1, sizes_per_doubling + 1)]
        base *= 2
    return sizes


def _limit(sizes: tuple[int, ...], largest: int) -> tuple[int, ...]:
    return (*(size for size in sizes if size < largest), largest)
