# SPDX-License-Identifier: Apache-2.0
"""Dataclasses of a step: the plan that the scheduler makes, and the outputs that the runner returns.

Torch-free. The scheduler and the runner both import this module, and do not import each other. Each sequence of a step
gets one span of tokens: a chunk of its prompt, or one decoded token and the draft tokens that may follow it. The runner
flattens all spans of a step into one batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from quire_engine.sequence import PLACEHOLDER_TOKEN, BlockId, Logprob, Sequence, SlotId
from quire_spec.constants import AdapterDigest
from quire_spec.errors import Unavailable
from quire_spec.protocol.messages import ImageInput, StartedSequence


@dataclass(frozen=True, slots=True)
class ScheduledSpan:
    """The tokens that a step computes for one sequence: `length` tokens, from position `start` on. The last ones can be
    draft tokens."""

    sequence: Sequence
    start: int
    length: int
    adapter_slot: SlotId | None
    """Device slot of the sequence's adapter; None runs the base model."""
    draft_token_ids: tuple[int, ...] = ()
    """Tokens that may follow the last token of the sequence; the step verifies them. Included in `length`."""
    num_lookahead_tokens: int = 0
    """Number of draft tokens that a draft model proposes after the step. Blocks for this number of further tokens are
    reserved."""

    @property
    def end(self) -> int:
        """Position after the last token, draft tokens included."""
        return self.start + self.length

    @property
    def num_base_tokens(self) -> int:
        """Number of tokens at the start of the span that the adapter does not change."""
        return min(max(self.sequence.adapter_start - self.start, 0), self.length)

    @property
    def active_slot(self) -> SlotId | None:
        """Device slot of the adapter that changes tokens of the span; None if the base model computes all of them."""
        return self.adapter_slot if self.num_base_tokens < self.length else None

    @property
    def samples(self) -> bool:
        """True if the span reaches the last token of the sequence, so that its last logits yield the next token. A
        sequence that is pooled never samples."""
        return self._reaches_end and self.sequence.pooling is None

    @property
    def completes_pooling(self) -> bool:
        """True if the span reaches the end of a sequence that is pooled."""
        return self._reaches_end and self.sequence.pooling is not None

    @property
    def pooled_positions(self) -> range:
        """Positions whose hidden states are pooled; empty unless the sequence is pooled."""
        if self.sequence.pooling is None:
            return range(0)
        if self.sequence.pools_first_token and self.start == 0:
            return range(1)
        if self.sequence.pools_all_tokens:
            return range(max(self.start, self.sequence.num_pooled_tokens), self.end)
        return range(self.end - 1, self.end) if self._reaches_end else range(0)

    @property
    def _reaches_end(self) -> bool:
        return self.end - len(self.draft_token_ids) == self.sequence.num_tokens

    @property
    def num_sampled_rows(self) -> int:
        """Number of tokens at the end of the span whose logits are sampled.

        They are the last token of the sequence and all draft tokens. The number is 0 if the span does not reach the
        last token of the sequence.
        """
        return 1 + len(self.draft_token_ids) if self.samples else 0

    @property
    def image_tokens(self) -> list[tuple[ImageInput, range]]:
        """The images of which the span computes tokens, each with positions of these tokens. An image whose rows are
        apart has an entry for each row."""
        spans = [
            (image, range(max(self.start, row.start), min(self.end, row.stop)))
            for image in self.sequence.images
            for row in _rows(image)
        ]
        return [(image, tokens) for image, tokens in spans if tokens]

    @property
    def awaits_token(self) -> bool:
        """True if the only token of the span is one that the step in flight samples, so that the host does not have it
        yet."""
        output_token_ids = self.sequence.output_token_ids
        return self.length == 1 and bool(output_token_ids) and output_token_ids[-1] == PLACEHOLDER_TOKEN

    @property
    def prompt_logprob_positions(self) -> range:
        """Positions whose logits yield prompt log probabilities; empty unless the request requires them."""
        sequence = self.sequence
        if sequence.params.prompt_logprobs is None:
            return range(0)
        return range(
            max(self.start, sequence.num_computed_prompt_logprobs), min(self.end, len(sequence.prompt_token_ids) - 1)
        )


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """The operation that copies an adapter from host memory into a device slot. No step uses the slot during the
    copy."""

    adapter_digest: AdapterDigest
    adapter_slot: SlotId
    first_page: int
    """Its pages of the memory of all slots begin here."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copies a block to another block, for all layers. The copy is made before the step writes anything."""

    source: BlockId
    destination: BlockId


@dataclass(frozen=True, slots=True)
class SwapCopy:
    """Copies a block to host memory or from host memory, for all layers."""

    block: BlockId
    host_block: BlockId
    """Block number in host memory."""


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Copies the state of one row to another row, for all layers."""

    source: int
    destination: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `spans` is never empty."""

    spans: list[ScheduledSpan]
    swap_outs: list[SwapCopy] = field(default_factory=list)
    """Blocks of preempted sequences, and blocks for the cache in host memory. The same step can overwrite these blocks,
    so swap-outs come first."""
    swap_ins: list[SwapCopy] = field(default_factory=list)
    """Blocks that sequences restore. The same step can copy these blocks, so swap-ins come before `copies`."""
    copies: list[BlockCopy] = field(default_factory=list)
    """Copies of blocks that other sequences share. The spans of the step write to the copies. A block is never both a
    source and a destination."""
    state_copies: list[StateCopy] = field(default_factory=list)
    """Copies to and from snapshots. They are made in this order, before the step writes anything; a copy can read what
    an earlier one has written."""
    started: list[StartedSequence] = field(default_factory=list)
    """The sequences that run for the first time. The runner does not use this list."""
    restoring: list[Sequence] = field(default_factory=list)
    """Sequences to whose blocks `swap_ins` copy. Some have no span, because their last blocks follow in later steps.
    The runner does not use this list."""


@dataclass(frozen=True, slots=True)
class BeamCandidate:
    """A token that may follow a beam."""

    token_id: int
    score: float
    """Sum of the log probabilities of all output tokens, this one included."""
    logprobs: list[Logprob] | None = None
    """Log probabilities of this token and of the most likely tokens; None unless the request requires them."""


@dataclass(frozen=True, slots=True)
class SpanOutput:
    """Output of one span. If the span ends within the prompt, the output has no tokens. Otherwise, it has the accepted
    draft tokens and one more token. The output of a beam has candidates instead of tokens.
    """

    token_ids: list[int]
    logprobs: list[list[Logprob]] | None = None
    """For each token: first its own log probability, then those of the most likely tokens. None unless the request
    requires them."""
    prompt_logprobs: list[list[Logprob]] | None = None
    """Log probabilities of the prompt tokens that follow the positions in `ScheduledSpan.prompt_logprob_positions`."""
    candidates: list[BeamCandidate] | None = None
    """For a beam: the candidates that continue this beam, best first. Only the best candidates of the whole group are
    included."""
    cumulative_logprob: float | None = None
    """For a finished output of a beam search: the sum of the log probabilities of its tokens."""
    next_draft_token_ids: tuple[int, ...] = ()
    """The draft for the next step, if a draft model computes the drafts."""
    pooled: bytes | None = None
    """If the span completes the pooling of its sequence: the vector, float32 numbers; empty if it is not finite."""
    num_draft_tokens: int = 0
    """Number of draft tokens that were verified. The scheduler sets this field and `num_accepted_tokens`."""
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was launched."""

    plan: StepPlan
    get_outputs: Callable[[], list[SpanOutput]]
    """Waits until the step is complete. Then it returns the outputs or raises an error, like `ModelRunner.execute`."""
    launch_failed: bool = False
    """True if the launch failed. In that case, `get_outputs` raises an error."""


class RunnerLost(Unavailable):
    """A process or device of the runner is permanently lost; no step can run any more."""


def _rows(image: ImageInput) -> list[range]:
    """Return the positions of adjacent tokens whose embeddings come from the image."""
    end, length = image.start + image.num_tokens, image.line_length
    if not length:
        return [range(image.start, end)]
    return [range(first, min(first + length - 1, end)) for first in range(image.start, end, length)]
