# SPDX-License-Identifier: Apache-2.0
"""One sequence in the engine core: a prompt, its output so far and its KV blocks, from arrival to the last token.

Torch-free. The scheduler owns the state; the block manager and the prefix cache change only the fields about blocks."""

import math
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NewType

from quire_engine.structured_outputs.grammar import Grammar
from quire_engine.tokenization.stop_strings import StopStrings
from quire_spec.constants import AdapterDigest
from quire_spec.engine.pooling_params import PoolingParams
from quire_spec.engine.sampling_params import SamplingParams
from quire_spec.protocol.kv_transfer_params import PromptKeys
from quire_spec.protocol.messages import ImageInput

BlockId = NewType("BlockId", int)
SlotId = NewType("SlotId", int)

PLACEHOLDER_TOKEN = -1
"""Takes the place of a token that the step in flight will sample, until the value of the token is known."""
MAX_ASYNC_LOGPROBS = 32
"""Maximum number of log probabilities per token with async scheduling. They arrive on the host one step late and use
device memory until then, so their number is limited.
"""


class SequenceStatus(Enum):
    """State of a sequence.

    The normal order is WAITING -> RUNNING -> FINISHED. Before its first step, a sequence is WAITING_FOR_ADAPTER while
    its adapter is not in a slot, WAITING_FOR_KV while a store reads its KV blocks, and WAITING_FOR_IMAGES while its
    images are encoded. A sequence that was preempted is PREEMPTED until it runs again.
    """

    WAITING = "waiting"
    WAITING_FOR_ADAPTER = "waiting_adapter"
    WAITING_FOR_KV = "waiting_kv"
    WAITING_FOR_IMAGES = "waiting_images"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Reason why a sequence finished."""

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


@dataclass(eq=False, slots=True)
class BeamGroup:
    """The beams of one beam search. They are sequences that have the same prompt and equally long outputs, and each
    step extends all of them."""

    id: int
    """Id of the first sequence of the request. Beams have this id and the `width - 1` ids after it."""
    width: int
    """Maximum number of beams."""
    num_candidates: int
    """The next beams are chosen from this number of continuations. The number is for all beams together."""
    sequences: list["Sequence"]
    """The beams, best first. Before the first output token, there is only one beam."""
    scores: list[float] = field(default_factory=lambda: [0.0])
    """For each beam: the sum of the log probabilities of its output tokens."""

    @property
    def can_decode(self) -> bool:
        """True if all beams run, and the keys and values of all their tokens except the last one are computed."""
        return all(
            sequence.status is SequenceStatus.RUNNING and sequence.num_tokens - sequence.num_computed_tokens == 1
            for sequence in self.sequences
        )

    @property
    def num_unused_places(self) -> int:
        """Number of places that are reserved for new beams and for waiting beams of this group. 0 if no beam of the
        group runs."""
        num_running = sum(sequence.status is SequenceStatus.RUNNING for sequence in self.sequences)
        return self.width - num_running if num_running else 0


@dataclass(eq=False, slots=True, weakref_slot=True)
class Sequence:
    """A prompt, its output so far, and the blocks with its keys and values."""

    id: int
    prompt_token_ids: list[int]
    params: SamplingParams
    seed: int
    """Sampling seed. It is params.seed, or a seed that is chosen when the sequence arrives."""
    max_output_tokens: int
    """params.max_tokens, limited by max_model_len."""
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the output: params.stop_token_ids and, unless ignore_eos is set, the model's stop tokens."""
    suppressed_token_ids: frozenset[int] = frozenset()
    """Tokens that must not be sampled while the output has fewer than params.min_tokens tokens. Every stop token is
    included. The model's stop tokens are included even if ignore_eos is set.
    """
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Token sequences that must not occur in the output."""
    grammar: Grammar | None = None
    """State of the grammar that the output must match; None allows any output."""
    stop_strings: StopStrings | None = None
    """Strings that end the output of a beam. The text process searches for the stop strings of all other sequences."""
    adapter_digest: AdapterDigest | None = None
    """Content digest."""
    adapter_parts: tuple[tuple[AdapterDigest, float], ...] = ()
    """If the adapter is a weighted sum of adapters: their digests and weights."""
    adapter_start: int = 0
    """Position of the first token that the adapter changes. The tokens before it have the base model's keys and
    values."""
    cache_salt: str | None = None
    parent_id: int | None = None
    """For a fork: the id of an earlier sequence that has the same prompt, adapter and salt. The fork shares the blocks
    of its prompt."""
    priority: int = 0
    """Sequences with a lower number run first."""
    arrival_time: float = 0.0
    """Time of arrival in monotonic seconds."""
    client: str = ""
    """The client that sent the request. Clients share the engine equally."""
    kv_source: str = ""
    """HOST:PORT of a pod that may have its blocks; empty if none is known."""
    kv_source_required: bool = False
    """The sequence fails if its blocks cannot be read there."""
    prompt_keys: PromptKeys | None = None
    """The keys of the blocks of its prompt, if its request returns them."""
    pooling: PoolingParams | None = None
    """If it is set, the sequence ends after its prompt with a vector instead of an output."""
    pools_all_tokens: bool = False
    """Whether the vector depends on the last hidden states of all tokens, and not only on that of the last one."""
    pools_first_token: bool = False
    """Whether the vector depends on the last hidden state of the first token only."""
    second_text_start: int = 0
    """Position of the first token of the second text of a pair; 0 if the prompt is one text."""
    images: tuple[ImageInput, ...] = ()
    """The images of the prompt, in the order of their tokens."""
    unsplit: tuple[range, ...] = ()
    """Positions of tokens that one step computes together, because they attend to each other in both directions."""

    status: SequenceStatus = SequenceStatus.WAITING
    adapter_wait_start: float | None = None
    """Since this time, the sequence waits for its adapter; None: it does not."""
    adapter_wait_s: float = 0.0
    """Seconds for which it has waited for its adapter, without the present wait."""
    output_token_ids: list[int] = field(default_factory=list)
    """Output tokens. The last token can be PLACEHOLDER_TOKEN: when the next step is planned, the step that samples this
    token may still be in flight.
    """
    output_logprobs: list[list[Logprob]] = field(default_factory=list)
    """Log probabilities of the output tokens. They are stored only for a beam, and only if its request requires
    them."""
    num_computed_tokens: int = 0
    """The blocks contain the keys and values of this many tokens, from the first token on. Tokens of the latest step in
    flight are not counted.
    """
    block_table: list[BlockId] = field(default_factory=list)
    """If there is one group of layers, block i contains `block_size` tokens, from token i * block_size on. If there are
    several groups, each group has its own block for these tokens. The entries of these blocks are next to each other
    (see KVLayout)."""
    num_freed_entries: int = 0
    """Number of entries at the start of the table whose blocks have left the sliding window. These blocks belong to the
    pool again. Their entries stay, so that the copy of the table on the device remains valid. Attention ignores the
    keys and values that it reads through these entries."""
    kept_blocks: list[BlockId] = field(default_factory=list)
    """Blocks of freed entries that the sequence keeps nevertheless, because they belong to layers without a sliding
    window."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Content hashes of the full blocks of this sequence. The hashes of the last blocks may not be computed yet."""
    num_cached_tokens: int | None = None
    """Number of prompt tokens that the prefix cache contained at the first run; None before the first run."""
    num_computed_prompt_logprobs: int = 0
    """If the request requires prompt log probabilities: the number of positions for which they are already computed."""
    num_pooled_tokens: int = 0
    """If the sequence pools all tokens or the first one: the number of tokens that are already pooled."""
    prompt_logprobs: list[list[Logprob]] = field(default_factory=list)
    """Log probabilities of prompt positions computed so far; returned with the first output token."""
    host_blocks: list[BlockId] = field(default_factory=list)
    """If the sequence is swapped out: the blocks in host memory that contain copies of its blocks. The first
    `num_shared_blocks` blocks of the sequence have no copies. If the sequence runs: the blocks in host memory that must
    still be copied to its next blocks before anything is computed for it."""
    num_shared_blocks: int = 0
    """Number of blocks at the start of the table that were not swapped out, because another sequence shares them."""
    num_swapped_tokens: int = 0
    """If the sequence has host blocks, its blocks before them and its host blocks contain this number of tokens, from
    the first token on."""
    num_searched_stores: int = 0
    """In how many of the stores outside of the process its blocks were searched; this happens once in each."""
    awaited_key: bytes = b""
    """Key of its first block that is in no cache. It waits while a store reads this block."""
    store_deadline: float = math.inf
    """Monotonic seconds after which it no longer waits for a store."""
    state_row: int = -1
    """For a model whose layers have states: row of its state; -1 if the sequence does not run. The state contains the
    computed tokens, except the last `num_replayed_tokens`."""
    num_replayed_tokens: int = 0
    """Number of its last computed tokens that its state does not contain. They are accepted drafts of the last step,
    and the next step computes their part of the state again."""
    state_stops: tuple[int, ...] = ()
    """Positions at which a chunk of its prompt ends, because a snapshot of its state is taken there; ascending."""
    num_matched_tokens: int = 0
    """Number of tokens at its start whose full blocks the prefix cache contained, with or without a snapshot of the
    state after them."""
    decode_snapshot: bytes = b""
    """Key of the last snapshot of its state that was taken while it decoded."""
    num_cached_blocks: int = 0
    """Number of blocks at the start of the table that came from the prefix cache or were passed to it."""
    sort_key: tuple[int, float, int, int] = (0, 0.0, 0, 0)
    """The scheduler's sort key: priority, start tag of the virtual clock, arrival number, number of the beam."""
    finish_reason: FinishReason | None = None
    num_preemptions: int = 0
    parent: "Sequence | None" = None
    """The sequence with id `parent_id`, if it was unfinished when this sequence arrived. For a preempted beam: the
    first beam of its group.
    """
    beam_group: BeamGroup | None = None
    """The beams that this sequence belongs to; None without beam search."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and of the output so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def held_blocks(self) -> list[BlockId]:
        """The blocks to which this sequence has a reference."""
        return self.kept_blocks + self.block_table[self.num_freed_entries :]

    @property
    def num_prefill_tokens(self) -> int:
        """Number of tokens that this sequence can compute independently of other beams. These are all tokens of the
        sequence or, if its group has other beams, all of them except the last one.
        """
        has_siblings = self.beam_group is not None and len(self.beam_group.sequences) > 1
        return self.num_tokens - 1 if has_siblings else self.num_tokens

    @property
    def resumes_beam_group(self) -> bool:
        """True if another beam of its group runs, while this one waits."""
        return (
            self.beam_group is not None
            and self.status is not SequenceStatus.RUNNING
            and self.beam_group.num_unused_places > 0
        )

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True while prompt log probabilities are incomplete, so that the whole prompt must be computed."""
        return (
            self.params.prompt_logprobs is not None
            and self.num_computed_prompt_logprobs < len(self.prompt_token_ids) - 1
        )

    @property
    def needs_hidden_states(self) -> bool:
        """True while the last hidden states of prompt tokens are needed that are not computed yet, so that the prefix
        cache must not replace these tokens."""
        num_pooled = len(self.prompt_token_ids) if self.pools_all_tokens else int(self.pools_first_token)
        is_pooling = self.num_pooled_tokens < num_pooled
        return is_pooling or self.needs_prompt_logprobs

    @property
    def requires_host_tokens(self) -> bool:
        """True if a step of this sequence must not start before the previous step is complete.

        Such a step requires the previous tokens on the host, or returns much more than a token to the host.
        """
        logprobs = self.params.num_logprobs
        return (
            bool(self.bad_words)
            or self.beam_group is not None
            or self.needs_prompt_logprobs
            or self.pooling is not None
            or not (logprobs is None or 0 <= logprobs <= MAX_ASYNC_LOGPROBS)
        )

    @property
    def awaited_parent(self) -> "Sequence | None":
        """The parent for which this sequence waits, or None.

        A fork that never ran waits until the prompt of its parent is computed, and so does a preempted beam.
        """
        parent, preempted = self.parent, SequenceStatus.PREEMPTED
        if parent is None or parent.status is SequenceStatus.FINISHED:
            return None
        if self.beam_group is None and preempted in (self.status, parent.status):
            return None
        return parent if parent.num_computed_tokens < len(parent.prompt_token_ids) else None

    @property
    def last_image_token(self) -> int:
        """Position of the last token of an image; -1 if the prompt has no images."""
        return self.images[-1].start + self.images[-1].num_tokens - 1 if self.images else -1

    def chunk_end(self, start: int, end: int) -> int:
        """Return where a chunk of the prompt ends that begins at `start` and could end at `end`. The result is `start`
        if the chunk could not contain all tokens that must be computed together."""
        end = next((stop for stop in self.state_stops if start < stop < end), end)
        return next((max(start, tokens.start) for tokens in self.unsplit if tokens.start < end < tokens.stop), end)

    def adapter_until(self, end: int) -> AdapterDigest | None:
        """Return the adapter that changes tokens before position `end`; None if the base model computes all of them."""
        return self.adapter_digest if end > self.adapter_start else None

    def tokens(self, start: int, end: int) -> list[int]:
        """Return token ids [start, end) of prompt and output together."""
        num_prompt_tokens = len(self.prompt_token_ids)
        if end <= num_prompt_tokens:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt_tokens:
            return self.output_token_ids[start - num_prompt_tokens : end - num_prompt_tokens]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt_tokens]
