# SPDX-License-Identifier: Apache-2.0
"""Messages between a pod's processes, as frozen dataclasses. framing.py encodes them.

The sender of a GenerateRequest or SequenceRequest chooses its id, which is unique on the connection. The first message
of a connection is Hello. When a connection ends, the remaining process cancels or fails all open requests on it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from quire_spec.constants import AdapterDigest
from quire_spec.errors import Internal


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a connection: identifies the client."""

    role: str
    """frontend, text or supervisor."""
    model: str = ""
    """Name of the server model, if the client is a frontend."""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """frontend -> text: run this request. The text process answers with OutputDeltas; the last delta is final."""

    id: int
    model: str
    """Model name of the request: the served name or an adapter name."""
    prompt: str | None
    prompt_token_ids: list[int] | None
    params: dict[str, Any]
    """SamplingParams.to_mapping()."""
    stream: bool
    """False: one final delta with the complete output."""
    cache_salt: str | None = None
    priority: int = 0
    """Priority; a lower number runs first. It must be 0 unless scheduling_policy is priority."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens, such as the beginning of a sequence, to a text prompt."""
    return_prompt_token_ids: bool = False
    """Return the token ids of the prompt in the first delta."""
    return_token_bytes: bool = False
    """Add the exact bytes to each entry of logprobs whose text is not valid UTF-8."""
    chat: dict[str, Any] | None = None
    """Conversation in place of a prompt: {messages, tools, documents, add_generation_prompt, continue_final_message,
    template_kwargs}. The text process renders it with the chat template of the checkpoint."""
    api_key_name: str = ""
    """Name of the API key that the client used, for the metrics; empty without keys."""
    parsing: dict[str, Any] | None = None
    """OutputParsing as JSON: the deltas then contain parsed events instead of text. None: the deltas contain text."""
    stream_interval: int = 1
    """Number of output tokens in a delta of a stream. The first token and the end of the output are sent at once."""


@dataclass(frozen=True, slots=True)
class CancelRequests:
    """frontend -> text: the client disconnected; send no more deltas for these ids."""

    ids: list[int]


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """frontend -> text: the frontend rejected an invalid request. The text process counts the rejection in a metric."""

    code: str


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New content of one output of a request.

    The last delta of a request has an error code, or a finish_reason and other_outputs_pending False.
    """

    id: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """stop or length."""
    cumulative_logprob: float | None = None
    logprobs: list[dict[str, dict[str, Any]]] | None = None
    """For each new token: token id -> {logprob, rank, decoded_token}, in vLLM's form."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    """Number of output tokens so far, including the tokens of this delta."""
    error_code: str | None = None
    error: str = ""
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
    """For each token of the prompt, an entry in the form of logprobs; null for the first token. Only one delta of a
    request contains the entries."""
    index: int = 0
    """Index of the output within the request."""
    other_outputs_pending: bool = False
    """True while other outputs of the request are not finished."""
    stop_reason: int | str | None = None
    """Stop string or stop token that ended the output; None for an end-of-sequence token."""
    num_cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache."""
    prompt_token_ids: list[int] | None = None
    """Token ids of the prompt. Only one delta of a request with return_prompt_token_ids contains the ids."""
    retry_after_s: float | None = None
    """Seconds after which a request that was rejected by a limit can succeed; None for other errors."""
    parsed: list[list[Any]] | None = None
    """Result of parsed_output.encode_events, which replaces the text if the request has `parsing`."""
    num_reasoning_tokens: int = 0
    """Number of reasoning tokens in the output so far, if the request has `parsing`."""

    @property
    def final(self) -> bool:
        """True for the last delta of a request."""
        return (self.finish_reason is not None and not self.other_outputs_pending) or self.error_code is not None


def merge_deltas(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Merge successive deltas of one output into one delta."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    logprobs = [delta.logprobs for delta in deltas if delta.logprobs is not None]
    return dataclasses.replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[position for positions in logprobs for position in positions] if logprobs else None,
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None),
        prompt_token_ids=next((delta.prompt_token_ids for delta in deltas if delta.prompt_token_ids), None),
        parsed=None if last.parsed is None else [event for delta in deltas for event in delta.parsed or ()],
    )


@dataclass(frozen=True, slots=True)
class OutputDeltas:
    """text -> frontend: new output of one or more requests."""

    deltas: list[OutputDelta]


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """text -> core: run this sequence."""

    id: int
    prompt_token_ids: list[int]
    params: dict[str, Any]
    adapter_digest: AdapterDigest | None = None
    cache_salt: str | None = None
    bad_word_ids: list[list[int]] = field(default_factory=list)
    """params.bad_words as lists of token ids."""
    parent_id: int | None = None
    """Id of the parent: an earlier SequenceRequest with the same prompt, adapter and salt. This sequence waits for the
    parent's prefill and shares its KV blocks. If the parent ends before its prefill is complete, this sequence computes
    the prompt itself."""
    priority: int = 0
    """Priority; a lower number runs first. It must be 0 unless scheduling_policy is priority."""
    grammar: str | None = None
    """Grammar of the output, which the text process has compiled without an error; None allows any output."""
    begin_after_token_ids: list[int] = field(default_factory=list)
    """Output tokens after which the grammar begins; empty: the grammar begins with the output."""
    reasoning_marks: list[list[int]] = field(default_factory=list)
    """Token ids of the start mark and the end mark of the reasoning, for params.thinking_token_budget. The start mark
    is empty if the output begins inside the reasoning. Without a budget the list is empty."""


@dataclass(frozen=True, slots=True)
class AbortSequences:
    """text -> core: stop these sequences and send no more results for them."""

    ids: list[int]


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """New tokens of one sequence. The last delta of a sequence has a finish_reason or an error_code."""

    id: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[list[list[float]]] | None = None
    """For each new token: [token id, logprob, rank] of the sampled token, then of the most likely tokens."""
    error_code: str | None = None
    error: str = ""
    prompt_logprobs: list[list[list[float]]] | None = None
    """For each prompt token except the first: entries in the form of logprobs. Only the first delta of a request
    contains the entries."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens found in the prefix cache; only the first delta of a sequence contains it."""
    cumulative_logprob: float | None = None
    """Sum of the log probabilities of all tokens; only for beam search, which returns each output in one delta."""
    num_drafts: int = 0
    """Number of drafts of the sequence that steps have verified."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """State of the scheduler after a step; counters start at zero when the core starts."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Number of KV blocks that sequences reference. Cached blocks without a reference are free blocks."""
    prefix_cache_queries: int = 0
    """Number of prompt tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Number of prompt tokens that were found in the prefix cache."""
    num_preemptions: int = 0
    num_block_copies: int = 0
    """Number of copy-on-write copies of KV blocks."""
    num_swapped: int = 0
    """Number of waiting sequences whose KV blocks are in host memory."""
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_steps: int = 0
    num_adapter_evictions: int = 0
    slot_adapters: list[AdapterDigest] = field(default_factory=list)
    """Digests of the adapters in adapter slots."""
    num_host_adapters: int = 0
    """Number of adapters in host memory."""
    host_adapter_bytes: int = 0
    num_drafts: int = 0
    """Number of drafts that steps have verified."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    accepted_draft_tokens_per_position: list[int] = field(default_factory=list)
    """Number of accepted draft tokens at each position of a draft; empty without speculative decoding."""


@dataclass(frozen=True, slots=True)
class AdapterEvent:
    """An adapter was loaded to host memory or to an adapter slot, or was evicted from its slot."""

    kind: str
    """host: loaded to host memory; slot: loaded to an adapter slot; evicted: removed from its adapter slot."""
    digest: AdapterDigest
    duration_s: float = 0.0
    """Duration of the load in seconds, including the time in the queue."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """core -> text: results of one step."""

    results: list[SequenceDelta]
    started: list[tuple[int, float]]
    """For each sequence that ran for the first time in this step: its id, and the seconds that it waited in the
    core."""
    stats: SchedulerStats
    adapter_events: list[AdapterEvent] = field(default_factory=list)
    """Adapter events since the previous step."""


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """supervisor -> text or core, frontend -> text, text -> core: call `method`. The receiver answers with one
    ControlResponse that has the same id."""

    id: int
    method: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ControlResponse:
    """Result or error of a ControlRequest."""

    id: int
    result: Any = None
    error_code: str | None = None
    error: str = ""


IpcMessage = (
    Hello
    | GenerateRequest
    | CancelRequests
    | RequestRejected
    | OutputDeltas
    | SequenceRequest
    | AbortSequences
    | StepResult
    | ControlRequest
    | ControlResponse
)

_MESSAGE_TYPES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        Hello,
        GenerateRequest,
        CancelRequests,
        RequestRejected,
        OutputDeltas,
        SequenceRequest,
        AbortSequences,
        StepResult,
        ControlRequest,
        ControlResponse,
    )
}

_NESTED_TYPES = (OutputDelta, SequenceDelta, SchedulerStats, AdapterEvent)


def _field_getter(cls: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a function that reads the fields of a message in order."""
    first_name, *other_names = (field.name for field in dataclasses.fields(cls))
    # With a single name, attrgetter does not return a tuple.
    return attrgetter(first_name, *other_names) if other_names else lambda message: (getattr(message, first_name),)


# Built once: thousands of frames are encoded per second.
_FIELD_GETTERS = {cls: _field_getter(cls) for cls in (*_MESSAGE_TYPES.values(), *_NESTED_TYPES)}

_SEQUENCE_DELTA_DEFAULTS = tuple(field.default for field in dataclasses.fields(SequenceDelta))[2:]


def encode_message(message: IpcMessage) -> list[Any]:
    """Return the JSON form of a message: a list of the type name and the fields, in order. A list is parsed faster than
    an object."""
    if isinstance(message, OutputDeltas):
        return ["OutputDeltas", list(map(_FIELD_GETTERS[OutputDelta], message.deltas))]
    if isinstance(message, StepResult):
        results = [_encode_sequence_delta(result) for result in message.results]
        encoded_events = (
            [list(map(_FIELD_GETTERS[AdapterEvent], message.adapter_events))] if message.adapter_events else []
        )
        return [
            "StepResult",
            results,
            message.started,
            _FIELD_GETTERS[SchedulerStats](message.stats),
            *encoded_events,
        ]
    return [type(message).__name__, *_FIELD_GETTERS[type(message)](message)]


def decode_message(payload: Any) -> IpcMessage:
    """Decode the result of `encode_message`.

    Raises:
        Internal: `payload` is not a message.
    """
    try:
        name, *values = payload
        if name == "OutputDeltas":
            return OutputDeltas([OutputDelta(*delta) for delta in values[0]])
        if name == "StepResult":
            results, started, stats, *encoded_events = values
            adapter_events = [AdapterEvent(*event) for event in encoded_events[0]] if encoded_events else []
            deltas = [SequenceDelta(*result) for result in results]
            return StepResult(deltas, [(i, s) for i, s in started], SchedulerStats(*stats), adapter_events)
        message: IpcMessage = _MESSAGE_TYPES[name](*values)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Internal(f"not a message: {str(payload)[:80]!r}") from error
    return message


def _encode_sequence_delta(result: SequenceDelta) -> tuple[Any, ...]:
    """Encode a delta; default values at its end are omitted, because nearly all deltas contain only token ids."""
    values = _FIELD_GETTERS[SequenceDelta](result)
    return values if values[2:] != _SEQUENCE_DELTA_DEFAULTS else values[:2]
