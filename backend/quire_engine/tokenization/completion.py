# SPDX-License-Identifier: Apache-2.0
"""State of one output of a request: converts results of the engine core to text. A request has one or several outputs.

This module depends on neither sockets nor client formats. The text process and the offline LLM use it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from quire_engine.tokenization.detokenizer import IncrementalDetokenizer
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.messages import RankedToken, SequenceDelta, SequenceRequest

MIN_LOGPROB = -9999.0
"""This number replaces NaN and the logarithm of zero, because JSON cannot represent them. vLLM uses the same number. If
`max` is called with this number and NaN, this number must be the first argument, because `max` then returns it.
"""


@dataclass(frozen=True, slots=True)
class CompletionDelta:
    """Text and tokens that one result added to an output."""

    text: str
    token_ids: list[int]
    logprobs: list[list[RankedToken]] | None
    """Log probabilities in the format of `SequenceDelta.logprobs`; None unless requested."""


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
        """Reason why the output ended; None until it ends."""
        self.stop_reason: int | str | None = None
        """The stop string or the stop token that ended the output. None if a token in `eos_token_ids` ended it."""
        self.cumulative_logprob = 0.0 if params.logprobs is not None else None
        """Sum of the log probabilities of the tokens so far. It is known only if the core returns log probabilities or
        the output is a beam; otherwise, it is None.
        """
        self.last_token_time: float | None = None
        """Time in monotonic seconds at which the last tokens arrived. The state of the request sets it."""
        self._has_logprobs = params.logprobs is not None
        self._ignore_eos = params.ignore_eos
        self._eos_token_ids = eos_token_ids
        self._detokenizer = IncrementalDetokenizer(tokenizer, params, prompt_token_ids)

    def update(self, result: SequenceDelta) -> CompletionDelta:
        """Add the next tokens of the core."""
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
        if self._has_logprobs:
            assert self.cumulative_logprob is not None
            logprobs = (result.logprobs or [])[: text_delta.num_tokens]
            self.cumulative_logprob += sum(max(MIN_LOGPROB, entries[0][1]) for entries in logprobs)
        if result.cumulative_logprob is not None:
            self.cumulative_logprob = result.cumulative_logprob
        return CompletionDelta(text_delta.text, token_ids, logprobs)


def fan_out(base_request: SequenceRequest) -> list[SequenceRequest]:
    """Return one core request per output. The ids count up from the id of `base_request`; each later request is a fork
    of the first one.

    A beam search is one request; the ids of its outputs count up from the request's id.
    """
    params = base_request.params
    fork_images = [replace(image, tensors={}) for image in base_request.images]
    return [
        replace(
            base_request,
            images=fork_images if index else base_request.images,
            id=base_request.id + index,
            params=params.child_params(index),
            parent_id=base_request.id if index else None,
        )
        for index in range(1 if params.use_beam_search else params.num_sequences)
    ]


def select_best_of(completions: Iterable[CompletionState], n: int) -> list[int]:
    """Return the indices of the `n` most likely completions, the most likely first."""

    def negative_logprob(entry: tuple[int, CompletionState]) -> float:
        return -(entry[1].cumulative_logprob or 0.0)

    return [index for index, _ in sorted(enumerate(completions), key=negative_logprob)[:n]]
