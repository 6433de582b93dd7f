# SPDX-License-Identifier: Apache-2.0
"""The planner: the best way to run a model on a GPU or CPU as a Plan, or why there is none. Pure."""

from collections.abc import Mapping

from quire_operator.plan import advice, limits
from quire_operator.plan.build_plan import build_plan
from quire_operator.plan.candidates import best_candidate, generate_candidates
from quire_operator.plan.errors import Unplannable, UnplannableReason
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.plan import VERSION, Plan

DEFAULT_IMAGES = {"GPU": "quire:gpu", "CPU": "quire:cpu"}
"""As backend/Dockerfile's targets are tagged; an installed operator has them from its own release."""


def make_plan(inputs: PlannerInputs, images: Mapping[str, str] = DEFAULT_IMAGES) -> Plan:
    """The plan for these inputs; `images` are this release's.

    Raises:
        Unplannable: nothing fits, or the GPU or the engine cannot do what is pinned.
    """
    limits.check_dtypes(inputs)
    limits.check_context(inputs)
    limits.check_lora_cache(inputs)
    candidates = list(generate_candidates(inputs))
    candidate = best_candidate(inputs, candidates)
    if candidate is None:
        raise Unplannable(UnplannableReason.DOES_NOT_FIT, advice.explain_no_fit(inputs, candidates))
    return build_plan(inputs, candidate, images)


def reuse_or_make_plan(
    stored: Plan | None, inputs: PlannerInputs, replan: bool = False, images: Mapping[str, str] = DEFAULT_IMAGES
) -> Plan:
    """The stored plan as long as its inputs are the same, else a new one; raises as `make_plan`.

    A new release changes nothing by itself, neither values nor image, unless `replan` (rollout.updatePolicy: Auto).
    """
    if stored is not None and stored.inputsHash == inputs.digest:
        is_current = stored.plannerVersion == VERSION and stored.image.value in (inputs.image, *images.values())
        if is_current or not replan:
            return stored
    return make_plan(inputs, images)
