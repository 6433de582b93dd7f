# SPDX-License-Identifier: Apache-2.0
"""Storage for the model of a service: the folder in the pods, the claim, and the container that downloads the model.

The folder of a model is named after a digest of the model's source. Therefore, each revision has its own folder. Called
by objects.py, pod_template.py and download_job.py.
"""

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from quire_operator.api.llmservice import LLMService
from quire_operator.api.validation_errors import format_path
from quire_operator.plan.device_memory import GIB, round_up_mib
from quire_operator.plan.plan import Plan, to_quantity
from quire_operator.render import object_names
from quire_operator.render.manifests import Manifest, container_env, new_manifest
from quire_operator.render.strategic_merge import merge
from quire_spec.dataclass_json import drop_nulls, to_json
from quire_spec.documents.download_progress import PROGRESS_PORT_VARIABLE
from quire_spec.documents.sources import ImageSource, Source
from quire_spec.errors import ConfigError

_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_PREFERRED = "preferredDuringSchedulingIgnoredDuringExecution"
DOWNLOAD_CONTAINER = "download"
"""Name of the container that downloads the model."""
_TERMINATION_LOG = "/dev/termination-log"
"""The container writes its termination message to this file. The operator reads the message from the pod's status."""
_NOT_PRUNED = {
    "argocd.argoproj.io/sync-options": "Prune=false",
    "argocd.argoproj.io/compare-options": "IgnoreExtraneous",
}
"""Annotations of a claim without an owner. Argo CD can take its label app.kubernetes.io/instance for the name of an
Application, and would delete a claim that is not in the Application's repository."""
MIN_CLAIM_BYTES = 10 * GIB
_VOLUME_SIZE_PERCENT, _CLAIM_SIZE_PERCENT = 130, 230
"""The sizes of the volume of a pod and of the claim are these percentages of the size of the files with the weights.
The additional 30 % are for the tokenizer, the configuration, and the files that an interrupted download leaves. A claim
has room for two revisions, because pods use the previous revision until the next one is downloaded."""


def cache_mode(service: LLMService) -> str:
    """Return spec.cache.mode, or the default mode if the spec does not set it."""
    return service.spec.cache.mode or ("PVC" if downloaded_sources(service) else "None")


def downloaded_sources(service: LLMService) -> list[Source]:
    """Return the sources of the model and of the draft model, but only those that must be downloaded before a pod can
    serve."""
    return [source for source in service.model_sources.values() if not source.is_mounted]


def folder(source: Source) -> str:
    """Return the folder of the model or the draft model in a pod."""
    if source.pvc is not None:
        return f"{object_names.CLAIMS_DIR}/{source.pvc.claimName}/{source.pvc.path}".rstrip("/")
    if source.image is not None:
        return f"{_image_folder(source.image)}/{source.image.path}".rstrip("/")
    return f"{object_names.MODEL_DIR}/{object_names.digest(_source_fields(source))}"


def download_folders(service: LLMService) -> list[str]:
    """Return the folders of the sources that are downloaded."""
    return [folder(source) for source in downloaded_sources(service)]


def image_volumes(sources: Iterable[Source]) -> tuple[list[Manifest], list[Manifest]]:
    """Return the volumes of the images among the sources, and their mounts."""
    images = {_image_folder(source.image): source.image for source in sources if source.image is not None}
    volumes, mounts = [], []
    for i, (path, image) in enumerate(sorted(images.items())):
        policy = {"pullPolicy": image.pullPolicy.value} if image.pullPolicy else {}
        volumes.append({"name": f"image-{i}", "image": {"reference": image.reference, **policy}})
        mounts.append({"name": f"image-{i}", "mountPath": path, "readOnly": True})
    return volumes, mounts


def _image_folder(image: ImageSource) -> str:
    """Return the path at which an image is mounted."""
    return f"{object_names.IMAGES_DIR}/{object_names.digest(image.reference)}"


def claim_names(service: LLMService) -> list[str]:
    """Return the names of the claims of the model, the draft model, the adapters and further models."""
    sources = [*service.model_sources.values(), *service.adapter_places.values()]
    if service.spec.runtime.models is not None:
        sources.append(service.spec.runtime.models.source)
    return sorted({source.pvc.claimName for source in sources if source.pvc is not None})


def validate(service: LLMService) -> None:
    """Check that pods can read every source.

    Raises:
        ConfigError: a source is a local folder.
    """
    for field, source in {**service.model_sources, **service.adapter_places}.items():
        if source.path is not None:
            raise ConfigError(
                f"{format_path(field)}.path: {source.path!r} is a local folder, which pods cannot read; copy the files "
                "to a claim and use pvc, or run quire serve"
            )


def claim(service: LLMService, plan: Plan) -> Manifest:
    """Return the PersistentVolumeClaim for spec.cache.mode PVC."""
    cache = service.spec.cache
    spec = {
        "accessModes": _access_modes(service),
        "resources": {"requests": {"storage": cache.size or claim_size(plan)}},
        **({"storageClassName": cache.storageClassName} if cache.storageClassName else {}),
    }
    name = object_names.model_claim(service.name)
    annotations = _NOT_PRUNED if cache.deletionPolicy == "Retain" else {}
    return new_manifest(
        "v1", "PersistentVolumeClaim", service, name, object_names.DOWNLOAD, annotations=annotations, spec=spec
    )


def claim_size(plan: Plan) -> str:
    """Return the default size of the claim, which has room for two revisions of the model."""
    return _size(plan, _CLAIM_SIZE_PERCENT)


def volume(service: LLMService, plan: Plan) -> Manifest:
    """Return the volume for downloaded models; it is mounted at MODEL_DIR."""
    if cache_mode(service) == "PVC":
        return {"name": "model", "persistentVolumeClaim": {"claimName": object_names.model_claim(service.name)}}
    return {"name": "model", "emptyDir": {"sizeLimit": service.spec.cache.size or _size(plan, _VOLUME_SIZE_PERCENT)}}


def download_container(service: LLMService, image: str, security: Manifest) -> Manifest:
    """Return the container that downloads the model and the draft model. If all files exist, and the digest of the
    weights if it is needed, the container does nothing.

    While it downloads, the container reports its progress on the health port. The server container uses the same port,
    but it starts only after all init containers have ended. spec.podTemplate can give environment variables and files
    to the server container, for example for a proxy. The download container then gets them too.
    """
    arguments = [
        argument
        for source in downloaded_sources(service)
        for argument in (
            f"--source={json.dumps(_source_fields(source), sort_keys=True)}",
            f"--into={folder(source)}",
        )
    ]
    container: Manifest = {
        "name": DOWNLOAD_CONTAINER,
        "image": image,
        "command": ["tini", "--", "python3", "-m", "quire_server.download"],
        "args": [
            *arguments,
            f"--secrets-dir={object_names.SECRETS_DIR}",
            f"--report={_TERMINATION_LOG}",
            # KV blocks in files are shared only between pods with the same bytes of weights.
            *(["--digest"] if service.kv_tier is not None else []),
            *(["--stream-weights"] if pods_download(service) and service.streams_weights else []),
        ],
        "env": container_env(service, **{PROGRESS_PORT_VARIABLE: str(service.spec.runtime.ports.health)}),
        "resources": {"requests": {"cpu": "500m", "memory": "512Mi"}},
        "securityContext": security,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "model", "mountPath": object_names.MODEL_DIR},
            {"name": "credentials", "mountPath": object_names.SECRETS_DIR, "readOnly": True},
            {"name": "home", "mountPath": object_names.HOME_DIR},
            {"name": "tmp", "mountPath": "/tmp"},
        ],
    }
    for pod_spec in service.pod_overrides:
        container = merge(container, _container_overrides(pod_spec))
    return container


def _container_overrides(pod_spec: Mapping[str, Any]) -> Manifest:
    """Return the part of a pod template's spec that changes the server container and also applies to the container that
    downloads the model.

    The part consists of environment variables, and of mounts of ConfigMaps, Secrets and projected volumes. For example,
    these contain CA certificates or the password of a proxy. Mounts of claims are excluded, because some claims can be
    mounted on one node only. Mounts of folders of the node are also excluded.
    """
    server = next((c for c in _mapping_entries(pod_spec.get("containers")) if c.get("name") == object_names.SERVER), {})
    volumes = _mapping_entries(pod_spec.get("volumes"))
    file_volumes = [v.get("name") for v in volumes if v.keys() & {"configMap", "secret", "projected"}]
    overrides = {
        "env": _mapping_entries(server.get("env")),
        "envFrom": _mapping_entries(server.get("envFrom")),
        "volumeMounts": [m for m in _mapping_entries(server.get("volumeMounts")) if m.get("name") in file_volumes],
    }
    return {name: entries for name, entries in overrides.items() if entries}


def _mapping_entries(entries: Any) -> list[Mapping[str, Any]]:
    """Return only the entries that are objects without a `$patch` directive. Other entries can be omitted here, because
    the API server rejects them later."""
    items = entries if isinstance(entries, list) else []
    return [entry for entry in items if isinstance(entry, Mapping) and "$patch" not in entry]


def pods_download(service: LLMService) -> bool:
    """Return whether each pod downloads the model in an init container."""
    return cache_mode(service) == "EmptyDir"


def _source_fields(source: Source) -> Manifest:
    """Return the fields of the source that are set."""
    source_fields: Manifest = drop_nulls(to_json(source))
    return source_fields


def is_on_one_node(service: LLMService, live_modes: Collection[str] = ()) -> bool:
    """Return whether only one node at a time can mount the claim for downloaded models. `live_modes` are the access
    modes of the existing claim, which cannot change; empty if there is no claim."""
    return cache_mode(service) == "PVC" and not allow_many_nodes(live_modes or _access_modes(service))


def allow_many_nodes(access_modes: Collection[str]) -> bool:
    """Return whether several nodes at a time can mount a claim with these access modes."""
    return not {"ReadWriteMany", "ReadOnlyMany"}.isdisjoint(access_modes)


def one_node_affinity(service: LLMService) -> Manifest:
    """Return the affinity of pods that share a claim which only one node can mount.

    The pods prefer the node on which other pods of the service run. For server pods, this must not be a requirement: on
    a node that has failed, a pod stays for a long time in deletion, and its replacement could then start nowhere.
    """
    return {"podAffinity": {_PREFERRED: [{"weight": 100, "podAffinityTerm": _one_node_term(service)}]}}


def require_one_node(service: LLMService, affinity: Any) -> Manifest:
    """Return the affinity of the server pods, in which the preference of `one_node_affinity` is a requirement.

    `affinity` can contain terms of spec.podTemplate, which are kept.
    """
    pod_affinity = affinity.get("podAffinity") if isinstance(affinity, Mapping) else None
    terms: Mapping[str, Any] = pod_affinity if isinstance(pod_affinity, Mapping) else {}
    own_preferences = one_node_affinity(service)["podAffinity"][_PREFERRED]
    preferred = [entry for entry in _mapping_entries(terms.get(_PREFERRED)) if entry not in own_preferences]
    required = [*_mapping_entries(terms.get(_REQUIRED)), _one_node_term(service)]
    merged: Manifest = merge(affinity, {"podAffinity": {_REQUIRED: required, _PREFERRED: preferred or None}})
    return merged


def _one_node_term(service: LLMService) -> Manifest:
    labels = object_names.selector_labels(service, object_names.SERVER)
    # Pods of all roles share the claim.
    own = (object_names.COMPONENT, object_names.ROLE_LABEL)
    selector = {"matchLabels": {key: value for key, value in labels.items() if key not in own}}
    return {"labelSelector": selector, "topologyKey": "kubernetes.io/hostname"}


def _access_modes(service: LLMService) -> list[str]:
    default_mode = "ReadWriteMany" if _max_pods(service) > 1 else "ReadWriteOnce"
    return list(service.spec.cache.accessModes) or [default_mode]


def _max_pods(service: LLMService) -> int:
    scaling = service.spec.autoscaling
    return service.num_nodes * max(service.num_replicas, scaling.maxReplicas if scaling else 0)


def _size(plan: Plan, percent: int) -> str:
    return to_quantity(max(round_up_mib(plan.modelBytes * percent // 100), MIN_CLAIM_BYTES))
