# SPDX-License-Identifier: Apache-2.0
"""Generation: one open request in the text process, from admission to its last event.

Turns the engine core's results (token ids) into what the client gets (events with text), and nothing else: no socket,
no clock, no queue. The desk owns it.
"""

from dataclasses import replace
from typing import Any

from quire_engine.admission import Admitted
from quire_engine.text import Detokenizer, Tokenizer
from quire_spec.messages import Event, Generate, SequenceResult, Submit

_MIN_LOGPROB = -9999.0
"""Stands for the logarithm of zero, which JSON cannot write; vLLM's clients know this number."""


class Generation:
    """State of one request. Times are monotonic seconds that the desk fills in."""

    def __init__(self, id: int, submit: Submit, admitted: Admitted, arrival: float) -> None:
        self.id = id
        """Of the sequence in the engine core."""
        self.client_id = submit.id
        """Of the request on its frontend's connection."""
        self.params = admitted.params
        self.adapter = admitted.adapter
        self.arrival = arrival
        self.last_token: float | None = None
        """When the last tokens came."""
        self.submitted = False
        """The engine core has it."""
        self.started = False
        """It has run in a step: it is not queued any more."""
        self.num_input_tokens = 0
        self.num_output_tokens = 0
        self.stopped = False
        """A stop string ended it; the engine core may not know."""
        self._digest = admitted.digest
        self._cache_salt = submit.cache_salt
        self._priority = submit.priority
        self._stream = submit.stream
        self._tokenizer: Tokenizer | None = None
        self._detokenizer: Detokenizer | None = None
        self._cumulative_logprob: float | None = 0.0 if self.params.logprobs is not None else None
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[dict[str, dict[str, Any]]] = []
        self._prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None

    def begin(
        self, prompt_token_ids: list[int], tokenizer: Tokenizer | None, bad_word_ids: list[list[int]]
    ) -> Generate:
        """The prompt is tokenized: the message that has the engine core run it."""
        self.submitted = True
        self.num_input_tokens = len(prompt_token_ids)
        self._tokenizer = tokenizer if self.params.detokenize else None
        self._detokenizer = Detokenizer(tokenizer, self.params, prompt_token_ids)
        return Generate(
            self.id,
            prompt_token_ids,
            self.params.to_mapping(),
            self._digest,
            self._cache_salt,
            bad_word_ids,
            priority=self._priority,
        )

    def take(self, result: SequenceResult) -> Event | None:
        """What the client gets for a result of the engine core; None while everything is kept for one final event."""
        if result.error_code is not None:
            return self.failed(result.error_code, result.error)
        assert self._detokenizer is not None, "a result before the request was sent"
        finished = result.finish_reason is not None
        delta = self._detokenizer.push(result.token_ids, finished, stop_token=result.finish_reason == "stop")
        self.stopped = delta.stopped
        self.num_output_tokens += delta.num_tokens
        event = Event(
            self.client_id,
            delta.text,
            result.token_ids[: delta.num_tokens],
            "stop" if delta.stopped else result.finish_reason,
            logprobs=self._logprobs_of(result, delta.num_tokens),
            cumulative_logprob=self._cumulative_logprob,
            prompt_logprobs=self._prompt_logprobs_of(result),
            num_input_tokens=self.num_input_tokens,
            num_output_tokens=self.num_output_tokens,
        )
        return event if self._stream else self._collected(event)

    def failed(self, code: str, message: str) -> Event:
        """The final event of a request that failed."""
        event = Event(self.client_id, error_code=code, error=message)
        return replace(event, num_input_tokens=self.num_input_tokens, num_output_tokens=self.num_output_tokens)

    def _collected(self, event: Event) -> Event | None:
        self._texts.append(event.text)
        self._token_ids += event.token_ids
        self._logprobs += event.logprobs or []
        self._prompt_logprobs = event.prompt_logprobs or self._prompt_logprobs
        if not event.final:
            return None
        logprobs = None if event.logprobs is None else self._logprobs
        return replace(
            event,
            text="".join(self._texts),
            token_ids=self._token_ids,
            logprobs=logprobs,
            prompt_logprobs=self._prompt_logprobs,
        )

    def _logprobs_of(self, result: SequenceResult, num_tokens: int) -> list[dict[str, dict[str, Any]]] | None:
        if self.params.logprobs is None:
            return None
        positions = []
        for entries in (result.logprobs or [])[:num_tokens]:
            assert self._cumulative_logprob is not None
            self._cumulative_logprob += max(entries[0][1], _MIN_LOGPROB)
            positions.append(self._position(entries))
        return positions

    def _prompt_logprobs_of(self, result: SequenceResult) -> list[dict[str, dict[str, Any]] | None] | None:
        """What the core tells of the prompt's tokens; the first has nothing before it to be likely after."""
        if result.prompt_logprobs is None:
            return None
        return [None, *map(self._position, result.prompt_logprobs)]

    def _position(self, entries: list[list[float]]) -> dict[str, dict[str, Any]]:
        return {str(int(token_id)): self._entry(token_id, p, rank) for token_id, p, rank in entries}

    def _entry(self, token_id: float, logprob: float, rank: float) -> dict[str, Any]:
        text = self._tokenizer.token_text(int(token_id)) if self._tokenizer else None
        return {"logprob": max(logprob, _MIN_LOGPROB), "rank": int(rank), "decoded_token": text}
