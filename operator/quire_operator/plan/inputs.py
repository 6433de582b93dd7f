# SPDX-License-Identifier: Apache-2.0
"""Inputs of the planner, and their hash. A stored plan is valid while the hash of its inputs is the same.

The hash includes only values that a user or the cluster sets. It does not include values that a release of Quire sets,
because an upgrade of the operator must not restart pods. It also does not include fields that are not set. Therefore, a
new optional field does not change existing hashes.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from quire_operator.api.disaggregation_spec import Role
from quire_operator.api.engine_spec import EngineSpec, LoraSpec
from quire_operator.api.field_effects import PLANNED_ENGINE_FIELDS
from quire_operator.api.llmservice import Device, LLMService
from quire_operator.api.quantity import to_bytes
from quire_operator.plan.checkpoint import CheckpointInfo
from quire_operator.plan.draft_info import DraftInfo
from quire_operator.plan.gpu import GpuInfo
from quire_spec.dataclass_json import drop_nulls, non_default_json, to_json


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """Capacity of the largest node for pods. It is not part of the hash, because nodes come and go."""

    memory: int | None = None
    """Bytes of host memory; None: unknown."""
    ephemeral_storage: int | None = None
    """Bytes of its disk; None: unknown."""


@dataclass(frozen=True, slots=True)
class PlannerInputs:
    """Everything that a plan depends on."""

    model: CheckpointInfo
    engine: EngineSpec
    lora: LoraSpec
    gpu: GpuInfo | None
    """GPU of the pods; None on a CPU."""
    max_gpus: int = 1
    """A replica can use at most this number of GPUs."""
    memory_limit: int | None = None
    """Memory limit of the container in bytes. If it is None, the planner chooses it."""
    shared_memory: int | None = None
    """Size of /dev/shm in bytes. If it is None, the planner chooses it."""
    image: str | None = None
    """Image of the pods. If it is None, the image of this release is used. An upgrade of the operator does not change a
    plan's image."""
    num_openai_fronts: int = 1
    """Number of processes that serve the OpenAI API. If it is 0, the API is turned off."""
    draft: DraftInfo | None = None
    """The draft model, the heads or the layer that spec.engine.speculativeConfig selects; None if its method uses
    none."""
    node: NodeCapacity = NodeCapacity()
    pipeline_parallel_size: int = 1
    """Number of pipeline stages. It is part of the hash only as a field of `engine`; otherwise, it is an option of a
    command."""
    num_nodes: int = 1
    """Number of nodes of a replica, each with as many stages. All sizes of a plan are those of the pod on one node."""
    prefill: "PlannerInputs | None" = None
    """Inputs for the pods that compute prompts, if the service has roles. The other fields are then those for the pods
    that generate tokens."""
    adapter_disk_bytes: int = 0
    """Maximum size of the adapters that a pod finds by name. It is not part of the hash, because running pods stay when
    a limit changes."""

    @classmethod
    def from_service(
        cls,
        service: LLMService,
        model: CheckpointInfo,
        gpu: GpuInfo | None,
        draft: DraftInfo | None = None,
        node: NodeCapacity = NodeCapacity(),
        stages_on_one_node: int | None = None,
    ) -> Self:
        """Return the inputs of a service. `gpu` is the result of `resolve_gpu`, or None for a CPU. `draft` describes
        the files of speculativeConfig.model. With `stages_on_one_node`, all pipeline stages are on one machine, and
        their number is not that of the spec."""
        spec = service.spec
        cpu = spec.device is Device.CPU
        gpu_count, num_cores = spec.gpu.count if spec.gpu else None, spec.engine.dataParallelSize or 1
        num_nodes = service.num_nodes if stages_on_one_node is None else 1
        num_ranks = (spec.engine.tensorParallelSize or 1) * (stages_on_one_node or 1) * num_cores
        limit, shm = spec.runtime.memory, spec.runtime.sharedMemory
        return cls(
            model=model,
            engine=spec.engine,
            lora=spec.lora,
            gpu=None if cpu else gpu,
            max_gpus=1 if cpu else gpu_count or num_ranks,
            memory_limit=None if limit is None else to_bytes(limit),
            shared_memory=None if shm is None else to_bytes(shm),
            image=spec.runtime.image,
            num_openai_fronts=spec.openai.apiServerCount if spec.openai.enabled else 0,
            draft=draft or DraftInfo.from_model(spec.engine.speculativeConfig, model),
            node=node,
            pipeline_parallel_size=stages_on_one_node or num_nodes,
            num_nodes=num_nodes,
            adapter_disk_bytes=sum(prefix.max_bytes for prefix in spec.adapterSources),
        )

    @classmethod
    def of_all_pods(cls, service: LLMService, of_pods: Callable[[LLMService], Self]) -> Self:
        """Return the inputs of a service that may have roles. `of_pods` returns the inputs of pods that are alike, for
        the service as they see it."""
        inputs = of_pods(service.pods_of_clients)
        return replace(inputs, prefill=of_pods(service.for_role(Role.PREFILL))) if service.roles else inputs

    @property
    def num_cores(self) -> int:
        """Number of cores of a replica. Each has its own GPUs and its own copy of everything on a device."""
        return self.engine.dataParallelSize or 1

    def num_ranks(self, tp: int) -> int:
        """Return the number of ranks of a pod if its stages have `tp` ranks each. Each rank has its own GPU, or on a
        CPU, its own process."""
        return tp * self.pipeline_parallel_size // self.num_nodes * self.num_cores

    @property
    def inputs_hash(self) -> str:
        """Hash (sha256:...) of the fields that are set. The field inputsHash of status.plan contains it."""
        text = json.dumps(drop_nulls(self._hashed_fields()), sort_keys=True, separators=(",", ":"))
        return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"

    @property
    def transfers_kv(self) -> bool:
        """Whether pods read KV blocks from each other."""
        return self.engine.kvTransfer is not None and self.engine.kvTransfer.enabled

    def _hashed_fields(self) -> dict[str, Any]:
        engine, gpu = self.engine, self.gpu
        return {
            "config": self.model.config_digest,
            "weightsBytes": self.model.weights_bytes,
            "gpu": gpu and {"product": gpu.product or None, "memoryMiB": gpu.memory_mib, "max": self.max_gpus},
            "memoryLimit": self.memory_limit,
            "sharedMemory": self.shared_memory,
            "image": self.image,
            "draft": self.draft
            and {
                "method": self.draft.method,
                "config": self.draft.config_digest,
                "weightsBytes": self.draft.file_bytes,
            },
            # The default is omitted, for the same reason as below.
            "prefill": self.prefill and self.prefill.inputs_hash,
            "openai": None if self.num_openai_fronts == 1 else self.num_openai_fronts,
            "lora": to_json(self.lora) if self.lora.maxLoaded else {"maxLoaded": 0},
            "engine": {
                **{name: getattr(engine, name) for name in PLANNED_ENGINE_FIELDS},
                "pipelineParallelSize": None if self.num_nodes == 1 else self.num_nodes,
                # The default is omitted. Therefore, plans that were made before this field existed keep their hash.
                "kvCacheDtype": None if engine.kvCacheDtype == "auto" else engine.kvCacheDtype,
                "mambaSsmCacheDtype": None if engine.mambaSsmCacheDtype == "auto" else engine.mambaSsmCacheDtype,
                "kvCacheOffloading": engine.kvCacheOffloading and non_default_json(engine.kvCacheOffloading),
                # Only this is a part of the plan.
                "kvTransfer": self.transfers_kv or None,
            },
        }
