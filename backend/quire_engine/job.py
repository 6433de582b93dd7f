# SPDX-License-Identifier: Apache-2.0
"""Job: one prompt of an offline run, from the engine's requests to a RequestOutput. llm.py runs many of them."""

from collections.abc import Sequence

from quire_engine.completion import Completion, Part, best, fan_out
from quire_engine.outputs import CompletionOutput, Logprob, LoRARequest, RequestOutput
from quire_engine.text import Tokenizer
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import error_from_code
from quire_spec.protocol.messages import SequenceDelta, SequenceRequest


class Job:
    """A prompt and the outputs that are made of it."""

    def __init__(
        self,
        first: SequenceRequest,
        prompt: str | None,
        params: SamplingParams,
        lora: LoRARequest | None,
        tokenizer: Tokenizer | None,
        eos_token_ids: frozenset[int],
    ) -> None:
        """`first` is what the engine would be asked for one output; its params are taken from `params`."""
        self.requests = fan_out(first, params)
        """To the engine, the first one first."""
        self.num_input_tokens = len(first.prompt_token_ids)
        self._prompt = prompt
        self._prompt_token_ids = first.prompt_token_ids
        self._params = params
        self._lora = lora
        self._tokenizer = tokenizer if params.detokenize else None
        as_asked = params.child_params(0)
        self._completions = {
            request.id: Completion(as_asked, self._tokenizer, first.prompt_token_ids, eos_token_ids)
            for request in self.requests
        }
        self._parts: dict[int, list[Part]] = {request.id: [] for request in self.requests}
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._num_cached_tokens: int | None = None

    @property
    def unfinished(self) -> list[int]:
        """Ids of the requests whose output is not complete."""
        return [id for id, completion in self._completions.items() if completion.finish_reason is None]

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(completion.num_tokens for completion in self._completions.values())

    def take(self, result: SequenceDelta) -> bool:
        """Add new tokens to an output; True when a stop string has ended it, which the engine cannot see.

        Raises:
            QuireError: the engine could not go on with it.
        """
        if result.error_code is not None:
            raise error_from_code(result.error_code, result.error)
        if result.prompt_logprobs is not None:
            self._prompt_logprobs = [None, *map(self._position, result.prompt_logprobs)]
        if result.num_cached_tokens is not None and self._num_cached_tokens is None:
            self._num_cached_tokens = result.num_cached_tokens
        completion = self._completions[result.id]
        self._parts[result.id].append(completion.take(result))
        return completion.finish_reason is not None and result.finish_reason is None

    def output(self) -> RequestOutput:
        """The finished request; the likeliest outputs first if there are more than asked for."""
        ids = list(self._completions)
        if self._params.num_sequences > self._params.n:
            ids = [ids[i] for i in best(self._completions.values(), self._params.n)]
        return RequestOutput(
            request_id=str(self.requests[0].id),
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[self._completion_output(index, id) for index, id in enumerate(ids)],
            finished=True,
            lora_request=self._lora,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached_tokens,
        )

    def _completion_output(self, index: int, id: int) -> CompletionOutput:
        completion, parts = self._completions[id], self._parts[id]
        wanted = self._params.logprobs is not None
        return CompletionOutput(
            index=index,
            text="".join(part.text for part in parts),
            token_ids=[token for part in parts for token in part.token_ids],
            cumulative_logprob=completion.cumulative_logprob if wanted else None,
            logprobs=self._positions(parts) if wanted else None,
            finish_reason=completion.finish_reason,
            stop_reason=completion.stop_reason,
            lora_request=self._lora,
        )

    def _positions(self, parts: Sequence[Part]) -> list[dict[int, Logprob]]:
        return [self._position(entries) for part in parts for entries in part.logprobs or []]

    def _position(self, entries: list[list[float]]) -> dict[int, Logprob]:
        return {int(i): Logprob(p, int(rank), self._text(int(i))) for i, p, rank in entries}

    def _text(self, token_id: int) -> str | None:
        return self._tokenizer.token_text(token_id) if self._tokenizer is not None else None
