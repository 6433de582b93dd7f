# SPDX-License-Identifier: Apache-2.0
"""The Job that downloads a model to its claim. It does so before the server pods are created, because these occupy
GPUs. Called by objects.py."""

from quire_operator.api.llmservice import LLMService
from quire_operator.plan.plan import Plan
from quire_operator.render import model_storage, object_names
from quire_operator.render.jobs import POD_FIELDS, new_job, with_settings
from quire_operator.render.manifests import Manifest

EXIT_INVALID_CONFIG = 2
"""quire_server.download exits with this code after an error that a retry cannot fix."""
_MAX_RETRIES = 6
_POD_SPEC_FIELDS = sorted((*POD_FIELDS, "serviceAccountName"))


def job(service: LLMService, plan: Plan, server_pod_spec: Manifest, on_one_node: bool) -> Manifest:
    """Return the Job. `server_pod_spec` is the pod spec of the Deployment. `on_one_node` is True if only one node can
    mount the claim. The Job then runs on the node of the server pods, if there are any.

    By default, the Job runs on the same nodes as the server pods. Otherwise, a volume that is local to one node could
    be created on a node without a GPU.
    """
    (container,) = [c for c in server_pod_spec["containers"] if c["name"] == object_names.SERVER]
    downloader = {
        **model_storage.download_container(service, plan.image.value, container.get("securityContext", {})),
        "ports": [{"name": "health", "containerPort": service.spec.runtime.ports.health}],
    }
    mounted_volumes = [mount["name"] for mount in downloader["volumeMounts"] if mount["name"] != "model"]
    spec = {
        **{name: server_pod_spec[name] for name in _POD_SPEC_FIELDS if name in server_pod_spec},
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Never",
        "containers": [downloader],
        "volumes": [
            model_storage.volume(service, plan),
            *(v for v in server_pod_spec["volumes"] if v["name"] in mounted_volumes),
        ],
    }
    if on_one_node:
        spec["affinity"] = model_storage.require_one_node(service, spec.get("affinity"))
    spec = with_settings(service, spec)
    invalid_config = {"containerName": downloader["name"], "operator": "In", "values": [EXIT_INVALID_CONFIG]}
    rules = [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "FailJob", "onExitCodes": invalid_config},
    ]
    job_fields = {"backoffLimit": _MAX_RETRIES, "podFailurePolicy": {"rules": rules}}
    name = object_names.download_job(service, object_names.digest(spec))
    labels = {object_names.DOWNLOAD_TARGET_LABEL: download_target(service)}
    return new_job(service, name, object_names.DOWNLOAD, job_fields, spec, labels)


def download_target(service: LLMService) -> str:
    """Return the value of DOWNLOAD_TARGET_LABEL. All Jobs that download the model of this service have this label."""
    return object_names.digest([object_names.model_claim(service.name), *model_storage.download_folders(service)])
