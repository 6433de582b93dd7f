# SPDX-License-Identifier: Apache-2.0
"""Plan: the numbers that a pod starts with, each with where it comes from and why. Its JSON form is status.plan.

A plan is written once for its inputs and then read back from the status, so the JSON form loses nothing: memory is in
whole MiB. Made by planner.py; read by the renderer, the commands and the status.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, Self, TypeVar

from quire_operator.api.quantity import to_bytes
from quire_operator.plan.device_memory import MIB
from quire_operator.plan.gpu import MemorySource
from quire_spec.dataclass_json import from_json
from quire_spec.errors import ConfigError

T = TypeVar("T", int, str)

VERSION = 1
"""Rises when the planner would plan differently from the same inputs."""


class Origin(StrEnum):
    """Where a value comes from."""

    SPEC = "Spec"
    COMPUTED = "Computed"


class FitReason(StrEnum):
    """Reasons of Planned=True."""

    FITS = "Fits"
    LOW_CONCURRENCY = "LowConcurrency"
    UTILIZATION_RISK = "UtilizationRisk"
    HETEROGENEOUS_POOL = "HeterogeneousPool"


@dataclass(frozen=True, slots=True)
class PlannedValue(Generic[T]):
    """A value, with where it comes from."""

    value: T
    origin: Origin
    why: str
    """In a few words."""

    def to_json(self) -> dict[str, Any]:
        """As in status.plan."""
        return {"value": self.value, "from": self.origin.value, "why": self.why}


@dataclass(frozen=True, slots=True)
class PlannedGpu:
    """The GPUs of a replica."""

    product: str
    visibleMiB: int
    """Memory of one that CUDA gives out."""
    count: int
    memory_source: MemorySource


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of one GPU, or of the CPU, by purpose; whole MiB."""

    weights: int
    activations: int
    nonTorch: int
    lora: int
    kv: int
    reserve: int
    """Of a GPU: what the engine leaves to CUDA graphs, the server and fragments."""

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.activations + self.nonTorch + self.lora + self.kv + self.reserve


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Memory of the container, by purpose; whole MiB."""

    processes: int
    stubs: int
    loraCopies: int
    sharedMemory: int
    model: int
    """On a CPU: what DeviceBytes says, which is host memory there."""
    total: int
    """What the container asks for: the sum, or what the spec gives it."""
    swap: int = 0
    """KV blocks of preempted requests."""

    @property
    def required(self) -> int:
        """The sum."""
        return self.processes + self.stubs + self.loraCopies + self.sharedMemory + self.model + self.swap


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided for one service."""

    inputsHash: str
    plannerVersion: int
    gpu: PlannedGpu | None
    """None on a CPU."""
    dtype: PlannedValue[str]
    tensorParallelSize: PlannedValue[int]
    gpuMemoryUtilization: PlannedValue[str] | None
    """None on a CPU."""
    kvCacheMemory: PlannedValue[str] | None
    """None on a GPU, where the engine measures what gpuMemoryUtilization leaves, unless the spec pins it."""
    blockSize: PlannedValue[int]
    maxModelLen: PlannedValue[int]
    maxNumSeqs: PlannedValue[int]
    maxNumBatchedTokens: PlannedValue[int]
    bytes: DeviceMemory
    hostBytes: HostMemory
    sharedMemory: PlannedValue[str]
    image: PlannedValue[str]
    """Of the pods. In the plan, so that a new release of the operator does not bring a new one by itself."""
    modelBytes: int
    """Of the weights' files, in whole MiB."""
    kvTokens: int
    fit: FitReason
    advice: str
    """What to change, where something is worth changing; else empty."""

    @property
    def concurrency(self) -> float:
        """Requests of full length that the KV cache holds."""
        return self.kvTokens / self.maxModelLen.value

    def to_json(self) -> dict[str, Any]:
        """status.plan."""
        planned = {
            name: planned_value.to_json()
            for name in _PLANNED_FIELDS
            if (planned_value := getattr(self, name)) is not None
        }
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
        }

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Self:
        """Read status.plan back; `measured` is not the planner's and is left out.

        Raises:
            ConfigError: it is not what `to_json` writes.
        """
        try:
            fields: dict[str, Any] = dict.fromkeys(_OPTIONAL_FIELDS)
            fields |= {
                name: _planned_value_from_json(body[name])
                for name in _PLANNED_FIELDS
                if name in body or name not in _OPTIONAL_FIELDS
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
                **fields,
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(f"status.plan: not a plan of this operator ({error}); remove it to plan anew") from error


def to_quantity(size: int) -> str:
    """Whole MiB as Kubernetes writes them; 0 without a unit."""
    assert size % MIB == 0, size
    return f"{size // MIB}Mi" if size else "0"


def round_down_mib(size: int) -> int:
    """Rounded down to whole MiB."""
    return size // MIB * MIB


_PLANNED_FIELDS = (
    "dtype", "tensorParallelSize", "gpuMemoryUtilization", "kvCacheMemory", "blockSize", "maxModelLen", "maxNumSeqs",
    "maxNumBatchedTokens", "sharedMemory", "image",
)  # fmt: skip


_OPTIONAL_FIELDS = ("gpuMemoryUtilization", "kvCacheMemory")
"""Those that not every device has."""


def _to_quantities(sizes: DeviceMemory | HostMemory) -> dict[str, str]:
    # Swap space is rare, and plans of before it have none.
    quantities = {name: to_quantity(getattr(sizes, name)) for name in sizes.__slots__}
    return (
        quantities
        if quantities.get("swap") != "0"
        else {name: size for name, size in quantities.items() if name != "swap"}
    )


def _from_quantities(sizes: Mapping[str, str]) -> dict[str, int]:
    return {name: to_bytes(size) for name, size in sizes.items()}


def _planned_value_from_json(body: Mapping[str, Any]) -> PlannedValue[Any]:
    return PlannedValue(body["value"], Origin(body["from"]), body["why"])


def _gpu_to_json(gpu: PlannedGpu) -> dict[str, Any]:
    product = {"product": gpu.product} if gpu.product else {}
    return {**product, "visibleMiB": gpu.visibleMiB, "count": gpu.count, "from": gpu.memory_source.value}


def _gpu_from_json(body: Mapping[str, Any]) -> PlannedGpu:
    return PlannedGpu(body.get("product", ""), body["visibleMiB"], body["count"], MemorySource(body["from"]))
