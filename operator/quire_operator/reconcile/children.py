# SPDX-License-Identifier: Apache-2.0
"""children(): the manifests that are applied for a service now: what desired() renders, less what this cluster lacks,
with pods that are to be left alone as they are, and nothing that waits for a download. Pure.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quire_operator.kube.client import without
from quire_operator.kube.kinds import CLAIM, DISCOVERED, JOB, Kind, kind_of
from quire_operator.plan.plan import Plan
from quire_operator.reconcile.model_cache import is_going, job_succeeded
from quire_operator.reconcile.pinned import Pinned
from quire_operator.render.cluster import OPTIONAL, Cluster
from quire_operator.render.desired import desired
from quire_operator.service import LLMService

Manifest = dict[str, Any]
Body = Mapping[str, Any]
_TEMPLATE = ("spec", "template")
"""Where spec.podTemplate is in a Deployment."""
_BY_DEFAULT = ("PodDisruptionBudget", "PodMonitor")
"""Kinds of which every service has an object where there is the kind (Auto): nobody has asked for it."""


@dataclass(frozen=True, slots=True)
class Around:
    """What children depend on beside the service and its plan."""

    uid: str
    admin_key: str
    credentials: Mapping[str, Mapping[str, str]]
    offered: frozenset[Kind]
    operator: Mapping[str, Any] | None = None
    """NetworkPolicy peer that the operator is."""


@dataclass(frozen=True, slots=True)
class Live:
    """Objects that are there, by what they mean for others."""

    deployment: Body | None = None
    claim: Body | None = None
    jobs: Mapping[str, Body] | None = None
    """Download Jobs of the model by name."""


@dataclass(frozen=True, slots=True)
class Children:
    """What is to be applied."""

    manifests: tuple[Manifest, ...]
    left_out: tuple[str, ...]
    """Kinds that the spec asks for, not by default, and the API server does not have."""
    job: str | None
    """Name of the download Job; None: nothing is downloaded before pods start."""
    held: bool
    """The Deployment stays on the previous model until the new one is there."""
    fields_left_out: tuple[str, ...] = ()
    """Fields of the spec that the API server does not know; filled once they were applied."""

    @property
    def kept(self) -> frozenset[tuple[str, str]]:
        """Kind and name of each object that is to stay: those that are applied, and the Job that has done its work."""
        applied = {(m["kind"], m["metadata"]["name"]) for m in self.manifests}
        return frozenset(applied | ({(JOB.name, self.job)} if self.job else set()))


def children(service: LLMService, digest: str, plan: Plan, around: Around, live: Live) -> Children:
    """What is to be applied for a service; `digest` is its spec_digest. Raises as `desired`."""
    offers = {kind.name for kind in around.offered}
    cluster = Cluster(
        admin_key=around.admin_key,
        offers=frozenset(offers & set(OPTIONAL)),
        credentials=around.credentials,
        operator=around.operator,
        owner_uid=around.uid,
    )
    found = desired(service, plan, cluster)
    lacking = [m["kind"] for m in found.manifests if kind_of(m) in DISCOVERED and kind_of(m) not in around.offered]
    manifests = [m for m in found.manifests if m["kind"] not in lacking]
    job = next((m for m in manifests if kind_of(m) is JOB), None)
    done = _done(job, live)
    if done is not None:
        # Whatever a new release, or another placement, would have it look like: what it brings is there.
        manifests = [m for m in manifests if m is not job]
    elif job is not None and is_going(live.claim):
        # Both are made once it is gone; nothing else has to wait for that.
        manifests = [m for m in manifests if kind_of(m) not in (CLAIM, JOB)]
    pods = Pinned.of(digest, plan, manifests)
    before = Pinned.read(live.deployment)
    serves = before is not None and (live.deployment or {}).get("spec", {}).get("replicas", 1) > 0
    there = job is None or done is not None
    same = before is not None and (before.spec, before.plan) == (pods.spec, pods.plan)
    held = serves and not there and not same
    if before is not None and (held or (same and service.spec.rollout.updatePolicy != "Auto")):
        pods = before
    replicas = service.spec.replicas if there or serves else 0
    ready = [_settled(service, manifest, replicas, live) for manifest in pods.into(manifests)]
    name = done if job is None or done is not None else str(job["metadata"]["name"])
    left_out = tuple(kind for kind in (*found.left_out, *lacking) if kind not in _BY_DEFAULT)
    return Children(tuple(ready), left_out, name, held)


def fields_left_out(service: LLMService, undeclared: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    """Fields of spec.podTemplate among those that the API server's Deployments do not have. What we add ourselves, for
    a later API server, is nobody's business."""
    asked = service.spec.podTemplate
    below = (path[len(_TEMPLATE) :] for path in undeclared if path[: len(_TEMPLATE)] == _TEMPLATE)
    return tuple(sorted(".".join(("spec.podTemplate", *path)) for path in below if without(asked, {path}) != asked))


def _settled(service: LLMService, manifest: Manifest, replicas: int, live: Live) -> Manifest:
    """With what the cluster has decided already."""
    if manifest["kind"] == "Deployment":
        return {**manifest, "spec": {**manifest["spec"], "replicas": replicas}}
    if manifest["kind"] == "PersistentVolumeClaim" and live.claim is not None:
        return _claim(service, manifest, live.claim["spec"])
    return manifest


def _claim(service: LLMService, manifest: Manifest, there: Body) -> Manifest:
    """A claim can hardly be changed: what the spec does not pin stays as it is."""
    cache, spec = service.spec.cache, dict(manifest["spec"])
    if not cache.accessModes:
        spec["accessModes"] = there["accessModes"]
    if not cache.storageClassName and "storageClassName" in there:
        spec["storageClassName"] = there["storageClassName"]
    if not cache.size:
        spec["resources"] = {"requests": {"storage": there["resources"]["requests"]["storage"]}}
    return {**manifest, "spec": spec}


def _done(job: Manifest | None, live: Live) -> str | None:
    """Name of the Job that has brought what this one would bring."""
    if job is None:
        return None
    return next((name for name, body in (live.jobs or {}).items() if job_succeeded(body, live.claim)), None)
