# SPDX-License-Identifier: Apache-2.0
"""Generation: one open request in the text process, from admission to its last event.

Turns the engine core's results (token ids) into what the client gets (events with text), and nothing else: no socket,
no clock, no queue. A request with several outputs is several sequences of the core. The desk owns it.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from quire_engine.admission import Admitted
from quire_engine.completion import MIN_LOGPROB, Completion, Part, best, fan_out
from quire_engine.text import Tokenizer
from quire_spec.protocol.messages import GenerateRequest, OutputDelta, SequenceDelta, SequenceRequest

_Position = dict[str, dict[str, Any]]


class Generation:
    """State of one request. Times are monotonic seconds that the desk fills in."""

    def __init__(self, first_id: int, submit: GenerateRequest, admitted: Admitted, arrival: float) -> None:
        self.params = admitted.params
        self.ids = range(first_id, first_id + self.params.num_sequences)
        """Of its sequences in the engine core, one for each output."""
        self.client_id = submit.id
        """Of the request on its frontend's connection."""
        self.adapter = admitted.adapter
        self.arrival = arrival
        self.submitted = False
        """The engine core has it."""
        self.started = False
        """It has run in a step: it is not queued any more."""
        self.over = False
        """The desk has closed it."""
        self.num_input_tokens = 0
        self.completions: list[Completion] = []
        """Its outputs, from `begin` on, in the order of `ids`."""
        self._digest = admitted.digest
        self._cache_salt = submit.cache_salt
        self._priority = submit.priority
        self._stream = submit.stream
        self._tokenizer: Tokenizer | None = None
        self._parts = [_Parts() for _ in self.ids]
        self._prompt_logprobs: list[_Position | None] | None = None

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs so far."""
        return sum(completion.num_tokens for completion in self.completions)

    def begin(
        self, prompt_token_ids: list[int], tokenizer: Tokenizer | None, bad_word_ids: list[list[int]]
    ) -> list[SequenceRequest]:
        """The prompt is tokenized: the messages that have the engine core run it."""
        self.submitted = True
        self.num_input_tokens = len(prompt_token_ids)
        self._tokenizer = tokenizer if self.params.detokenize else None
        first = SequenceRequest(
            self.ids.start,
            prompt_token_ids,
            {},
            self._digest,
            self._cache_salt,
            bad_word_ids,
            priority=self._priority,
        )
        # As the core has them: it may be asked for log probabilities that only the choice of the best needs.
        params = self.params.child_params(0)
        self.completions = [Completion(params, self._tokenizer, prompt_token_ids) for _ in self.ids]
        return fan_out(first, self.params)

    def completion(self, id: int) -> Completion:
        """The output that a sequence of the core makes."""
        return self.completions[id - self.ids.start]

    def take(self, result: SequenceDelta) -> list[OutputDelta]:
        """What the client gets for a result of the engine core; nothing while it is kept for the end."""
        if result.error_code is not None:
            return [self.failed(result.error_code, result.error)]
        part = self.completion(result.id).take(result)
        if result.prompt_logprobs is not None:
            # The first token of a prompt has nothing before it to be likely after.
            self._prompt_logprobs = [None, *map(self._position, result.prompt_logprobs)]
        index = result.id - self.ids.start
        if self._stream:
            return [self._event(index, part)]
        self._parts[index].add(part)
        if self.completions[index].finish_reason is None:
            return []
        if self.params.num_sequences == self.params.n:
            return [self._event(index, self._parts[index].joined())]
        return self._best() if self._all_finished() else []

    def failed(self, code: str, message: str) -> OutputDelta:
        """The final event of a request that failed."""
        event = OutputDelta(self.client_id, error_code=code, error=message)
        return replace(event, num_input_tokens=self.num_input_tokens, num_output_tokens=self.num_output_tokens)

    def _event(self, index: int, part: Part) -> OutputDelta:
        completion = self.completions[index]
        wanted = self.params.logprobs is not None
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return OutputDelta(
            self.client_id,
            part.text,
            part.token_ids,
            completion.finish_reason,
            logprobs=[self._position(entries) for entries in part.logprobs or []] if wanted else None,
            cumulative_logprob=completion.cumulative_logprob if wanted else None,
            num_input_tokens=self.num_input_tokens,
            num_output_tokens=completion.num_tokens,
            prompt_logprobs=prompt_logprobs,
            index=index,
            other_outputs_pending=not self._all_finished(),
        )

    def _best(self) -> list[OutputDelta]:
        """The likeliest outputs, renumbered."""
        chosen = best(self.completions, self.params.n)
        events = [replace(self._event(i, self._parts[i].joined()), index=rank) for rank, i in enumerate(chosen)]
        return [replace(event, other_outputs_pending=event is not events[-1]) for event in events]

    def _all_finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    def _position(self, entries: list[list[float]]) -> _Position:
        return {str(int(token_id)): self._entry(token_id, p, rank) for token_id, p, rank in entries}

    def _entry(self, token_id: float, logprob: float, rank: float) -> dict[str, Any]:
        text = self._tokenizer.token_text(int(token_id)) if self._tokenizer else None
        return {"logprob": max(MIN_LOGPROB, logprob), "rank": int(rank), "decoded_token": text}


@dataclass(slots=True)
class _Parts:
    """Of an output that is handed out as a whole."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[list[float]]] = field(default_factory=list)

    def add(self, part: Part) -> None:
        self.texts.append(part.text)
        self.token_ids += part.token_ids
        self.logprobs += part.logprobs or []

    def joined(self) -> Part:
        return Part("".join(self.texts), self.token_ids, self.logprobs)
