# SPDX-License-Identifier: Apache-2.0
"""Beam search of one request: decides which continuations become beams, which ones are outputs, and when the search
ends.

Policy only: this module uses tokens and scores, but no KV blocks, steps or devices. The beam scheduler calls it after
each step of the beams.

Source: `_beam_search` of transformers; this module gives the same outputs. The score of an output is the sum of its log
probabilities, divided by `length ** length_penalty`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from quire_engine.sequence import FinishReason, Logprob
from quire_engine.sequence import Sequence as Beam
from quire_engine.step.plan import BeamCandidate
from quire_spec.engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output."""

    token_ids: list[int]
    score: float
    """Score with the length penalty; higher is better."""
    cumulative_logprob: float
    finish_reason: FinishReason
    """The reason is LENGTH not only at the maximum length, but also if a stop string ended the output. The text process
    detects the stop string itself."""
    logprobs: list[list[Logprob]] | None


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam and the token that follows it."""

    beam: Beam
    candidate: BeamCandidate


def num_candidates(params: SamplingParams, num_stop_tokens: int) -> int:
    """Return the number of continuations that a step considers.

    The number is so large that at least `width` of these continuations do not end with a stop token, even if the
    continuations include every stop token of every beam.
    """
    return max(2, 1 + num_stop_tokens) * params.num_sequences


class BeamSearch:
    """State of one search: its finished outputs."""

    def __init__(self, first_beam: Beam) -> None:
        """`first_beam` is the sequence that contains the prompt, the sampling parameters and the limits."""
        params = first_beam.params
        self._first_beam = first_beam
        self._width = params.num_sequences
        self._num_candidates = num_candidates(params, len(first_beam.stop_token_ids))
        self._length_penalty = params.length_penalty
        self._early_stopping = params.early_stopping
        self._hypotheses: list[Hypothesis] = []
        self.is_finished = False

    def extend(self, continuations: Sequence[Continuation]) -> list[Continuation]:
        """Choose the next beams among the continuations of all beams, and return them, the best one first.

        If the search has ended, return an empty list.

        If there are no continuations, because no log probability is finite, the search ends with the outputs found so
        far.

        The best `width` continuations that do not end an output become beams. A continuation that ends an output is
        kept only if it is among the best `width` of all continuations. The best `width` outputs are kept.
        """
        # Python's sort is stable: among equal scores, the continuation of the better beam comes first.
        ranked = sorted(continuations, key=lambda c: -c.candidate.score)[: self._num_candidates]
        if not ranked:
            self.is_finished = True
            return []
        length = len(ranked[0].beam.output_token_ids) + 1
        tails: dict[Beam, bytes] = {}
        beams: list[Continuation] = []
        for rank, continuation in enumerate(ranked):
            reason = self._finish_reason(continuation, length, tails)
            if reason is not None and rank < self._width:
                self._hypotheses.append(self._hypothesis(continuation, length, reason))
            elif reason is None and len(beams) < self._width:
                beams.append(continuation)
        self._hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self._hypotheses[self._width :]
        self.is_finished = not beams or not self._can_improve(beams[0].candidate.score, length)
        return [] if self.is_finished else beams

    def best_outputs(self) -> list[Hypothesis]:
        """Return the `n` best outputs. The search can find fewer outputs if few tokens are allowed; in that case, the
        last output is repeated.
        """
        num_outputs = self._first_beam.params.n
        best = self._hypotheses[:num_outputs]
        return best + best[-1:] * (num_outputs - len(best))

    def _can_improve(self, best_score: float, length: int) -> bool:
        """Return whether the best beam can become better than the worst of the `width` best outputs."""
        if len(self._hypotheses) < self._width:
            return True
        if self._early_stopping is True:
            return False
        # The score of a longer output divides the same sum by a larger number. So with "never", the estimate assumes
        # the maximum length.
        if self._early_stopping == "never" and self._length_penalty > 0:
            length = self._first_beam.max_output_tokens
        return self._score(best_score, length) > self._hypotheses[-1].score

    def _finish_reason(self, continuation: Continuation, length: int, tails: dict[Beam, bytes]) -> FinishReason | None:
        beam, token_id = continuation.beam, continuation.candidate.token_id
        if token_id in beam.stop_token_ids and length > beam.params.min_tokens:
            return FinishReason.STOP
        if length == beam.max_output_tokens:
            return FinishReason.LENGTH
        if beam.stop_strings is not None:
            if beam not in tails:
                tails[beam] = beam.stop_strings.tail(beam.output_token_ids)
            if beam.stop_strings.is_completed_by(token_id, tails[beam], length):
                return FinishReason.LENGTH
        return None

    def _hypothesis(self, continuation: Continuation, length: int, reason: FinishReason) -> Hypothesis:
        beam, candidate = continuation.beam, continuation.candidate
        return Hypothesis(
            [*beam.output_token_ids, candidate.token_id],
            self._score(candidate.score, length),
            candidate.score,
            reason,
            None if candidate.logprobs is None else [*beam.output_logprobs, candidate.logprobs],
        )

    def _score(self, cumulative_logprob: float, length: int) -> float:
        return cumulative_logprob / math.pow(length, self._length_penalty)
