# SPDX-License-Identifier: Apache-2.0
"""Draft: a step while the scheduler plans it."""

from dataclasses import dataclass, field

from quire_engine.sequence import Sequence
from quire_engine.step.plan import BlockCopy, ScheduledSpan, StepPlan, SwapCopy


@dataclass(slots=True)
class StepPlanBuilder:
    """What a step will do so far."""

    token_budget: int
    """Tokens that are left for prompts."""
    decodes: list[ScheduledSpan] = field(default_factory=list)
    prefills: list[ScheduledSpan] = field(default_factory=list)
    swap_outs: list[SwapCopy] = field(default_factory=list)
    swap_ins: list[SwapCopy] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    started_ids: list[int] = field(default_factory=list)
    pending_forks: set[int] = field(default_factory=set)
    """Ids of forks that will start as soon as their leaders' prompts are computed."""

    def remove_decode(self, sequence: Sequence) -> None:
        """Forget the token that a sequence was to decode, if it was."""
        remaining = [span for span in self.decodes if span.sequence is not sequence]
        self.token_budget += len(self.decodes) - len(remaining)
        self.decodes = remaining

    def add_prefill(self, span: ScheduledSpan) -> None:
        """Add a prompt's chunk."""
        self.prefills.append(span)
        self.token_budget -= span.length

    def build(self) -> StepPlan:
        """The step as it is."""
        spans = self.decodes + self.prefills
        return StepPlan(spans, self.swap_outs, self.swap_ins, self.copies, self.started_ids)
