# SPDX-License-Identifier: Apache-2.0
"""The classes of an LLMService, which are frozen dataclasses.

They are created from a document that crd.py has validated.

The fields have the same names as in the custom resource. crds/llmservices.yaml documents each field, and a test checks
that both have the same fields. Values that are only copied into Kubernetes objects stay dictionaries. Called by the
controller, render, plan and the commands.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from typing import Any, Self

from quire_operator.api.validation_errors import FieldPath
from quire_spec import constants
from quire_spec.dataclass_json import from_json
from quire_spec.documents.adapter_catalog import (
    AdapterCatalog,
    AdapterSpec,
    HuggingFaceSource,
    PvcSource,
    SecretRef,
    Source,
)
from quire_spec.documents.pod_config import OpenAIOptions, Ports

MODEL_SOURCE: FieldPath = ("spec", "model", "source")
DRAFT_SOURCE: FieldPath = ("spec", "engine", "speculativeConfig", "model", "source")


class Device(StrEnum):
    """The kind of device on which the model runs."""

    GPU = "GPU"
    CPU = "CPU"


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """spec.model"""

    source: Source
    servedName: str | None = None


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """spec.lora"""

    maxLoaded: int
    maxRank: int
    maxCached: int | None = None
    maxCachedMemory: str | None = None


@dataclass(frozen=True, slots=True)
class SpeculativeModelSpec:
    """spec.engine.speculativeConfig.model"""

    source: Source


@dataclass(frozen=True, slots=True)
class SpeculativeConfigSpec:
    """spec.engine.speculativeConfig"""

    method: str
    numSpeculativeTokens: int
    model: SpeculativeModelSpec | None = None
    promptLookupMin: int | None = None
    promptLookupMax: int | None = None
    suffixDecodingMaxTreeDepth: int | None = None
    suffixDecodingMaxCachedRequests: int | None = None
    suffixDecodingMaxSpecFactor: str | None = None
    suffixDecodingMinTokenProb: str | None = None


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """spec.engine. If a field is None, the planner chooses its value."""

    prefixCaching: bool
    minConcurrency: int
    maxModelLen: int | None = None
    gpuMemoryUtilization: str | None = None
    kvCacheMemory: str | None = None
    kvCacheDtype: str | None = None
    blockSize: int | None = None
    tensorParallelSize: int | None = None
    dtype: str | None = None
    quantization: str | None = None
    speculativeConfig: SpeculativeConfigSpec | None = None
    maxNumSeqs: int | None = None
    maxNumBatchedTokens: int | None = None
    maxNumQueuedReqs: int | None = None
    maxLogprobs: int | None = None
    skipTokenizerInit: bool | None = None
    schedulingPolicy: str | None = None
    swapSpace: str | None = None


@dataclass(frozen=True, slots=True)
class OpenAILimitsSpec:
    """spec.openai.limits"""

    maxBodySize: str | None = None


@dataclass(frozen=True, slots=True)
class ConfigMapKeyRef:
    """spec.openai.chatTemplate.configMapKeyRef"""

    name: str
    key: str


@dataclass(frozen=True, slots=True)
class ChatTemplateSpec:
    """spec.openai.chatTemplate. Exactly one of the fields is set."""

    text: str | None = None
    configMapKeyRef: ConfigMapKeyRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAISpec(OpenAIOptions):
    """spec.openai"""

    enabled: bool
    toolCallParser: str
    reasoningParser: str
    limits: OpenAILimitsSpec
    port: int | None = None
    apiKeysSecretRef: SecretRef | None = None
    tlsSecretRef: SecretRef | None = None
    chatTemplate: ChatTemplateSpec | None = None


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """spec.gpu"""

    resourceName: str
    product: str | None = None
    memory: str | None = None
    count: int | None = None
    nodeSelector: dict[str, str] = field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()
    runtimeClassName: str | None = None


@dataclass(frozen=True, slots=True)
class AutoscalingSpec:
    """spec.autoscaling"""

    kind: str
    minReplicas: int
    maxReplicas: int
    scaleDownSeconds: int
    requestsPerReplica: int | None = None
    prometheusAddress: str | None = None


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """spec.cache"""

    deletionPolicy: str
    mode: str | None = None
    size: str | None = None
    storageClassName: str | None = None
    accessModes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EnvVar:
    """An entry of spec.runtime.env."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class ModelsSpec:
    """spec.runtime.models. Exactly one of the fields is set."""

    pvc: PvcSource | None = None
    path: str | None = None

    @property
    def source(self) -> Source:
        """The source of the folder that contains other Triton models."""
        return Source(pvc=self.pvc, path=self.path)


@dataclass(frozen=True, slots=True)
class RuntimeSpec:
    """spec.runtime"""

    ports: Ports
    expose: tuple[str, ...]
    image: str | None = None
    imagePullSecrets: tuple[dict[str, str], ...] = ()
    env: tuple[EnvVar, ...] = ()
    models: ModelsSpec | None = None
    serverArgs: tuple[str, ...] = ()
    cpu: str | None = None
    memory: str | None = None
    sharedMemory: str | None = None


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """spec.rollout"""

    maxSurge: int
    maxUnavailable: int
    minReadySeconds: int
    drainSeconds: int
    updatePolicy: str
    progressDeadlineSeconds: int | None = None


@dataclass(frozen=True, slots=True)
class DisruptionSpec:
    """spec.disruption"""

    pdb: str


@dataclass(frozen=True, slots=True)
class ObservabilitySpec:
    """spec.observability"""

    podMonitor: str
    metricsLabels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NetworkPolicySpec:
    """spec.networking.networkPolicy"""

    enabled: bool
    ingressFrom: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True)
class EndpointPickerSpec:
    """spec.networking.inferencePool.endpointPicker"""

    name: str
    port: int
    failureMode: str


@dataclass(frozen=True, slots=True)
class InferencePoolSpec:
    """spec.networking.inferencePool"""

    endpointPicker: EndpointPickerSpec
    targetPort: str


@dataclass(frozen=True, slots=True)
class NetworkingSpec:
    """spec.networking"""

    networkPolicy: NetworkPolicySpec
    inferencePool: InferencePoolSpec | None = None


@dataclass(frozen=True, slots=True)
class SecuritySpec:
    """spec.security"""

    runAsUser: int
    fsGroup: int
    readOnlyRootFilesystem: bool


@dataclass(frozen=True, slots=True)
class LLMServiceSpec:
    """The field `spec` of an LLMService. The CRD's defaults have been added to it."""

    device: Device
    model: ModelSpec
    lora: LoraSpec
    engine: EngineSpec
    openai: OpenAISpec
    replicas: int
    cache: CacheSpec
    runtime: RuntimeSpec
    rollout: RolloutSpec
    disruption: DisruptionSpec
    observability: ObservabilitySpec
    networking: NetworkingSpec
    security: SecuritySpec
    paused: bool
    adapters: tuple[AdapterSpec, ...] = ()
    gpu: GpuSpec | None = None
    autoscaling: AutoscalingSpec | None = None
    podTemplate: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LLMService:
    """The name and the spec of an LLMService."""

    name: str
    spec: LLMServiceSpec
    namespace: str | None = None
    generation: int = 0
    """metadata.generation. It is 0 for a document that was read from a file."""

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Convert the body of a valid LLMService to which `crd.validate` has added defaults."""
        meta = body["metadata"]
        return cls(
            meta["name"],
            from_json(LLMServiceSpec, body["spec"], "spec"),
            meta.get("namespace"),
            meta.get("generation", 0),
        )

    @property
    def served_name(self) -> str:
        """The name by which clients request the base model."""
        return self.spec.model.servedName or self.name

    @property
    def openai_port(self) -> int | None:
        """Port of the OpenAI API; None if the API is turned off."""
        openai, used = self.spec.openai, self.spec.runtime.ports.by_name.values()
        if not openai.enabled:
            return None
        # The default depends on the other ports. A service that already used 8004 for another port before this field
        # existed therefore stays valid.
        return openai.port or next(port for port in count(constants.OPENAI_PORT) if port not in used)

    @property
    def ports(self) -> dict[str, int]:
        """The number of each port on which a pod accepts connections from other pods, by port name."""
        openai_port, runtime = self.openai_port, self.spec.runtime
        hidden = set(constants.SERVER_PROTOCOLS) - set(runtime.expose)
        ports = {name: port for name, port in runtime.ports.by_name.items() if name not in hidden}
        return ports | ({} if openai_port is None else {"openai": openai_port})

    @property
    def grpc_uses_tls(self) -> bool:
        """Whether clients must use TLS on the gRPC port."""
        return "grpc-use-ssl=true" in self.spec.runtime.serverArgs

    def without_openai(self) -> Self:
        """Return the service with the OpenAI API turned off."""
        return replace(self, spec=replace(self.spec, openai=replace(self.spec.openai, enabled=False)))

    def build_catalog(self) -> AdapterCatalog:
        """Return the adapter catalog for pods. If an adapter from the hub has no tokenSecretRef, it gets the
        tokenSecretRef of the model.
        """
        adapters = (replace(adapter, source=self._with_model_token(adapter.source)) for adapter in self.spec.adapters)
        return AdapterCatalog(self.generation, tuple(adapters))

    @property
    def draft_source(self) -> Source | None:
        """Source of the draft model, or of the model's draft heads. If the source is on the hub and has no token, it
        gets the token of the model.
        """
        speculative = self.spec.engine.speculativeConfig
        if speculative is None or speculative.model is None:
            return None
        return self._with_model_token(speculative.model.source)

    @property
    def model_sources(self) -> dict[FieldPath, Source]:
        """The sources of all weights that pods must load before they serve, by the field path of each source."""
        draft = self.draft_source
        sources: dict[FieldPath, Source] = {MODEL_SOURCE: self.spec.model.source}
        return sources if draft is None else {**sources, DRAFT_SOURCE: draft}

    def _with_model_token(self, source: Source) -> Source:
        model_hub, hub = self.spec.model.source.huggingFace, source.huggingFace
        if model_hub is None or hub is None or hub.tokenSecretRef is not None:
            return source
        with_token: HuggingFaceSource = replace(hub, tokenSecretRef=model_hub.tokenSecretRef)
        return replace(source, huggingFace=with_token)
