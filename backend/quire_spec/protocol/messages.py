# SPDX-License-Identifier: Apache-2.0
"""Messages between the processes of a pod. Each is a frozen dataclass, and framing.py encodes it.

The sender of a GenerateRequest or SequenceRequest chooses an id that is unique on the connection. The first message on
a connection is Hello. If a process closes a connection while requests are open on it, the other process cancels these
requests or reports them as failed.
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
    """First message on a connection. It identifies the client."""

    role: str
    """frontend, text or supervisor."""
    model: str = ""
    """Name of the server model if the client is a frontend."""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """frontend -> text: asks the text process to run a request. The text process answers with OutputDeltas. The last
    delta is final."""

    id: int
    model: str
    """The model name that the client sent. It is the served name or the name of an adapter."""
    prompt: str | None
    prompt_token_ids: list[int] | None
    params: dict[str, Any]
    """SamplingParams.to_mapping()."""
    stream: bool
    """If false, the text process sends a single delta, which contains the complete output."""
    cache_salt: str | None = None
    priority: int = 0
    """A request with a lower number runs first. The number must be 0 unless scheduling_policy is priority."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to a text prompt. An example is the token that begins a
    sequence."""
    return_prompt_token_ids: bool = False
    """Whether the first delta contains the token ids of the prompt."""
    return_token_bytes: bool = False
    """If this is true and the text of a token is not valid UTF-8, the token's entry in logprobs also contains the exact
    bytes of the token."""
    chat: dict[str, Any] | None = None
    """A conversation that replaces the prompt: {messages, tools, documents, add_generation_prompt,
    continue_final_message, template_kwargs}.

    The text process converts it to a prompt with the chat template of the checkpoint.
    """
    api_key_name: str = ""
    """Name of the API key that the client used. Metrics report it. Empty if no keys are configured."""
    parsing: dict[str, Any] | None = None
    """OutputParsing as JSON. If it is set, the deltas contain parsed events instead of text. If it is None, the deltas
    contain text."""
    stream_interval: int = 1
    """In a stream, a delta contains this number of output tokens. The first token and the end of the output are sent
    without waiting for more tokens."""


@dataclass(frozen=True, slots=True)
class CancelRequests:
    """frontend -> text: the client disconnected, and the text process must not send any more deltas for these ids."""

    ids: list[int]


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """frontend -> text: the frontend rejected a request that was invalid. The text process counts these rejections in a
    metric."""

    code: str


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New part of one output of a request.

    A delta is the last one of its request if it has an error code. It is also the last one if it has a finish_reason
    and other_outputs_pending is False.
    """

    id: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """stop or length."""
    cumulative_logprob: float | None = None
    logprobs: list[dict[str, dict[str, Any]]] | None = None
    """For each new token, a dict in vLLM's form. It maps a token id to {logprob, rank, decoded_token}."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    """Number of output tokens so far. The tokens of this delta are counted, too."""
    error_code: str | None = None
    error: str = ""
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
    """One entry for each token of the prompt. It has the same form as an entry of logprobs. The entry of the first
    token is null. Only one delta of a request contains this list."""
    index: int = 0
    """Index of this output among the outputs of the request."""
    other_outputs_pending: bool = False
    """True while the request has other outputs that are not finished."""
    stop_reason: int | str | None = None
    """The stop string or stop token that ended the output. None if it ended with an end-of-sequence token."""
    num_cached_tokens: int = 0
    """Number of prompt tokens that were found in the prefix cache."""
    prompt_token_ids: list[int] | None = None
    """Token ids of the prompt. Only requests with return_prompt_token_ids have them, and only in one delta."""
    retry_after_s: float | None = None
    """If a limit rejected the request, it can succeed after this number of seconds. None for other errors."""
    parsed: list[list[Any]] | None = None
    """Events from parsed_output.encode_events. They replace the text if the request has `parsing`."""
    num_reasoning_tokens: int = 0
    """Number of reasoning tokens in the output so far. It is counted only if the request has `parsing`."""

    @property
    def final(self) -> bool:
        """True if this is the last delta of a request."""
        return (self.finish_reason is not None and not self.other_outputs_pending) or self.error_code is not None


def merge_deltas(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Combine successive deltas of one output into a single delta."""
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
    """text -> frontend: new parts of the outputs of one or more requests."""

    deltas: list[OutputDelta]


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """text -> core: asks the core to run a sequence."""

    id: int
    prompt_token_ids: list[int]
    params: dict[str, Any]
    adapter_digest: AdapterDigest | None = None
    cache_salt: str | None = None
    bad_word_ids: list[list[int]] = field(default_factory=list)
    """The words of params.bad_words, each as a list of token ids."""
    parent_id: int | None = None
    """Id of the parent.

    This is an earlier SequenceRequest that has the same prompt, adapter and salt. This sequence waits until the parent
    is prefilled, and then shares the parent's KV blocks. If the parent ends before it is completely prefilled, this
    sequence computes the prompt itself.
    """
    priority: int = 0
    """A sequence with a lower number runs first. The number must be 0 unless scheduling_policy is priority."""
    grammar: str | None = None
    """Grammar that the output must match. The text process has already compiled it successfully. None allows any
    output."""
    begin_after_token_ids: list[int] = field(default_factory=list)
    """The grammar begins after these output tokens. If the list is empty, it applies from the first output token."""
    reasoning_marks: list[list[int]] = field(default_factory=list)
    """Token ids of the start mark and of the end mark of the reasoning.

    They are needed for params.thinking_token_budget. The start mark is empty if the output already begins inside the
    reasoning. The list is empty if the request has no budget.
    """


@dataclass(frozen=True, slots=True)
class AbortSequences:
    """text -> core: the core must stop these sequences and must not send any more results for them."""

    ids: list[int]


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """New tokens of a sequence. The last delta of a sequence has a finish_reason or an error_code."""

    id: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[list[list[float]]] | None = None
    """For each new token, a list of [token id, logprob, rank]. The first item is the sampled token, and the others are
    the most likely tokens."""
    error_code: str | None = None
    error: str = ""
    prompt_logprobs: list[list[list[float]]] | None = None
    """One list for each token of the prompt except the first. It has the same form as a list in logprobs. Only the
    first delta of a request contains these lists."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens that were found in the prefix cache. Only the first delta of a sequence contains it."""
    cumulative_logprob: float | None = None
    """Sum of the log probabilities of all tokens. It is set only for a beam search, which returns each output in one
    delta."""
    num_drafts: int = 0
    """Number of drafts that were verified for this sequence."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """State of the scheduler after a step. The counters start at zero when the core starts."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Number of KV blocks that are in use by sequences. A cached block that no sequence uses counts as free."""
    prefix_cache_queries: int = 0
    """Number of prompt tokens that were looked up in the prefix cache."""
    prefix_cache_hits: int = 0
    """Number of prompt tokens that were found in the prefix cache."""
    num_preemptions: int = 0
    num_block_copies: int = 0
    """Number of KV blocks that were copied because of copy-on-write."""
    num_swapped: int = 0
    """Number of sequences that wait while their KV blocks are in host memory."""
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_steps: int = 0
    num_adapter_evictions: int = 0
    slot_adapters: list[AdapterDigest] = field(default_factory=list)
    """Digests of the adapters that are in adapter slots."""
    num_host_adapters: int = 0
    """Number of adapters that are in host memory."""
    host_adapter_bytes: int = 0
    num_drafts: int = 0
    """Number of drafts that were verified in steps."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    accepted_draft_tokens_per_position: list[int] = field(default_factory=list)
    """Number of accepted draft tokens for each position in a draft. Empty if speculative decoding is not used."""


@dataclass(frozen=True, slots=True)
class AdapterEvent:
    """Reports that an adapter was loaded to host memory or to an adapter slot, or was evicted from its slot."""

    kind: str
    """Kind of the event: host, slot or evicted.

    - "host": the adapter was loaded to host memory.
    - "slot": the adapter was loaded to an adapter slot.
    - "evicted": the adapter was removed from its adapter slot.
    """
    digest: AdapterDigest
    duration_s: float = 0.0
    """Number of seconds that it took to load the adapter, including the wait in the queue."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """core -> text: the results of one step."""

    results: list[SequenceDelta]
    started: list[tuple[int, float]]
    """The sequences that ran for the first time in this step. Each item contains the id of a sequence, and the number
    of seconds for which it waited in the core."""
    stats: SchedulerStats
    adapter_events: list[AdapterEvent] = field(default_factory=list)
    """The adapter events that happened since the previous step."""


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """Asks the receiver to call `method`.

    The supervisor sends it to the text process or to the core. The frontend sends it to the text process, and the text
    process sends it to the core. The receiver answers with one ControlResponse, which has the same id.
    """

    id: int
    method: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ControlResponse:
    """The result of a ControlRequest, or its error."""

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
    """Return a function that returns the values of a message's fields in order."""
    first_name, *other_names = (field.name for field in dataclasses.fields(cls))
    # If there is only one name, attrgetter returns a value instead of a tuple.
    return attrgetter(first_name, *other_names) if other_names else lambda message: (getattr(message, first_name),)


# The getters are built only once, because thousands of frames are encoded per second.
_FIELD_GETTERS = {cls: _field_getter(cls) for cls in (*_MESSAGE_TYPES.values(), *_NESTED_TYPES)}

_SEQUENCE_DELTA_DEFAULTS = tuple(field.default for field in dataclasses.fields(SequenceDelta))[2:]


def encode_message(message: IpcMessage) -> list[Any]:
    """Convert a message to JSON. The result is a list that contains the name of the type and then the fields in order.
    A list is used because it can be parsed faster than an object."""
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
    """Decode a list that `encode_message` returned.

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
        raise Internal(f"the decoder expected a message, got {str(payload)[:80]!r}") from error
    return message


def _encode_sequence_delta(result: SequenceDelta) -> tuple[Any, ...]:
    """Encode a delta without the default values at its end. Nearly all deltas contain only token ids."""
    values = _FIELD_GETTERS[SequenceDelta](result)
    return values if values[2:] != _SEQUENCE_DELTA_DEFAULTS else values[:2]
