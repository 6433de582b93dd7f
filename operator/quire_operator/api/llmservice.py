# SPDX-License-Identifier: Apache-2.0
"""The classes of an LLMService, which are frozen dataclasses.

They are created from a document that crd.py has validated.

The fields have the same names as in the custom resource. These types are the source of the CRD: `make generated` writes
crds/llmservices.yaml from them. Values that are only copied into Kubernetes objects stay dictionaries. Called by the
controller, render, plan and the commands.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from enum import StrEnum
from itertools import count
from typing import Any, ClassVar, Self

from quire_operator.api.adapter_source_spec import AdapterSourceSpec
from quire_operator.api.disaggregation_spec import MAX_GROUP_NAME_LENGTH, MAX_NAME_LENGTH, DisaggregationSpec, Role
from quire_operator.api.engine_spec import EngineSpec, KVTransferSpec, LoraSpec, RoleEngineSpec, SecondaryTierSpec
from quire_operator.api.networking_spec import (
    KV_EVENT_PORTS_RULE,
    KV_TRANSFER_PORT_RULE,
    RANK_PORTS_RULE,
    NetworkingSpec,
)
from quire_operator.api.openai_spec import OpenAISpec
from quire_operator.api.pod_spec import (
    CacheSpec,
    ContainerResources,
    GpuSpec,
    JobsSpec,
    PodTemplateSpec,
    RuntimeSpec,
    SecuritySpec,
)
from quire_operator.api.validation_errors import FieldPath
from quire_operator.api.workload_spec import AutoscalingSpec, DisruptionSpec, ObservabilitySpec, RolloutSpec
from quire_spec import constants
from quire_spec.dataclass_json import from_json
from quire_spec.documents.adapter_catalog import (
    MAX_ADAPTER_SOURCES,
    MAX_SUMS,
    AdapterCatalog,
    AdapterSource,
    AdapterSpec,
    AdapterSum,
)
from quire_spec.documents.field_schema import ANNOTATIONS, LABELS, Restarts, Rule, schema_field
from quire_spec.documents.sources import HuggingFaceSource, Source
from quire_spec.documents.trust import TrustConfig, TrustPolicy

QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label of an LLMService or another object for the queue of Kueue that admits its pods."""
MODEL_SOURCE: FieldPath = ("spec", "model", "source")
KV_FOLDER: FieldPath = ("spec", "engine", "kvCacheOffloading", "secondary", 0, "folder")
DRAFT_SOURCE: FieldPath = ("spec", "engine", "speculativeConfig", "model", "source")
SERVICE_RULES = (
    Rule(
        "size(self.metadata.name) <= 48",
        "metadata.name must be at most 48 characters, because the operator adds a suffix for other objects and their "
        "names are limited to 63; choose a shorter name.",
    ),
    Rule(
        f"!has(self.spec.disaggregation) || size(self.metadata.name) <= {MAX_NAME_LENGTH}",
        f"metadata.name must be at most {MAX_NAME_LENGTH} characters with spec.disaggregation, because the controller "
        "of the pods adds a revision and the role to their names; choose a shorter name, and set spec.model.servedName "
        "to the name that clients use.",
    ),
    Rule(
        "!has(self.spec.disaggregation) || !has(self.spec.engine.pipelineParallelSize) || "
        f"self.spec.engine.pipelineParallelSize == 1 || size(self.metadata.name) <= {MAX_GROUP_NAME_LENGTH}",
        f"metadata.name must be at most {MAX_GROUP_NAME_LENGTH} characters with spec.disaggregation and "
        "spec.engine.pipelineParallelSize above 1, because the controllers of the pods add a revision, the role and "
        "the group to their names; choose a shorter name, and set spec.model.servedName to the name that clients use.",
    ),
    Rule(
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name must begin with a letter and contain only a-z, 0-9 and '-', because it becomes the DNS name of "
        "a Service; rename the service, and set spec.model.servedName to the name that clients use.",
    ),
    Rule(
        "!has(self.spec.adapters) || has(self.spec.model.servedName) || self.spec.adapters.all(a, a.name != "
        "self.metadata.name)",
        "spec.adapters must not contain an adapter with the name of the service, because the base model has that name "
        "when servedName is not set; rename the adapter or set spec.model.servedName.",
    ),
)
"""Rules of an LLMService as a whole."""
_RESERVED_KEYS = Rule(
    "self.all(key, !key.startsWith('quire.dev/') && !(key in ['app.kubernetes.io/name', 'app.kubernetes.io/instance', "
    "'app.kubernetes.io/component', 'app.kubernetes.io/managed-by']))",
    "the keys app.kubernetes.io/name, instance, component and managed-by and the keys of quire.dev must not be set, "
    "because the operator finds its objects by them; use another key.",
)


def _with_rule(keywords: Mapping[str, Any], rule: Rule) -> dict[str, Any]:
    return {**keywords, "rules": (*keywords["rules"], rule)}


class Device(StrEnum):
    """The kind of device on which the model runs."""

    GPU = "GPU"
    CPU = "CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """spec.model"""

    source: Source = schema_field()
    """Location of the files: set exactly one field. Weights must be in safetensors format. Code in a model repository
    is never executed."""
    servedName: str | None = schema_field(
        None, min_length=1, max_length=63, pattern="^[A-Za-z0-9]([-A-Za-z0-9._]*[A-Za-z0-9])?$"
    )
    """Model name that clients use. Default: metadata.name. Unlike metadata.name, it can contain capitals, dots and
    underscores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LLMServiceSpec:
    """The field `spec` of an LLMService. The CRD's defaults have been added to it."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "self.device != 'CPU' || !has(self.gpu)",
            "gpu must not be set when device is CPU; remove spec.gpu, or set spec.device to GPU.",
        ),
        Rule(
            "self.device != 'CPU' || !has(self.engine.gpuMemoryUtilization)",
            "engine.gpuMemoryUtilization must not be set when device is CPU, because it is a fraction of GPU memory; "
            "remove it, and set engine.kvCacheMemory to limit memory.",
        ),
        Rule(
            "!has(self.engine.tensorParallelSize) || !has(self.gpu) || !has(self.gpu.count) || "
            "self.engine.tensorParallelSize <= self.gpu.count",
            "engine.tensorParallelSize must not exceed gpu.count, because the layers of a replica are divided among "
            "its own GPUs; raise spec.gpu.count or lower spec.engine.tensorParallelSize.",
        ),
        Rule(
            "!has(self.engine.dataParallelSize) || !has(self.gpu) || !has(self.gpu.count) || "
            "self.engine.dataParallelSize * (has(self.engine.tensorParallelSize) ? self.engine.tensorParallelSize : 1) "
            "<= self.gpu.count",
            "engine.dataParallelSize must not exceed gpu.count, divided by engine.tensorParallelSize if that is set, "
            "because each core has its own GPUs; raise spec.gpu.count or lower spec.engine.dataParallelSize.",
        ),
        Rule(
            "!has(self.adapters) || size(self.adapters) == 0 || self.lora.maxLoaded > 0",
            "adapters must be empty when lora.maxLoaded is 0, because there are no adapter slots; set "
            "spec.lora.maxLoaded to the number of adapters that are used at the same time.",
        ),
        Rule(
            "!has(self.adapterSources) || size(self.adapterSources) == 0 || self.lora.maxLoaded > 0",
            "adapterSources must be empty when lora.maxLoaded is 0, because there are no adapter slots; set "
            "spec.lora.maxLoaded to the number of adapters that are used at the same time.",
        ),
        Rule(
            "!has(self.adapters) || self.adapters.filter(a, a.pinned).size() <= self.lora.maxLoaded",
            "adapters must not have more pinned entries than lora.maxLoaded, because each pinned adapter occupies a "
            "slot permanently; raise spec.lora.maxLoaded or unpin adapters.",
        ),
        Rule(
            "!has(self.adapters) || !has(self.model.servedName) || self.adapters.all(a, a.name != "
            "self.model.servedName)",
            "adapters must not contain a name that equals model.servedName, because both are model names on one "
            "server; rename the adapter or the base model.",
        ),
        Rule(
            "!has(self.adapters) || !has(self.openai.servedModelNames) || self.adapters.all(a, !(a.name in "
            "self.openai.servedModelNames))",
            "adapters must not contain a name of openai.servedModelNames, because both are model names in the OpenAI "
            "API; rename the adapter or remove the name.",
        ),
        Rule(
            "!has(self.cache.mode) || (self.cache.mode == 'None') == ((has(self.model.source.pvc) || "
            "has(self.model.source.image) || has(self.model.source.path)) && (!has(self.engine.speculativeConfig) || "
            "!has(self.engine.speculativeConfig.model) || has(self.engine.speculativeConfig.model.source.pvc) || "
            "has(self.engine.speculativeConfig.model.source.image) || "
            "has(self.engine.speculativeConfig.model.source.path)))",
            "cache.mode must be None if the sources of the model and of engine.speculativeConfig.model are of kind "
            "pvc, image or path, and must not be None for other sources, because files on a volume are read in place "
            "and all other files are downloaded; remove spec.cache.mode to use the default.",
        ),
        Rule(
            "!has(self.networking.inferencePool) || self.networking.inferencePool.targetPort != 'openai' || "
            "self.openai.enabled",
            "networking.inferencePool.targetPort must not be openai when openai.enabled is false, because the pods do "
            "not have that port; use http, or set spec.openai.enabled to true.",
        ),
        Rule(
            "self.openai.enabled || size(self.runtime.expose) > 0",
            "runtime.expose must not be empty when openai.enabled is false, because no client could send a request; "
            "add http or grpc, or set spec.openai.enabled to true.",
        ),
        Rule(
            "!has(self.networking.inferencePool) || self.networking.inferencePool.targetPort != 'http' || 'http' in "
            "self.runtime.expose",
            "networking.inferencePool.targetPort must not be http when runtime.expose does not contain http, because "
            "that port is on loopback; use openai, or add http to spec.runtime.expose.",
        ),
        Rule(
            "!has(self.networking.httpRoute) || has(self.networking.inferencePool) || "
            "(self.networking.httpRoute.port == 'openai' ? self.openai.enabled : 'http' in self.runtime.expose)",
            "networking.httpRoute.port must be a port that the pods serve; set spec.openai.enabled to true for openai, "
            "or add http to spec.runtime.expose for http.",
        ),
        Rule(
            "!has(self.openai.keys) || size(self.openai.keys) == 0 || size(self.runtime.expose) == 0",
            "runtime.expose must be empty with openai.keys, because the ports of Triton Inference Server know no API "
            "keys, so that their clients could use every adapter; set spec.runtime.expose to [].",
        ),
        Rule(
            "!has(self.disaggregation) || self.replicas == 1",
            "replicas must not be set beside disaggregation, because each role has its own number of pods; remove "
            "spec.replicas, and set replicas of spec.disaggregation.prefill and spec.disaggregation.decode.",
        ),
        Rule(
            "!has(self.disaggregation) || !has(self.autoscaling)",
            "autoscaling must not be set beside disaggregation, because one number of pods does not describe two "
            "roles; remove spec.autoscaling, and set replicas of spec.disaggregation.prefill and "
            "spec.disaggregation.decode.",
        ),
        Rule(
            "!has(self.disaggregation) || !has(self.engine.kvTransfer) || self.engine.kvTransfer.enabled",
            "engine.kvTransfer.enabled must not be false beside disaggregation, because decode pods read the KV blocks "
            "of prefill pods; remove it, or set it to true.",
        ),
        Rule(
            "!has(self.disaggregation) || has(self.engine.kvCacheOffloading) || "
            "has(self.disaggregation.prefill.engine.kvCacheOffloading)",
            "disaggregation.prefill.engine.kvCacheOffloading must be set, because a prefill pod sends KV blocks from "
            "its memory; set engine.kvCacheOffloading.memory in spec.disaggregation.prefill, or spec.engine for both "
            "roles.",
        ),
        Rule(
            "!has(self.disaggregation) || has(self.engine.kvCacheOffloading) || "
            "has(self.disaggregation.decode.engine.kvCacheOffloading)",
            "disaggregation.decode.engine.kvCacheOffloading must be set, because a decode pod receives KV blocks in "
            "its memory; set engine.kvCacheOffloading.memory in spec.disaggregation.decode, or spec.engine for both "
            "roles.",
        ),
        Rule(
            "self.device != 'CPU' || !has(self.disaggregation) || (!has(self.disaggregation.prefill.resources.gpu) && "
            "!has(self.disaggregation.decode.resources.gpu))",
            "disaggregation must not contain resources.gpu when device is CPU; remove it, or set spec.device to GPU.",
        ),
        Rule(
            KV_EVENT_PORTS_RULE,
            "networking.kvEvents must use ports that differ from all other ports of the pod and are at most 65535; "
            "with engine.dataParallelSize, each core uses one more of both; choose other numbers.",
        ),
        Rule(
            KV_TRANSFER_PORT_RULE,
            "engine.kvTransfer.port must differ from all other ports of the pod, because one container listens on all "
            "of them; use another number.",
        ),
        Rule(
            RANK_PORTS_RULE,
            f"engine.pipelineParallelSize must be 1 if a port is {constants.RANK_PORT} or {constants.RANK_PORT + 1}, "
            "because the pods of a group use these ports; choose other numbers for the ports.",
        ),
        Rule(
            "!has(self.openai.port) || (self.openai.port != self.runtime.ports.http && self.openai.port != "
            "self.runtime.ports.grpc && self.openai.port != self.runtime.ports.metrics && self.openai.port != "
            "self.runtime.ports.health)",
            "openai.port must differ from every port of runtime.ports, because one container listens on all of them; "
            "use another number, or remove spec.openai.port.",
        ),
    )

    device: Device = schema_field(Device.GPU)
    """Device that the model runs on. Default GPU. There is no automatic fallback to the CPU: a service that silently
    moved to the CPU would be Ready but about 100 times slower. Use CPU for small models, tests and laptops."""
    model: ModelSpec = schema_field()
    """The base model."""
    adapters: tuple[AdapterSpec, ...] = schema_field(
        (),
        max_items=1024,
        list_type="map",
        map_keys=("name",),
        restarts=Restarts.NO,
        without=("candidate", "previous"),
    )
    """LoRA adapters of the model. Adding, changing or removing an adapter does not restart pods. The exception is the
    first and the last adapter on a PersistentVolumeClaim, because pods mount claims when they start. The limit is 1024
    adapters, because `kubectl apply` cannot store more in one object."""
    adapterSources: tuple[AdapterSourceSpec, ...] = schema_field(
        (), max_items=MAX_ADAPTER_SOURCES, list_type="atomic", restarts=Restarts.NO
    )
    """Places with one folder or repository for each adapter. If a request names an adapter that is not in
    spec.adapters, the pod looks for the name here, in this order, loads the adapter and then runs the request. Such
    adapters have no server model: on the ports of Triton Inference Server, clients select them with the parameter
    lora_name of the base model. Ready does not wait for them. Default: none."""
    adapterSums: tuple[AdapterSum, ...] = schema_field(
        (), max_items=MAX_SUMS, list_type="map", map_keys=("name",), restarts=Restarts.NO
    )
    """Names for weighted sums of adapters. Clients use them like the names of adapters: as the parameter lora_name of
    the base model, and as model of the OpenAI API. A request can also contain the sum itself, such as a:0.7,b:0.3.
    Default: none."""
    lora: LoraSpec = schema_field(factory=LoraSpec)
    """Memory for adapters. The engine reserves it at its start, so a change of these fields restarts pods, except
    onNoEffect. A change of the adapters does not."""
    engine: EngineSpec = schema_field(factory=EngineSpec)
    """Settings of the engine. Every field is optional. The planner chooses omitted fields from the model and the GPU.
    """
    openai: OpenAISpec = schema_field(factory=OpenAISpec)
    """The OpenAI API of the pods."""
    trust: TrustConfig | None = schema_field(None)
    """Signatures that pods verify before they use a model or an adapter. Default: none."""
    gpu: GpuSpec | None = schema_field(None)
    """GPUs of a replica. Default: one GPU of the product that the cluster's nodes have."""
    replicas: int = schema_field(1, minimum=0, maximum=1000, restarts=Restarts.NO)
    """Number of pods, each with its own GPUs; with engine.pipelineParallelSize above 1, number of groups of pods.
    Autoscalers write this field through the scale subresource. With 0, no pod runs, and the cache is kept. Default 1.
    """
    autoscaling: AutoscalingSpec | None = schema_field(None, restarts=Restarts.NO)
    """Autoscaler that sets spec.replicas from the number of requests. Default: none. Your own autoscaler can set
    spec.replicas through the scale subresource."""
    disaggregation: DisaggregationSpec | None = schema_field(None)
    """Pods of two roles: some compute prompts, and the others generate tokens, so that long prompts do not delay the
    tokens of other requests. The operator creates a DisaggregatedSet instead of a Deployment. Pods of both roles have
    spec.engine.kvTransfer, with its defaults if it is not set. Default: every pod does both."""
    cache: CacheSpec = schema_field(factory=CacheSpec)
    """Cache for downloaded models. A restarted pod does not download them again."""
    runtime: RuntimeSpec = schema_field(factory=RuntimeSpec)
    """The server container."""
    rollout: RolloutSpec = schema_field(
        factory=RolloutSpec, crd_default={"maxSurge": 0, "maxUnavailable": 1}, restarts=Restarts.NO
    )
    """How pods are replaced."""
    disruption: DisruptionSpec = schema_field(factory=DisruptionSpec, restarts=Restarts.NO)
    """Protection against evictions, for example when nodes are drained."""
    observability: ObservabilitySpec = schema_field(factory=ObservabilitySpec, restarts=Restarts.NO)
    """Discovery of metrics."""
    networking: NetworkingSpec = schema_field(factory=NetworkingSpec, restarts=Restarts.NO)
    """Access to the pods over the network."""
    security: SecuritySpec = schema_field(factory=SecuritySpec)
    """Security context of the pods. They always run without root, capabilities and privilege escalation."""
    podTemplate: dict[str, Any] = schema_field(factory=dict, type=PodTemplateSpec)
    """Overrides for the pods, merged last like `kubectl patch --type=strategic`. Use it for settings without a field of
    their own, such as affinity, priority or sidecars. The environment variables and the ConfigMap and Secret mounts of
    the container `server` also apply to the container that downloads the model. Default: none."""
    jobs: JobsSpec = schema_field(factory=JobsSpec, restarts=Restarts.NO)
    """The Jobs that download the model, or that read its config.json from a claim. They also use the labels,
    annotations, DNS settings, host aliases and placement of podTemplate. A Job that has finished does not run again."""
    labels: dict[str, str] = schema_field(factory=dict, **_with_rule(LABELS, _RESERVED_KEYS), restarts=Restarts.LATER)
    """Labels of all objects that the operator creates for the service, and of their pods. Keys of the operator are not
    allowed. podTemplate.metadata.labels takes precedence. The labels of the LLMService itself are not copied, because
    tools such as Argo CD would take the objects for their own. Default: none."""
    annotations: dict[str, str] = schema_field(
        factory=dict, **_with_rule(ANNOTATIONS, _RESERVED_KEYS), restarts=Restarts.LATER
    )
    """The same for annotations. Default: none."""
    paused: bool = schema_field(False, restarts=Restarts.NO)
    """Pause reconciliation. The operator does not change or repair the objects of the service; it only writes the
    status. Default false."""


@dataclass(frozen=True, slots=True)
class LLMService:
    """The name and the spec of an LLMService."""

    name: str
    spec: LLMServiceSpec
    namespace: str | None = None
    generation: int = 0
    """metadata.generation. It is 0 for a document that was read from a file."""
    queue: str = ""
    """Queue of Kueue in the labels of the LLMService. Empty if there is none."""
    default_pod_template: Mapping[str, Any] = field(default_factory=dict)
    """podTemplate in the operator's defaults. It is merged before the one of the spec."""
    defaulted_fields: tuple[str, ...] = ()
    """Paths below spec of the fields whose value comes from the operator's defaults."""
    role: Role | None = None
    """The role of the pods that this value describes, see `for_role`. None: the service as a whole."""

    @classmethod
    def from_body(cls, body: Mapping[str, Any]) -> Self:
        """Convert the body of a valid LLMService to which `crd.validate` has added defaults."""
        meta = body["metadata"]
        return cls(
            meta["name"],
            from_json(LLMServiceSpec, body["spec"], "spec"),
            meta.get("namespace"),
            meta.get("generation", 0),
            queue_of(body),
        )

    @property
    def served_name(self) -> str:
        """The name by which clients request the base model."""
        return self.spec.model.servedName or self.name

    @property
    def roles(self) -> tuple[Role, ...]:
        """The roles of the pods. Empty if every pod does everything."""
        return () if self.spec.disaggregation is None else tuple(Role)

    def for_role(self, role: Role) -> Self:
        """Return the service as the pods of a role see it: with the settings of the role in place of the common
        ones."""
        assert self.spec.disaggregation is not None, "the service has roles"
        own, spec = self.spec.disaggregation.role(role), self.spec
        container = _set_fields(own.resources, ContainerResources)
        engine = replace(spec.engine, kvTransfer=self.kv_transfer, **_set_fields(own.engine, RoleEngineSpec))
        spec = replace(
            spec,
            engine=engine,
            gpu=own.resources.gpu or spec.gpu,
            runtime=replace(spec.runtime, **container),
            replicas=own.replicas,
        )
        return replace(self, role=role, spec=spec)

    @property
    def pods(self) -> tuple[Self, ...]:
        """The service as each kind of its pods sees it: one for each role, or the service itself."""
        return tuple(map(self.for_role, self.roles)) or (self,)

    @property
    def num_replicas(self) -> int:
        """Number of replicas of all roles."""
        return sum(pods.spec.replicas for pods in self.pods)

    @property
    def pods_of_clients(self) -> Self:
        """The service as those pods see it to which clients send requests."""
        return self.for_role(Role.DECODE) if self.roles else self

    @property
    def pod_templates(self) -> tuple[Mapping[str, Any], ...]:
        """The overrides for the pods, in the order in which they are merged."""
        return tuple(template for template in (self.default_pod_template, self.spec.podTemplate) if template)

    @property
    def pod_overrides(self) -> list[Mapping[str, Any]]:
        """The field `spec` of each of `pod_templates`."""
        return [template["spec"] for template in self.pod_templates if "spec" in template]

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
    def kv_event_ports(self) -> dict[str, int]:
        """The ports on which subscribers of KV events connect to a pod, by port name. No Service has them."""
        events, num_cores = self.spec.networking.kvEvents, self.spec.engine.dataParallelSize or 1
        if events is None:
            return {}
        first_ports = {"kv-events": events.port, "kv-replay": events.replayPort or events.port + num_cores}
        return {
            name if i == 0 else f"{name}-{i}": port + i for name, port in first_ports.items() for i in range(num_cores)
        }

    @property
    def num_nodes(self) -> int:
        """Number of pods of a replica, each on a node of its own. If it is 1, a replica is a pod of a Deployment."""
        return self.spec.engine.pipelineParallelSize or 1

    @property
    def streams_weights(self) -> bool:
        """Whether the weights of an s3 source stay in the bucket if pods would download them. A signature can only be
        verified on the disk."""
        trust = self.spec.trust
        return self.spec.engine.loadFormat == "runai_streamer" and (trust is None or trust.model is TrustPolicy.IGNORE)

    @property
    def kv_tier(self) -> SecondaryTierSpec | None:
        """The folder that keeps KV blocks in files, and its size; None: there is none."""
        offloading = self.spec.engine.kvCacheOffloading
        return offloading.secondary[0] if offloading is not None and offloading.secondary else None

    @property
    def kv_transfer(self) -> KVTransferSpec | None:
        """How pods read KV blocks from each other; None: they do not."""
        transfer = self.spec.engine.kvTransfer
        if transfer is None and self.spec.disaggregation is not None:
            return KVTransferSpec()
        return transfer if transfer is not None and transfer.enabled else None

    @property
    def pod_ports(self) -> dict[str, int]:
        """All ports on which a pod accepts connections, also those that no Service has, by port name."""
        transfer = self.kv_transfer
        return self.ports | self.kv_event_ports | ({} if transfer is None else {"kv-transfer": transfer.port})

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
        adapters = map(self._with_tokens, self.spec.adapters)
        sources = tuple(map(self._to_source, self.spec.adapterSources))
        return AdapterCatalog(
            self.generation, tuple(adapters), self.spec.lora.onNoEffect, sources, self.spec.adapterSums
        )

    @property
    def adapter_places(self) -> dict[FieldPath, Source]:
        """The sources of the adapters, and the places in which others are found, by the field path of each."""
        places: dict[FieldPath, Source] = {}
        for i, adapter in enumerate(self.spec.adapters):
            if not adapter.versions:
                places["spec", "adapters", i, "source"] = adapter.source
            for j, version in enumerate(adapter.versions or ()):
                places["spec", "adapters", i, "versions", j, "source"] = version.source
        places |= {("spec", "adapterSources", i): prefix.source for i, prefix in enumerate(self.spec.adapterSources)}
        return places

    def _with_tokens(self, adapter: AdapterSpec) -> AdapterSpec:
        versions = tuple(replace(v, source=self._with_model_token(v.source)) for v in adapter.versions or ()) or None
        return replace(adapter, source=self._with_model_token(adapter.source), versions=versions).with_source()

    def _to_source(self, prefix: AdapterSourceSpec) -> AdapterSource:
        source, model_hub = prefix.to_source(), self.spec.model.source.huggingFace
        if source.huggingFace is None or source.huggingFace.tokenSecretRef is not None or model_hub is None:
            return source
        return replace(source, huggingFace=replace(source.huggingFace, tokenSecretRef=model_hub.tokenSecretRef))

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


def _set_fields(value: Any, cls: type) -> dict[str, Any]:
    """Return the fields of a dataclass that `value`, an instance of it or of a subclass, sets."""
    values = {each.name: getattr(value, each.name) for each in fields(cls)}
    return {name: value for name, value in values.items() if value is not None}


def queue_of(body: Mapping[str, Any]) -> str:
    """Return the queue of Kueue in the labels of an object; "" if there is none."""
    labels: Mapping[str, str] = body["metadata"].get("labels") or {}
    return labels.get(QUEUE_LABEL, "")
