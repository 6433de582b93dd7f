# SPDX-License-Identifier: Apache-2.0
"""Environment variables of a pod's containers. Called by pod_template.py and model_storage.py."""

from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_spec.net.addresses import POD_IP_VARIABLE


def container_env(service: LLMService, **extra: str) -> list[dict[str, Any]]:
    """Return the environment of a container: the variables that every container has, those in `extra`, and those in
    spec.runtime.env. If a variable occurs more than once, the value in spec.runtime.env is used."""
    configured = extra | {variable.name: variable.value for variable in service.spec.runtime.env}
    defaults = {POD_IP_VARIABLE: {"valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}}
    values = defaults | {name: {"value": value} for name, value in configured.items()}
    return [{"name": name, **value} for name, value in values.items()]
