# SPDX-License-Identifier: Apache-2.0
"""Status of a pod, as a document. A pod returns it for GET /status. The operator reads a pod's state only from this
document."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum


class AdapterState(StrEnum):
    """State of an adapter of the catalog."""

    FETCHING = "Fetching"
    LOADING = "Loading"
    VERIFIED = "Verified"
    READY = "Ready"
    FAILED = "Failed"


class OtherModelState(StrEnum):
    """State of a model of --model-repository."""

    LOADING = "Loading"
    READY = "Ready"
    FAILED = "Failed"
    UNLOADED = "Unloaded"


class ProcessState(StrEnum):
    """State of a process of the pod."""

    STARTING = "Starting"
    READY = "Ready"
    RESTARTING = "Restarting"


@dataclass(frozen=True, slots=True)
class ContentStatus:
    """State of one of several contents of an adapter."""

    state: AdapterState
    digest: str | None = None
    error: str = ""
    effect: float | None = None
    warning: str = ""


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """State of one adapter of the catalog on this pod."""

    name: str
    state: AdapterState
    since: str
    """Time at which the adapter entered its current state, in RFC 3339 format."""
    digest: str | None = None
    """sha256:... of the adapter's content; None until the adapter is fetched."""
    model: str | None = None
    """Name of the adapter's server model; None if clients can select the adapter only with the parameter lora_name."""
    error: str = ""
    effect: float | None = None
    """The largest change of a log probability in the effect probe; None until the probe has run."""
    warning: str = ""
    """A defect of an adapter that is used in spite of it; empty if there is none."""
    candidate: ContentStatus | None = None
    """The content that replaces the current one when all pods have verified it."""
    previous: ContentStatus | None = None
    """The content that the current one has replaced."""
    signer: str | None = None
    """Name of the signer in spec.trust whose signature was verified."""
    versions: dict[str, ContentStatus] = field(default_factory=dict)
    """The versions by name; empty if the adapter has none."""


@dataclass(frozen=True, slots=True)
class OnDemandStatus:
    """The adapters of the adapter sources that requests have named. GET /adapters lists them."""

    adapters: int
    bytes: int
    """Size of their files."""


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """The signature of the base model or the draft model."""

    signer: str | None
    """Name of the signer in spec.trust; None if the signature was refused and the policy is Warn."""
    digest: str | None
    """sha256:... of the signed files."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class OtherModelStatus:
    """State of one model of the model repository on this pod."""

    name: str
    state: OtherModelState
    error: str = ""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process that the supervisor manages."""

    state: ProcessState
    pid: int | None
    started_at: str | None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class CoreState:
    """One of several cores, as the text process sees it."""

    connected: bool
    num_running: int
    """Running requests."""
    num_waiting: int
    """Requests that wait to run."""
    kv_cache_usage: float
    """Fraction of the KV blocks in use."""


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Measured memory. Sizes are in bytes and apply to each device of the engine."""

    weights_bytes: int
    lora_bytes: int
    kv_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    dtype: str
    device: str
    swap_bytes: int = 0
    """Size of the KV swap space in host memory, in bytes."""
    tensor_parallel_size: int = 1
    """Number of tensor-parallel ranks of a pipeline stage."""
    pipeline_parallel_size: int = 1
    """Number of pipeline stages. Sizes are those of the first one."""
    kv_tokens: int = 0
    """Number of tokens that fit into the KV cache if every sequence has max_model_len tokens; see KVLayout.num_tokens.
    An older version does not report this number; it is then 0."""
    state_bytes: int = 0
    """Size of the states of sequences, in bytes; 0 if the model has none."""


@dataclass(frozen=True, slots=True)
class PodStatus:
    """The complete status of a pod."""

    version: str
    """Version of Quire."""
    served_name: str
    ready: bool
    reason: str
    """A sentence that explains why the pod is not ready; empty if the pod is ready."""
    core_started_at: str | None
    generation: int
    """Generation of the catalog that this pod applies."""
    processes: dict[str, ProcessStatus]
    """Maps the name of each process (server, text, core) to its state."""
    memory: MeasuredMemory | None
    models: list[str] = field(default_factory=list)
    """Names of the server models that clients can use now."""
    adapters: list[AdapterStatus] = field(default_factory=list)
    catalogue: str = ""
    """Digest of the catalog that this pod applies (CatalogVersion.digest); empty until the pod has a catalog."""
    tool_call_parser: str | None = None
    """Format of the tool calls in chat outputs. None: the format is unknown, and tool calls are left in the text."""
    reasoning_parser: str | None = None
    """Format of the reasoning in chat outputs. None: the format is unknown, and the reasoning is left in the text."""
    other_models: list[OtherModelStatus] = field(default_factory=list)
    """Status of each model of --model-repository."""
    cores: dict[str, CoreState] = field(default_factory=dict)
    """State of each core by the name of its process. Empty if the pod has one core."""
    on_demand: OnDemandStatus | None = None
    """The adapters that were found by name; None if the catalog has no adapter sources."""
    model_signatures: dict[str, ModelSignature] = field(default_factory=dict)
    """The verified signatures by model: `model` and `draft`. Empty without spec.trust."""
    degraded: str = ""
    """Which part of a ready pod does not work, such as `cores 3 of 4`; empty if all work."""
    kv_differences: list[str] = field(default_factory=list)
    """Fields of kv_wire.RowLayout in which other pods that asked for KV blocks differed. The process that serves the
    blocks has seen them since it started."""


def utc_now() -> str:
    """Return the current time in UTC, in RFC 3339 format."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
