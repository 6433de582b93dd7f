# SPDX-License-Identifier: Apache-2.0
"""Steps in flight: steps that are planned but not complete.

There are at most two such steps with async scheduling, as many as stages with pipeline stages, and otherwise at most
one. The scheduler owns them. A finished
sequence keeps its blocks and its adapter slot while one of these steps contains it.
"""

from quire_engine.sequence import Sequence
from quire_engine.step.plan import StepPlan


class InFlightSteps:
    """The plans of the steps in flight, and the finished sequences that these steps still contain. The plan of the
    earliest step comes first.
    """

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []
        self.finished_sequences: list[Sequence] = []
        """Sequences that are finished, although a step in flight can still write to their blocks."""

    def __bool__(self) -> bool:
        return bool(self.plans)

    def add(self, plan: StepPlan) -> StepPlan:
        """Add a planned step and return it."""
        self.plans.append(plan)
        return plan

    def complete(self, plan: StepPlan) -> None:
        """Remove the earliest step in flight."""
        assert plan is self.plans[0]
        del self.plans[0]

    def pop_released(self) -> list[Sequence]:
        """Remove and return the finished sequences that no step in flight contains."""
        if not self.finished_sequences:
            return []
        running = {span.sequence for plan in self.plans for span in plan.spans}
        running.update(sequence for plan in self.plans for sequence in plan.restoring)
        released = [sequence for sequence in self.finished_sequences if sequence not in running]
        self.finished_sequences = [sequence for sequence in self.finished_sequences if sequence in running]
        return released
