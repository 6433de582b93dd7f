# SPDX-License-Identifier: Apache-2.0
"""The planner: the best way to run a model on a GPU or CPU as a Plan, or why there is none. Pure."""

from collections.abc import Mapping

from quire_operator.plan import advice, limits
from quire_operator.plan.errors import Unplannable, Why
from quire_operator.plan.inputs import Inputs
from quire_operator.plan.outcome import plan_of
from quire_operator.plan.plan import VERSION, Plan
from quire_operator.plan.ways import all_ways, best

DEFAULT_IMAGES = {"GPU": "quire:gpu", "CPU": "quire:cpu"}
"""As backend/Dockerfile's targets are tagged; an installed operator has them from its own release."""


def make_plan(inputs: Inputs, images: Mapping[str, str] = DEFAULT_IMAGES) -> Plan:
    """The plan for these inputs; `images` are this release's.

    Raises:
        Unplannable: nothing fits, or the GPU or the engine cannot do what is pinned.
    """
    limits.check_type(inputs)
    limits.check_length(inputs)
    limits.check_copies(inputs)
    ways = list(all_ways(inputs))
    found = best(inputs, ways)
    if found is None:
        raise Unplannable(Why.DOES_NOT_FIT, advice.does_not_fit(inputs, ways))
    return plan_of(inputs, found, images)


def keep_or_make(
    stored: Plan | None, inputs: Inputs, replan: bool = False, images: Mapping[str, str] = DEFAULT_IMAGES
) -> Plan:
    """The stored plan as long as its inputs are the same, else a new one; raises as `make_plan`.

    A new release changes nothing by itself, neither values nor image, unless `replan` (rollout.updatePolicy: Auto).
    """
    if stored is not None and stored.inputsHash == inputs.digest:
        same = stored.plannerVersion == VERSION and stored.image.value in (inputs.image, *images.values())
        if same or not replan:
            return stored
    return make_plan(inputs, images)
