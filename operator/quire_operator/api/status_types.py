# SPDX-License-Identifier: Apache-2.0
"""The status of an LLMService, as the CRD describes it. controller/status writes it."""

from dataclasses import dataclass

from quire_spec.documents.field_schema import schema_field


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """An entry of status.conditions."""

    type: str = schema_field(max_length=316)
    """Name of the condition."""
    status: str = schema_field(enum=("True", "False", "Unknown"))
    """Status of the condition."""
    observedGeneration: int | None = schema_field(None, minimum=0)
    """Generation of the spec that the condition describes."""
    lastTransitionTime: str = schema_field(format="date-time", max_length=64)
    """Time of the last change of status."""
    reason: str = schema_field(max_length=1024)
    """Reason for the status, in one word."""
    message: str = schema_field(max_length=32768)
    """Reason for the status, in sentences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AddressStatus:
    """status.address"""

    url: str | None = schema_field(None, max_length=512)
    """URL for most clients. The OpenAI API, or HTTP if the pods do not serve that API."""
    openai: str | None = schema_field(None, max_length=512)
    """Base URL of the OpenAI API. Absent if the pods do not serve it."""
    http: str | None = schema_field(None, max_length=512)
    """URL of Triton Inference Server over HTTP."""
    grpc: str | None = schema_field(None, max_length=512)
    """URL of Triton Inference Server over gRPC."""
    external: str | None = schema_field(None, max_length=512)
    """URL for clients outside of the cluster, from the first host name of networking.httpRoute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointsStatus:
    """status.endpoints"""

    http: str | None = schema_field(None, max_length=512)
    """URL for HTTP."""
    grpc: str | None = schema_field(None, max_length=512)
    """Host and port for gRPC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterStatus:
    """An entry of status.adapters."""

    name: str = schema_field(max_length=63)
    """Name in the spec."""
    digest: str | None = schema_field(None, max_length=71)
    """SHA-256 digest of the content, as sha256:...."""
    signer: str | None = schema_field(None, max_length=63)
    """Signer in spec.trust whose signature all pods have verified. Absent if there is none."""
    ready: int | None = schema_field(None, minimum=0)
    """Number of ready pods that have loaded the adapter."""
    total: int | None = schema_field(None, minimum=0)
    """Number of ready pods."""
    state: str = schema_field(enum=("Pending", "Fetching", "Loading", "Verified", "Ready", "Failed"))
    """State of the adapter, or of its new content, on the pod that has made the least progress. Verified: the pods wait
    for each other."""
    message: str | None = schema_field(None, max_length=1024)
    """Reason for a failure, or a warning, and the name of the pod."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSignatureStatus:
    """status.modelSignature"""

    signer: str = schema_field(max_length=63)
    """Signer in spec.trust."""
    digest: str = schema_field(max_length=71)
    """SHA-256 digest of the signed files, as sha256:...."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheStatus:
    """status.cache"""

    state: str | None = schema_field(None, enum=("Pending", "Downloading", "Ready", "Failed"))
    """State of the download."""
    progress: str | None = schema_field(None, max_length=4)
    """Downloaded percentage during the download, such as 21%. Absent if unknown."""
    bytes: str | None = schema_field(None, max_length=32)
    """Downloaded bytes, as a quantity."""
    totalBytes: str | None = schema_field(None, max_length=32)
    """Size of all files during the download, as a quantity."""
    bytesPerSecond: str | None = schema_field(None, max_length=32)
    """Recent download speed in bytes per second, as a quantity."""
    at: str | None = schema_field(None, format="date-time", max_length=64)
    """Time at which progress, bytes, totalBytes and bytesPerSecond were measured, every 30 s or 5%."""
    revision: str | None = schema_field(None, max_length=255)
    """Commit that was downloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedGpuStatus:
    """status.plan.gpu"""

    product: str | None = schema_field(None, max_length=63)
    """GPU product, if known."""
    visibleMiB: int = schema_field(minimum=0)
    """Memory of one GPU that CUDA reports, in MiB."""
    count: int = schema_field(minimum=0)
    """Number of GPUs of a replica."""
    from_: str = schema_field(enum=("Spec", "NodeLabels", "ProductTable"))
    """Source of the memory size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedNumber:
    """A number in status.plan."""

    value: int = schema_field(minimum=0)
    """Value in effect."""
    from_: str = schema_field(enum=("Spec", "Computed"))
    """Origin of the value."""
    why: str = schema_field(max_length=256)
    """Reason for the value, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedText:
    """A text in status.plan."""

    value: str = schema_field(max_length=512)
    """Value in effect."""
    from_: str = schema_field(enum=("Spec", "Computed"))
    """Origin of the value."""
    why: str = schema_field(max_length=256)
    """Reason for the value, in a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBytesStatus:
    """status.plan.bytes"""

    weights: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    activations: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    nonTorch: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    lora: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    kv: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    reserve: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    draft: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    states: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBytesStatus:
    """status.plan.hostBytes"""

    processes: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    stubs: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    loraCopies: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    sharedMemory: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    model: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    swap: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    kvOffloading: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    total: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStatus:
    """status.plan.measured"""

    kvBlocks: int | None = schema_field(None, minimum=0)
    """Number of KV blocks."""
    kvTokens: int | None = schema_field(None, minimum=0)
    """Capacity of the KV blocks, in tokens."""
    at: str | None = schema_field(None, format="date-time", max_length=64)
    """Time of the measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodPlanStatus:
    """status.plan, and status.plan.prefill"""

    inputsHash: str = schema_field(max_length=71)
    """Digest of the planner's inputs: the model, the GPU and parts of the spec."""
    plannerVersion: int = schema_field(minimum=0)
    """Version of the planner that made the plan."""
    fit: str | None = schema_field(None, enum=("Fits", "LowConcurrency", "UtilizationRisk", "HeterogeneousPool"))
    """How well the model fits. LowConcurrency: fewer than four requests of length maxModelLen fit into the KV cache.
    UtilizationRisk: too little GPU memory is left for other uses. HeterogeneousPool: the nodes have several GPU
    products, and the plan is for the one with the least memory."""
    advice: str | None = schema_field(None, max_length=4096)
    """Change that would make the model fit better. Absent if there is none."""
    gpu: PlannedGpuStatus | None = schema_field(None)
    """GPUs of a replica. Absent for device CPU."""
    tensorParallelSize: PlannedNumber | None = schema_field(None)
    """A number with its origin and reason."""
    blockSize: PlannedNumber | None = schema_field(None)
    """A number with its origin and reason."""
    maxModelLen: PlannedNumber | None = schema_field(None)
    """A number with its origin and reason."""
    maxNumSeqs: PlannedNumber | None = schema_field(None)
    """A number with its origin and reason."""
    maxNumBatchedTokens: PlannedNumber | None = schema_field(None)
    """A number with its origin and reason."""
    gpuMemoryUtilization: PlannedText | None = schema_field(None)
    """A value with its origin and reason."""
    kvCacheMemory: PlannedText | None = schema_field(None)
    """A value with its origin and reason."""
    dtype: PlannedText | None = schema_field(None)
    """A value with its origin and reason."""
    sharedMemory: PlannedText | None = schema_field(None)
    """A value with its origin and reason."""
    image: PlannedText | None = schema_field(None)
    """A value with its origin and reason."""
    bytes: DeviceBytesStatus | None = schema_field(None)
    """Memory of one GPU, or of the CPU, by purpose, as quantities."""
    hostBytes: HostBytesStatus | None = schema_field(None)
    """Host memory of a pod by purpose, as quantities."""
    modelBytes: str | None = schema_field(None, max_length=32)
    """Bytes as a quantity."""
    kvTokens: int | None = schema_field(None, minimum=0)
    """Expected capacity of the KV cache, in tokens."""
    measured: MeasuredStatus | None = schema_field(None)
    """Values that the engine measured when it started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStatus(PodPlanStatus):
    """status.plan"""

    prefill: PodPlanStatus | None = schema_field(None)
    """The plan of the pods that compute prompts, with spec.disaggregation. The other fields are then the plan of the
    pods that generate tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorStatus:
    """status.operator"""

    identity: str = schema_field(max_length=320)
    """Namespace and name of the operator's installation."""
    renewedAt: str = schema_field(format="date-time", max_length=64)
    """Time at which the operator last renewed this mark, every 10 minutes. If it was not renewed for 30 minutes,
    another operator can take the service over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleStatus:
    """An entry of status.roles."""

    name: str = schema_field(enum=("prefill", "decode"))
    """The role."""
    desiredReplicas: int | None = schema_field(None, minimum=0)
    """Number of pods that the DisaggregatedSet should have."""
    replicas: int | None = schema_field(None, minimum=0)
    """Number of existing pods."""
    readyReplicas: int | None = schema_field(None, minimum=0)
    """Number of ready pods (readiness probe succeeded)."""
    updatedReplicas: int | None = schema_field(None, minimum=0)
    """Number of pods of the newest generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVTransferStatus:
    """status.kvTransfer"""

    differences: tuple[str, ...] = schema_field((), items={"max_length": 63}, max_items=16, list_type="atomic")
    """What differs between pods, such as block_size. Pods read no KV blocks from a pod that differs, and compute them.
    A name is listed until the pods that have seen the difference are replaced."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupHistoryStatus:
    """An entry of status.groups.history"""

    group: int = schema_field(minimum=0)
    """Index of the group."""
    role: str | None = schema_field(None, max_length=63)
    """Role of its pods, with spec.disaggregation."""
    leader: str = schema_field(max_length=63)
    """uid of its first pod."""
    template: str = schema_field(max_length=63)
    """Digest of the templates of its pods."""
    recreated: int = schema_field(minimum=0)
    """How often the group was created anew with these templates, without serving for 10 minutes."""
    rank: int | None = schema_field(None, minimum=0)
    """Index of the pod that ended last in the group."""
    error: str | None = schema_field(None, max_length=256)
    """How it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupsStatus:
    """status.groups"""

    size: int = schema_field(minimum=1)
    """Number of pods of a group."""
    wanted: int = schema_field(minimum=0)
    """Number of groups in the spec."""
    ready: int = schema_field(minimum=0)
    """Number of groups of which all pods are ready."""
    history: tuple[GroupHistoryStatus, ...] = schema_field((), max_items=64, list_type="atomic")
    """Groups that are not ready, or were created anew a short time ago."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMServiceStatus:
    """The field `status` of an LLMService."""

    observedGeneration: int | None = schema_field(None, minimum=0)
    """Generation of the spec that the status describes."""
    conditions: tuple[Condition, ...] = schema_field((), max_items=16, list_type="map", map_keys=("type",))
    """Conditions ConfigValid, Planned, ModelCached, Available, Progressing and AdaptersReady, and Ready, which
    summarizes them."""
    operator: OperatorStatus | None = schema_field(None)
    """Operator that owns the service. Other operators do not change the service and its objects."""
    servedName: str | None = schema_field(None, max_length=63)
    """Model name that clients use for the base model."""
    replicas: int | None = schema_field(None, minimum=0)
    """Number of existing pods, or of groups with engine.pipelineParallelSize above 1."""
    groups: GroupsStatus | None = schema_field(None)
    """Groups of pods. Absent if each replica is one pod."""
    selector: str | None = schema_field(None, max_length=1024)
    """Label selector of the pods, for autoscalers."""
    readyReplicas: int | None = schema_field(None, minimum=0)
    """Number of ready pods (readiness probe succeeded)."""
    updatedReplicas: int | None = schema_field(None, minimum=0)
    """Number of pods of the newest generation."""
    roles: tuple[RoleStatus, ...] = schema_field((), max_items=2, list_type="map", map_keys=("name",))
    """The pods of each role, with spec.disaggregation."""
    kvTransfer: KVTransferStatus | None = schema_field(None)
    """KV blocks that pods read from each other. Absent if no difference between pods was seen."""
    address: AddressStatus | None = schema_field(None)
    """URLs for clients inside the cluster, one for each port that the pods have. In a gateway or proxy, these are the
    addresses to forward to."""
    endpoints: EndpointsStatus | None = schema_field(None)
    """Addresses of Triton Inference Server as in status.address, without the scheme for gRPC; kept for scripts that
    read them."""
    models: tuple[str, ...] = schema_field((), items={"max_length": 63}, max_items=1025, list_type="atomic")
    """Model names that are available on every ready pod."""
    toolCallParser: str | None = schema_field(None, max_length=63)
    """Format of tool calls that every ready pod uses. Absent if pods do not parse calls, which then stay in the text.
    """
    reasoningParser: str | None = schema_field(None, max_length=63)
    """Format of the reasoning before an answer that every ready pod uses. Absent if there is none."""
    modelSignature: ModelSignatureStatus | None = schema_field(None)
    """Signature of the base model that every ready pod has verified. Absent if there is none."""
    adaptersReady: str | None = schema_field(None, max_length=16)
    """Number of adapters that are ready on every ready pod, and number of adapters in the spec, such as 2/3."""
    adapters: tuple[AdapterStatus, ...] = schema_field((), max_items=1024, list_type="atomic")
    """State of each adapter in the spec."""
    cache: CacheStatus | None = schema_field(None)
    """The model's files."""
    defaults: tuple[str, ...] = schema_field((), items={"max_length": 63}, max_items=32, list_type="atomic")
    """Fields of the spec whose value comes, at least in part, from the defaults of the operator (the chart's value
    defaults)."""
    plan: PlanStatus | None = schema_field(None)
    """The plan: every value with its origin (Spec: set in the spec; Computed: chosen by the planner) and reason. The
    operator makes one plan for a spec, a model and a GPU, and keeps it when the operator is upgraded."""
