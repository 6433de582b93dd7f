# SPDX-License-Identifier: Apache-2.0
"""The Job that reads config.json and the size of the weights of a model that is on a claim, which only a pod can see.

It tells them in its container's termination message (quire_server.read_model): that is in the pod's status, so the
operator needs no right to read logs. Services whose Job would be the same share it.
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
"""An image of some gigabytes is pulled in that time; a claim that does not exist is not waited for for ever."""
_POD_PLACEMENT_FIELDS = (
    "affinity", "imagePullSecrets", "nodeSelector", "priorityClassName", "schedulerName", "securityContext",
    "tolerations",
)  # fmt: skip


def job(service: LLMService, source: PvcSource, image: str) -> dict[str, Any]:
    """The Job, of the image of the pods that serve; it runs where they may."""
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
