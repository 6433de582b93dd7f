# SPDX-License-Identifier: Apache-2.0
"""The kind DisaggregatedSet for tests: a reduced schema, and a double of its controller.

The controller is part of LeaderWorkerSet 1.0, which is not published as a Go module. The schema has the fields of
api/disaggregatedset/v1 of kubernetes-sigs/lws (2026-08), and groupIdentity of its KEP 898. The double makes the
LeaderWorkerSets that the controller makes, with the same names and labels; LeaderWorkerSet's real controller runs them.
A rollout is simpler than the real one: all pods of the new revision are made, and then those of the old one end.
"""

import contextlib
import hashlib
import json
import threading
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kubernetes.dynamic.exceptions import DynamicApiError
from support.cluster import Cluster

Manifest = dict[str, Any]
API, KIND = "disaggregatedset.x-k8s.io/v1", "DisaggregatedSet"
LWS = "leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"
PREFIX = "disaggregatedset.x-k8s.io"
_PAUSE_S = 0.2
_COUNT = {"type": "integer", "format": "int32", "minimum": 0}
_NUMBER = {"x-kubernetes-int-or-string": True}
_TEXT = {"type": "string"}


def _object(required: tuple[str, ...] = (), **properties: Any) -> Manifest:
    return {"type": "object", "properties": properties, **({"required": list(required)} if required else {})}


def _enum(*values: str) -> Manifest:
    return {"type": "string", "enum": list(values)}


_TEMPLATE = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
_STRINGS = {"type": "object", "additionalProperties": _TEXT}
_GROUP = _object(
    ("workerTemplate",),
    size=_COUNT,
    leaderTemplate=_TEMPLATE,
    workerTemplate=_TEMPLATE,
    restartPolicy=_enum("Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
)
_ROLLING_UPDATE = _object(partition=_COUNT, maxSurge=_NUMBER, maxUnavailable=_NUMBER)
_ROLE_SPEC = _object(
    ("leaderWorkerTemplate",),
    replicas=_COUNT,
    groupIdentity=_enum("Ordinal", "Hash"),
    startupPolicy=_enum("LeaderCreated", "LeaderReady"),
    networkConfig=_object(subdomainPolicy=_enum("Shared", "UniquePerReplica")),
    rolloutStrategy=_object(type=_enum("RollingUpdate"), rollingUpdateConfiguration=_ROLLING_UPDATE),
    leaderWorkerTemplate=_GROUP,
)
_NAME = {"type": "string", "minLength": 1, "maxLength": 63, "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
_ROLE = _object(("name",), name=_NAME, metadata=_object(labels=_STRINGS, annotations=_STRINGS), spec=_ROLE_SPEC)
_RULES = [
    {
        "rule": "self.roles.all(r, !has(r.spec.replicas) || r.spec.replicas == 0) || "
        "self.roles.all(r, has(r.spec.replicas) && r.spec.replicas > 0)",
        "message": "replicas must be zero for all roles or non-zero for all roles",
    },
    {
        "rule": "self.roles.all(r, !has(r.spec.rolloutStrategy) || "
        "!has(r.spec.rolloutStrategy.rollingUpdateConfiguration) || "
        "!has(r.spec.rolloutStrategy.rollingUpdateConfiguration.partition))",
        "message": "partition must not be set",  # a webhook checks this
    },
]
_SPEC = _object(
    ("roles",),
    slices=_COUNT,
    roles={"type": "array", "minItems": 2, "maxItems": 10, "items": _ROLE, "x-kubernetes-list-type": "map",
           "x-kubernetes-list-map-keys": ["name"]},
) | {"x-kubernetes-validations": _RULES}  # fmt: skip
_ROLE_STATUS = _object(("name",), name=_TEXT, replicas=_COUNT, readyReplicas=_COUNT, updatedReplicas=_COUNT)
_STATUS = _object(
    observedGeneration={"type": "integer", "format": "int64"}, roleStatuses={"type": "array", "items": _ROLE_STATUS}
)
CRD: Manifest = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {
        "name": f"disaggregatedsets.{PREFIX}",
        "annotations": {"api-approved.kubernetes.io": "https://github.com/kubernetes-sigs/lws/pull/766"},
    },
    "spec": {
        "group": PREFIX,
        "scope": "Namespaced",
        "names": {"kind": KIND, "listKind": f"{KIND}List", "plural": "disaggregatedsets", "singular": KIND.lower()},
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "subresources": {"status": {}},
                "schema": {"openAPIV3Schema": _object(("spec",), spec=_SPEC, status=_STATUS)},
            }
        ],
    },
}


@contextlib.contextmanager
def running_double(cluster: Cluster) -> Iterator["DisaggregatedSets"]:
    """Install the kind, and run the double; delete the kind at the end."""
    cluster.apply_crd(CRD)
    double = DisaggregatedSets(cluster)
    thread = threading.Thread(target=double.run, name="disaggregated sets", daemon=True)
    thread.start()
    try:
        yield double
    finally:
        double.stop.set()
        thread.join(20)
        cluster.delete_crd(CRD["metadata"]["name"])
    assert not double.errors, double.errors


@dataclass
class DisaggregatedSets:
    """The double of the controller."""

    cluster: Cluster
    errors: list[str] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        """Bring all sets to their state, again and again."""
        while not self.stop.wait(_PAUSE_S):
            try:
                for item in self.cluster.request("GET", f"/apis/{API}/disaggregatedsets")["items"]:
                    if "deletionTimestamp" not in item["metadata"]:
                        self._sync(item)
            except DynamicApiError as error:
                # Objects go while we look at them.
                if error.status not in (404, 409, 429):
                    self.errors.append(str(error.summary()))
            except Exception:
                if not self.stop.is_set():
                    self.errors.append(traceback.format_exc())

    def _sync(self, item: Manifest) -> None:
        meta, roles = item["metadata"], item["spec"]["roles"]
        content = [[role["name"], role["spec"]["leaderWorkerTemplate"]] for role in roles]
        revision = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
        children = [
            child
            for child in self.cluster.items(*LWS, meta["namespace"])
            if any(owner["uid"] == meta["uid"] for owner in child["metadata"].get("ownerReferences", ()))
        ]
        newest = {_label(child, "role"): child for child in children if _label(child, "revision") == revision}
        for role in roles:
            self._make(item, role, revision, newest.get(role["name"]))
        if all(_is_ready(newest.get(role["name"]), role["spec"].get("replicas", 0)) for role in roles):
            for old in (child for child in children if _label(child, "revision") != revision):
                self.cluster.delete(*LWS, old["metadata"]["name"], meta["namespace"])
        self._report(item, children, revision)

    def _make(self, item: Manifest, role: Manifest, revision: str, existing: Manifest | None) -> None:
        meta, spec = item["metadata"], {key: value for key, value in role["spec"].items() if key != "groupIdentity"}
        name = f"{meta['name']}-0-{revision}-{role['name']}"
        if existing is not None:
            if existing["spec"]["replicas"] != spec["replicas"]:
                self.cluster.merge(*LWS, name, {"spec": {"replicas": spec["replicas"]}}, meta["namespace"])
            return
        own = {"name": meta["name"], "slice": "0", "role": role["name"], "revision": revision}
        labels = {"app": f"{meta['name']}-0-{role['name']}", **{f"{PREFIX}/{key}": own[key] for key in own}}
        group = spec["leaderWorkerTemplate"]
        for name_of_template in {"leaderTemplate", "workerTemplate"} & group.keys():
            template = group[name_of_template]
            template_meta = {**template["metadata"], "labels": {**template["metadata"]["labels"], **labels}}
            group = {**group, name_of_template: {**template, "metadata": template_meta}}
        owner = {"apiVersion": API, "kind": KIND, "name": meta["name"], "uid": meta["uid"], "controller": True}
        child_meta = {"name": name, "namespace": meta["namespace"], "ownerReferences": [owner]}
        child_meta["labels"] = {**role["metadata"].get("labels", {}), **labels}
        child = {"apiVersion": LWS[0], "kind": LWS[1], "metadata": child_meta}
        child["spec"] = {**spec, "leaderWorkerTemplate": group}
        # Strictly, so that a field that LeaderWorkerSet 0.8 does not have is an error.
        path = self.cluster.path(*LWS, meta["namespace"])
        self.cluster.request("POST", path, child, fieldValidation="Strict")

    def _report(self, item: Manifest, children: list[Manifest], revision: str) -> None:
        statuses = []
        for role in item["spec"]["roles"]:
            own = [child for child in children if _label(child, "role") == role["name"]]
            status = {"name": role["name"], "replicas": 0, "readyReplicas": 0, "updatedReplicas": 0}
            for child in own:
                for name in ("replicas", "readyReplicas", "updatedReplicas"):
                    if name != "updatedReplicas" or _label(child, "revision") == revision:
                        status[name] += child.get("status", {}).get(name, 0)
            statuses.append(status)
        status = {"observedGeneration": item["metadata"]["generation"], "roleStatuses": statuses}
        if item.get("status") != status:
            meta = item["metadata"]
            path = f"{self.cluster.path(API, KIND, meta['namespace'], meta['name'])}/status"
            self.cluster.request("PATCH", path, {"status": status}, "application/merge-patch+json")


def _label(child: Manifest, name: str) -> str:
    return str(child["metadata"].get("labels", {}).get(f"{PREFIX}/{name}", ""))


def _is_ready(child: Manifest | None, replicas: int) -> bool:
    return child is not None and child.get("status", {}).get("readyReplicas", 0) == replicas
