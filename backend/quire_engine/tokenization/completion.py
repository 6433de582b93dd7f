# SPDX-License-Identifier: Apache-2.0
"""Completion: one output of a request, from results of the engine core to text. A request has one, or several.

Knows no socket and no client's format. The text process and the offline LLM both make their outputs of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from quire_engine.tokenization.detokenizer import IncrementalDetokenizer
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import SequenceDelta, SequenceRequest

MIN_LOGPROB = -9999.0
"""Stands for the logarithm of zero and for NaN, which JSON cannot write; vLLM's clients know this number. As the first
argument of `max` it is taken where the second is NaN."""


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """What one result added to an output."""

    text: str
    token_ids: list[int]
    logprobs: list[list[list[float]]] | None
    """As SequenceResult has them; None unless the request asks."""


class CompletionState:
    """State of one output."""

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        prompt_token_ids: Sequence[int],
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.num_tokens = 0
        self.finish_reason: str | None = None
        """None while it goes on."""
        self.stop_reason: int | str | None = None
        """The stop string or stop token that ended it; none of `eos_token_ids`."""
        self.cumulative_logprob = 0.0 if params.logprobs is not None else None
        """Of the tokens so far; None unless the core tells log probabilities."""
        self.last_token_time: float | None = None
        """When the last tokens came, in monotonic seconds; the desk's to fill in."""
        self._ignore_eos = params.ignore_eos
        self._eos_token_ids = eos_token_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer, params, prompt_token_ids)

    def update(self, result: SequenceDelta) -> CompletionDelta:
        """The core's next tokens for this output."""
        stop_token = result.finish_reason == "stop"
        text_delta = self._detokenizer.update(result.token_ids, result.finish_reason is not None, stop_token)
        token_ids = result.token_ids[: text_delta.num_tokens]
        self.num_tokens += text_delta.num_tokens
        self.finish_reason = "stop" if text_delta.stopped else result.finish_reason
        if text_delta.stopped:
            self.stop_reason = text_delta.stop_string
        elif stop_token and (self._ignore_eos or token_ids[-1] not in self._eos_token_ids):
            self.stop_reason = token_ids[-1]
        logprobs = None
        if self.cumulative_logprob is not None:
            logprobs = (result.logprobs or [])[: text_delta.num_tokens]
            self.cumulative_logprob += sum(max(MIN_LOGPROB, entries[0][1]) for entries in logprobs)
        return CompletionDelta(text_delta.text, token_ids, logprobs)


def fan_out(base_request: SequenceRequest, params: SamplingParams) -> list[SequenceRequest]:
    """The core's requests for each output of a request: ids from `first`'s on, the others forks of it."""
    return [
        replace(
            base_request,
            id=base_request.id + index,
            params=params.child_params(index).to_mapping(),
            parent_id=base_request.id if index else None,
        )
        for index in range(params.num_sequences)
    ]


def select_best_of(completions: Iterable[CompletionState], n: int) -> list[int]:
    """Indices of the `count` most likely ones, the likeliest first."""

    def negative_logprob(entry: tuple[int, CompletionState]) -> float:
        return -(entry[1].cumulative_logprob or 0.0)

    return [index for index, _ in sorted(enumerate(completions), key=negative_logprob)[:n]]
