# SPDX-License-Identifier: Apache-2.0
"""A step as a value: what the scheduler decided, what the runner made of it. Torch-free; both sides import only this.

Each sequence gets a span of tokens, one or many: a prompt's chunk, one decoded token, or (speculation) several. All
spans of a step are flattened into one batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from quire_engine.sequence import PLACEHOLDER_TOKEN, BlockId, Logprob, Sequence, SlotId
from quire_spec.errors import Unavailable


@dataclass(frozen=True, slots=True)
class ScheduledSpan:
    """Tokens [start, start + length) of a sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    length: int
    adapter_slot: SlotId | None
    """Device slot of its adapter; None runs the base model."""

    @property
    def end(self) -> int:
        """One past the last token."""
        return self.start + self.length

    @property
    def samples(self) -> bool:
        """True when the span reaches the sequence's last token, so that its last logits choose the next one."""
        return self.end == self.sequence.num_tokens

    @property
    def awaits_token(self) -> bool:
        """True when its one token is what the step in flight chooses: the host does not know it."""
        output_token_ids = self.sequence.output_token_ids
        return self.length == 1 and bool(output_token_ids) and output_token_ids[-1] == PLACEHOLDER_TOKEN

    @property
    def prompt_logprob_positions(self) -> range:
        """Positions whose logits tell how likely the prompt's next token was; none unless the request asks."""
        sequence = self.sequence
        if sequence.params.prompt_logprobs is None:
            return range(0)
        return range(
            max(self.start, sequence.num_computed_prompt_logprobs), min(self.end, len(sequence.prompt_token_ids) - 1)
        )


@dataclass(frozen=True, slots=True)
class SlotLoad:
    """Copy an adapter from host memory into a device slot that no step uses meanwhile."""

    adapter_digest: str
    adapter_slot: SlotId


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Copy a block of all layers to another one, before the step writes anything."""

    source: BlockId
    destination: BlockId


@dataclass(frozen=True, slots=True)
class SwapCopy:
    """Copy a block of all layers to host memory, or back."""

    block: BlockId
    host_block: BlockId
    """Number of the place in host memory."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step. `spans` is never empty."""

    spans: list[ScheduledSpan]
    swap_outs: list[SwapCopy] = field(default_factory=list)
    """Blocks of preempted sequences. They may be written in the same step, so this comes first."""
    swap_ins: list[SwapCopy] = field(default_factory=list)
    """Blocks of sequences that come back. They may be copied in the same step, so this comes before the copies."""
    copies: list[BlockCopy] = field(default_factory=list)
    """Blocks that spans go on writing in a copy, as others read the original; no destination is a source."""
    started_ids: list[int] = field(default_factory=list)
    """Ids of the sequences that run for the first time; the runner needs none of it."""


@dataclass(frozen=True, slots=True)
class SpanOutput:
    """What one span yielded: no token while its prompt is not through, else one (speculation: several)."""

    token_ids: list[int]
    logprobs: list[list[Logprob]] | None = None
    """Per token: the token taken, then the most likely ones; None unless the request asks."""
    prompt_logprobs: list[list[Logprob]] | None = None
    """The same for the prompt tokens after each of `Span.scored`; None unless the request asks."""


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """A step that was begun."""

    plan: StepPlan
    get_outputs: Callable[[], list[SpanOutput]]
    """Waits until it is over; then returns, or raises, as `Runner.execute`."""
    launch_failed: bool = False
    """It could not even be begun: `outcome` raises."""


class RunnerLost(Unavailable):
    """What the runner computes with is gone for good: no step can run any more."""
