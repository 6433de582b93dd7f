# SPDX-License-Identifier: Apache-2.0
"""The conditions InferencePool and HTTPRoute, which repeat what the gateways report about these objects. Pure. Called
by status.py."""

from collections.abc import Iterator, Mapping
from typing import Any

from quire_operator.api.networking_spec import NetworkingSpec
from quire_operator.controller.status.conditions import Condition, ConditionType, Reason
from quire_operator.controller.status.observed_state import Body, ObservedState

_REPEATED = ("Accepted", "ResolvedRefs")
"""Conditions that a gateway reports about an object that is attached to it."""


def route_conditions(networking: NetworkingSpec, observed: ObservedState) -> Iterator[Condition]:
    """Return a condition for each object that the spec attaches to gateways."""
    if networking.inferencePool:
        yield _condition(ConditionType.INFERENCE_POOL, observed.inference_pool)
    if networking.httpRoute:
        yield _condition(ConditionType.HTTP_ROUTE, observed.http_route)


def _condition(kind: ConditionType, route: Body | None) -> Condition:
    parents = ((route or {}).get("status") or {}).get("parents") or ()
    repeated = [
        (_describe(parent, condition), condition.get("status"))
        for parent in parents
        for condition in parent.get("conditions") or ()
        if condition.get("type") in _REPEATED
    ]
    failed = [text for text, status in repeated if status == "False"]
    if failed:
        return Condition(kind, False, Reason.PARENT_FAILED, "; ".join(failed))
    if not repeated or any(status != "True" for _, status in repeated):
        unknown = "; ".join(text for text, status in repeated if status != "True")
        return Condition(kind, None, Reason.PARENT_PENDING, unknown or "no gateway has reported its state yet")
    return Condition(kind, True, Reason.PARENT_ACTIVE, "; ".join(text for text, _ in repeated))


def _describe(parent: Mapping[str, Any], condition: Mapping[str, Any]) -> str:
    """Return a condition of a parent as text, such as `Gateway infra/public: Accepted is False: NotAllowed: ...`."""
    reference = parent.get("parentRef") or {}
    name = "/".join(filter(None, (reference.get("namespace"), reference.get("name"), reference.get("sectionName"))))
    cause = ": ".join(filter(None, (condition.get("reason"), condition.get("message"))))
    return f"{reference.get('kind', 'Gateway')} {name}: {condition['type']} is {condition.get('status')}: {cause}"
