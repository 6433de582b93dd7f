# SPDX-License-Identifier: Apache-2.0
"""Sequence: one request inside the engine, from arrival to its last token. Torch-free; the scheduler owns the state."""

from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NewType

from quire_spec.engine.sampling_params import SamplingParams

BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)

PLACEHOLDER_TOKEN = -1
"""Stands in a sequence's output for the token that the step in flight will choose."""
MAX_ASYNC_LOGPROBS = 32
"""Log probabilities for each token that may come to the host a step late; more of them take room on the device."""


class SequenceStatus(Enum):
    """Where a sequence is.

    WAITING -> RUNNING -> FINISHED, with WAITING_ADAPTER before the first step while its adapter is on its way, and
    PREEMPTED between two runs.
    """

    WAITING = "waiting"
    WAITING_FOR_ADAPTER = "waiting_adapter"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log probability; rank 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """A prompt, its output so far, and the blocks that hold its keys and values."""

    id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """Of its draws: params.seed, or one chosen at arrival."""
    max_output_tokens: int
    """params.max_tokens, cut to what max_model_len leaves."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the output: params.stop_token_ids, and the model's unless ignore_eos."""
    suppressed_token_ids: frozenset[int] = frozenset()
    """Tokens that are not taken before params.min_tokens are: those that would end a text, the model's own also where
    ignore_eos lets it go on."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Runs of tokens that the output must not have."""
    adapter_digest: str | None = None
    """Content digest."""
    cache_salt: str | None = None
    parent_id: int | None = None
    """Id of an earlier sequence of the same prompt, adapter and salt, whose blocks of the prompt it shares."""
    priority: int = 0
    """Lower runs first."""
    arrival_time: float = 0.0
    """Monotonic seconds."""

    status: SequenceStatus = SequenceStatus.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    """The last one may be PENDING, while the step after the one in flight is planned or in flight itself."""
    num_computed_tokens: int = 0
    """Keys and values of tokens [0, num_computed_tokens) are in the blocks; not those of the last step in flight."""
    block_table: list[BlockId] = field(default_factory=list)
    """Block i holds tokens [i * block_size, (i + 1) * block_size)."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Content hashes of its full blocks, as far as they have been computed."""
    num_cached_tokens: int | None = None
    """Prompt tokens that were found computed; None before it runs."""
    num_computed_prompt_logprobs: int = 0
    """Positions of the prompt whose logits have told how likely the next token was, if the request asks for that."""
    prompt_logprobs: list[list[Logprob]] = field(default_factory=list)
    """What they told; handed out with the first token."""
    host_blocks: list[BlockId] = field(default_factory=list)
    """While swapped out: places in host memory of its blocks, the first num_left_blocks excepted."""
    num_shared_blocks: int = 0
    """Blocks that were not swapped out with the others, because another sequence held them too."""
    num_swapped_tokens: int = 0
    """While swapped out: tokens [0, num_swapped_tokens) are in those blocks and in host memory."""
    num_cached_blocks: int = 0
    """Blocks of its table that others find, or that it found itself: the first ones."""
    sort_key: tuple[int, int] = (0, 0)
    """Priority, then number in order of arrival: its place among all."""
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    parent: "Sequence | None" = None
    """The open sequence that fork_of names."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True while logits of its prompt are wanted, so that all of it has to be computed."""
        return (
            self.params.prompt_logprobs is not None
            and self.num_computed_prompt_logprobs < len(self.prompt_token_ids) - 1
        )

    @property
    def requires_host_tokens(self) -> bool:
        """True when a step of it needs the host to know the tokens before, or tells the host much more than a token:
        then it is not begun before the last one is over."""
        logprobs = self.params.logprobs
        return (
            bool(self.bad_words)
            or self.needs_prompt_logprobs
            or not (logprobs is None or 0 <= logprobs <= MAX_ASYNC_LOGPROBS)
        )

    def tokens(self, start: int, end: int) -> list[int]:
        """Token ids [start, end) of prompt and output together."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if end <= num_prompt_tokens:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt_tokens:
            return self.output_token_ids[start - num_prompt_tokens : end - num_prompt_tokens]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt_tokens]
