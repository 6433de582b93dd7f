# SPDX-License-Identifier: Apache-2.0
"""The planner: chooses the best candidate for running a model on GPUs or a CPU and returns it as a Plan. Pure.

Called by cli/plan.py and the controller.
"""

from collections.abc import Mapping

from quire_operator.plan import advice, limits
from quire_operator.plan.build_plan import build_plan
from quire_operator.plan.candidates import best_candidate, generate_candidates
from quire_operator.plan.errors import Unplannable, UnplannableReason
from quire_operator.plan.host_memory import check_disk, check_kv_tiers
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.plan import VERSION, Plan

DEFAULT_IMAGES = {"GPU": "quire:gpu", "CPU": "quire:cpu"}
"""Default images. The tag of an image is the name of the target in backend/Dockerfile that builds it. In a cluster, the
chart passes the images of its own release to the operator."""


def make_plan(inputs: PlannerInputs, images: Mapping[str, str] = DEFAULT_IMAGES) -> Plan:
    """Return the plan for these inputs. `images` maps each device to the image of this release.

    Raises:
        Unplannable: no candidate fits, or the GPU or the engine does not support a requested value.
    """
    limits.check_dtypes(inputs)
    limits.check_attention(inputs)
    limits.check_encoder(inputs)
    limits.check_pipeline(inputs)
    limits.check_context(inputs)
    limits.check_quantization(inputs)
    limits.check_speculation(inputs)
    limits.check_lora_cache(inputs)
    limits.check_kv_offloading(inputs)
    limits.check_kv_cache_dtype(inputs)
    candidates = list(generate_candidates(inputs))
    candidate = best_candidate(inputs, candidates)
    if candidate is None:
        raise Unplannable(UnplannableReason.DOES_NOT_FIT, advice.explain_no_fit(inputs, candidates))
    check_disk(inputs)
    check_kv_tiers(inputs, inputs.num_ranks(candidate.tp))
    return build_plan(inputs, candidate, images)


def reuse_or_make_plan(
    stored: Plan | None, inputs: PlannerInputs, replan: bool = False, images: Mapping[str, str] = DEFAULT_IMAGES
) -> Plan:
    """Return the stored plan if its inputs are the same, else a new plan. Raises the errors of `make_plan`.

    By default, a new release of the operator keeps the values and the image of the stored plan. With `replan`
    (rollout.updatePolicy: Auto), it makes a new plan.
    """
    if stored is not None and stored.inputsHash == inputs.inputs_hash:
        is_current = stored.plannerVersion == VERSION and stored.image.value in (inputs.image, *images.values())
        if is_current or not replan:
            return stored
    return make_plan(inputs, images)
