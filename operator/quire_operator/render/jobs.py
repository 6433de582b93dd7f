# SPDX-License-Identifier: Apache-2.0
"""Parts that the Jobs of a service have in common. Called by download_job.py and model_reader_job.py."""

from collections.abc import Mapping

from quire_operator.api.llmservice import LLMService
from quire_operator.render.manifests import NONE, Manifest, metadata, new_manifest

POD_FIELDS = (
    "affinity", "dnsConfig", "dnsPolicy", "hostAliases", "hostUsers", "imagePullSecrets", "nodeSelector",
    "preemptionPolicy", "priorityClassName", "schedulerName", "securityContext", "tolerations",
)  # fmt: skip
"""A Job gets these fields from the server's pod spec, so that its pod runs on the same nodes as the server pods and
reaches the same hosts."""


def with_settings(service: LLMService, pod_spec: Manifest) -> Manifest:
    """Return a copy of the pod spec of a Job, which has one container, with the values of spec.jobs."""
    jobs = service.spec.jobs
    tolerations = None if jobs.tolerations is None else list(jobs.tolerations)
    placement = {"nodeSelector": jobs.nodeSelector, "tolerations": tolerations, "affinity": jobs.affinity}
    (container,) = pod_spec["containers"]
    resources = {
        "requests": {**container["resources"]["requests"], **jobs.resources.requests},
        "limits": jobs.resources.limits,
    }
    return {
        **{name: value for name, value in pod_spec.items() if placement.get(name) is None},
        **{name: value for name, value in placement.items() if value},
        "containers": [{**container, "resources": {name: values for name, values in resources.items() if values}}],
    }


def new_job(
    service: LLMService,
    name: str,
    component: str,
    job_fields: Manifest,
    pod_spec: Manifest,
    labels: Mapping[str, str] = NONE,
) -> Manifest:
    """Return a Job with one pod, which has the labels and annotations of the pod templates and of spec.jobs. `labels`
    are those of the Job in addition to the ones of all objects."""
    metas = [template.get("metadata", {}) for template in service.pod_templates]
    pod_labels = {key: value for meta in metas for key, value in meta.get("labels", {}).items()}
    annotations = {key: value for meta in metas for key, value in meta.get("annotations", {}).items()}
    own = service.spec.jobs
    pod_metadata = metadata(service, component, pod_labels | own.labels, annotations | own.annotations)
    spec = {**job_fields, "template": {"metadata": pod_metadata, "spec": pod_spec}}
    job_labels = {**own.labels, **labels}
    return new_manifest(
        "batch/v1", "Job", service, name, component, labels=job_labels, annotations=own.annotations, spec=spec
    )
