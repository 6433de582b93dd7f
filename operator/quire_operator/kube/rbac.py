# SPDX-License-Identifier: Apache-2.0
"""RBAC rules of the operator. Tests check that the chart grants exactly these rules, and that the operator uses all of
them.

Server-side apply always needs the verb patch. If the object does not exist yet, it also needs the verb create.
"""

from dataclasses import dataclass
from typing import Any

from quire_operator.kube import resources
from quire_operator.kube.resources import Resource


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """The verbs that the operator needs for one resource."""

    resource: Resource
    verbs: tuple[str, ...]
    subresource: str = ""
    optional: str = ""
    """The effect on the operator if an administrator removes this rule. It is empty if the operator cannot run without
    the rule."""

    def to_json(self) -> dict[str, Any]:
        """Return the rule in the form of a Role's `rules` entry."""
        resource_name = f"{self.resource.plural}/{self.subresource}" if self.subresource else self.resource.plural
        return {"apiGroups": [self.resource.group], "resources": [resource_name], "verbs": list(self.verbs)}


_OWNED_VERBS = ("create", "delete", "get", "list", "patch", "watch")

RULES: tuple[PolicyRule, ...] = (
    PolicyRule(resources.LLM_SERVICE, ("list", "watch")),
    PolicyRule(resources.LLM_SERVICE, ("patch",), "status"),
    # Some API servers check owner references with blockOwnerDeletion, for example in OpenShift. They require this
    # permission.
    PolicyRule(resources.LLM_SERVICE, ("update",), "finalizers"),
    # The operator needs neither list nor watch, because it reads Secrets only by name: its own Secrets and those of
    # sources.
    PolicyRule(resources.SECRET, ("create", "delete", "get", "patch")),
    *(PolicyRule(kind, _OWNED_VERBS) for kind in resources.CHILD_RESOURCES if kind is not resources.SECRET),
    PolicyRule(resources.REPLICA_SET, ("list", "watch")),
    PolicyRule(resources.POD, ("list", "watch")),
    PolicyRule(resources.EVENT, ("create", "list")),
    PolicyRule(
        resources.KUEUE_WORKLOADS[0],
        ("list",),
        optional="without it, the status does not contain the reason why Kueue keeps a pod waiting",
    ),
    PolicyRule(
        resources.NODE,
        ("list",),
        optional="without it, the operator knows GPUs only from spec.gpu and the table of products",
    ),
)
