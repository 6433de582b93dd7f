# SPDX-License-Identifier: Apache-2.0
"""What the operator asks of the API server, as rules of a Role: the chart is held to this table, and tests hold the
operator to it, so that nothing is refused and nothing is granted in vain.

Applying an object is the verb patch on one that is there and create on one that is not.
"""

from dataclasses import dataclass
from typing import Any

from quire_operator.kube import kinds
from quire_operator.kube.kinds import Kind


@dataclass(frozen=True, slots=True)
class Rule:
    """Verbs on a kind."""

    kind: Kind
    verbs: tuple[str, ...]
    subresource: str = ""
    cluster: bool = False
    """The kind belongs to no namespace: the rule takes a ClusterRole also where one namespace is watched."""
    optional: str = ""
    """What works without it; empty: nothing does."""

    def to_json(self) -> dict[str, Any]:
        """As in a Role."""
        resource = f"{self.kind.plural}/{self.subresource}" if self.subresource else self.kind.plural
        return {"apiGroups": [self.kind.group], "resources": [resource], "verbs": list(self.verbs)}


_OWNED = ("create", "delete", "get", "list", "patch", "watch")

RULES: tuple[Rule, ...] = (
    Rule(kinds.LLM_SERVICE, ("list", "watch")),
    Rule(kinds.LLM_SERVICE, ("patch",), "status"),
    # Owner references that block deletion need it where the API server checks them (OpenShift does).
    Rule(kinds.LLM_SERVICE, ("update",), "finalizers"),
    # No list and no watch: a Secret is read by the name that a source gives, or by the name that it was made with.
    Rule(kinds.SECRET, ("create", "delete", "get", "patch")),
    *(Rule(kind, _OWNED) for kind in kinds.CHILDREN if kind is not kinds.SECRET),
    Rule(kinds.REPLICA_SET, ("list", "watch")),
    Rule(kinds.POD, ("list", "watch")),
    Rule(kinds.EVENT, ("create", "list")),
    Rule(kinds.NODE, ("list",), cluster=True, optional="GPUs are known from spec.gpu and the table of products only"),
)
