# SPDX-License-Identifier: Apache-2.0
"""Child objects: this module selects which of a service's rendered manifests are applied now. Pure.

It leaves out kinds that the API server does not serve, and objects that must wait for a download. If the pods must not
restart, the selected Deployment keeps its pod template. Called by the reconciler.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.api.quantity import to_bytes
from quire_operator.controller.apply.replacement import Replacement
from quire_operator.controller.status.model_cache import is_terminating, job_succeeded
from quire_operator.controller.template_revision import WORKLOAD_KINDS, TemplateRevision, has_replicas
from quire_operator.kube.resources import (
    DISAGGREGATED_SET,
    JOB,
    LEADER_WORKER_SET,
    OPTIONAL_RESOURCES,
    PERSISTENT_VOLUME_CLAIM,
    resource_for,
)
from quire_operator.kube.unknown_fields import FieldPath, remove_fields
from quire_operator.plan.plan import Plan
from quire_operator.render.context import RenderContext
from quire_operator.render.manifests import Manifest
from quire_operator.render.model_storage import DOWNLOAD_CONTAINER
from quire_operator.render.objects import render_objects, render_running_objects
from quire_spec.constants import CONFIG_FILE
from quire_spec.documents.download_result import KEPT_FOLDERS_VARIABLE
from quire_spec.errors import ConfigError

Body = Mapping[str, Any]
_POD_TEMPLATE_PATHS = (
    ("spec", "template"),
    ("spec", "leaderWorkerTemplate", "leaderTemplate"),
    ("spec", "roles", "spec", "leaderWorkerTemplate", "leaderTemplate"),
    ("spec", "roles", "spec", "leaderWorkerTemplate", "workerTemplate"),
)
"""In a workload, the fields of spec.podTemplate are below one of these paths."""
_POD_TEMPLATES = frozenset({"template", "leaderTemplate", "workerTemplate"})
"""The fields of workloads that contain a pod template."""
_SETS = frozenset({LEADER_WORKER_SET.kind, DISAGGREGATED_SET.kind})
"""Kinds of workloads of which a cluster can have an older release without some fields."""
_DEFAULT_KINDS = ("PodDisruptionBudget", "PodMonitor")
"""Kinds that every service uses by default (Auto). If a cluster does not have one of them, the status does not contain
a warning.
"""


@dataclass(frozen=True, slots=True)
class LiveObjects:
    """Existing objects that the manifests depend on."""

    workload: Body | None = None
    """The Deployment or LeaderWorkerSet, of the kind that the spec needs."""
    claim: Body | None = None
    download_jobs: Mapping[str, Body] | None = None
    """The Jobs that download the model, by name."""
    used_folders: Collection[str] | None = None
    """Names of the folders on the claim that pods use. None if this is not known."""
    replaced_workload: Body | None = None
    """The workload of the other kind, if it exists."""
    replacement: Replacement | None = None
    """Replicas of both, if both kinds or only the other one exist."""

    @property
    def paused_replacement(self) -> Replacement | None:
        """The replicas that both workloads have now. None if there is only one."""
        if self.workload is None or self.replaced_workload is None:
            return None
        new, old = (body["spec"].get("replicas", 1) for body in (self.workload, self.replaced_workload))
        return Replacement(new, old, is_complete=False)

    @property
    def serving_workload(self) -> Body | None:
        """The workload whose pods serve: the one of the other kind until the new one exists."""
        return self.replaced_workload if self.workload is None else self.workload


@dataclass(frozen=True, slots=True)
class ChildObjects:
    """The manifests to apply."""

    manifests: tuple[Manifest, ...]
    unavailable_kinds: tuple[str, ...]
    """Kinds that the spec requests explicitly, but that the API server does not serve."""
    download_job_name: str | None
    """Name of the download Job, or None if the model is not downloaded by a Job."""
    keeps_pods: bool
    """True if the Deployment still has the pods of an earlier generation, because the new model is not downloaded
    completely.
    """
    unknown_fields: tuple[str, ...] = ()
    """Fields of the spec that the API server does not know. Empty before the first apply."""
    outdated_image: str = ""
    """The image in spec.runtime.image, if it is older than the operator. Its pods keep their template. Otherwise
    empty."""

    @property
    def retained(self) -> frozenset[tuple[str, str]]:
        """The kinds and names of the objects that prune() must keep.

        These are all applied objects, and the finished download Job.
        """
        applied_ids = {(m["kind"], m["metadata"]["name"]) for m in self.manifests}
        return frozenset(applied_ids | ({(JOB.kind, self.download_job_name)} if self.download_job_name else set()))


def build_child_objects(
    service: LLMService, pods_digest: str, plan: Plan, context: RenderContext, live_objects: LiveObjects
) -> ChildObjects:
    """Select the manifests to apply.

    `pods_digest` is the result of `template_revision.pods_digest`. Raises the same errors as `render_objects`, and
    ConfigError if pods must be replaced, but their image is older than the operator.
    """
    rendered = render_objects(service, plan, context)
    manifests, missing_kinds = _select_available(rendered.manifests, context)
    job = next((m for m in manifests if resource_for(m) is JOB), None)
    finished_job = _finished_job(job, live_objects)
    if finished_job is not None:
        # The model is already downloaded. Therefore, the Job does not run again, even if a new release or a new
        # placement renders it differently.
        manifests = [m for m in manifests if m is not job]
    elif job is not None and is_terminating(live_objects.claim):
        # The claim and the Job are created after the old claim has been deleted. The other objects need not wait.
        manifests = [m for m in manifests if resource_for(m) not in (PERSISTENT_VOLUME_CLAIM, JOB)]
    revision = TemplateRevision.from_manifests(pods_digest, plan, manifests)
    live_revision = TemplateRevision.from_workload(live_objects.serving_workload)
    is_serving = live_revision is not None and has_replicas(live_objects.serving_workload)
    model_ready = job is None or finished_job is not None
    is_same_revision = live_revision is not None and live_revision.inputs == revision.inputs
    keeps_pods = is_serving and not model_ready and not is_same_revision
    is_outdated = live_revision is not None and _has_outdated_image(live_revision, plan)
    if is_outdated and not is_same_revision:
        field = "the image in the chart's values" if service.spec.runtime.image is None else "spec.runtime.image"
        raise ConfigError(
            f"{field}: {plan.image.value!r} is older than the operator and cannot read {CONFIG_FILE}; its pods keep "
            "running with the previous spec; set an image of the operator's release, or omit the field"
        )
    keeps_template = (
        live_revision is not None
        and is_same_revision
        and (is_outdated or not _policy_replaces_pods(service, live_revision, revision))
    )
    if live_revision is not None and (keeps_pods or keeps_template):
        revision = live_revision
        if service.openai_port is not None and not revision.serves_openai:
            # Services and NetworkPolicies get the port of the OpenAI API when the pods get it, not earlier.
            return build_child_objects(service.without_openai(), pods_digest, plan, context, live_objects)
    replicas = service.spec.replicas if model_ready or is_serving else 0
    replacement = live_objects.replacement if model_ready else live_objects.paused_replacement
    # With maxSurge, a LeaderWorkerSet that is scaled has more groups for a while.
    is_replacing = replacement is not None and not replacement.is_complete
    replicas = replicas if replacement is None else replacement.new
    applied = revision.apply_to(manifests, service, plan, replicas, surges=not is_replacing)
    if replacement is not None and is_replacing:
        applied += _replaced_objects(service, plan, context, live_objects, replacement.old)
    manifests = [_with_live_values(service, m, live_objects, downloads=not model_ready) for m in applied]
    job_name = finished_job if job is None or finished_job is not None else str(job["metadata"]["name"])
    reported = tuple(k for k in (*rendered.unavailable_kinds, *missing_kinds) if k not in _DEFAULT_KINDS)
    pinned_image = service.spec.runtime.image or ""
    return ChildObjects(
        tuple(manifests), reported, job_name, keeps_pods, outdated_image=pinned_image if is_outdated else ""
    )


def _policy_replaces_pods(service: LLMService, live_revision: TemplateRevision, revision: TemplateRevision) -> bool:
    """Whether spec.rollout.updatePolicy replaces the pods although their inputs are the same. It does not if only the
    labels or annotations of the pods differ."""
    is_automatic = service.spec.rollout.updatePolicy == "Auto"
    return is_automatic and _pod_specs(live_revision) != _pod_specs(revision)


def _pod_specs(revision: TemplateRevision) -> list[Manifest]:
    return [pods.template["spec"] for pods in revision.pods.values()]


def build_running_objects(
    service: LLMService, plan: Plan, context: RenderContext, live_objects: LiveObjects
) -> tuple[Manifest, ...]:
    """Select the manifests to apply while there are no new pods, because the spec has no plan yet, or cannot have one.

    The running pods keep their template. Their number, the adapters, the access to them and everything else that does
    not depend on new pods follow the spec. `plan` is the plan of the running pods. Return nothing if no pods run.

    Raises:
        ConfigError: the adapter catalog is too large.
    """
    live = live_objects.serving_workload
    revision = TemplateRevision.from_workload(live)
    if live is None or revision is None or not has_replicas(live):
        return ()
    if service.openai_port is not None and not revision.serves_openai:
        service = service.without_openai()
    rendered = render_running_objects(service, plan, context, revision.pods)
    # A replacement does not continue without a plan for the new pods.
    is_partial = live_objects.workload is not None and live_objects.replaced_workload is not None
    replicas = live["spec"].get("replicas", 1) if is_partial else service.spec.replicas
    manifests, _ = _select_available(revision.apply_to(rendered.manifests, service, plan, replicas), context)
    return tuple(_with_live_values(service, m, live_objects, downloads=False) for m in manifests)


def _replaced_objects(
    service: LLMService, plan: Plan, context: RenderContext, live_objects: LiveObjects, replicas: int
) -> list[Manifest]:
    """Return the workload of the other kind, with its own templates and `replicas`, and its ConfigMap."""
    revision = TemplateRevision.from_workload(live_objects.replaced_workload)
    if revision is None:
        return []  # Without its templates, it cannot be applied: it is deleted at once.
    rendered = render_running_objects(service, plan, context, revision.pods)
    manifests = revision.apply_to(rendered.manifests, service, plan, replicas, surges=False)
    return [m for m in manifests if m["kind"] in WORKLOAD_KINDS or (m["kind"] == "ConfigMap" and m.get("immutable"))]


def _select_available(manifests: Sequence[Manifest], context: RenderContext) -> tuple[list[Manifest], list[str]]:
    """Return the manifests whose kinds the API server serves, and the kinds of the others."""
    unavailable = {resource.kind for resource in OPTIONAL_RESOURCES} - context.available_kinds
    selected = [m for m in manifests if m["kind"] not in unavailable]
    return selected, [m["kind"] for m in manifests if m["kind"] in unavailable]


def _has_outdated_image(live_revision: TemplateRevision, plan: Plan) -> bool:
    """Whether the pods would get an image that is known to be older than pod.json.

    This is known if an older release rendered the running pods, and they have the same image. A template of this
    release would only make them crash.
    """
    return not live_revision.reads_pod_config and live_revision.server_container.get("image") == plan.image.value


def unknown_fields(service: LLMService, kind: str, unknown: Collection[FieldPath]) -> tuple[str, ...]:
    """Return the fields of spec.podTemplate that the API server does not know, and those of a kind of another project.
    `kind` is the kind of the workload, to which the paths in `unknown` belong.

    Other fields of pods that only the operator adds are not returned.
    """
    pod_template = service.spec.podTemplate
    paths = [path[len(top) :] for path in unknown for top in _POD_TEMPLATE_PATHS if path[: len(top)] == top]
    used_paths = [path for path in paths if remove_fields(pod_template, {path}) != pod_template]
    found = [".".join(("spec.podTemplate", *path)) for path in used_paths]
    if kind in _SETS:
        found += [f"{kind} {'.'.join(path)}" for path in unknown if _POD_TEMPLATES.isdisjoint(path)]
    return tuple(sorted(found))


def _with_live_values(service: LLMService, manifest: Manifest, live_objects: LiveObjects, downloads: bool) -> Manifest:
    """Return the manifest, in which the values that the live objects determine are set. `downloads` is True if the
    model must still be downloaded.
    """
    if manifest["kind"] == "PersistentVolumeClaim" and live_objects.claim is not None:
        return _claim_with_live_values(service, manifest, live_objects.claim["spec"], downloads)
    return _job_with_kept_folders(manifest, live_objects) if manifest["kind"] == "Job" else manifest


def _job_with_kept_folders(manifest: Manifest, live_objects: LiveObjects) -> Manifest:
    """Return the Job with the list of folders that it must keep. It removes all other revisions.

    The pod template of a Job is immutable, so it keeps the list, the labels and the annotations with which it was
    created. Meanwhile, no pod can get a folder that is not in the list, except the folder that the Job itself writes.
    """
    live_job = (live_objects.download_jobs or {}).get(manifest["metadata"]["name"])
    if live_job is not None:
        env = _download_container(live_job).get("env") or ()
        entries = [entry for entry in env if entry["name"] == KEPT_FOLDERS_VARIABLE]
    elif live_objects.used_folders is not None:
        entries = [{"name": KEPT_FOLDERS_VARIABLE, "value": ",".join(sorted(live_objects.used_folders))}]
    else:
        entries = []
    job = copy.deepcopy(manifest)
    container = _download_container(job)
    container["env"] = [*(container.get("env") or ()), *entries]
    if live_job is not None:
        # The name is a digest of the pod's spec, so the labels and annotations of the spec can have changed.
        live_metadata = live_job["spec"]["template"].get("metadata") or {}
        kept = {key: live_metadata[key] for key in ("labels", "annotations") if key in live_metadata}
        job["spec"]["template"]["metadata"] = kept
    return job


def _download_container(job: Body) -> dict[str, Any]:
    """Return the container of a download Job that downloads. A webhook can have added others."""
    containers: list[dict[str, Any]] = job["spec"]["template"]["spec"]["containers"]
    return next(container for container in containers if container["name"] == DOWNLOAD_CONTAINER)


def _claim_with_live_values(service: LLMService, manifest: Manifest, live_spec: Body, downloads: bool) -> Manifest:
    """Return the claim with the live value of each field that the spec does not set. Most fields of a claim are
    immutable. The size grows before a download that needs more room, but not because of a new release alone.
    """
    cache, spec = service.spec.cache, dict(manifest["spec"])
    if not cache.accessModes:
        spec["accessModes"] = live_spec["accessModes"]
    if not cache.storageClassName and "storageClassName" in live_spec:
        spec["storageClassName"] = live_spec["storageClassName"]
    live_size, size = (parts["resources"]["requests"]["storage"] for parts in (live_spec, spec))
    if not cache.size and (not downloads or to_bytes(live_size) >= to_bytes(size)):
        spec["resources"] = {"requests": {"storage": live_size}}
    return {**manifest, "spec": spec}


def _finished_job(job: Manifest | None, live_objects: LiveObjects) -> str | None:
    """Return the name of a Job that has already downloaded the same model."""
    jobs = live_objects.download_jobs if job is not None and live_objects.download_jobs else {}
    return next((name for name, body in jobs.items() if job_succeeded(body, live_objects.claim)), None)
