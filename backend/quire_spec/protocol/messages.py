# SPDX-License-Identifier: Apache-2.0
"""Messages between the processes of a pod. Each is a frozen struct, and framing.py encodes it as MessagePack.

- A frontend (a stub, or the OpenAI front) sends GenerateRequest, CancelRequests, RequestRejected, FieldsIgnored and
  PrefillReported to the text process. The text process sends OutputDeltas to the frontend.
- The text process sends SequenceRequest and AbortSequences to the core. The core sends StepResult to the text process.
- A client of any server can send Call. The server answers with Reply or Failure.

The sender of a GenerateRequest, SequenceRequest or Call chooses an id that is unique on the connection. The first
message on a connection is Hello. If a process closes a connection while requests are open on it, the other process
cancels these requests or reports them as failed.

A message is encoded as an array: its tag, and then its fields in order. JSON values whose form Quire does not define
(tool schemas, documents, arguments and results of calls) are `msgspec.Raw`. The process that receives such a value from
a client bounds its size and depth.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal, Self

import msgspec

from quire_spec.constants import AdapterDigest
from quire_spec.engine.pooling_params import PoolingParams
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.errors import Code, InvalidArgument, QuireError, Unavailable, error_text
from quire_spec.protocol.kv_transfer_params import KVTransferParams, PromptKeys
from quire_spec.protocol.parsed_output import Event, OutputParsing

Role = Literal["stub", "openai", "text", "supervisor", "kv_peer"]
"""The kind of process that opens a connection."""


class Value(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of the values inside messages. The garbage collector does not track them, because they contain no cycles."""


class Message(Value, frozen=True):
    """Base of all messages. The tag of a message is the kind in the header of its frame."""

    @property
    def request_ids(self) -> Sequence[int]:
        """Ids of the requests or calls to which this message belongs. They are in the header of the frame. If the
        message cannot be encoded or decoded, only these requests fail."""
        return ()


class RequestMessage(Message, frozen=True):
    """Base of the messages that belong to one request, sequence or call."""

    id: Annotated[int, msgspec.Meta(ge=0)]
    """Id that its sender chose. It is unique on the connection. The headers of the answers contain it as an unsigned
    integer."""

    @property
    def request_ids(self) -> Sequence[int]:
        """The id."""
        return (self.id,)


class Hello(Message, frozen=True, tag=1):
    """First message on a connection. It identifies the client."""

    role: Role
    model: str = ""
    """Name of the server model if the client is a stub."""
    pid: int = 0


class Conversation(Value, frozen=True):
    """A conversation that the text process converts to a prompt with the chat template of the checkpoint."""

    messages: msgspec.Raw
    """List of objects with a role and a content, in the form that templates read."""
    tools: msgspec.Raw = msgspec.Raw(b"\xc0")
    """List of objects {type, function}, or null, which is the default."""
    documents: msgspec.Raw = msgspec.Raw(b"\xc0")
    """List of objects, or null, which is the default."""
    template_kwargs: msgspec.Raw = msgspec.Raw(b"\x80")
    """Object with additional arguments of the template."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False


class ImageTensor(Value, frozen=True):
    """A tensor that the processor of a checkpoint makes of an image, in little-endian order."""

    dtype: Literal["float32", "int64"]
    shape: list[int]
    data: bytes


class ImageInput(Value, frozen=True):
    """An image of a prompt, as a vision tower reads it."""

    start: int
    """Position of the first of its tokens in the prompt."""
    num_tokens: int
    digest: bytes
    """SHA-256 of its tensors. They determine the embeddings of its tokens."""
    grid: tuple[int, int]
    """Number of rows and of columns of its tokens; (0, 0) if its tokens have no row and column."""
    tensors: dict[str, ImageTensor] = {}
    """Empty for a fork, which uses those of its parent."""
    line_length: int = 0
    """If it is not 0, each of its tokens that is last among line_length tokens is a token of text, which ends a row."""


class GenerateRequest(RequestMessage, frozen=True, tag=2):
    """frontend -> text: asks the text process to run a request. The text process answers with OutputDeltas. The last
    delta is final."""

    model: str
    """The model name that the client sent. It is the served name or the name of an adapter."""
    prompt: str | None
    prompt_token_ids: list[int] | None
    params: SamplingParams
    stream: bool
    """If false, the text process sends a single delta, which contains the complete output."""
    cache_salt: str | None = None
    priority: int = 0
    """A request with a lower number runs first. The number has no effect unless scheduling_policy is priority."""
    add_special_tokens: bool = True
    """Whether the tokenizer adds its special tokens to a text prompt. An example is the token that begins a
    sequence."""
    return_prompt_token_ids: bool = False
    """Whether the first delta contains the token ids of the prompt."""
    return_token_bytes: bool = False
    """If this is true and the text of a token is not valid UTF-8, the token's entry in logprobs also contains the exact
    bytes of the token."""
    chat: Conversation | None = None
    """A conversation that replaces the prompt."""
    api_key_name: str = ""
    """Name of the API key that the client used. Metrics report it. Empty if no keys are configured."""
    parsing: OutputParsing | None = None
    """If it is set, the deltas contain parsed events instead of text. If it is None, the deltas contain text."""
    client: str = ""
    """The client that sent the request: the name of its API key, its address, or the port that it used. Clients share
    the engine equally."""
    data_parallel_rank: int | None = None
    """The core that must run the request, if the pod has several. None: the text process chooses one."""
    session: str = ""
    """Requests with the same session get the same version of an adapter. Empty: each request is its own session."""
    traceparent: str = ""
    """The header traceparent of W3C Trace Context; the spans of the request belong to this trace. Empty: it starts a
    trace of its own."""
    pooling: PoolingParams | None = None
    """If it is set, the request ends after its prompt, and its only delta contains a vector instead of an output."""
    second_text: str | None = None
    """For an encoder: the second text of a pair, of which `prompt` is the first one."""
    images: list[bytes] = []
    """Files of the images of the prompt, in the order of their places in it."""
    kv_source: str = ""
    """HOST:PORT of a pod that may have the KV blocks of the prompt. The frontend has checked that it is an allowed
    peer. Empty: none is known."""
    kv_source_required: bool = False
    """The request fails with UNAVAILABLE if this pod does not have all blocks, or if they cannot be read."""
    kv_transfer_params: KVTransferParams | None = None
    """The role of this pod, and where the blocks of the prompt are. The text process checks the object."""


class CancelRequests(Message, frozen=True, tag=3):
    """frontend -> text: the client disconnected, and the text process must not send any more deltas for these ids."""

    ids: list[int]


class RequestRejected(Message, frozen=True, tag=4):
    """frontend -> text: the frontend rejected a request that was invalid. The text process counts these rejections in a
    metric."""

    code: Code


class FieldsIgnored(Message, frozen=True, tag=12):
    """frontend -> text: a request had fields that the frontend does not know, and ignored. The text process counts
    these requests in a metric."""


PrefillResult = Literal["used", "local", "skipped", "unreachable", "deadline", "rejected", "failed", "invalid"]
"""What became of a request whose header names a pod for its prompt; docs/kv-peers.md explains the values."""


class PrefillReported(Message, frozen=True, tag=13):
    """frontend -> text: the header of a request named a pod that computes its prompt. The text process counts the
    results in a metric."""

    result: PrefillResult


class TokenLogprob(Value, frozen=True):
    """Log probability of a token at one position."""

    token_id: int
    logprob: float
    rank: int
    """Rank of the token among all tokens at this position. The most likely token has rank 1."""
    text: str | None = None
    """None if the model has no tokenizer."""
    token_bytes: bytes | None = None
    """The exact bytes of the token. Only requests with return_token_bytes have them, and only if the text of the token
    is not valid UTF-8."""


def logprobs_by_token(position: Iterable[TokenLogprob]) -> dict[str, dict[str, Any]]:
    """Return the tokens of a position in vLLM's form: a dict that maps each token id to {logprob, rank, decoded_token}.
    If `token_bytes` is set, the entry also contains `bytes`."""
    return {
        str(entry.token_id): {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": entry.text}
        | ({} if entry.token_bytes is None else {"bytes": list(entry.token_bytes)})
        for entry in position
    }


class OutputDelta(Value, frozen=True):
    """New part of one output of a request.

    A delta is the last one of its request if it has an error code. It is also the last one if it has a finish_reason
    and other_outputs_pending is False.
    """

    id: int
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None
    """stop or length."""
    cumulative_logprob: float | None = None
    logprobs: list[list[TokenLogprob]] | None = None
    """One list for each new token. The first item is the token itself, and the others are the most likely tokens."""
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    """Number of output tokens so far. The tokens of this delta are counted, too."""
    error_code: Code | None = None
    error: str = ""
    prompt_logprobs: list[list[TokenLogprob] | None] | None = None
    """One entry for each token of the prompt. It has the same form as an entry of logprobs. The entry of the first
    token is None. Only one delta of a request contains this list."""
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
    parsed: list[Event] | None = None
    """Events that replace the text if the request has `parsing`."""
    num_reasoning_tokens: int = 0
    """Number of reasoning tokens in the output so far. It is counted only if the request has `parsing`."""
    adapter_version: str = ""
    """Version of the adapter that answers; empty if the adapter has no versions."""
    pooled: bytes | None = None
    """The vector of a request with `pooling`: float32 numbers in little-endian order."""
    kv_transfer_params: dict[str, Any] | None = None
    """For the request to a decode pod: where the blocks of the prompt are. The last delta of a request to a prefill pod
    contains it."""

    @classmethod
    def from_error(cls, request_id: int, error: QuireError) -> Self:
        """Return the last delta of a request that failed."""
        retry_after_s = error.retry_after_s if isinstance(error, Unavailable) else None
        return cls(request_id, error_code=error.code, error=error_text(error), retry_after_s=retry_after_s)

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
    return msgspec.structs.replace(
        last,
        text="".join(delta.text for delta in deltas),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[position for positions in logprobs for position in positions] if logprobs else None,
        prompt_logprobs=next((delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs), None),
        prompt_token_ids=next((delta.prompt_token_ids for delta in deltas if delta.prompt_token_ids), None),
        parsed=None if last.parsed is None else [event for delta in deltas for event in delta.parsed or ()],
    )


class OutputDeltas(Message, frozen=True, tag=5):
    """text -> frontend: new parts of the outputs of one or more requests."""

    deltas: list[OutputDelta]

    @property
    def request_ids(self) -> Sequence[int]:
        """The ids of the requests, in the order of the deltas."""
        return [delta.id for delta in self.deltas]

    def split(self) -> tuple["OutputDeltas", "OutputDeltas"]:
        """Return two messages that contain the first and the second half of the deltas."""
        middle = len(self.deltas) // 2
        return OutputDeltas(self.deltas[:middle]), OutputDeltas(self.deltas[middle:])


class SequenceRequest(RequestMessage, frozen=True, tag=6):
    """text -> core: asks the core to run a sequence."""

    prompt_token_ids: list[int]
    params: SamplingParams
    adapter_digest: AdapterDigest | None = None
    """Digest of an adapter that the core has loaded, or of a sum of such adapters (adapter_sum.py)."""
    cache_salt: str | None = None
    bad_word_ids: list[list[int]] = []
    """The words of params.bad_words, each as a list of token ids."""
    parent_id: int | None = None
    """Id of the parent.

    This is an earlier SequenceRequest that has the same prompt, adapter and salt. This sequence waits until the parent
    is prefilled, and then shares the parent's KV blocks. If the parent ends before it is completely prefilled, this
    sequence computes the prompt itself.
    """
    priority: int = 0
    """A sequence with a lower number runs first. The number has no effect unless scheduling_policy is priority."""
    grammar: str | None = None
    """Grammar that the output must match. The text process has already compiled it successfully. None allows any
    output."""
    begin_after_token_ids: list[int] = []
    """The grammar begins after these output tokens. If the list is empty, it applies from the first output token."""
    reasoning_marks: list[list[int]] = []
    """Token ids of the start mark and of the end mark of the reasoning.

    They are needed for params.thinking_token_budget. The start mark is empty if the output already begins inside the
    reasoning. The list is empty if the request has no budget.
    """
    client: str = ""
    """See GenerateRequest."""
    adapter_parts: list[tuple[AdapterDigest, float]] = []
    """If the adapter is a weighted sum of adapters: their digests and weights."""
    pooling: PoolingParams | None = None
    """See GenerateRequest."""
    second_text_start: int = 0
    """Position of the first token of the second text of a pair; 0 if the prompt is one text."""
    images: list[ImageInput] = []
    """The images of the prompt, in the order of their tokens."""
    kv_source: str = ""
    """See GenerateRequest."""
    kv_source_required: bool = False
    """See GenerateRequest."""
    kv_source_keys: PromptKeys | None = None
    """The keys that the pod at `kv_source` has for the blocks of the prompt; None if they are not known."""
    returns_prompt_keys: bool = False
    """Whether the first delta contains the keys of the blocks of the prompt."""


class AbortSequences(Message, frozen=True, tag=7):
    """text -> core: the core must stop these sequences and must not send any more results for them."""

    ids: list[int]


RankedToken = tuple[int, float, int]
"""Token id, log probability and rank."""


class SequenceDelta(Value, frozen=True):
    """New tokens of a sequence. The last delta of a sequence has a finish_reason or an error_code."""

    id: int
    token_ids: list[int] = []
    finish_reason: str | None = None
    logprobs: list[list[RankedToken]] | None = None
    """One list for each new token. The first item is the sampled token, and the others are the most likely tokens."""
    error_code: Code | None = None
    error: str = ""
    prompt_logprobs: list[list[RankedToken]] | None = None
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
    pooled: bytes | None = None
    """See OutputDelta. The delta with the vector is the only one of its sequence."""
    prompt_keys: PromptKeys | None = None
    """Only the first delta of a sequence with returns_prompt_keys contains it."""

    @classmethod
    def from_error(cls, sequence_id: int, error: QuireError) -> Self:
        """Return the last delta of a sequence that failed."""
        return cls(sequence_id, error_code=error.code, error=error_text(error))


class SchedulerStats(Value, frozen=True):
    """State of the scheduler after a step. The counters start at zero when the core starts."""

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_used_blocks: int = 0
    """Number of KV blocks that are in use by sequences. A cached block that no sequence uses counts as free."""
    num_states: int = 0
    """Number of states of sequences for which there is memory; 0 if no layer has a state."""
    num_used_states: int = 0
    """Number of states that running sequences have."""
    num_state_snapshots: int = 0
    """Number of states that the prefix cache keeps."""
    num_host_states: int = 0
    """Number of states that host memory keeps for the prefix cache."""
    num_stored_host_states: int = 0
    """Number of states that were copied to host memory."""
    num_loaded_host_states: int = 0
    """Number of states in host memory that sequences have continued from."""
    num_folder_read_states: int = 0
    """Number of states that were read from the folder of KV blocks."""
    num_folder_written_states: int = 0
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
    num_cached_host_blocks: int = 0
    """Number of KV blocks that are cached in host memory."""
    kv_offload_store_bytes: int = 0
    """Bytes of KV blocks that a rank has copied to the cache in host memory."""
    kv_offload_load_bytes: int = 0
    """Bytes of KV blocks that new sequences have taken from the cache in host memory, on each rank."""
    num_folder_read_blocks: int = 0
    """Number of KV blocks that were read from the folder of KV blocks."""
    num_folder_written_blocks: int = 0
    folder_errors: dict[str, int] = {}
    """Number of KV blocks in the folder that were wrong or could not be read or written, by reason."""
    num_peer_requested_blocks: int = 0
    """Number of KV blocks that were requested from other pods."""
    num_peer_read_blocks: int = 0
    """Number of KV blocks that were read from other pods."""
    num_peer_read_states: int = 0
    """Number of states that were read from other pods."""
    peer_errors: dict[str, int] = {}
    """Number of reads from other pods that failed, by reason."""
    num_leased_rows: int = 0
    """Number of rows of host memory that other pods have leased."""
    num_refused_leases: int = 0
    """Number of KV blocks that were not leased, because the leases of other pods had the whole quota."""
    host_cache_queries: int = 0
    """Number of prompt tokens that were looked up in host memory, because the device did not have them."""
    host_cache_hits: int = 0
    """Number of prompt tokens that were found in host memory."""
    num_steps: int = 0
    num_step_tokens: int = 0
    """Number of prompt and output tokens that steps have computed."""
    num_adapter_evictions: int = 0
    num_host_adapters: int = 0
    """Number of adapters that are in host memory."""
    host_adapter_bytes: int = 0
    num_drafts: int = 0
    """Number of drafts that were verified in steps."""
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    accepted_draft_tokens_per_position: list[int] = []
    """Number of accepted draft tokens for each position in a draft. Empty if speculative decoding is not used."""
    num_dropped_kv_events: int = 0
    """Number of batches of KV events that were dropped because their queue was full."""


class AdapterEvent(Value, frozen=True):
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


class AdapterResidency(Value, frozen=True):
    """Reports where a registered adapter is now."""

    digest: AdapterDigest
    state: str
    """slot, host or disk; removed if the adapter is not registered any more."""
    pinned: bool = False
    """Whether the adapter keeps its slot while no request uses it."""
    rank: int = 0
    """The largest LoRA rank among the adapter's modules."""
    invocation_tokens: list[int] = []
    """The tokens from which the adapter applies. If there are none, it applies to all tokens."""


class BlockChanges(Value, frozen=True):
    """Reports which full KV blocks the prefix cache gained and lost."""

    stored: list[bytes]
    """Hashes of blocks (32 bytes each) that are cached now. The hash of a block also identifies all tokens before it,
    the adapter and the salt."""
    removed: list[bytes] = []
    """Hashes of blocks that are not cached any more."""


class StartedSequence(Value, frozen=True):
    """A sequence that ran for the first time, and how long it waited in the core before."""

    id: int
    queued_s: float
    adapter_wait_s: float = 0.0
    """The part of queued_s in which its adapter was not in a slot."""


class StepResult(Message, frozen=True, tag=8):
    """core -> text: the results of one step."""

    results: list[SequenceDelta]
    started: list[StartedSequence]
    """The sequences that ran for the first time in this step."""
    stats: SchedulerStats
    adapter_events: list[AdapterEvent] = []
    """The adapter events that happened since the previous step."""
    block_changes: BlockChanges | None = None
    """The changes of the prefix cache since the previous result; None if there are none, or if the core does not report
    them. The first result after the text process connected contains all cached blocks."""
    adapter_changes: list[AdapterResidency] = []
    """The adapters that were registered, moved, pinned or removed since the previous result. The first result after the
    text process connected contains all registered adapters."""

    @property
    def request_ids(self) -> Sequence[int]:
        """The ids of the sequences, in the order of the results."""
        return [result.id for result in self.results]

    def split(self) -> tuple["StepResult", "StepResult"]:
        """Return two messages that contain the first and the second half of the results."""
        middle = len(self.results) // 2
        first = msgspec.structs.replace(self, results=self.results[:middle])
        return first, StepResult(self.results[middle:], [], self.stats)


class Call(RequestMessage, frozen=True, tag=9):
    """Calls a method of a server. The server answers with one Reply or one Failure, which has the same id."""

    method: str
    args: msgspec.Raw
    """Object with the arguments by name."""


class Reply(RequestMessage, frozen=True, tag=10):
    """The result of a call."""

    result: msgspec.Raw


class Failure(RequestMessage, frozen=True, tag=11):
    """Reports that a call or a request failed. A server also sends it for a frame that it cannot accept."""

    error_code: Code
    error: str

    @classmethod
    def from_error(cls, request_id: int, error: QuireError) -> Self:
        """Return the message for an error."""
        return cls(request_id, error.code, error_text(error))


MESSAGE_TYPES: tuple[type[Message], ...] = (
    Hello,
    GenerateRequest,
    CancelRequests,
    RequestRejected,
    FieldsIgnored,
    PrefillReported,
    OutputDeltas,
    SequenceRequest,
    AbortSequences,
    StepResult,
    Call,
    Reply,
    Failure,
)


def to_raw(value: Any, name: str) -> msgspec.Raw:
    """Encode a JSON value for a message; raises InvalidArgument if it has lone surrogates, integers of more than 64
    bits, or too many levels. `name` is the name of the value in this error."""
    try:
        return msgspec.Raw(msgspec.msgpack.encode(value))
    except (ValueError, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"{name}: cannot be sent to another process ({error})") from None
