# SPDX-License-Identifier: Apache-2.0
"""Environment variables of a pod's containers."""

from typing import Any

from quire_operator.service import LLMService
from quire_spec.net.addresses import POD_IP_VARIABLE


def environment(service: LLMService, **more: str) -> list[dict[str, Any]]:
    """What each container is told, `more`, and what the service asks for, which wins."""
    given = more | {each.name: each.value for each in service.spec.runtime.env}
    own = {POD_IP_VARIABLE: {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}}
    values = own | {name: {"value": value} for name, value in given.items()}
    return [{"name": name, **value} for name, value in values.items()]
