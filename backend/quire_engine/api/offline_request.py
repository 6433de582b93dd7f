# SPDX-License-Identifier: Apache-2.0
"""One prompt of an offline run: creates the engine requests for its outputs and collects their results in a
RequestOutput. `LLM` owns it."""

import time

from quire_engine.api.outputs import CompletionOutput, Logprob, LoRARequest, RequestMetrics, RequestOutput
from quire_engine.tokenization.completion import CompletionDelta, CompletionState, fan_out, select_best_of
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import error_from_code
from quire_spec.protocol.messages import RankedToken, SequenceDelta, SequenceRequest


class OfflineRequest:
    """A prompt and its outputs."""

    def __init__(
        self,
        base_request: SequenceRequest,
        prompt: str | None,
        params: SamplingParams,
        lora_request: LoRARequest | None,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        """`base_request` is the engine request for one output; `params` replaces its parameters."""
        self.sequence_requests = fan_out(base_request)
        """Engine requests. Each output has a request of its own, but all outputs of a beam search share one request."""
        self.num_input_tokens = len(base_request.prompt_token_ids)
        self._prompt = prompt
        self._prompt_token_ids = base_request.prompt_token_ids
        self._params = params
        self._lora_request = lora_request
        self._tokenizer = tokenizer if params.detokenize else None
        core_params = params.child_params(0)
        self._completions = {
            sequence_id: CompletionState(core_params, self._tokenizer, base_request.prompt_token_ids, eos_token_ids)
            for sequence_id in range(base_request.id, base_request.id + params.num_results)
        }
        self._deltas: dict[int, list[CompletionDelta]] = {sequence_id: [] for sequence_id in self._completions}
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._num_cached_tokens: int | None = None
        self._arrival_time, self._queued_ts = time.time(), time.monotonic()
        self._scheduled_ts = self._first_token_ts = self._last_token_ts = self._queued_ts

    @property
    def sequence_ids(self) -> list[int]:
        """Ids by which the engine's results identify the outputs."""
        return list(self._completions)

    @property
    def unfinished_sequence_ids(self) -> list[int]:
        """Ids of the engine requests that have not finished."""
        return [
            sequence_id for sequence_id, completion in self._completions.items() if completion.finish_reason is None
        ]

    @property
    def num_output_tokens(self) -> int:
        """Total number of tokens of all outputs."""
        return sum(completion.num_tokens for completion in self._completions.values())

    def mark_started(self, queued_s: float) -> None:
        """Record that a step ran a sequence of this request for the first time.

        The step started `queued_s` seconds after the request arrived.
        """
        if self._scheduled_ts == self._queued_ts:
            self._scheduled_ts += queued_s

    def update(self, result: SequenceDelta) -> bool:
        """Add new tokens to an output. Return True if a stop string ended the output.

        The caller must then abort the sequence: the engine core does not search for stop strings.

        Raises:
            QuireError: the engine reported an error.
        """
        if result.error_code is not None:
            raise error_from_code(result.error_code, result.error)
        if result.token_ids:
            self._last_token_ts = time.monotonic()
            if self._first_token_ts == self._queued_ts:
                self._first_token_ts = self._last_token_ts
        if result.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *map(self._logprobs_by_token, result.prompt_logprobs)]
        if result.num_cached_tokens is not None and self._num_cached_tokens is None:
            self._num_cached_tokens = result.num_cached_tokens
        completion = self._completions[result.id]
        self._deltas[result.id].append(completion.update(result))
        return completion.finish_reason is not None and result.finish_reason is None

    def to_request_output(self) -> RequestOutput:
        """Return the finished request. If best_of exceeds n, the most likely outputs come first."""
        sequence_ids = self.sequence_ids
        if self._params.num_results > self._params.n:
            sequence_ids = [sequence_ids[i] for i in select_best_of(self._completions.values(), self._params.n)]
        return RequestOutput(
            request_id=str(self.sequence_requests[0].id),
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[self._completion_output(index, sequence_id) for index, sequence_id in enumerate(sequence_ids)],
            finished=True,
            lora_request=self._lora_request,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
            metrics=RequestMetrics(
                self._arrival_time,
                self._queued_ts,
                self._scheduled_ts,
                self._first_token_ts,
                self._last_token_ts,
                self.num_output_tokens,
            ),
        )

    def _completion_output(self, index: int, sequence_id: int) -> CompletionOutput:
        completion, deltas = self._completions[sequence_id], self._deltas[sequence_id]
        has_logprobs = self._params.logprobs is not None
        logprobs = [self._logprobs_by_token(entries) for delta in deltas for entries in delta.logprobs or []]
        return CompletionOutput(
            index=index,
            text="".join(delta.text for delta in deltas),
            token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
            cumulative_logprob=completion.cumulative_logprob if has_logprobs or self._params.use_beam_search else None,
            logprobs=logprobs if has_logprobs else None,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            lora_request=self._lora_request,
        )

    def _logprobs_by_token(self, entries: list[RankedToken]) -> dict[int, Logprob]:
        token_text = self._tokenizer.token_text if self._tokenizer is not None else lambda token_id: None
        return {token_id: Logprob(logprob, rank, token_text(token_id)) for token_id, logprob, rank in entries}
