# SPDX-License-Identifier: Apache-2.0
"""The pod that serves: `python -m quire_server` with its files, folders, probes and identity, and how it is drained.

What the process needs is in quire_server/__main__.py and backend/Dockerfile; a test gives the arguments rendered here
to that parser.
"""

import math
from collections.abc import Mapping
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.plan.gpu import GPU_RESOURCE, PRODUCT_LABEL
from quire_operator.plan.host_memory import start_seconds
from quire_operator.plan.plan import Plan
from quire_operator.render import model_storage, object_names, security_context
from quire_operator.render.env import container_env
from quire_operator.render.strategic_merge import merge
from quire_spec.errors import ConfigError
from quire_spec.net.addresses import ANY_ADDRESS

SERVER_CONTAINER = object_names.SERVER
PROPAGATION_S = 10
"""Before SIGTERM, so that no client is still being sent here when the server stops to accept connections."""
STOP_S = 35
"""After the drain: connections that clients keep alive for 5 s, and 10 s at most for each of three processes."""
_STARTUP_PERIOD_S = 10
_BASE_CPU_CORES = 2


def template(service: LLMService, plan: Plan, engine_configmap: str) -> dict[str, Any]:
    """The pod template, with spec.podTemplate merged in last; `engine_map` is the ConfigMap of engine.json.

    Raises:
        ConfigError: spec.podTemplate cannot be merged in.
    """
    rendered = {
        "metadata": {
            "labels": {**object_names.labels(service, object_names.SERVER), "llm-d.ai/engine-type": "vllm"},
            "annotations": {"kubectl.kubernetes.io/default-container": SERVER_CONTAINER},
        },
        "spec": _pod_spec(service, plan, engine_configmap),
    }
    try:
        merged: dict[str, Any] = merge(rendered, _overrides(service))
    except ConfigError as error:
        raise ConfigError(f"spec.podTemplate.spec.{error}") from error
    _validate(merged["spec"])
    return merged


def _validate(spec: Mapping[str, Any]) -> None:
    """Raise ConfigError where an override took what the download Job is made from; the API server checks the rest."""
    field_path = "spec.podTemplate.spec"
    for field in ("containers", "volumes"):
        entries = spec.get(field)
        if not isinstance(entries, list) or not all(isinstance(e, Mapping) and "name" in e for e in entries):
            raise ConfigError(
                f"{field_path}.{field}: must stay a list of objects with names; change or add single entries"
            )
    if [c["name"] for c in spec["containers"]].count(SERVER_CONTAINER) != 1:
        raise ConfigError(
            f"{field_path}.containers: the container {SERVER_CONTAINER!r} must stay; change it instead of removing it"
        )


def drain_seconds(service: LLMService) -> int:
    """terminationGracePeriodSeconds: propagation, drain, stop."""
    return PROPAGATION_S + service.spec.rollout.drainSeconds + STOP_S


def startup_seconds(service: LLMService, plan: Plan) -> int:
    """Seconds that a container may take to become ready, from the bytes that it loads."""
    # An init container downloads outside of the probes' time; the kubelet starts them after it.
    return start_seconds(plan.modelBytes, downloads=False, gpu=plan.gpu is not None)


def progress_seconds(service: LLMService, plan: Plan) -> int:
    """progressDeadlineSeconds: one pod's drain and start, with five minutes for the scheduler and the image."""
    if service.spec.rollout.progressDeadlineSeconds is not None:
        return service.spec.rollout.progressDeadlineSeconds
    start = start_seconds(plan.modelBytes, downloads=model_storage.pods_download(service), gpu=plan.gpu is not None)
    return start + drain_seconds(service) + 300


def _overrides(service: LLMService) -> dict[str, Any]:
    """spec.podTemplate, less the labels that pods are found by: a Deployment whose pods lack those of its selector is
    refused, and the operator does not see pods without its own."""
    overrides = dict(service.spec.podTemplate)
    meta = dict(overrides.get("metadata", {}))
    if "labels" in meta:
        reserved_labels = object_names.labels(service, object_names.SERVER)
        meta["labels"] = {key: value for key, value in meta["labels"].items() if key not in reserved_labels}
        overrides["metadata"] = meta
    return overrides


def _pod_spec(service: LLMService, plan: Plan, engine_configmap: str) -> dict[str, Any]:
    spec, gpu = service.spec, service.spec.gpu
    container = _server_container(service, plan)
    init_containers = [model_storage.download_container(service, container["image"], container["securityContext"])]
    return {
        "serviceAccountName": service.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": security_context.pod_security_context(service),
        "terminationGracePeriodSeconds": drain_seconds(service),
        **({"initContainers": init_containers} if model_storage.pods_download(service) else {}),
        "containers": [container],
        "volumes": _volumes(service, plan, engine_configmap),
        **({"imagePullSecrets": list(spec.runtime.imagePullSecrets)} if spec.runtime.imagePullSecrets else {}),
        **({"nodeSelector": selector} if (selector := _node_selector(service)) else {}),
        **({"tolerations": list(gpu.tolerations)} if gpu and gpu.tolerations else {}),
        **({"runtimeClassName": gpu.runtimeClassName} if gpu and gpu.runtimeClassName else {}),
    }


def _server_container(service: LLMService, plan: Plan) -> dict[str, Any]:
    runtime = service.spec.runtime
    return {
        "name": SERVER_CONTAINER,
        "image": plan.image.value,
        "args": server_arguments(service),
        "env": container_env(service),
        "ports": [{"name": n, "containerPort": getattr(runtime.ports, n)} for n in runtime.ports.__slots__],
        "resources": _resources(service, plan),
        "startupProbe": {
            "httpGet": {"path": "/health/ready", "port": "health"},
            "periodSeconds": _STARTUP_PERIOD_S,
            "failureThreshold": math.ceil(startup_seconds(service, plan) / _STARTUP_PERIOD_S),
            "timeoutSeconds": 5,
        },
        "readinessProbe": {
            "httpGet": {"path": "/health/ready", "port": "health"},
            "periodSeconds": 5,
            "failureThreshold": 2,
            "timeoutSeconds": 5,
        },
        "livenessProbe": {
            "httpGet": {"path": "/health/live", "port": "health"},
            "periodSeconds": 10,
            "failureThreshold": 6,
            "timeoutSeconds": 5,
        },
        # Not the sleep action: it is ignored by API servers before 1.29, and exec is not.
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PROPAGATION_S)]}}},
        "securityContext": security_context.container_security_context(service.spec.security.readOnlyRootFilesystem),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _volume_mounts(service),
    }


def server_arguments(service: LLMService) -> list[str]:
    """Arguments of `python -m quire_server`, which the image runs."""
    ports = service.spec.runtime.ports
    return [
        f"--engine={object_names.ENGINE_DIR}/engine.json",
        f"--adapters={object_names.ADAPTER_CATALOG_DIR}/adapters.json",
        f"--served-name={service.served_name}",
        f"--run-dir={object_names.RUN_DIR}",
        f"--cache-dir={object_names.CACHE_DIR}/adapters",
        f"--host={ANY_ADDRESS}",
        *(f"--{name}-port={getattr(ports, name)}" for name in ports.__slots__),
        f"--admin-key-file={object_names.ADMIN_DIR}/{object_names.ADMIN_KEY_FIELD}",
        f"--secrets-dir={object_names.SECRETS_DIR}",
        *(f"--pvc={claim}={object_names.CLAIMS_DIR}/{claim}" for claim in _claim_names(service)),
        f"--drain-timeout={service.spec.rollout.drainSeconds}",
    ]


def _resources(service: LLMService, plan: Plan) -> dict[str, Any]:
    runtime, gpu = service.spec.runtime, service.spec.gpu
    count = plan.gpu.count if plan.gpu else 0
    memory = runtime.memory or f"{plan.hostBytes.total // 2**20}Mi"
    requests = {"cpu": runtime.cpu or str(_BASE_CPU_CORES + count), "memory": memory}
    # A pod without a limit could take a CPU node down with the model in its memory; beside a GPU the plan is an
    # estimate of what the host needs, and killing the pod for it would help nobody.
    limits = {"memory": memory} if runtime.memory or not count else {}
    if count:
        limits[gpu.resourceName if gpu else GPU_RESOURCE] = str(count)
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


def _node_selector(service: LLMService) -> dict[str, str]:
    gpu = service.spec.gpu
    if gpu is None:
        return {}
    product = {PRODUCT_LABEL: gpu.product} if gpu.product else {}
    return {**product, **gpu.nodeSelector}


def _claim_names(service: LLMService) -> list[str]:
    """Claims that the model and the adapters are on."""
    sources = [service.spec.model.source, *(adapter.source for adapter in service.spec.adapters)]
    return sorted({source.pvc.claimName for source in sources if source.pvc is not None})


def _volume_mounts(service: LLMService) -> list[dict[str, Any]]:
    mounts: list[dict[str, Any]] = [
        # Whole folders, not subPath: a mount of one file would never see a change.
        {"name": "engine", "mountPath": object_names.ENGINE_DIR, "readOnly": True},
        {"name": "catalogue", "mountPath": object_names.ADAPTER_CATALOG_DIR, "readOnly": True},
        {"name": "admin", "mountPath": object_names.ADMIN_DIR, "readOnly": True},
        {"name": "credentials", "mountPath": object_names.SECRETS_DIR, "readOnly": True},
        {"name": "run", "mountPath": object_names.RUN_DIR},
        {"name": "cache", "mountPath": object_names.CACHE_DIR},
        {"name": "home", "mountPath": object_names.HOME_DIR},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if model_storage.cache_mode(service) != "None":
        mounts.append({"name": "model", "mountPath": object_names.MODEL_DIR, "readOnly": True})
    claims = _claim_names(service)
    mounts += [
        {"name": f"claim-{i}", "mountPath": f"{object_names.CLAIMS_DIR}/{claim}", "readOnly": True}
        for i, claim in enumerate(claims)
    ]
    return mounts


def _volumes(service: LLMService, plan: Plan, engine_configmap: str) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "engine", "configMap": {"name": engine_configmap}},
        {"name": "catalogue", "configMap": {"name": object_names.adapter_configmap(service.name)}},
        {"name": "admin", "secret": {"secretName": object_names.admin_secret(service.name), "defaultMode": 0o440}},
        # There is none while no source names a Secret; one that comes later is seen without a restart.
        {
            "name": "credentials",
            "secret": {
                "secretName": object_names.credentials_secret(service.name),
                "optional": True,
                "defaultMode": 0o440,
            },
        },
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
        {"name": "cache", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": plan.sharedMemory.value}},
    ]
    if model_storage.cache_mode(service) != "None":
        volumes.append(model_storage.volume(service, plan))
    volumes += [
        {"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        for i, claim in enumerate(_claim_names(service))
    ]
    return volumes
