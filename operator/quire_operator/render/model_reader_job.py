# SPDX-License-Identifier: Apache-2.0
"""The Job that reads config.json and the size of the weights from a claim or an image volume. Only a pod
can access them.

The container writes the result to its termination message (quire_server.read_model). This message is part of the pod's
status, so the operator needs no permission to read logs. If several services need the same Job, they share one Job.
Called by the controller.
"""

from quire_operator.api.llmservice import LLMService
from quire_operator.render import model_storage, object_names, pod_template
from quire_operator.render.jobs import POD_FIELDS, new_job, with_settings
from quire_operator.render.manifests import Manifest
from quire_operator.render.strategic_merge import merge
from quire_spec.documents.sources import Source

READER_COMPONENT = "model-reader"
"""Value of the component label of the Job and its pod."""
_MAX_RETRIES = 2
_DEADLINE_S = 600
"""Deadline of the Job in seconds. It is sufficient to pull an image of several gigabytes. Without a deadline, the Job
would wait forever if the claim does not exist."""


def job(service: LLMService, source: Source, image: str) -> Manifest:
    """Return the Job for a claim or an image volume. It uses the same image as the server pods, and by default it runs
    on the same nodes."""
    gpu = service.spec.gpu
    volumes, mounts = model_storage.image_volumes([source])
    if source.pvc is not None:
        claim = {"claimName": source.pvc.claimName, "readOnly": True}
        volumes = [{"name": "claim", "persistentVolumeClaim": claim}]
        folder = f"{object_names.CLAIMS_DIR}/{source.pvc.claimName}"
        mounts = [{"name": "claim", "mountPath": folder, "readOnly": True}]
    pod_spec = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "securityContext": pod_template.pod_security_context(service),
        **pod_template.placement(service, gpu.nodeSelector if gpu else {}),
        "containers": [
            {
                "name": "read",
                "image": image,
                "command": ["tini", "--", "python3", "-m", "quire_server.read_model"],
                "args": [f"--model={model_storage.folder(source)}"],
                "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
                "securityContext": pod_template.container_security_context(read_only_root_filesystem=True),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    for overrides in service.pod_overrides:
        pod_spec = merge(pod_spec, {key: overrides[key] for key in POD_FIELDS if key in overrides})
    pod = with_settings(service, pod_spec)
    job_fields = {"backoffLimit": _MAX_RETRIES, "activeDeadlineSeconds": _DEADLINE_S}
    return new_job(service, f"quire-read-{object_names.digest(pod)}", READER_COMPONENT, job_fields, pod)
