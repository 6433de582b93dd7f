# SPDX-License-Identifier: Apache-2.0
"""Nodes of a cluster, and those of them on which the pods of a service can start. Pure. Called by cli/plan.py and the
controller."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire_operator.api.llmservice import LLMService
from quire_operator.api.quantity import to_bytes
from quire_operator.plan.gpu import GPU_RESOURCE, PRODUCT_LABEL, GpuInfo, Labels, MemorySource
from quire_operator.plan.inputs import NodeCapacity

_BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")
"""Effects of taints that keep pods off a node. The effect PreferNoSchedule does not."""


@dataclass(frozen=True, slots=True)
class Node:
    """What planning needs to know about a node."""

    labels: Labels
    taints: tuple[Mapping[str, Any], ...] = ()
    is_schedulable: bool = True
    """False if the node is cordoned or not ready."""
    memory: int | None = None
    """Bytes of host memory for pods; None: unknown."""
    ephemeral_storage: int | None = None
    """Bytes of the node's disk for pods; None: unknown."""

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Convert a Node of the API server. Parts that are missing do not exclude the node."""
        spec, status = body.get("spec") or {}, body.get("status") or {}
        conditions = {c.get("type"): c.get("status") for c in status.get("conditions") or ()}
        labels = body.get("metadata", {}).get("labels") or {}
        is_schedulable = not spec.get("unschedulable") and conditions.get("Ready", "True") == "True"
        allocatable = status.get("allocatable") or {}
        sizes = (_to_bytes(allocatable.get(name)) for name in ("memory", "ephemeral-storage"))
        return cls(dict(labels), tuple(spec.get("taints") or ()), is_schedulable, *sizes)


def parse_nodes(node_list: Any) -> list[Node]:
    """Return the nodes in the parsed output of `kubectl get nodes -o json` (a list, or one node)."""
    items = node_list.get("items", [node_list]) if isinstance(node_list, Mapping) else []
    return [Node.from_body(item) for item in items if isinstance(item, Mapping)]


def usable_node_labels(service: LLMService, nodes: Iterable[Node]) -> list[Labels]:
    """Return the labels of the nodes on which pods of a service can start now.

    If there are none, return the labels of all nodes: their hardware is the best guess for nodes that will come.
    """
    nodes = list(nodes)
    return [node.labels for node in _usable_nodes(service, nodes) or nodes]


def node_capacity(service: LLMService, nodes: Iterable[Node], gpu: GpuInfo | None) -> NodeCapacity:
    """Return the largest capacity of the nodes with this GPU on which pods of a service can start now.

    It is unknown on a CPU, and if the spec sets the memory of the GPU, because the nodes may be others then.
    """
    if gpu is None or gpu.memory_source is MemorySource.SPEC:
        return NodeCapacity()
    selector = service.spec.gpu.nodeSelector if service.spec.gpu else {}
    wanted = {PRODUCT_LABEL: gpu.product, **selector}
    usable = [node for node in _usable_nodes(service, nodes) if wanted.items() <= node.labels.items()]
    memory = [node.memory for node in usable if node.memory is not None]
    storage = [node.ephemeral_storage for node in usable if node.ephemeral_storage is not None]
    return NodeCapacity(max(memory, default=None), max(storage, default=None))


def _usable_nodes(service: LLMService, nodes: Iterable[Node]) -> list[Node]:
    pod_specs, gpu = service.pod_overrides, service.spec.gpu
    tolerations = [*(gpu.tolerations if gpu else ()), *(t for s in pod_specs for t in _mappings(s.get("tolerations")))]
    resource = gpu.resourceName if gpu else GPU_RESOURCE
    selectors = [selector for spec in pod_specs if isinstance(selector := spec.get("nodeSelector"), Mapping)]
    wanted = {key: value for selector in selectors for key, value in selector.items() if key != "$patch"}
    return [
        node
        for node in nodes
        if node.is_schedulable
        and wanted.items() <= node.labels.items()
        and all(_is_tolerated(taint, tolerations, resource) for taint in node.taints)
    ]


def _is_tolerated(taint: Mapping[str, Any], tolerations: Iterable[Mapping[str, Any]], resource: str) -> bool:
    # Many clusters add a toleration for the taint of the resource that a pod requests (ExtendedResourceToleration).
    is_harmless = taint.get("effect") not in _BLOCKING_EFFECTS or taint.get("key") == resource
    return is_harmless or any(_matches(toleration, taint) for toleration in tolerations)


def _matches(toleration: Mapping[str, Any], taint: Mapping[str, Any]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    if toleration.get("operator") == "Exists":
        return toleration.get("key") in (None, "", taint.get("key"))
    return (toleration.get("key"), toleration.get("value") or "") == (taint.get("key"), taint.get("value") or "")


def _to_bytes(quantity: Any) -> int | None:
    try:
        return to_bytes(str(quantity))
    except ValueError:
        return None


def _mappings(entries: Any) -> list[Mapping[str, Any]]:
    return [entry for entry in entries if isinstance(entry, Mapping)] if isinstance(entries, list) else []
