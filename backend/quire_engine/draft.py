# SPDX-License-Identifier: Apache-2.0
"""Draft: a step while the scheduler plans it."""

from dataclasses import dataclass, field

from quire_engine.request import Sequence
from quire_engine.step import BlockCopy, HostCopy, Span, StepPlan


@dataclass(slots=True)
class Draft:
    """What a step will do so far."""

    budget: int
    """Tokens that are left for prompts."""
    decodes: list[Span] = field(default_factory=list)
    prefills: list[Span] = field(default_factory=list)
    swap_outs: list[HostCopy] = field(default_factory=list)
    swap_ins: list[HostCopy] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    started: list[int] = field(default_factory=list)
    promised: set[int] = field(default_factory=set)
    """Ids of forks that will start as soon as their leaders' prompts are computed."""

    def drop(self, sequence: Sequence) -> None:
        """Forget the token that a sequence was to decode, if it was."""
        spans = [span for span in self.decodes if span.sequence is not sequence]
        self.budget += len(self.decodes) - len(spans)
        self.decodes = spans

    def prefill(self, span: Span) -> None:
        """Add a prompt's chunk."""
        self.prefills.append(span)
        self.budget -= span.length

    def plan(self) -> StepPlan:
        """The step as it is."""
        spans = self.decodes + self.prefills
        return StepPlan(spans, self.swap_outs, self.swap_ins, self.copies, self.started)
