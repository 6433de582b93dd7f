# SPDX-License-Identifier: Apache-2.0
"""children(): the manifests that are applied for a service now: what desired() renders, less what this cluster lacks,
with pods that are to be left alone as they are, and nothing that waits for a download. Pure.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.controller.status.model_cache import is_terminating, job_succeeded
from quire_operator.controller.template_revision import TemplateRevision
from quire_operator.kube.old_api_servers import remove_fields
from quire_operator.kube.resources import JOB, OPTIONAL_RESOURCES, PERSISTENT_VOLUME_CLAIM, Resource, resource_for
from quire_operator.plan.plan import Plan
from quire_operator.render.context import OPTIONAL_KINDS, RenderContext
from quire_operator.render.objects import render_objects

Manifest = dict[str, Any]
Body = Mapping[str, Any]
_POD_TEMPLATE_PATH = ("spec", "template")
"""Where spec.podTemplate is in a Deployment."""
_DEFAULT_KINDS = ("PodDisruptionBudget", "PodMonitor")
"""Kinds of which every service has an object where there is the kind (Auto): nobody has asked for it."""


@dataclass(frozen=True, slots=True)
class ChildContext:
    """What children depend on beside the service and its plan."""

    uid: str
    admin_key: str
    credentials: Mapping[str, Mapping[str, str]]
    available_kinds: frozenset[Resource]
    operator_peer: Mapping[str, Any] | None = None
    """NetworkPolicy peer that the operator is."""


@dataclass(frozen=True, slots=True)
class LiveObjects:
    """Objects that are there, by what they mean for others."""

    deployment: Body | None = None
    claim: Body | None = None
    download_jobs: Mapping[str, Body] | None = None
    """Download Jobs of the model by name."""


@dataclass(frozen=True, slots=True)
class ChildObjects:
    """What is to be applied."""

    manifests: tuple[Manifest, ...]
    unavailable_kinds: tuple[str, ...]
    """Kinds that the spec asks for, not by default, and the API server does not have."""
    download_job_name: str | None
    """Name of the download Job; None: nothing is downloaded before pods start."""
    waiting_for_download: bool
    """The Deployment stays on the previous model until the new one is there."""
    unknown_fields: tuple[str, ...] = ()
    """Fields of the spec that the API server does not know; filled once they were applied."""

    @property
    def retained(self) -> frozenset[tuple[str, str]]:
        """Kind and name of each object that is to stay: those that are applied, and the Job that has done its work."""
        applied_ids = {(m["kind"], m["metadata"]["name"]) for m in self.manifests}
        return frozenset(applied_ids | ({(JOB.kind, self.download_job_name)} if self.download_job_name else set()))


def build_child_objects(
    service: LLMService, spec_digest: str, plan: Plan, context: ChildContext, live_objects: LiveObjects
) -> ChildObjects:
    """What is to be applied for a service; `digest` is its spec_digest. Raises as `desired`."""
    available_kinds = {resource.kind for resource in context.available_kinds}
    render_context = RenderContext(
        admin_key=context.admin_key,
        available_kinds=frozenset(available_kinds & set(OPTIONAL_KINDS)),
        credentials=context.credentials,
        operator_peer=context.operator_peer,
        owner_uid=context.uid,
    )
    rendered = render_objects(service, plan, render_context)
    missing_kinds = [
        m["kind"]
        for m in rendered.manifests
        if resource_for(m) in OPTIONAL_RESOURCES and resource_for(m) not in context.available_kinds
    ]
    manifests = [m for m in rendered.manifests if m["kind"] not in missing_kinds]
    job = next((m for m in manifests if resource_for(m) is JOB), None)
    finished_job = _finished_job(job, live_objects)
    if finished_job is not None:
        # Whatever a new release, or another placement, would have it look like: what it brings is there.
        manifests = [m for m in manifests if m is not job]
    elif job is not None and is_terminating(live_objects.claim):
        # Both are made once it is gone; nothing else has to wait for that.
        manifests = [m for m in manifests if resource_for(m) not in (PERSISTENT_VOLUME_CLAIM, JOB)]
    revision = TemplateRevision.from_manifests(spec_digest, plan, manifests)
    live_revision = TemplateRevision.from_deployment(live_objects.deployment)
    is_serving = live_revision is not None and (live_objects.deployment or {}).get("spec", {}).get("replicas", 1) > 0
    model_ready = job is None or finished_job is not None
    is_same_revision = live_revision is not None and (live_revision.spec_digest, live_revision.plan_hash) == (
        revision.spec_digest,
        revision.plan_hash,
    )
    waiting_for_download = is_serving and not model_ready and not is_same_revision
    if live_revision is not None and (
        waiting_for_download or (is_same_revision and service.spec.rollout.updatePolicy != "Auto")
    ):
        revision = live_revision
    replicas = service.spec.replicas if model_ready or is_serving else 0
    final_manifests = [
        _with_live_values(service, manifest, replicas, live_objects) for manifest in revision.apply_to(manifests)
    ]
    job_name = finished_job if job is None or finished_job is not None else str(job["metadata"]["name"])
    unavailable_kinds = tuple(
        kind for kind in (*rendered.unavailable_kinds, *missing_kinds) if kind not in _DEFAULT_KINDS
    )
    return ChildObjects(tuple(final_manifests), unavailable_kinds, job_name, waiting_for_download)


def unknown_fields(service: LLMService, unsupported_fields: Collection[tuple[str, ...]]) -> tuple[str, ...]:
    """Fields of spec.podTemplate among those that the API server's Deployments do not have. What we add ourselves, for
    a later API server, is nobody's business."""
    pod_template = service.spec.podTemplate
    relative_paths = (
        path[len(_POD_TEMPLATE_PATH) :]
        for path in unsupported_fields
        if path[: len(_POD_TEMPLATE_PATH)] == _POD_TEMPLATE_PATH
    )
    return tuple(
        sorted(
            ".".join(("spec.podTemplate", *path))
            for path in relative_paths
            if remove_fields(pod_template, {path}) != pod_template
        )
    )


def _with_live_values(service: LLMService, manifest: Manifest, replicas: int, live_objects: LiveObjects) -> Manifest:
    """With what the cluster has decided already."""
    if manifest["kind"] == "Deployment":
        return {**manifest, "spec": {**manifest["spec"], "replicas": replicas}}
    if manifest["kind"] == "PersistentVolumeClaim" and live_objects.claim is not None:
        return _claim_with_live_values(service, manifest, live_objects.claim["spec"])
    return manifest


def _claim_with_live_values(service: LLMService, manifest: Manifest, live_spec: Body) -> Manifest:
    """A claim can hardly be changed: what the spec does not pin stays as it is."""
    cache, spec = service.spec.cache, dict(manifest["spec"])
    if not cache.accessModes:
        spec["accessModes"] = live_spec["accessModes"]
    if not cache.storageClassName and "storageClassName" in live_spec:
        spec["storageClassName"] = live_spec["storageClassName"]
    if not cache.size:
        spec["resources"] = {"requests": {"storage": live_spec["resources"]["requests"]["storage"]}}
    return {**manifest, "spec": spec}


def _finished_job(job: Manifest | None, live_objects: LiveObjects) -> str | None:
    """Name of the Job that has brought what this one would bring."""
    if job is None:
        return None
    return next(
        (name for name, body in (live_objects.download_jobs or {}).items() if job_succeeded(body, live_objects.claim)),
        None,
    )
