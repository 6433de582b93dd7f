# SPDX-License-Identifier: Apache-2.0
"""The Job that downloads a model to its claim before pods occupy GPUs. Called by objects.py."""

from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.plan.plan import Plan
from quire_operator.render import model_storage, object_names

EXIT_INVALID_CONFIG = 2
"""Exit code of quire_server.download for an error that a retry cannot fix."""
_MAX_RETRIES = 6
_POD_PLACEMENT_FIELDS = (
    "affinity", "imagePullSecrets", "nodeSelector", "priorityClassName", "schedulerName", "securityContext",
    "serviceAccountName", "tolerations",
)  # fmt: skip


def job(service: LLMService, plan: Plan, server_pod_spec: dict[str, Any]) -> dict[str, Any]:
    """Return the Job. `server_pod_spec` is the pod spec of the Deployment.

    The Job has the same placement as the server pods. Otherwise a node-local volume could be created on a node without
    a GPU.
    """
    (container,) = [c for c in server_pod_spec["containers"] if c["name"] == object_names.SERVER]
    downloader = {
        **model_storage.download_container(service, plan.image.value, container.get("securityContext", {})),
        "ports": [{"name": "health", "containerPort": service.spec.runtime.ports.health}],
    }
    mounted_volumes = [mount["name"] for mount in downloader["volumeMounts"] if mount["name"] != "model"]
    spec = {
        **{name: server_pod_spec[name] for name in _POD_PLACEMENT_FIELDS if name in server_pod_spec},
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "containers": [downloader],
        "volumes": [
            model_storage.volume(service, plan),
            *(v for v in server_pod_spec["volumes"] if v["name"] in mounted_volumes),
        ],
    }
    meta = object_names.object_meta(
        service, object_names.download_job(service, object_names.digest(spec)), object_names.DOWNLOAD
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            **meta,
            "labels": {**meta["labels"], object_names.DOWNLOAD_TARGET_LABEL: download_target(service)},
        },
        "spec": {
            "backoffLimit": _MAX_RETRIES,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": downloader["name"],
                            "operator": "In",
                            "values": [EXIT_INVALID_CONFIG],
                        },
                    },
                ]
            },
            "template": {"metadata": {"labels": object_names.labels(service, object_names.DOWNLOAD)}, "spec": spec},
        },
    }


def download_target(service: LLMService) -> str:
    """Return the value of DOWNLOAD_TARGET_LABEL for the Jobs that download the service's model."""
    return object_names.digest([object_names.model_claim(service.name), model_storage.folder(service)])
