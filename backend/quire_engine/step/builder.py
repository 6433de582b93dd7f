# SPDX-License-Identifier: Apache-2.0
"""Builder of a step plan; the scheduler and the block manager add spans and copies."""

from collections import Counter
from dataclasses import dataclass, field, replace

from quire_engine.sequence import Sequence
from quire_engine.step.plan import BlockCopy, ScheduledSpan, StateCopy, StepPlan, SwapCopy
from quire_spec.protocol.messages import StartedSequence


@dataclass(slots=True)
class StepPlanBuilder:
    """The spans and copies planned so far."""

    token_budget: int
    """Remaining tokens for prompts."""
    decodes: list[ScheduledSpan] = field(default_factory=list)
    prefills: list[ScheduledSpan] = field(default_factory=list)
    swap_outs: list[SwapCopy] = field(default_factory=list)
    swap_ins: list[SwapCopy] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    state_copies: list[StateCopy] = field(default_factory=list)
    started: list[StartedSequence] = field(default_factory=list)
    restoring: list[Sequence] = field(default_factory=list)
    """Sequences whose blocks the step copies from host memory."""
    copy_budget: int = 0
    """Number of blocks that the step can still copy from host memory, or to the cache there, while other sequences
    run."""
    pending_forks: set[int] = field(default_factory=set)
    """Ids of forks that will start as soon as their parents' prompts are computed."""
    client_share: int | None = None
    """Maximum number of prompt tokens of each client; None means no limit."""
    prefill_tokens_by_client: Counter[str] = field(default_factory=Counter)

    def remove_decode(self, sequence: Sequence) -> None:
        """Remove the decode span of a sequence, if it has one."""
        remaining = [span for span in self.decodes if span.sequence is not sequence]
        self.token_budget += len(self.decodes) - len(remaining)
        self.decodes = remaining

    def budget_of(self, client: str) -> int:
        """Return how many prompt tokens a client can still have in this step."""
        if self.client_share is None:
            return self.token_budget
        return min(self.token_budget, self.client_share - self.prefill_tokens_by_client[client])

    def is_share_spent(self, client: str) -> bool:
        """Return whether a client has its share of the prompt tokens of this step."""
        return self.client_share is not None and self.prefill_tokens_by_client[client] >= self.client_share

    def add_prefill(self, span: ScheduledSpan) -> None:
        """Add a chunk of a prompt, unless it is empty."""
        if not span.length:
            return
        self.prefills.append(span)
        self.token_budget -= span.length
        self.prefill_tokens_by_client[span.sequence.client] += span.length

    def lift_client_share(self) -> None:
        """Give the tokens that no share has used to the chunks that a share has cut."""
        self.client_share = None
        for i, span in enumerate(self.prefills):
            last = min(span.end + self.token_budget, span.sequence.num_prefill_tokens)
            if extra := span.sequence.chunk_end(span.start, last) - span.end:
                self.prefills[i] = replace(span, length=span.length + extra)
                self.token_budget -= extra

    def build(self) -> StepPlan:
        """Return the plan."""
        spans = self.decodes + self.prefills
        copies = self.swap_outs, self.swap_ins, self.copies, self.state_copies
        return StepPlan(spans, *copies, self.started, self.restoring)
