# SPDX-License-Identifier: Apache-2.0
"""The pod template: the supervisor (`python -m quire_server`), its volumes, probes, security context and drain time.

pod_config.py renders the settings of the supervisor. A test reads the rendered files with the supervisor's own reader.
Called by objects.py and workload.py.
"""

import math
from collections.abc import Mapping
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.plan.gpu import GPU_RESOURCE, PRODUCT_LABEL
from quire_operator.plan.host_memory import ephemeral_bytes, start_seconds
from quire_operator.plan.plan import Plan, to_quantity
from quire_operator.render import kv_storage, model_storage, object_names
from quire_operator.render.manifests import Manifest, container_env, metadata
from quire_operator.render.strategic_merge import merge
from quire_spec import constants
from quire_spec.errors import ConfigError

SERVER_CONTAINER = object_names.SERVER
CONFIG_OPTION = "--config"
"""Option of the supervisor. Pods that were rendered before pod.json do not have it."""
PROPAGATION_S = 10
"""Before a pod gets SIGTERM, Kubernetes has this number of seconds to remove the pod from its endpoints. After SIGTERM,
the server rejects new connections."""
STOP_S = 35
"""Number of seconds that a pod needs to stop after the drain. The keep-alive connections of clients get 5 s, and each
of three processes gets up to 10 s."""
_STARTUP_PERIOD_S = 10
_BASE_CPU_CORES = 2


def template(service: LLMService, plan: Plan, engine_configmap: str, on_one_node: bool) -> Manifest:
    """Return the pod template after spec.podTemplate is merged into it. `engine_configmap` is the ConfigMap with
    pod.json. `on_one_node` is True if only one node can mount the claim with the model.

    Raises:
        ConfigError: spec.podTemplate cannot be merged.
    """
    rendered = {
        "metadata": metadata(
            service,
            object_names.SERVER,
            {"llm-d.ai/engine-type": "vllm"},
            {"kubectl.kubernetes.io/default-container": SERVER_CONTAINER},
        ),
        "spec": _pod_spec(service, plan, engine_configmap)
        | ({"affinity": model_storage.one_node_affinity(service)} if on_one_node else {}),
    }
    merged: Manifest = rendered
    try:
        for overrides in service.pod_templates:
            merged = merge(merged, _without_reserved_labels(service, overrides))
    except ConfigError as error:
        raise ConfigError(f"spec.podTemplate.spec.{error}") from error
    _validate(merged["spec"])
    return merged


def _validate(spec: Mapping[str, Any]) -> None:
    """Check that spec.podTemplate did not remove a part that the download Job needs. The API server checks all other
    parts.

    Raises:
        ConfigError: containers or volumes are invalid, or the server container is missing.
    """
    field_path = "spec.podTemplate.spec"
    for field in ("containers", "volumes"):
        entries = spec.get(field)
        if not isinstance(entries, list) or not all(isinstance(e, Mapping) and "name" in e for e in entries):
            raise ConfigError(
                f"{field_path}.{field}: must be a list of objects with names; change or add entries, but do "
                "not replace the list"
            )
    if [c["name"] for c in spec["containers"]].count(SERVER_CONTAINER) != 1:
        raise ConfigError(
            f"{field_path}.containers: the container {SERVER_CONTAINER!r} must not be removed; change its fields "
            "instead"
        )


def drain_seconds(service: LLMService) -> int:
    """Return terminationGracePeriodSeconds: the sum of PROPAGATION_S, the drain timeout, and STOP_S."""
    return PROPAGATION_S + service.spec.rollout.drainSeconds + STOP_S


def startup_seconds(service: LLMService, plan: Plan) -> int:
    """Return the maximum number of seconds until a container is ready. It depends on the number of bytes that the
    container reads."""
    # If an init container downloads the model, its time is not included, because the kubelet starts the probes only
    # after the init containers.
    return start_seconds(_bytes_to_read(service, plan), downloads=False, gpu=plan.gpu is not None)


def _bytes_to_read(service: LLMService, plan: Plan) -> int:
    """Return how many bytes of weights a container reads. KV blocks in files need a digest of the weights, for which a
    container reads them once more, unless the digest was kept with the weights."""
    return plan.modelBytes * (1 if service.kv_tier is None else 2)


def progress_seconds(service: LLMService, plan: Plan) -> int:
    """Return progressDeadlineSeconds. By default, it is the sum of three times: the time that one pod needs to drain,
    the time that another pod needs to start, and 300 s to schedule the new pod and to pull its image."""
    if service.spec.rollout.progressDeadlineSeconds is not None:
        return service.spec.rollout.progressDeadlineSeconds
    start = start_seconds(
        _bytes_to_read(service, plan), downloads=model_storage.pods_download(service), gpu=plan.gpu is not None
    )
    return start + drain_seconds(service) + 300


def _without_reserved_labels(service: LLMService, template: Mapping[str, Any]) -> Manifest:
    """Return spec.podTemplate without the labels by which pods are selected.

    spec.podTemplate must not change these labels. The API server rejects a Deployment if its pods do not match its
    selector, and the operator ignores pods that do not have these labels.
    """
    overrides = dict(template)
    meta = dict(overrides.get("metadata", {}))
    if "labels" in meta:
        reserved_labels = object_names.labels(service, object_names.SERVER)
        meta["labels"] = {key: value for key, value in meta["labels"].items() if key not in reserved_labels}
        overrides["metadata"] = meta
    return overrides


def _pod_spec(service: LLMService, plan: Plan, engine_configmap: str) -> Manifest:
    gpu = service.spec.gpu
    container = _server_container(service, plan)
    init_containers = [model_storage.download_container(service, container["image"], container["securityContext"])]
    return {
        "serviceAccountName": service.name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security_context(service),
        "terminationGracePeriodSeconds": drain_seconds(service),
        **({"initContainers": init_containers} if model_storage.pods_download(service) else {}),
        "containers": [container],
        "volumes": _volumes(service, plan, engine_configmap),
        **placement(service, ({PRODUCT_LABEL: gpu.product} if gpu.product else {}) | gpu.nodeSelector if gpu else {}),
        **({"runtimeClassName": gpu.runtimeClassName} if gpu and gpu.runtimeClassName else {}),
    }


def placement(service: LLMService, node_selector: Mapping[str, str]) -> Manifest:
    """Return the fields of a pod spec that determine on which nodes the pod can run and how its image is pulled."""
    fields = {
        "imagePullSecrets": list(service.spec.runtime.imagePullSecrets),
        "nodeSelector": dict(node_selector),
        "tolerations": list(service.spec.gpu.tolerations) if service.spec.gpu else [],
    }
    return {name: value for name, value in fields.items() if value}


def _server_container(service: LLMService, plan: Plan) -> Manifest:
    closing_file = f"{object_names.RUN_DIR}/{constants.CLOSING_FILE}"
    return {
        "name": SERVER_CONTAINER,
        "image": plan.image.value,
        "args": server_arguments(),
        "env": container_env(service),
        "ports": [{"name": name, "containerPort": port} for name, port in service.pod_ports.items()],
        "resources": _resources(service, plan),
        "startupProbe": _probe(
            "ready", _STARTUP_PERIOD_S, math.ceil(startup_seconds(service, plan) / _STARTUP_PERIOD_S)
        ),
        "readinessProbe": _probe("ready", 1, failures=1),
        "livenessProbe": _probe("live", 10, failures=6),
        # When the file exists, the OpenAI front closes its connections. Otherwise, clients would continue to use the
        # connections to this pod.
        "lifecycle": {"preStop": {"exec": {"command": ["sh", "-c", f"touch {closing_file}; sleep {PROPAGATION_S}"]}}},
        "securityContext": container_security_context(service.spec.security.readOnlyRootFilesystem),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _volume_mounts(service),
    }


def pod_security_context(service: LLMService) -> Manifest:
    """Return the securityContext of a pod."""
    security = service.spec.security
    ids = {"runAsUser": security.runAsUser, "runAsGroup": security.fsGroup, "fsGroup": security.fsGroup}
    return {
        "runAsNonRoot": True,
        **(ids if security.ids == "Fixed" else {}),
        "fsGroupChangePolicy": "OnRootMismatch",
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security_context(read_only_root_filesystem: bool) -> Manifest:
    """Return the securityContext of a container."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "privileged": False,
        "readOnlyRootFilesystem": read_only_root_filesystem,
    }


def _probe(check: str, period_s: int, failures: int) -> Manifest:
    return {
        "httpGet": {"path": f"/health/{check}", "port": "health"},
        "periodSeconds": period_s,
        "failureThreshold": failures,
        "timeoutSeconds": 5,
    }


def server_arguments() -> list[str]:
    """Return the supervisor's arguments. The entry point of the image, `python -m quire_server`, is the supervisor."""
    return [
        f"{CONFIG_OPTION}={object_names.ENGINE_DIR}/{constants.CONFIG_FILE}",
        f"--run-dir={object_names.RUN_DIR}",
        f"--cache-dir={object_names.CACHE_DIR}/adapters",
    ]


def _resources(service: LLMService, plan: Plan) -> Manifest:
    runtime, gpu = service.spec.runtime, service.spec.gpu
    count = plan.gpu.count if plan.gpu else 0
    memory = runtime.memory or f"{plan.hostBytes.total // 2**20}Mi"
    requests = {"cpu": runtime.cpu or str(_BASE_CPU_CORES + count), "memory": memory}
    adapter_bytes = sum(prefix.max_bytes for prefix in service.spec.adapterSources)
    if disk_bytes := ephemeral_bytes(service.spec.engine.kvCacheOffloading, adapter_bytes):
        requests["ephemeral-storage"] = to_quantity(disk_bytes)
    # On a CPU, the model is in host memory, so a pod without a limit could use all memory of the node. On a GPU, the
    # plan only estimates the host memory. If a pod uses more than the estimate, it should not be killed.
    limits = {"memory": memory} if runtime.memory or not count else {}
    if count:
        limits[gpu.resourceName if gpu else GPU_RESOURCE] = str(count)
    return {"requests": requests, "limits": limits} if limits else {"requests": requests}


def _openai_secrets(service: LLMService) -> dict[str, tuple[str, str]]:
    """Return a mapping from the name of each volume to its mount path and Secret. It is empty if the OpenAI API is
    turned off."""
    openai = service.spec.openai
    refs = {
        "api-keys": (object_names.API_KEYS_DIR, openai.apiKeysSecretRef),
        "tls": (object_names.TLS_DIR, openai.tlsSecretRef),
    }
    is_served = service.openai_port is not None
    return {name: (path, ref.name) for name, (path, ref) in refs.items() if ref is not None and is_served}


def _chat_template_volume(service: LLMService) -> Manifest | None:
    """Return the volume for a chat template that is in a ConfigMap; None if the spec does not refer to a ConfigMap."""
    template = service.spec.openai.chatTemplate
    if template is None or template.configMapKeyRef is None:
        return None
    ref = template.configMapKeyRef
    items = [{"key": ref.key, "path": object_names.CHAT_TEMPLATE_FILE}]
    return {"name": "chat-template", "configMap": {"name": ref.name, "items": items}}


def _volume_mounts(service: LLMService) -> list[Manifest]:
    mounts: list[Manifest] = [
        # Whole folders are mounted, because the kubelet never updates a mount with subPath.
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
    for name, (path, _) in _openai_secrets(service).items():
        mounts.append({"name": name, "mountPath": path, "readOnly": True})
    if volume := _chat_template_volume(service):
        mounts.append({"name": volume["name"], "mountPath": object_names.CHAT_TEMPLATE_DIR, "readOnly": True})
    mounts += kv_storage.volume_mounts(service)
    mounts += model_storage.image_volumes(service.model_sources.values())[1]
    for i, claim in enumerate(model_storage.claim_names(service)):
        mounts.append({"name": f"claim-{i}", "mountPath": f"{object_names.CLAIMS_DIR}/{claim}", "readOnly": True})
    return mounts


def _volumes(service: LLMService, plan: Plan, engine_configmap: str) -> list[Manifest]:
    credentials = object_names.credentials_secret(service.name)
    volumes: list[Manifest] = [
        {"name": "engine", "configMap": {"name": engine_configmap}},
        {"name": "catalogue", "configMap": {"name": object_names.adapter_configmap(service.name)}},
        {"name": "admin", "secret": {"secretName": object_names.admin_secret(service.name), "defaultMode": 0o440}},
        # The Secret is optional, because it exists only if a source refers to a Secret. It can be added later without a
        # restart.
        {"name": "credentials", "secret": {"secretName": credentials, "optional": True, "defaultMode": 0o440}},
        {"name": "run", "emptyDir": {"medium": "Memory", "sizeLimit": "16Mi"}},
        {"name": "cache", "emptyDir": {}},
        {"name": "home", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": plan.sharedMemory.value}},
    ]
    if model_storage.cache_mode(service) != "None":
        volumes.append(model_storage.volume(service, plan))
    for name, (_, secret) in _openai_secrets(service).items():
        # The Secret is required. If it is missing, the pod waits, and an event names the Secret. If it were optional,
        # the pod would start and reject all requests.
        volumes.append({"name": name, "secret": {"secretName": secret, "defaultMode": 0o440}})
    if volume := _chat_template_volume(service):
        volumes.append(volume)
    volumes += kv_storage.volumes(service)
    volumes += model_storage.image_volumes(service.model_sources.values())[0]
    for i, claim in enumerate(model_storage.claim_names(service)):
        volumes.append({"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}})
    return volumes
