# SPDX-License-Identifier: Apache-2.0
"""The planner: the best way to run a model on a GPU or CPU as a Plan, or why there is none. Pure."""

from quire_operator.plan import advice, limits
from quire_operator.plan.errors import Unplannable, Why
from quire_operator.plan.inputs import Inputs
from quire_operator.plan.outcome import plan_of
from quire_operator.plan.plan import VERSION, Plan
from quire_operator.plan.ways import all_ways, best


def make_plan(inputs: Inputs) -> Plan:
    """The plan for these inputs.

    Raises:
        Unplannable: nothing fits, or the GPU or the engine cannot do what is pinned.
    """
    limits.check_type(inputs)
    ways = list(all_ways(inputs))
    found = best(inputs, ways)
    if found is None:
        raise Unplannable(Why.DOES_NOT_FIT, advice.does_not_fit(inputs, ways))
    return plan_of(inputs, found)


def keep_or_make(stored: Plan | None, inputs: Inputs, replan: bool = False) -> Plan:
    """The stored plan as long as its inputs are the same, else a new one; raises as `make_plan`.

    A new release of the planner changes nothing by itself, unless `replan` (spec.rollout.updatePolicy: Auto).
    """
    if stored is not None and stored.inputsHash == inputs.digest and (stored.plannerVersion == VERSION or not replan):
        return stored
    return make_plan(inputs)
