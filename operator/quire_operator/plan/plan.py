# SPDX-License-Identifier: Apache-2.0
"""The plan: the settings with which a pod starts, each with its origin and reason. The field status.plan contains its
JSON form.

For the same inputs, the planner makes a plan only once. Later, the operator reads this plan from the status. All sizes
of memory are whole MiB, so that the JSON form is exact. planner.py makes plans; the renderer, the commands and the
status read them.
"""

from collections.abc import Mapping
from dataclasses import astuple, dataclass
from enum import StrEnum
from typing import Any, Generic, Self, TypeVar

from quire_operator.api.disaggregation_spec import Role
from quire_operator.api.quantity import to_bytes
from quire_operator.plan.device_memory import MIB
from quire_operator.plan.gpu import MemorySource
from quire_spec.dataclass_json import from_json
from quire_spec.errors import ConfigError

T = TypeVar("T", int, str)

VERSION = 2
"""Version of the planner. A release increments this number if its planner makes a different plan for the same
inputs."""


class Origin(StrEnum):
    """Origin of a value."""

    SPEC = "Spec"
    COMPUTED = "Computed"


class FitReason(StrEnum):
    """Reasons of the condition Planned if its status is True."""

    FITS = "Fits"
    LOW_CONCURRENCY = "LowConcurrency"
    UTILIZATION_RISK = "UtilizationRisk"
    HETEROGENEOUS_POOL = "HeterogeneousPool"


@dataclass(frozen=True, slots=True)
class PlannedValue(Generic[T]):
    """A value with its origin and reason."""

    value: T
    origin: Origin
    why: str
    """Reason for the value, in a few words."""

    def to_json(self) -> dict[str, Any]:
        """Return the JSON form in status.plan."""
        return {"value": self.value, "from": self.origin.value, "why": self.why}


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    """The GPUs of a replica."""

    product: str
    visibleMiB: int
    """Memory of one GPU, as CUDA reports it."""
    count: int
    memory_source: MemorySource


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """How the memory of one GPU, or of the CPU, is divided. The sizes are whole MiB."""

    weights: int
    activations: int
    nonTorch: int
    lora: int
    kv: int
    reserve: int
    """Memory for CUDA graphs, the server and fragmentation; only on a GPU."""
    draft: int = 0
    """Weights of the draft model or of its heads; the field kv includes their KV cache."""
    states: int = 0
    """States of sequences, and their snapshots."""

    @property
    def total(self) -> int:
        """Sum of all fields."""
        return sum(astuple(self))


@dataclass(frozen=True, slots=True)
class HostMemory:
    """How the memory of the container is divided. The sizes are whole MiB."""

    processes: int
    stubs: int
    loraCopies: int
    sharedMemory: int
    model: int
    """On a CPU, this is the total of DeviceMemory, because the model is in host memory."""
    total: int
    """Memory request of the container. It is the value in the spec, or the sum of all uses if the spec does not set
    it."""
    swap: int = 0
    """Memory for KV blocks of preempted requests."""
    kvOffloading: int = 0
    """Memory that caches KV blocks."""

    @property
    def required(self) -> int:
        """Sum of all uses of memory."""
        processes = self.processes + self.stubs + self.loraCopies + self.sharedMemory
        return processes + self.model + self.swap + self.kvOffloading


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of one service."""

    inputsHash: str
    plannerVersion: int
    gpu: PlannedGpu | None
    """GPUs of a replica; None on a CPU."""
    dtype: PlannedValue[str]
    tensorParallelSize: PlannedValue[int]
    gpuMemoryUtilization: PlannedValue[str] | None
    """Fraction of the GPU's memory that the engine may use; None on a CPU."""
    kvCacheMemory: PlannedValue[str] | None
    """Size of the KV cache. On a GPU, it is None if the spec does not set it: the engine then measures the free
    memory."""
    blockSize: PlannedValue[int]
    maxModelLen: PlannedValue[int]
    maxNumSeqs: PlannedValue[int]
    maxNumBatchedTokens: PlannedValue[int]
    bytes: DeviceMemory
    hostBytes: HostMemory
    sharedMemory: PlannedValue[str]
    image: PlannedValue[str]
    """Image of the pods. It is part of the plan, so that an upgrade of the operator does not change the image of
    existing pods."""
    modelBytes: int
    """Size in whole MiB of the files with the weights, including those of a draft model."""
    kvTokens: int
    fit: FitReason
    advice: str
    """Recommended changes; empty if there are none."""
    prefill: "Plan | None" = None
    """Settings of the pods that compute prompts, if the service has roles. The other fields are then those of the pods
    that generate tokens. Both have the same inputsHash."""

    @property
    def concurrency(self) -> float:
        """Number of requests that fit into the KV cache if each of them has maxModelLen tokens."""
        return self.kvTokens / self.maxModelLen.value

    def for_role(self, role: Role | None) -> "Plan":
        """Return the settings of the pods of a role."""
        return self.prefill if role is Role.PREFILL and self.prefill is not None else self

    def to_json(self) -> dict[str, Any]:
        """Return the content of status.plan."""
        planned = {name: value.to_json() for name in _PLANNED_FIELDS if (value := getattr(self, name)) is not None}
        gpu = {} if self.gpu is None else {"gpu": _gpu_to_json(self.gpu)}
        return {
            "inputsHash": self.inputsHash,
            "plannerVersion": self.plannerVersion,
            **gpu,
            **planned,
            "bytes": _to_quantities(self.bytes),
            "hostBytes": _to_quantities(self.hostBytes),
            "modelBytes": to_quantity(self.modelBytes),
            "kvTokens": self.kvTokens,
            "fit": self.fit.value,
            **({"advice": self.advice} if self.advice else {}),
            **({} if self.prefill is None else {"prefill": self.prefill.to_json()}),
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Read status.plan. The field `measured` is ignored, because the planner does not write it.

        Raises:
            ConfigError: `body` does not have the form that `to_json` writes.
        """
        try:
            fields: dict[str, Any] = {
                name: None
                if name in _OPTIONAL_FIELDS and name not in body
                else PlannedValue(body[name]["value"], Origin(body[name]["from"]), body[name]["why"])
                for name in _PLANNED_FIELDS
            }
            return cls(
                inputsHash=body["inputsHash"],
                plannerVersion=body["plannerVersion"],
                gpu=_gpu_from_json(body["gpu"]) if "gpu" in body else None,
                bytes=from_json(DeviceMemory, _from_quantities(body["bytes"])),
                hostBytes=from_json(HostMemory, _from_quantities(body["hostBytes"])),
                modelBytes=to_bytes(body["modelBytes"]),
                kvTokens=body["kvTokens"],
                fit=FitReason(body["fit"]),
                advice=body.get("advice", ""),
                prefill=cls.from_json(body["prefill"]) if "prefill" in body else None,
                **fields,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"status.plan: is not a plan that this operator wrote ({error}); remove it") from error


def to_quantity(size: int) -> str:
    """Format a size in bytes as a Kubernetes quantity in MiB; 0 is formatted without a unit. The size must be whole
    MiB."""
    assert size % MIB == 0, size
    return f"{size // MIB}Mi" if size else "0"


def round_down_mib(size: int) -> int:
    """Round a size down to whole MiB."""
    return size // MIB * MIB


_PLANNED_FIELDS = (
    "dtype", "tensorParallelSize", "gpuMemoryUtilization", "kvCacheMemory", "blockSize", "maxModelLen", "maxNumSeqs",
    "maxNumBatchedTokens", "sharedMemory", "image",
)  # fmt: skip


_OPTIONAL_FIELDS = ("gpuMemoryUtilization", "kvCacheMemory")
"""Fields of status.plan that are absent on some devices."""


def _to_quantities(sizes: DeviceMemory | HostMemory) -> dict[str, str]:
    # These are rarely used, and plans of older releases do not contain them.
    rare = ("swap", "draft", "kvOffloading", "states")
    quantities = {name: to_quantity(getattr(sizes, name)) for name in sizes.__slots__}
    return {name: size for name, size in quantities.items() if name not in rare or size != "0"}


def _from_quantities(sizes: Mapping[str, str]) -> dict[str, int]:
    return {name: to_bytes(size) for name, size in sizes.items()}


def _gpu_to_json(gpu: PlannedGpu) -> dict[str, Any]:
    product = {"product": gpu.product} if gpu.product else {}
    return {**product, "visibleMiB": gpu.visibleMiB, "count": gpu.count, "from": gpu.memory_source.value}


def _gpu_from_json(body: Mapping[str, Any]) -> PlannedGpu:
    return PlannedGpu(body.get("product", ""), body["visibleMiB"], body["count"], MemorySource(body["from"]))
