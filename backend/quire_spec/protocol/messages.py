# SPDX-License-Identifier: Apache-2.0
"""The messages between a pod's processes, as frozen values. frames.py carries them.

Ids are chosen by the sender of Submit or Generate and are unique on its connection. A connection's first message is
Hello. When a connection ends, everything its peer had open on it is over: the side that stays cancels or fails it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from quire_spec.errors import Internal


@dataclass(frozen=True, slots=True)
class Hello:
    """Who is at the other end. Role: frontend, text or supervisor."""

    role: str
    model: str = ""
    """The server model that a frontend serves."""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """frontend -> text: generate. Answered by Events until one is final."""

    id: int
    model: str
    """Name that the client asked for: the served name, or an adapter's."""
    prompt: str | None
    prompt_token_ids: list[int] | None
    params: dict[str, Any]
    """SamplingParams.to_mapping()."""
    stream: bool
    """False asks for one final event with everything."""
    cache_salt: str | None = None
    priority: int = 0
    """Lower runs first; other than 0 only where scheduling_policy is priority."""


@dataclass(frozen=True, slots=True)
class CancelRequests:
    """frontend -> text: the client has gone; no more events are wanted for these ids."""

    ids: list[int]


@dataclass(frozen=True, slots=True)
class RequestRejected:
    """frontend -> text: a request was wrong and got its error; no Submit follows. For the metrics."""

    code: str


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What is new for one output of a request; the request's last when it has an error code, or a finish_reason and no
    other output goes on."""

    id: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """stop or length."""
    cumulative_logprob: float | None = None
    logprobs: list[dict[str, dict[str, Any]]] | None = None
    """New positions only: token id -> {logprob, rank, decoded_token}, as vLLM's."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    """Output tokens so far, those of this event included."""
    error_code: str | None = None
    error: str = ""
    prompt_logprobs: list[dict[str, dict[str, Any]] | None] | None = None
    """As logprobs, for each token of the prompt, null for the first; in one event of a request that asks."""
    index: int = 0
    """Of the output that this is about, among those of the request."""
    other_outputs_pending: bool = False
    """Other outputs of the request are not finished."""

    @property
    def final(self) -> bool:
        """True for the last event of a request."""
        return (self.finish_reason is not None and not self.other_outputs_pending) or self.error_code is not None


def merge_deltas(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """One event that says what `events`, successive ones of an output, say together."""
    last = deltas[-1]
    if len(deltas) == 1:
        return last
    with_logprobs = [event.logprobs for event in deltas if event.logprobs is not None]
    return dataclasses.replace(
        last,
        text="".join(event.text for event in deltas),
        token_ids=[token for event in deltas for token in event.token_ids],
        logprobs=[position for positions in with_logprobs for position in positions] if with_logprobs else None,
        prompt_logprobs=next((event.prompt_logprobs for event in deltas if event.prompt_logprobs), None),
    )


@dataclass(frozen=True, slots=True)
class OutputDeltas:
    """text -> frontend."""

    deltas: list[OutputDelta]


@dataclass(frozen=True, slots=True)
class SequenceRequest:
    """text -> core: run this sequence."""

    id: int
    prompt_token_ids: list[int]
    params: dict[str, Any]
    adapter_digest: str | None = None
    """Content digest."""
    cache_salt: str | None = None
    bad_word_ids: list[list[int]] = field(default_factory=list)
    """params.bad_words as runs of tokens."""
    parent_id: int | None = None
    """Id of an earlier Generate of the same prompt, adapter and salt: this one waits until that prompt is computed and
    shares it. A leader that is over by then costs nothing but the sharing."""
    priority: int = 0
    """Lower runs first; other than 0 only where scheduling_policy is priority."""


@dataclass(frozen=True, slots=True)
class AbortSequences:
    """text -> core: stop these sequences; no more results are wanted for them."""

    ids: list[int]


@dataclass(frozen=True, slots=True)
class SequenceDelta:
    """New tokens of one sequence; the last when finish_reason or error_code is set."""

    id: int
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: list[list[list[float]]] | None = None
    """Per new token: [token id, logprob, rank] for the token taken, then for the most likely ones."""
    error_code: str | None = None
    error: str = ""
    prompt_logprobs: list[list[list[float]]] | None = None
    """The same for the prompt's tokens but the first; comes with the first token, if the request asks."""
    num_cached_tokens: int | None = None
    """Prompt tokens that were found computed; comes with the first token."""


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """State of the scheduler after a step; counters count from the core's start."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Blocks that a live sequence holds; cached blocks that nobody holds count as free."""
    prefix_cache_queries: int = 0
    """Prompt tokens looked up."""
    prefix_cache_hits: int = 0
    """Prompt tokens found."""
    num_preemptions: int = 0
    num_block_copies: int = 0
    """Blocks copied because a sequence went on writing what others read."""
    num_swapped: int = 0
    """Waiting sequences of which host memory keeps what was computed."""
    num_host_blocks: int = 0
    num_used_host_blocks: int = 0
    num_swapped_out_blocks: int = 0
    num_swapped_in_blocks: int = 0
    num_steps: int = 0
    num_adapter_evictions: int = 0
    slot_adapters: list[str] = field(default_factory=list)
    """Digests of the adapters in device slots."""
    num_host_adapters: int = 0
    """Adapters in host memory."""
    host_adapter_bytes: int = 0


@dataclass(frozen=True, slots=True)
class AdapterEvent:
    """An adapter has come to host memory or to a slot, or has lost its slot to another one."""

    kind: str
    """host, slot or evicted."""
    digest: str
    duration_s: float = 0.0
    """That it took to come, waiting for others included."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """core -> text: what one step produced."""

    results: list[SequenceDelta]
    started_ids: list[int]
    """Sequences that this step ran for the first time: they no longer count as queued."""
    stats: SchedulerStats
    adapter_events: list[AdapterEvent] = field(default_factory=list)
    """Since the step before."""


@dataclass(frozen=True, slots=True)
class ControlRequest:
    """supervisor -> text or core: do `method`. Answered by one Reply with the same id."""

    id: int
    method: str
    args: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ControlResponse:
    """The answer to a Call."""

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
    """What reads the fields of a message, in order."""
    first_name, *other_names = (field.name for field in dataclasses.fields(cls))
    # With one name, attrgetter gives no tuple.
    return attrgetter(first_name, *other_names) if other_names else lambda message: (getattr(message, first_name),)


# Made once: frames are made thousands of times a second.
_FIELD_GETTERS = {cls: _field_getter(cls) for cls in (*_MESSAGE_TYPES.values(), *_NESTED_TYPES)}

_SEQUENCE_DELTA_DEFAULTS = tuple(field.default for field in dataclasses.fields(SequenceDelta))[2:]


def encode_message(message: IpcMessage) -> list[Any]:
    """JSON form: type name, then the fields in order. Shorter than an object and faster to read."""
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
            message.started_ids,
            _FIELD_GETTERS[SchedulerStats](message.stats),
            *encoded_events,
        ]
    return [type(message).__name__, *_FIELD_GETTERS[type(message)](message)]


def decode_message(payload: Any) -> IpcMessage:
    """Undo `payload_of`.

    Raises:
        Internal: not one of our messages.
    """
    try:
        name, *values = payload
        if name == "OutputDeltas":
            return OutputDeltas([OutputDelta(*event) for event in values[0]])
        if name == "StepResult":
            results, started, stats, *encoded_events = values
            adapter_events = [AdapterEvent(*move) for move in encoded_events[0]] if encoded_events else []
            return StepResult([SequenceDelta(*r) for r in results], started, SchedulerStats(*stats), adapter_events)
        message: IpcMessage = _MESSAGE_TYPES[name](*values)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Internal(f"not a message: {str(payload)[:80]!r}") from error
    return message


def _encode_sequence_delta(result: SequenceDelta) -> tuple[Any, ...]:
    """Nearly all are tokens and nothing else: defaults at the end are left out."""
    values = _FIELD_GETTERS[SequenceDelta](result)
    return values if values[2:] != _SEQUENCE_DELTA_DEFAULTS else values[:2]
