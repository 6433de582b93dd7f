# SPDX-License-Identifier: Apache-2.0
"""What the operator asks of the API server, as rules of a Role: the chart is held to this table, and tests hold the
operator to it, so that nothing is refused and nothing is granted in vain.

Applying an object is the verb patch on one that is there and create on one that is not.
"""

from dataclasses import dataclass
from typing import Any

from quire_operator.kube import resources
from quire_operator.kube.resources import Resource


@dataclass(frozen=True, slots=True)
class PolicyRule:
    """Verbs on a kind."""

    resource: Resource
    verbs: tuple[str, ...]
    subresource: str = ""
    cluster_scoped: bool = False
    """The kind belongs to no namespace: the rule takes a ClusterRole also where one namespace is watched."""
    optional: str = ""
    """What works without it; empty: nothing does."""

    def to_json(self) -> dict[str, Any]:
        """As in a Role."""
        resource_name = f"{self.resource.plural}/{self.subresource}" if self.subresource else self.resource.plural
        return {"apiGroups": [self.resource.group], "resources": [resource_name], "verbs": list(self.verbs)}


_OWNED_VERBS = ("create", "delete", "get", "list", "patch", "watch")

RULES: tuple[PolicyRule, ...] = (
    PolicyRule(resources.LLM_SERVICE, ("list", "watch")),
    PolicyRule(resources.LLM_SERVICE, ("patch",), "status"),
    # Owner references that block deletion need it where the API server checks them (OpenShift does).
    PolicyRule(resources.LLM_SERVICE, ("update",), "finalizers"),
    # No list and no watch: a Secret is read by the name that a source gives, or by the name that it was made with.
    PolicyRule(resources.SECRET, ("create", "delete", "get", "patch")),
    *(PolicyRule(kind, _OWNED_VERBS) for kind in resources.CHILD_RESOURCES if kind is not resources.SECRET),
    PolicyRule(resources.REPLICA_SET, ("list", "watch")),
    PolicyRule(resources.POD, ("list", "watch")),
    PolicyRule(resources.EVENT, ("create", "list")),
    PolicyRule(
        resources.NODE,
        ("list",),
        cluster_scoped=True,
        optional="GPUs are known from spec.gpu and the table of products only",
    ),
)
