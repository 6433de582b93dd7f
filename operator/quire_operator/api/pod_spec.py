# SPDX-License-Identifier: Apache-2.0
"""Fields of an LLMService that describe its pods: spec.gpu, cache, runtime, security and podTemplate."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire_operator.api.quantity import QUANTITY
from quire_spec.documents.field_schema import ANNOTATIONS, LABELS, OBJECT_NAME, Restarts, Rule, schema_field
from quire_spec.documents.pod_config import Ports
from quire_spec.documents.sources import PvcSource, Source

_SERVER_ARGS = (
    r"grpc-use-ssl=(true|false)",
    r"grpc-server-cert=/[^\s]{1,511}",
    r"grpc-server-key=/[^\s]{1,511}",
    r"http-thread-count=[1-9][0-9]{0,2}",
    r"http-header-forward-pattern=[^\s]{1,256}",
    r"grpc-header-forward-pattern=[^\s]{1,256}",
    r"log-verbose=[0-9]",
    r"log-info=(true|false)",
    r"log-warning=(true|false)",
    r"log-error=(true|false)",
    r"log-format=(default|ISO8601)",
    r"rate-limit=(off|execution_count)",
    r"rate-limit-resource=[A-Za-z0-9_.-]{1,63}:[1-9][0-9]{0,5}(:[0-9]{1,3})?",
)
"""Regular expressions of the arguments in spec.runtime.serverArgs."""
QUANTITY_OF_RESOURCE = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
_RESOURCES: Mapping[str, Any] = {
    "items": {"min_length": 1, "max_length": 32, "pattern": QUANTITY_OF_RESOURCE},
    "max_properties": 16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Toleration:
    """An entry of spec.gpu.tolerations. It is copied into pods."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.operator) || self.operator != 'Exists' || !has(self.value)",
            "value must not be set when operator is Exists, because every value matches; remove it or use Equal.",
        ),
    )

    key: str | None = schema_field(None, max_length=316)
    """Key of the taint. Default: all keys, with operator Exists."""
    operator: str | None = schema_field(None, enum=("Exists", "Equal"))
    """Comparison of the value. Default Equal."""
    value: str | None = schema_field(None, max_length=63)
    """Value of the taint."""
    effect: str | None = schema_field(None, enum=("NoSchedule", "PreferNoSchedule", "NoExecute"))
    """Effect of the taint. Default: all."""
    tolerationSeconds: int | None = schema_field(None, minimum=0, maximum=2147483647)
    """Seconds for which a NoExecute taint is tolerated. Default: unlimited."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpec:
    """spec.gpu"""

    product: str | None = schema_field(
        None, min_length=1, max_length=63, pattern="^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
    )
    """GPU product, as in the node label nvidia.com/gpu.product, such as NVIDIA-L4. Pods run only on nodes with this
    label. Default: any product, and the plan is for the GPU with the least memory."""
    memory: str | None = schema_field(None, **QUANTITY, restarts=Restarts.BY_PLAN)
    """Memory of one GPU, such as 23034Mi. Default: the node label nvidia.com/gpu.memory. Required if nodes do not have
    that label and the product is unknown."""
    count: int | None = schema_field(None, minimum=1, maximum=16, restarts=Restarts.BY_PLAN)
    """Maximum number of GPUs of a replica, all on one node. Default: tensorParallelSize, or 1."""
    resourceName: str = schema_field(
        "nvidia.com/gpu",
        min_length=1,
        max_length=253,
        pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$",
    )
    """Extended resource that a pod requests. Default nvidia.com/gpu. A MIG slice has its own resource, such as
    nvidia.com/mig-3g.40gb."""
    nodeSelector: dict[str, str] = schema_field(factory=dict, **LABELS)
    """Labels that a node must have. Default: only the label of product."""
    tolerations: tuple[dict[str, Any], ...] = schema_field(
        (), type=tuple[Toleration, ...], max_items=32, list_type="atomic"
    )
    """Node taints that the pods tolerate. Default: none."""
    runtimeClassName: str | None = schema_field(None, **OBJECT_NAME)
    """RuntimeClass of the pods, if GPUs require one (often nvidia). Default: the cluster's default."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResources:
    """spec.jobs.resources"""

    requests: dict[str, str] = schema_field(factory=dict, **_RESOURCES)
    """Requested amounts by resource, such as cpu and memory. Default: cpu 500m and memory 512Mi for a download, 100m
    and 128Mi for reading config.json."""
    limits: dict[str, str] = schema_field(factory=dict, **_RESOURCES)
    """Limits by resource. A ResourceQuota on limits requires them. Default: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobsSpec:
    """spec.jobs"""

    labels: dict[str, str] = schema_field(factory=dict, **LABELS)
    """Labels of the Jobs and their pods, which take precedence over spec.labels and podTemplate, such as the queue of
    Kueue or the setting that leaves out a sidecar. Default: none."""
    annotations: dict[str, str] = schema_field(factory=dict, **ANNOTATIONS)
    """The same for annotations. Default: none."""
    resources: JobResources = schema_field(factory=JobResources)
    """Resources of the container. The container that downloads the model inside a pod (cache.mode EmptyDir) does not
    use them; change it in podTemplate.spec.initContainers."""
    nodeSelector: dict[str, str] | None = schema_field(None, **LABELS)
    """Labels that a node must have. With {}, the Jobs can run on any node, also without a GPU. A volume that can be
    mounted only on some nodes must then also be reachable from the server pods. Default: those of the server pods."""
    tolerations: tuple[dict[str, Any], ...] | None = schema_field(
        None, type=tuple[Toleration, ...], max_items=32, list_type="atomic"
    )
    """Node taints that the pods of the Jobs tolerate. Default: those that the server pods tolerate."""
    affinity: dict[str, Any] | None = schema_field(None, max_properties=3, preserve_unknown_fields=True)
    """Affinity of a PodSpec. Default: that of the server pods."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSpec:
    """spec.cache"""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.mode) || self.mode == 'PVC' || (!has(self.storageClassName) && !has(self.accessModes))",
            "storageClassName and accessModes must not be set unless mode is PVC, because they are fields of a claim; "
            "remove them or set spec.cache.mode to PVC.",
        ),
        Rule(
            "has(self.storageClassName) == has(oldSelf.storageClassName) && (!has(self.storageClassName) || "
            "self.storageClassName == oldSelf.storageClassName)",
            "storageClassName must not change, because a claim cannot move to another storage class; create a new "
            "LLMService.",
        ),
        Rule(
            "!has(self.size) || !has(oldSelf.size) || quantity(self.size).compareTo(quantity(oldSelf.size)) >= 0",
            "size must not shrink, because a claim cannot shrink; keep or raise it.",
        ),
    )

    mode: str | None = schema_field(None, enum=("PVC", "EmptyDir", "None"))
    """With PVC, the model is downloaded once to a PersistentVolumeClaim of the service, before pods occupy GPUs. With
    EmptyDir, every pod downloads it to the disk of its node. With None, pods read it directly from the source. Default:
    None for a model source of kind pvc, image or path, PVC for all others."""
    size: str | None = schema_field(None, **QUANTITY, restarts=Restarts.OF_EMPTY_DIR)
    """Size of the claim, or size limit of the EmptyDir. It can grow but not shrink. Default: 2.3 times the size of the
    model's files for a claim, which has room for two revisions; 1.3 times for an EmptyDir; at least 10Gi."""
    storageClassName: str | None = schema_field(None, **OBJECT_NAME, restarts=Restarts.NO)
    """StorageClass of the claim. Default: the cluster's default."""
    accessModes: tuple[str, ...] = schema_field(
        (),
        items={"enum": ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")},
        minItems=1,
        max_items=4,
        list_type="set",
        restarts=Restarts.LATER,
    )
    """Access modes of the claim. Default: ReadWriteMany with more than one pod, otherwise ReadWriteOnce. With
    ReadWriteOnce, all pods must run on one node."""
    deletionPolicy: str = schema_field("Retain", enum=("Retain", "Delete"), restarts=Restarts.NO)
    """Whether the claim is deleted with the LLMService. Default Retain, because downloading a large model again can
    take hours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvVar:
    """An entry of spec.runtime.env."""

    name: str = schema_field(min_length=1, max_length=128, pattern="^[A-Za-z_][A-Za-z0-9_]*$")
    """Name of the variable."""
    value: str = schema_field("", max_length=4096)
    """Value of the variable. Default: empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImagePullSecret:
    """An entry of spec.runtime.imagePullSecrets."""

    name: str = schema_field(**OBJECT_NAME)
    """Name of a Secret in the same namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsSpec:
    """spec.runtime.models. Exactly one of the fields is set."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.pvc) != has(self.path)",
            "models must have exactly one of pvc and path; keep the one that contains the models.",
        ),
    )

    pvc: PvcSource | None = schema_field(None)
    """A folder on a PersistentVolumeClaim in the same namespace. It is mounted read-only."""
    path: str | None = schema_field(None, min_length=2, max_length=1024, pattern=r"^/[^\s]*$")
    """A folder of the image, or of a volume that podTemplate mounts. With Kubernetes 1.31 and later, the volume can be
    an image."""

    @property
    def source(self) -> Source:
        """The source of the folder that contains other Triton models."""
        return Source(pvc=self.pvc, path=self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerResources:
    """What the server container of a pod requests, except GPUs."""

    cpu: str | None = schema_field(None, min_length=1, max_length=32, pattern=r"^[1-9][0-9]*(\.[0-9]+)?m?$")
    """CPU cores that the container requests, such as 4 or 1500m. The container has no CPU limit, so it can also use
    idle cores of the node. Default: 2, plus one for each GPU."""
    memory: str | None = schema_field(None, **QUANTITY)
    """Host memory of the container, as request and limit. On a CPU it contains the model and the KV cache. Default: the
    planned amount; with device GPU, the pod then has no limit."""
    sharedMemory: str | None = schema_field(None, **QUANTITY)
    """Size of /dev/shm. The server passes tensors to its models through /dev/shm, and GPUs communicate through it.
    Default: 1Gi for each GPU of a replica, at least 1Gi. The default of containers, 64 MB, is not enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeSpec(ContainerResources):
    """spec.runtime"""

    image: str | None = schema_field(None, min_length=1, max_length=512, pattern="^[A-Za-z0-9][-A-Za-z0-9._/:@]*$")
    """Image of the pods. Default: the image for the device from the same release as the operator."""
    imagePullSecrets: tuple[dict[str, str], ...] = schema_field(
        (), type=tuple[ImagePullSecret, ...], max_items=16, list_type="map", map_keys=("name",)
    )
    """Secrets for the image registry. Default: none."""
    env: tuple[EnvVar, ...] = schema_field((), max_items=64, list_type="map", map_keys=("name",))
    """Environment variables of the container, for libraries such as NCCL. Settings of Quire are fields, not variables.
    Every reader of the LLMService can read the values, so they must not contain secrets. Default: none."""
    models: ModelsSpec | None = schema_field(None)
    """A model repository of other Triton models (Python, ensembles), which the server runs beside the LLM. Their code
    runs in the pod as the same user, and can read everything that the pod can read. The server loads all of them at
    start. Default: none."""
    serverArgs: tuple[str, ...] = schema_field(
        (),
        items={
            "min_length": 1,
            "max_length": 600,
            "pattern": f"^({'|'.join(_SERVER_ARGS)})$",
        },
        max_items=32,
        list_type="set",
    )
    """Arguments of Triton Inference Server in the form NAME=VALUE, such as http-thread-count=16. Allowed are TLS of the
    gRPC port, threads, forwarded headers, log levels and rate limits. Default: none."""
    ports: Ports = schema_field(
        factory=Ports, crd_default={"http": 8000, "grpc": 8001, "metrics": 8002, "health": 8003}
    )
    """Ports of the container and of the Service."""
    expose: tuple[str, ...] = schema_field(
        ("http", "grpc"), items={"enum": ("http", "grpc")}, max_items=2, list_type="set"
    )
    """Protocols of Triton Inference Server that clients can reach. The port of any other protocol is not in the Service
    and the NetworkPolicy, and listens on loopback only. For the OpenAI API, use openai.enabled. Default ['http',
    'grpc']."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SecuritySpec:
    """spec.security"""

    ids: str = schema_field("Fixed", enum=("Fixed", "Cluster"))
    """Origin of the user and group IDs. With Fixed, they are runAsUser and fsGroup. With Cluster, the pods have no IDs
    of their own, and an admission plugin sets them, such as OpenShift's security context constraints. Default Fixed."""
    runAsUser: int = schema_field(1000, minimum=1, maximum=2147483647)
    """User ID of the processes. Default 1000, the user of the images."""
    fsGroup: int = schema_field(1000, minimum=1, maximum=2147483647)
    """Group ID with write access to volumes. Default 1000."""
    readOnlyRootFilesystem: bool = schema_field(True)
    """Mount the root filesystem read-only; temporary files are written to volumes. Default true. Set false if the GPU
    runtime must write to the root filesystem."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodMetadata:
    """spec.podTemplate.metadata"""

    labels: dict[str, str] = schema_field(factory=dict, **LABELS)
    """Label names and values."""
    annotations: dict[str, str] = schema_field(factory=dict, **ANNOTATIONS)
    """Annotations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodTemplateSpec:
    """spec.podTemplate. It is merged into the pod template."""

    metadata: PodMetadata | None = schema_field(None)
    """Additional labels and annotations."""
    spec: dict[str, Any] = schema_field(factory=dict, max_properties=64, preserve_unknown_fields=True)
    """Fields of a PodSpec. The API server validates them when the operator applies the Deployment."""
