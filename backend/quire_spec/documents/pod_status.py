# SPDX-License-Identifier: Apache-2.0
"""The status document of a pod: what GET /status answers, and the only thing the operator believes."""

from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum


class AdapterState(StrEnum):
    """Where an adapter of the catalogue is on its way to serving."""

    FETCHING = "Fetching"
    LOADING = "Loading"
    READY = "Ready"
    FAILED = "Failed"


class ProcessState(StrEnum):
    """Where a process of the pod is."""

    STARTING = "Starting"
    READY = "Ready"
    RESTARTING = "Restarting"


@dataclass(frozen=True, slots=True)
class AdapterStatus:
    """One adapter of the catalogue on this pod."""

    name: str
    state: AdapterState
    since: str
    """When it entered this state, RFC 3339."""
    digest: str | None = None
    """sha256:... of its content, once fetched."""
    model: str | None = None
    """The server model it is reached by; None: only by lora_name."""
    error: str = ""


@dataclass(frozen=True, slots=True)
class ProcessStatus:
    """One process that the supervisor watches."""

    state: ProcessState
    pid: int | None
    started_at: str | None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """Measured bytes on the engine's device, or on each of those that share the layers."""

    weights_bytes: int
    lora_bytes: int
    kv_bytes: int
    num_blocks: int
    block_size: int
    max_model_len: int
    dtype: str
    device: str
    swap_bytes: int = 0
    """In host memory."""
    tensor_parallel_size: int = 1
    """Devices that share the layers."""


@dataclass(frozen=True, slots=True)
class PodStatus:
    """The whole document."""

    version: str
    """Quire's."""
    served_name: str
    ready: bool
    reason: str
    """Why not ready, in a sentence; empty when ready."""
    core_started_at: str | None
    generation: int
    """Of the catalogue that this pod works on."""
    processes: dict[str, ProcessStatus]
    """server, text, core."""
    memory: MeasuredMemory | None
    models: list[str] = field(default_factory=list)
    """Names that clients can use now."""
    adapters: list[AdapterStatus] = field(default_factory=list)
    catalogue: str = ""
    """Digest of that catalogue (catalogue.Mark); empty before there is one."""


def utc_now() -> str:
    """This moment as documents have it: RFC 3339, UTC."""
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
