# SPDX-License-Identifier: Apache-2.0
"""API resources: their paths at the API server, and the list of resources that the operator reads and writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_spec import constants


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object."""

    group: str
    """API group; empty for the core kinds."""
    version: str
    plural: str
    kind: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """Return the value of apiVersion in manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """Return the path of the group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Return the path of one object, of all objects in a namespace, or of all objects in the cluster."""
        parts = [self.root]
        if self.namespaced and namespace:
            parts.append(f"namespaces/{namespace}")
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/".join(parts)


LLM_SERVICE = Resource(constants.API_GROUP, constants.API_VERSION, "llmservices", constants.KIND)
SERVICE_ACCOUNT = Resource("", "v1", "serviceaccounts", "ServiceAccount")
SECRET = Resource("", "v1", "secrets", "Secret")
CONFIG_MAP = Resource("", "v1", "configmaps", "ConfigMap")
PERSISTENT_VOLUME_CLAIM = Resource("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
SERVICE = Resource("", "v1", "services", "Service")
POD = Resource("", "v1", "pods", "Pod")
NODE = Resource("", "v1", "nodes", "Node", namespaced=False)
DEPLOYMENT = Resource("apps", "v1", "deployments", "Deployment")
LEADER_WORKER_SET = Resource("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet")
DISAGGREGATED_SET = Resource("disaggregatedset.x-k8s.io", "v1", "disaggregatedsets", "DisaggregatedSet")
REPLICA_SET = Resource("apps", "v1", "replicasets", "ReplicaSet")
JOB = Resource("batch", "v1", "jobs", "Job")
NETWORK_POLICY = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
POD_DISRUPTION_BUDGET = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
HORIZONTAL_POD_AUTOSCALER = Resource("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
POD_MONITOR = Resource("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor")
SCALED_OBJECT = Resource("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject")
INFERENCE_POOL = Resource("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool")
HTTP_ROUTE = Resource("gateway.networking.k8s.io", "v1", "httproutes", "HTTPRoute")
EVENT = Resource("events.k8s.io", "v1", "events", "Event")
KUEUE_WORKLOADS = tuple(
    Resource("kueue.x-k8s.io", version, "workloads", "Workload") for version in ("v1beta2", "v1beta1")
)
"""The object that Kueue creates for a pod or Job in a queue, in the versions that its releases serve."""

CHILD_RESOURCES = (
    SERVICE_ACCOUNT, SECRET, CONFIG_MAP, PERSISTENT_VOLUME_CLAIM, SERVICE, DEPLOYMENT, LEADER_WORKER_SET,
    DISAGGREGATED_SET, JOB, NETWORK_POLICY, POD_DISRUPTION_BUDGET, HORIZONTAL_POD_AUTOSCALER,
    POD_MONITOR, SCALED_OBJECT, INFERENCE_POOL, HTTP_ROUTE,
)  # fmt: skip
"""Kinds that the operator creates for an LLMService."""

OPTIONAL_RESOURCES = (
    POD_DISRUPTION_BUDGET,
    HORIZONTAL_POD_AUTOSCALER,
    POD_MONITOR,
    SCALED_OBJECT,
    INFERENCE_POOL,
    HTTP_ROUTE,
)
"""Kinds that a service can do without. Their CRD may not be installed, or the operator may lack the permission."""

DISCOVERED_RESOURCES = (*OPTIONAL_RESOURCES, LEADER_WORKER_SET, DISAGGREGATED_SET)
"""Kinds whose CRD may not be installed. A service of groups of pods needs a LeaderWorkerSet."""

WORKLOADS = (DEPLOYMENT, LEADER_WORKER_SET, DISAGGREGATED_SET)
"""Kinds of which a service has one object, which makes its pods; two while one replaces the other."""

WATCHED_RESOURCES = (*(resource for resource in CHILD_RESOURCES if resource is not SECRET), REPLICA_SET, POD)
"""Kinds that the operator watches. The operator does not watch Secrets, because the right to list Secrets includes the
right to read their values."""

_BY_API_VERSION_AND_KIND: Mapping[tuple[str, str], Resource] = {
    (resource.api_version, resource.kind): resource for resource in CHILD_RESOURCES
}


def resource_for(manifest: Mapping[str, Any]) -> Resource:
    """Return the resource of a rendered manifest. Raises KeyError if CHILD_RESOURCES does not contain the resource."""
    return _BY_API_VERSION_AND_KIND[manifest["apiVersion"], manifest["kind"]]
