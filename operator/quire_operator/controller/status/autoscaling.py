# SPDX-License-Identifier: Apache-2.0
"""The condition Autoscaling, which repeats what the autoscaler of a service reports. Pure. Called by status.py."""

from quire_operator.api.workload_spec import AutoscalingSpec
from quire_operator.controller.status.conditions import Condition, ConditionType, Reason
from quire_operator.controller.status.observed_state import Body

_REQUIRED_CONDITIONS = {"HorizontalPodAutoscaler": ("AbleToScale", "ScalingActive"), "ScaledObject": ("Ready",)}
"""Conditions that an autoscaler reports as False if it cannot scale."""
_DISABLED = "ScalingDisabled"
"""Reason of a HorizontalPodAutoscaler while spec.replicas is 0. A user scaled to 0, so nothing has failed."""


def autoscaling_condition(scaling: AutoscalingSpec, autoscaler: Body | None) -> Condition:
    """Return the condition Autoscaling. `autoscaler` is the HorizontalPodAutoscaler or ScaledObject of the service."""
    kind = scaling.kind
    conditions = {c["type"]: c for c in ((autoscaler or {}).get("status") or {}).get("conditions") or ()}
    relevant = [conditions[name] for name in _REQUIRED_CONDITIONS[kind] if name in conditions]
    failed = [c for c in relevant if c["status"] == "False" and c.get("reason") != _DISABLED]
    if failed:
        text = ": ".join(filter(None, (failed[0].get("reason", ""), failed[0].get("message", ""))))
        message = f"{kind} {_name(autoscaler)}: {failed[0]['type']} is False: {text}"
        return Condition(ConditionType.AUTOSCALING, False, Reason.AUTOSCALER_FAILED, message)
    if not relevant:
        message = f"{kind} has not reported its state yet"
        return Condition(ConditionType.AUTOSCALING, None, Reason.AUTOSCALER_PENDING, message)
    text = "; ".join(c["message"] for c in relevant if c.get("message"))
    return Condition(ConditionType.AUTOSCALING, True, Reason.AUTOSCALER_ACTIVE, text or f"{kind} works")


def _name(autoscaler: Body | None) -> str:
    return str((autoscaler or {}).get("metadata", {}).get("name", ""))
