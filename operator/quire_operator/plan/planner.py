# SPDX-License-Identifier: Apache-2.0
"""The planner: chooses the best candidate for running a model on GPUs or a CPU and returns it as a Plan. Pure.

Called by cli/plan.py and the controller.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from quire_operator.api.disaggregation_spec import Role
from quire_operator.plan import advice, limits
from quire_operator.plan.build_plan import build_plan
from quire_operator.plan.candidates import best_candidate, generate_candidates
from quire_operator.plan.errors import Unplannable, UnplannableReason
from quire_operator.plan.host_memory import check_disk, check_kv_tiers
from quire_operator.plan.inputs import PlannerInputs
from quire_operator.plan.plan import VERSION, Plan, PlannedValue

DEFAULT_IMAGES = {"GPU": "quire:gpu", "CPU": "quire:cpu"}
"""Default images. The tag of an image is the name of the target in backend/Dockerfile that builds it. In a cluster, the
chart passes the images of its own release to the operator."""


def make_plan(inputs: PlannerInputs, images: Mapping[str, str] = DEFAULT_IMAGES) -> Plan:
    """Return the plan for these inputs. `images` maps each device to the image of this release.

    Raises:
        Unplannable: no candidate fits, or the GPU or the engine does not support a requested value.
    """
    return _plan_pods(inputs, images) if inputs.prefill is None else _plan_roles(inputs, inputs.prefill, images)


def _plan_roles(decode: PlannerInputs, prefill: PlannerInputs, images: Mapping[str, str]) -> Plan:
    """Return the plan of the decode pods, which contains the plan of the prefill pods.

    A prefill pod must accept every prompt that a decode pod accepts, and its blocks must have the same size and be
    divided between the same number of GPUs. So the shorter context and the blocks of the decode pods apply to both.
    """
    inputs = {Role.DECODE: decode, Role.PREFILL: prefill}
    plans = {role: _plan_role(role, own, images) for role, own in inputs.items()}
    if len({plan.tensorParallelSize.value for plan in plans.values()}) > 1:
        inputs, plans = _plan_equal_sizes(inputs, plans, images)
    length = min((plan.maxModelLen for plan in plans.values()), key=lambda planned: planned.value)
    block_size = plans[Role.DECODE].blockSize
    for role, plan in plans.items():
        if (plan.maxModelLen.value, plan.blockSize.value) == (length.value, block_size.value):
            continue
        size = plan.tensorParallelSize
        engine = replace(inputs[role].engine, maxModelLen=length.value, blockSize=block_size.value)
        # With a shorter context, fewer GPUs could be enough for this role.
        engine = replace(engine, tensorParallelSize=size.value)
        other = _plan_role(role, replace(inputs[role], engine=engine), images)
        plans[role] = replace(
            other,
            tensorParallelSize=size,
            maxModelLen=_as_in_other_role(length),
            blockSize=_as_in_other_role(block_size),
        )
    prefill_plan = replace(plans[Role.PREFILL], inputsHash=decode.inputs_hash)
    return replace(plans[Role.DECODE], inputsHash=decode.inputs_hash, prefill=prefill_plan)


def _plan_equal_sizes(
    inputs: dict[Role, PlannerInputs], plans: Mapping[Role, Plan], images: Mapping[str, str]
) -> tuple[dict[Role, PlannerInputs], dict[Role, Plan]]:
    """Return the inputs and the plans of both roles with the same tensorParallelSize: the larger one of those in
    `plans`, or the smaller one.

    Raises:
        Unplannable: neither is possible for both roles.
    """
    for size in sorted({plan.tensorParallelSize.value for plan in plans.values()}, reverse=True):
        if any(limits.rejection_reason(own, size) for own in inputs.values()):
            continue
        with suppress(Unplannable):
            equal = {
                role: replace(own, engine=replace(own.engine, tensorParallelSize=size)) for role, own in inputs.items()
            }
            new = {role: _plan_role(role, own, images) for role, own in equal.items()}
            return equal, {
                role: replace(plan, tensorParallelSize=_as_in_other_role(plan.tensorParallelSize))
                for role, plan in new.items()
            }
    sizes = ", and ".join(f"{role} pods {plan.tensorParallelSize.value}" for role, plan in plans.items())
    raise Unplannable(
        UnplannableReason.DOES_NOT_FIT,
        f"spec.engine.tensorParallelSize: {sizes}, but pods read KV blocks only from pods with the same number; give "
        "both roles GPUs of the same size and number in spec.disaggregation, or set maxModelLen",
    )


def _as_in_other_role(planned: PlannedValue[int]) -> PlannedValue[int]:
    return replace(planned, why="the same in both roles")


def _plan_role(role: Role, inputs: PlannerInputs, images: Mapping[str, str]) -> Plan:
    try:
        return _plan_pods(inputs, images)
    except Unplannable as error:
        raise Unplannable(error.reason, f"role {role}: {error}") from error


def _plan_pods(inputs: PlannerInputs, images: Mapping[str, str]) -> Plan:
    """Return the plan of pods that are all alike."""
    limits.check_dtypes(inputs)
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
