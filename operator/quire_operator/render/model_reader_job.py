# SPDX-License-Identifier: Apache-2.0
"""The Job that reads config.json and the size of the weights from a claim, which only a pod can access.

The container writes them to its termination message (quire_server.read_model). That is part of the pod's status, so the
operator does not need permission to read logs. Services with identical Jobs share one. Called by the controller.
"""

from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.render import object_names, security_context
from quire_operator.render.strategic_merge import merge
from quire_spec.documents.adapter_catalog import PvcSource

READER_COMPONENT = "model-reader"
"""Component label of the Job and its pod."""
_MAX_RETRIES = 2
_DEADLINE_S = 600
"""Enough to pull an image of some gigabytes. Without a deadline, a Job for a missing claim would wait forever."""
_POD_PLACEMENT_FIELDS = (
    "affinity", "imagePullSecrets", "nodeSelector", "priorityClassName", "schedulerName", "securityContext",
    "tolerations",
)  # fmt: skip


def job(service: LLMService, source: PvcSource, image: str) -> dict[str, Any]:
    """Return the Job. It has the image and the placement of the server pods."""
    spec, gpu = service.spec, service.spec.gpu
    folder = f"{object_names.CLAIMS_DIR}/{source.claimName}"
    pod_spec = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "securityContext": security_context.pod_security_context(service),
        **({"imagePullSecrets": list(spec.runtime.imagePullSecrets)} if spec.runtime.imagePullSecrets else {}),
        **({"nodeSelector": dict(gpu.nodeSelector)} if gpu and gpu.nodeSelector else {}),
        **({"tolerations": list(gpu.tolerations)} if gpu and gpu.tolerations else {}),
        "containers": [
            {
                "name": "read",
                "image": image,
                "command": ["tini", "--", "python3", "-m", "quire_server.read_model"],
                "args": [f"--model={folder}/{source.path}".rstrip("/")],
                "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
                "securityContext": security_context.container_security_context(read_only_root_filesystem=True),
                "volumeMounts": [{"name": "claim", "mountPath": folder, "readOnly": True}],
            }
        ],
        "volumes": [
            {"name": "claim", "persistentVolumeClaim": {"claimName": source.claimName, "readOnly": True}},
        ],
    }
    template_spec = service.spec.podTemplate.get("spec", {})
    pod: dict[str, Any] = merge(
        pod_spec, {key: template_spec[key] for key in _POD_PLACEMENT_FIELDS if key in template_spec}
    )
    meta = object_names.object_meta(service, f"quire-read-{object_names.digest(pod)}", READER_COMPONENT)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {
            "backoffLimit": _MAX_RETRIES,
            "activeDeadlineSeconds": _DEADLINE_S,
            "template": {"metadata": {"labels": object_names.labels(service, READER_COMPONENT)}, "spec": pod},
        },
    }
