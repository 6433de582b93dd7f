# SPDX-License-Identifier: Apache-2.0
"""State of one open request, from its admission to its final output delta.

Converts the engine core's results (token ids) into output deltas (with text). The core runs one sequence for each
output of the request. This module has no socket, clock or queue. The request manager of the text process and the
offline `LLM` own the states.
"""

from dataclasses import dataclass, field

from msgspec.structs import replace

from quire_engine.parsers.output_parser import OutputParser
from quire_engine.requests.processor import PreparedRequest
from quire_engine.requests.request_adapter import RequestAdapter
from quire_engine.tokenization.completion import MIN_LOGPROB, CompletionDelta, CompletionState, fan_out, select_best_of
from quire_engine.tokenization.tokenizer import Tokenizer
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import Code
from quire_spec.protocol.kv_transfer_params import PromptKeys
from quire_spec.protocol.messages import (
    GenerateRequest,
    OutputDelta,
    RankedToken,
    SequenceDelta,
    SequenceRequest,
    TokenLogprob,
)
from quire_spec.protocol.parsed_output import Event, join_neighbours


@dataclass(frozen=True, slots=True)
class RequestSummary:
    """Counts and times of a request that has ended, for the metrics. All times are in seconds."""

    params: SamplingParams
    num_input_tokens: int
    num_output_tokens: int
    """Tokens of all outputs."""
    max_output_tokens: int
    """Tokens of the longest output."""
    latency_s: float
    """From the arrival to the end."""
    prefill_s: float
    """From the start of the first step to the first token."""
    decode_s: float
    """From the first token to the last one."""


class RequestState:
    """State of one request. All times are in monotonic seconds, and come from the owner."""

    def __init__(
        self,
        first_sequence_id: int,
        request: GenerateRequest,
        adapter: RequestAdapter,
        arrival_time: float,
    ) -> None:
        self.request = replace(request, prompt=None, prompt_token_ids=None, chat=None, images=[])
        """The request without its prompt, which can be large."""
        self.is_chat = request.chat is not None
        self.params = request.params
        self.sequence_ids = range(first_sequence_id, first_sequence_id + self.params.num_results)
        """Ids of the request's sequences in the engine core. There is one sequence for each output."""
        self.adapter = adapter
        self.arrival_time = arrival_time
        self.submit_time: float | None = None
        """Time when the sequences of the request were sent to the engine core; None before that."""
        self.start_time: float | None = None
        """Start of the first step that ran one of the sequences; None while the request is queued."""
        self.adapter_wait_s = 0.0
        """Seconds for which the request waited for its adapter while it was queued."""
        self.first_token_time: float | None = None
        self.num_input_tokens = 0
        self.num_cached_tokens = 0
        """Number of prompt tokens whose KV blocks were in the prefix cache."""
        self.prompt_keys: PromptKeys | None = None
        """Keys of the KV blocks of the prompt, if the request is for a prefill pod and its prompt is computed."""
        self.completions: list[CompletionState] = []
        """The outputs of the request, in the order of `sequence_ids`. The list is empty until the request is
        submitted."""
        self._prompt_token_ids: list[int] | None = None
        self._tokenizer: Tokenizer | None = None
        self._parsers: list[OutputParser] = []
        """The parser of each output. The list is empty if outputs are returned as text."""
        self._collected_outputs = [_CollectedOutput() for _ in self.sequence_ids]
        """The outputs so far. They are empty if the request is streamed."""
        self._prompt_logprobs: list[list[TokenLogprob] | None] | None = None

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens of all outputs so far."""
        return sum(completion.num_tokens for completion in self.completions)

    def summary(self, now: float) -> RequestSummary:
        """Return the counts and times of the request, which ends now. If it has no token, the phases take 0 s."""
        token_counts = [completion.num_tokens for completion in self.completions]
        last_times = [c.last_token_time for c in self.completions if c.last_token_time is not None]
        start_time, first_token_time = self.start_time, self.first_token_time
        return RequestSummary(
            self.params,
            self.num_input_tokens,
            sum(token_counts),
            max(token_counts, default=0),
            now - self.arrival_time,
            0.0 if start_time is None or first_token_time is None else first_token_time - start_time,
            0.0 if first_token_time is None else max(last_times) - first_token_time,
        )

    def submit(
        self, prepared: PreparedRequest, tokenizer: Tokenizer | None, eos_token_ids: frozenset[int], now: float
    ) -> list[SequenceRequest]:
        """Mark the request as submitted and return the messages that make the engine core run it.

        If `prepared` creates parsers, the deltas contain parsed events.
        """
        self.submit_time = now
        self.num_input_tokens = len(prepared.prompt_token_ids)
        self._tokenizer = tokenizer if self.params.detokenize else None
        # Outputs are converted with the parameters that the core uses. These can request log probabilities that only
        # `best_of` needs.
        params = self.params.child_params(0)
        if prepared.create_parser is not None:
            # The parser needs the marks, which can be special tokens. It omits all other special tokens.
            params = replace(params, skip_special_tokens=False)
            self._parsers = [prepared.create_parser() for _ in self.sequence_ids]
        self.completions = [
            CompletionState(params, self._tokenizer, prepared.prompt_token_ids, eos_token_ids)
            for _ in self.sequence_ids
        ]
        self._prompt_token_ids = prepared.prompt_token_ids if self.request.return_prompt_token_ids else None
        transfer = self.request.kv_transfer_params
        base_request = SequenceRequest(
            self.sequence_ids.start,
            prepared.prompt_token_ids,
            self.params,
            self.adapter.digest,
            self.request.cache_salt,
            prepared.bad_word_ids,
            priority=self.request.priority,
            grammar=prepared.grammar,
            begin_after_token_ids=prepared.begin_after_token_ids,
            reasoning_marks=prepared.reasoning_marks,
            client=self.request.client,
            adapter_parts=[(part.digest, part.weight) for part in self.adapter.parts if part.digest is not None],
            pooling=self.request.pooling,
            second_text_start=prepared.second_text_start,
            images=prepared.images,
            kv_source=self.request.kv_source,
            kv_source_required=self.request.kv_source_required,
            kv_source_keys=None if transfer is None or not transfer.do_remote_prefill else transfer.quire,
            returns_prompt_keys=transfer is not None and bool(transfer.do_remote_decode),
        )
        return fan_out(base_request)

    def completion(self, sequence_id: int) -> CompletionState:
        """Return the state of the output that a sequence generates."""
        return self.completions[sequence_id - self.sequence_ids.start]

    def update(self, result: SequenceDelta, now: float) -> list[OutputDelta]:
        """Return the deltas for a result of the engine core.

        The list is empty if the result is collected and will be returned later.
        """
        if result.error_code is not None:
            return [self.to_error_delta(result.error_code, result.error)]
        completion = self.completion(result.id)
        if result.pooled is not None:
            completion.finish_reason = result.finish_reason
            self.num_cached_tokens = result.num_cached_tokens or 0
            return [self._to_pooled_delta(result)]
        delta = completion.update(result)
        if delta.token_ids:
            completion.last_token_time = now
            if self.first_token_time is None:
                self.first_token_time = now
        if result.prompt_logprobs is not None:
            # The first token of a prompt has no log probability, because no token precedes it.
            self._prompt_logprobs = [None, *map(self._logprobs, result.prompt_logprobs)]
        index = result.id - self.sequence_ids.start
        events = self._parse(index, delta)
        if index == 0 and result.num_cached_tokens is not None:
            self.num_cached_tokens, self.prompt_keys = result.num_cached_tokens, result.prompt_keys
        if self.request.stream:
            return [self._to_output_delta(index, delta, events)]
        output = self._collected_outputs[index]
        output.add(delta, events)
        if completion.finish_reason is None:
            return []
        if self.params.num_results == self.params.n:
            return [self._to_output_delta(index, *output.complete())]
        return self._best_outputs() if self._all_finished() else []

    def to_error_delta(self, code: Code, message: str) -> OutputDelta:
        """Return the final delta of a failed request."""
        output_delta = OutputDelta(self.request.id, error_code=code, error=message)
        return replace(output_delta, num_input_tokens=self.num_input_tokens, num_output_tokens=self.num_output_tokens)

    def _to_pooled_delta(self, result: SequenceDelta) -> OutputDelta:
        return OutputDelta(
            self.request.id,
            finish_reason=result.finish_reason,
            num_input_tokens=self.num_input_tokens,
            num_cached_tokens=self.num_cached_tokens,
            prompt_token_ids=self._prompt_token_ids,
            pooled=result.pooled,
        )

    def _parse(self, index: int, delta: CompletionDelta) -> list[Event]:
        """Return the parsed events of a delta. The list is empty if the output is returned as text."""
        if not self._parsers:
            return []
        is_finished = self.completions[index].finish_reason is not None
        return self._parsers[index].feed(delta.token_ids, delta.text, is_finished)

    def _to_output_delta(self, index: int, delta: CompletionDelta, events: list[Event]) -> OutputDelta:
        completion = self.completions[index]
        has_logprobs = self.params.logprobs is not None
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        prompt_token_ids, self._prompt_token_ids = self._prompt_token_ids, None
        return OutputDelta(
            self.request.id,
            "" if self._parsers else delta.text,
            delta.token_ids,
            completion.finish_reason,
            logprobs=[self._logprobs(entries) for entries in delta.logprobs or []] if has_logprobs else None,
            cumulative_logprob=completion.cumulative_logprob if has_logprobs or self.params.use_beam_search else None,
            num_input_tokens=self.num_input_tokens,
            num_output_tokens=completion.num_tokens,
            prompt_logprobs=prompt_logprobs,
            index=index,
            other_outputs_pending=not self._all_finished(),
            stop_reason=completion.stop_reason,
            num_cached_tokens=self.num_cached_tokens,
            prompt_token_ids=prompt_token_ids,
            parsed=events if self._parsers else None,
            num_reasoning_tokens=self._parsers[index].num_reasoning_tokens if self._parsers else 0,
        )

    def _best_outputs(self) -> list[OutputDelta]:
        """Return the `n` most likely outputs, numbered from 0."""
        best_indices = select_best_of(self.completions, self.params.n)
        output_deltas = [
            replace(self._to_output_delta(i, *self._collected_outputs[i].complete()), index=output_index)
            for output_index, i in enumerate(best_indices)
        ]
        return [
            replace(output_delta, other_outputs_pending=output_delta is not output_deltas[-1])
            for output_delta in output_deltas
        ]

    def _all_finished(self) -> bool:
        return all(completion.finish_reason is not None for completion in self.completions)

    def _logprobs(self, entries: list[RankedToken]) -> list[TokenLogprob]:
        # The sampled token can also be one of the most likely tokens.
        return [self._logprob(*entry) for entry in {entry[0]: entry for entry in entries}.values()]

    def _logprob(self, token_id: int, logprob: float, rank: int) -> TokenLogprob:
        text = self._tokenizer.token_text(token_id) if self._tokenizer else None
        token_bytes = None
        if self.request.return_token_bytes and self._tokenizer and text is not None and "\ufffd" in text:
            token_bytes = bytes(self._tokenizer.token_bytes.bytes_of(token_id))
        return TokenLogprob(token_id, max(MIN_LOGPROB, logprob), rank, text, token_bytes)


@dataclass(slots=True)
class _CollectedOutput:
    """Collects the deltas of an output that is returned as a whole."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[RankedToken]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    def add(self, delta: CompletionDelta, events: list[Event]) -> None:
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.events += events

    def complete(self) -> tuple[CompletionDelta, list[Event]]:
        """Return the complete output."""
        return CompletionDelta("".join(self.texts), self.token_ids, self.logprobs), join_neighbours(self.events)
