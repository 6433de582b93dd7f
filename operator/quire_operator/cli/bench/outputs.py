# SPDX-License-Identifier: Apache-2.0
"""Compares outputs under load with those of the same prompts alone. Pure functions.

Both are greedy with the same seed, so they are equal on a server that is batch-invariant. On other servers, the results
of a step depend on its batch by rounding: where two tokens are almost equally likely, the other one can win, and the
rest of the text is another one. This is not an error. Any other difference is.
"""

from dataclasses import dataclass, field
from enum import StrEnum

from quire_operator.cli.bench.client import Outcome

MAX_TIE = 0.5
"""Largest difference of two log probabilities that rounding can reverse. Two neighbours of bfloat16 near 30
differ by 0.125."""
_CONTEXT_CHARS = 40


class Comparison(StrEnum):
    """How an output compares."""

    SAME = "same"
    NEAR_TIE = "near tie"
    DIFFERENT = "different"


@dataclass(slots=True)
class OutputCheck:
    """The result of all comparisons."""

    num_same: int = 0
    num_near_ties: int = 0
    num_different: int = 0
    examples: list[str] = field(default_factory=list)
    """Descriptions of different outputs."""

    @property
    def num_compared(self) -> int:
        return self.num_same + self.num_near_ties + self.num_different

    def add(self, alone: Outcome, loaded: Outcome, load: str) -> None:
        """Compare the outputs of one prompt. Failed requests are counted elsewhere."""
        if loaded.error is not None:
            return
        match compare(alone, loaded):
            case Comparison.SAME:
                self.num_same += 1
            case Comparison.NEAR_TIE:
                self.num_near_ties += 1
            case Comparison.DIFFERENT:
                self.num_different += 1
                self.examples.append(_describe(alone, loaded, load))


def compare(alone: Outcome, loaded: Outcome) -> Comparison:
    """Compare the outputs of one prompt."""
    if alone.text == loaded.text and alone.num_output_tokens == loaded.num_output_tokens:
        return Comparison.SAME
    for first, second in zip(alone.tokens, loaded.tokens, strict=False):
        if first.text != second.text:
            best, other = first.top_logprobs.get(first.text), first.top_logprobs.get(second.text)
            is_tie = best is not None and other is not None and best - other <= MAX_TIE
            return Comparison.NEAR_TIE if is_tie else Comparison.DIFFERENT
    return Comparison.DIFFERENT


def count_problem(outcome: Outcome) -> str | None:
    """Return what is wrong with the number of tokens of an output; None if nothing is."""
    wanted, got = outcome.request.max_tokens, outcome.num_output_tokens
    if got > wanted or (outcome.finish_reason == "length" and got != wanted):
        return f"model {outcome.request.model}: {got} tokens instead of {wanted}, finish_reason {outcome.finish_reason}"
    return None


def _describe(alone: Outcome, loaded: Outcome, load: str) -> str:
    same = next(
        (i for i, (a, b) in enumerate(zip(alone.text, loaded.text, strict=False)) if a != b),
        min(len(alone.text), len(loaded.text)),
    )
    first, second = (text[same : same + _CONTEXT_CHARS] for text in (alone.text, loaded.text))
    return f"{load}, model {alone.request.model}: after {same} characters, {first!r} alone and {second!r} under load"
