# SPDX-License-Identifier: Apache-2.0
"""Kind: where the API server keeps objects of a kind; and the kinds that the operator reads and writes."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire_spec import constants


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of object."""

    group: str
    """Empty for the core kinds."""
    version: str
    plural: str
    name: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        """As in manifests."""
        return f"{self.group}/{self.version}" if self.group else self.version

    @property
    def root(self) -> str:
        """Path of the group and version."""
        return f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Path of an object, or of all in a namespace, or of all there are."""
        parts = [self.root]
        if self.namespaced and namespace:
            parts.append(f"namespaces/{namespace}")
        parts += [part for part in (self.plural, name, subresource) if part]
        return "/".join(parts)


LLM_SERVICE = Kind(constants.API_GROUP, constants.API_VERSION, "llmservices", constants.KIND)
SERVICE_ACCOUNT = Kind("", "v1", "serviceaccounts", "ServiceAccount")
SECRET = Kind("", "v1", "secrets", "Secret")
CONFIG_MAP = Kind("", "v1", "configmaps", "ConfigMap")
CLAIM = Kind("", "v1", "persistentvolumeclaims", "PersistentVolumeClaim")
SERVICE = Kind("", "v1", "services", "Service")
POD = Kind("", "v1", "pods", "Pod")
NODE = Kind("", "v1", "nodes", "Node", namespaced=False)
DEPLOYMENT = Kind("apps", "v1", "deployments", "Deployment")
REPLICA_SET = Kind("apps", "v1", "replicasets", "ReplicaSet")
JOB = Kind("batch", "v1", "jobs", "Job")
NETWORK_POLICY = Kind("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
DISRUPTION_BUDGET = Kind("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
AUTOSCALER = Kind("autoscaling", "v2", "horizontalpodautoscalers", "HorizontalPodAutoscaler")
POD_MONITOR = Kind("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor")
SCALED_OBJECT = Kind("keda.sh", "v1alpha1", "scaledobjects", "ScaledObject")
INFERENCE_POOL = Kind("inference.networking.k8s.io", "v1", "inferencepools", "InferencePool")
EVENT = Kind("events.k8s.io", "v1", "events", "Event")

CHILDREN = (
    SERVICE_ACCOUNT, SECRET, CONFIG_MAP, CLAIM, SERVICE, DEPLOYMENT, JOB, NETWORK_POLICY, DISRUPTION_BUDGET, AUTOSCALER,
    POD_MONITOR, SCALED_OBJECT, INFERENCE_POOL,
)  # fmt: skip
"""Kinds that an LLMService is made into."""

DISCOVERED = (DISRUPTION_BUDGET, AUTOSCALER, POD_MONITOR, SCALED_OBJECT, INFERENCE_POOL)
"""Those that an API server may lack: too old for them, or nobody installed them."""

WATCHED = (*(kind for kind in CHILDREN if kind is not SECRET), REPLICA_SET, POD)
"""Kinds whose objects are watched. Not Secrets: who may list those of a namespace may read all of them."""

_BY_NAME: Mapping[tuple[str, str], Kind] = {(kind.api_version, kind.name): kind for kind in CHILDREN}


def kind_of(manifest: Mapping[str, Any]) -> Kind:
    """The kind of a manifest that was rendered; a KeyError is a kind that is missing here."""
    return _BY_NAME[manifest["apiVersion"], manifest["kind"]]
