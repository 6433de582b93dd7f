# SPDX-License-Identifier: Apache-2.0
"""Builder of a step plan; the scheduler and the block manager add spans and copies."""

from dataclasses import dataclass, field

from quire_engine.sequence import Sequence
from quire_engine.step.plan import BlockCopy, ScheduledSpan, StepPlan, SwapCopy


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
    started: list[tuple[int, float]] = field(default_factory=list)
    pending_forks: set[int] = field(default_factory=set)
    """Ids of forks that will start as soon as their parents' prompts are computed."""

    def remove_decode(self, sequence: Sequence) -> None:
        """Remove the decode span of a sequence, if it has one."""
        remaining = [span for span in self.decodes if span.sequence is not sequence]
        self.token_budget += len(self.decodes) - len(remaining)
        self.decodes = remaining

    def add_prefill(self, span: ScheduledSpan) -> None:
        """Add a chunk of a prompt."""
        self.prefills.append(span)
        self.token_budget -= span.length

    def build(self) -> StepPlan:
        """Return the plan."""
        spans = self.decodes + self.prefills
        return StepPlan(spans, self.swap_outs, self.swap_ins, self.copies, self.started)
