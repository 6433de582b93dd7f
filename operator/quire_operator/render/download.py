# SPDX-License-Identifier: Apache-2.0
"""The Job that downloads a model to its claim before any GPU is taken."""

from typing import Any

from quire_operator.plan.plan import Plan
from quire_operator.render import model, names
from quire_operator.service import LLMService

EXIT_WRONG_CONFIG = 2
"""Of quire_server.download: trying again would change nothing."""
_RETRIES = 6
_PLACEMENT = (
    "affinity", "imagePullSecrets", "nodeSelector", "priorityClassName", "schedulerName", "securityContext",
    "serviceAccountName", "tolerations",
)  # fmt: skip


def job(service: LLMService, plan: Plan, server: dict[str, Any]) -> dict[str, Any]:
    """The Job; `server` is the spec of the pods that serve.

    It runs where they will: a volume that belongs to one node would otherwise be made on a node without a GPU.
    """
    (container,) = [c for c in server["containers"] if c["name"] == names.SERVER]
    downloader = {
        **model.download_container(service, plan.image.value, container.get("securityContext", {})),
        "ports": [{"name": "health", "containerPort": service.spec.runtime.ports.health}],
    }
    mounted = [mount["name"] for mount in downloader["volumeMounts"] if mount["name"] != "model"]
    spec = {
        **{name: server[name] for name in _PLACEMENT if name in server},
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "containers": [downloader],
        "volumes": [model.volume(service, plan), *(v for v in server["volumes"] if v["name"] in mounted)],
    }
    meta = names.meta(service, names.download(service, names.digest(spec)), names.DOWNLOAD)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {**meta, "labels": {**meta["labels"], names.BRINGS: brings(service)}},
        "spec": {
            "backoffLimit": _RETRIES,
            "podFailurePolicy": {
                "rules": [
                    {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                    {
                        "action": "FailJob",
                        "onExitCodes": {
                            "containerName": downloader["name"],
                            "operator": "In",
                            "values": [EXIT_WRONG_CONFIG],
                        },
                    },
                ]
            },
            "template": {"metadata": {"labels": names.labels(service, names.DOWNLOAD)}, "spec": spec},
        },
    }


def brings(service: LLMService) -> str:
    """The label `names.BRINGS` of the Jobs that bring a service's model."""
    return names.digest([names.model_claim(service.name), model.folder(service)])
