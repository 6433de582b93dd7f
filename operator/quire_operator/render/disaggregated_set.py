# SPDX-License-Identifier: Apache-2.0
"""DisaggregatedSet of a service with roles. Its controller makes a LeaderWorkerSet of each role, replaces the pods of
both roles together, and labels the pods with their common revision. Pure. Called by objects.py and the controller.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire_operator.api.disaggregation_spec import Role
from quire_operator.api.llmservice import LLMService
from quire_operator.plan.plan import Plan
from quire_operator.render import leader_worker_set, object_names
from quire_operator.render.manifests import Manifest, metadata, new_manifest

API_VERSION, KIND = "disaggregatedset.x-k8s.io/v1", "DisaggregatedSet"


@dataclass(frozen=True, slots=True)
class RoleTemplates:
    """The pod templates of a role."""

    leader: Manifest
    """Template of the pods that serve."""
    worker: Manifest | None = None
    """Template of the other pods of a group. None: a replica is one pod."""
    size: int = 1
    """Number of pods of a replica."""

    @classmethod
    def from_template(cls, template: Manifest, size: int) -> Self:
        """Return the templates of replicas with `size` pods. `template` is that of a Deployment. Pods have a label that
        identifies their templates."""
        leader, worker = leader_worker_set.group_templates(template, size)
        return cls(leader, worker if size > 1 else None, size)

    @classmethod
    def from_set(cls, manifest: Mapping[str, Any], role: Role) -> Self:
        """Return the templates of a role from a DisaggregatedSet."""
        (entry,) = (entry for entry in manifest["spec"]["roles"] if entry["name"] == role)
        group = entry["spec"]["leaderWorkerTemplate"]
        if "leaderTemplate" not in group:
            return cls(group["workerTemplate"])
        return cls(group["leaderTemplate"], group["workerTemplate"], group["size"])


def manifest(
    service: LLMService, plan: Plan, templates: Mapping[Role, RoleTemplates], has_pods: bool = True
) -> Manifest:
    """Return the DisaggregatedSet. Without `has_pods`, the roles have no replicas."""
    annotations = {object_names.PLAN_ANNOTATION: plan.inputsHash}
    roles = [_role(service.for_role(role), templates[role], has_pods) for role in service.roles]
    return new_manifest(API_VERSION, KIND, service, service.name, annotations=annotations, spec={"roles": roles})


def _role(service: LLMService, templates: RoleTemplates, has_pods: bool) -> Manifest:
    assert service.role is not None, "the service is the one of a role"
    replicas, worker = service.spec.replicas if has_pods else 0, templates.worker
    spec = leader_worker_set.spec(service, templates.leader, worker or {}, templates.size, replicas)
    if worker is None:
        # A container that ends is started again in its pod. There is no group that would have to start together.
        spec["leaderWorkerTemplate"] = {"size": 1, "workerTemplate": templates.leader, "restartPolicy": "None"}
    # The name of the LeaderWorkerSet is not the one of a Service, so one headless Service for all its pods is possible.
    del spec["networkConfig"]
    # The controller of the DisaggregatedSet decides which pods are replaced first.
    del spec["rolloutStrategy"]["rollingUpdateConfiguration"]["partition"]
    meta = metadata(service, object_names.SERVER, leader_worker_set.queue_labels(service))
    # Pods have no order, so that the ones that are not ready are removed first. Kueue counts groups by their order, and
    # so does status.groups.
    is_queued = leader_worker_set.QUEUE_LABEL in meta["labels"]
    return {
        "name": service.role.value,
        "metadata": meta,
        "spec": {**spec, "groupIdentity": "Ordinal" if is_queued or worker is not None else "Hash"},
    }
