# SPDX-License-Identifier: Apache-2.0
"""spec.networking of an LLMService."""

from dataclasses import dataclass
from typing import Any, ClassVar

from quire_spec.constants import OPENAI_PORT, RANK_PORT
from quire_spec.documents.field_schema import LABELS, OBJECT_NAME, Restarts, Rule, schema_field
from quire_spec.engine import kv_transfer_config
from quire_spec.engine.kv_events_config import DEFAULT_PORT

HOSTNAME = r"^([*]\.)?[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSelector:
    """namespaceSelector of a NetworkPolicyPeer."""

    matchLabels: dict[str, str] = schema_field(factory=dict, **LABELS)
    """Label names and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PodSelector:
    """podSelector of a NetworkPolicyPeer."""

    matchLabels: dict[str, str] = schema_field(factory=dict, **LABELS)
    """Label names and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IpBlock:
    """ipBlock of a NetworkPolicyPeer."""

    cidr: str = schema_field(min_length=1, max_length=64, pattern="^[0-9a-fA-F.:]+/[0-9]{1,3}$")
    """IP range in CIDR notation, such as 10.0.0.0/8."""
    except_: tuple[str, ...] = schema_field(
        (), items={"max_length": 64, "pattern": "^[0-9a-fA-F.:]+/[0-9]{1,3}$"}, max_items=32, list_type="set"
    )
    """Ranges within cidr that are excluded. Default: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPolicyPeer:
    """An entry of spec.networking.networkPolicy.ingressFrom or of spec.networking.kvEvents.subscribers. It is copied
    into the NetworkPolicy."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "has(self.ipBlock) != (has(self.namespaceSelector) || has(self.podSelector))",
            "ipBlock must not be set beside selectors, and one of them must be set, as in a NetworkPolicy; split the "
            "entry into two, or add the missing field.",
        ),
    )

    namespaceSelector: NamespaceSelector | None = schema_field(None)
    """Namespaces by label; an empty selector matches all. Default: the namespace of the service."""
    podSelector: PodSelector | None = schema_field(None)
    """Pods by label; an empty selector matches all. Default: all pods of the namespaces."""
    ipBlock: IpBlock | None = schema_field(None)
    """IP addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkPolicySpec:
    """spec.networking.networkPolicy"""

    enabled: bool = schema_field(True)
    """Create a NetworkPolicy. It allows clients to reach the HTTP, gRPC and OpenAI ports, and only the operator to
    reach the administration port. Default true."""
    ingressFrom: tuple[dict[str, Any], ...] = schema_field(
        (), type=tuple[NetworkPolicyPeer, ...], max_items=32, list_type="atomic"
    )
    """Peers that can send requests. Default: all pods in the same namespace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointPickerSpec:
    """spec.networking.inferencePool.endpointPicker"""

    name: str = schema_field(min_length=1, max_length=63, pattern="^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    """Name of a Service in the same namespace."""
    port: int = schema_field(9002, minimum=1, maximum=65535)
    """Port of the endpoint picker. Default 9002."""
    failureMode: str = schema_field("FailClose", enum=("FailClose", "FailOpen"))
    """Reaction of the gateway if the endpoint picker does not respond. FailClose rejects requests; FailOpen sends them
    to any pod. Default FailClose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferencePoolSpec:
    """spec.networking.inferencePool"""

    targetPort: str = schema_field("http", enum=("http", "openai"))
    """Port of the pods that the gateway sends requests to. Default http, the KServe protocol. Use openai for an
    endpoint picker that reads the model from the body of an OpenAI request. With openai.tlsSecretRef, configure
    TLS to the pods in the gateway, because an InferencePool has no field for it."""
    endpointPicker: EndpointPickerSpec = schema_field()
    """Service of the endpoint picker. The operator does not deploy an endpoint picker."""


_SINGLE_PORTS = ", ".join((
    *(f"self.runtime.ports.{name}" for name in ("http", "grpc", "metrics", "health")),
    f"has(self.openai.port) ? self.openai.port : {OPENAI_PORT}",
))  # fmt: skip
_KV_TRANSFER_PORTS = (
    "(has(self.engine.kvTransfer) ? [self.engine.kvTransfer.port] : "
    f"has(self.disaggregation) ? [{kv_transfer_config.DEFAULT_PORT}] : [])"
)


def _kv_event_ports_rule() -> str:
    """Return the CEL rule that no port of the KV events is beyond 65535 or used twice. `self` is the spec."""
    events, cores = "self.networking.kvEvents", "(has(self.engine.dataParallelSize) ? self.engine.dataParallelSize : 1)"
    first = f"{events}.port"
    replay = f"(has({events}.replayPort) ? {events}.replayPort : {first} + {cores})"
    return (
        f"!has({events}) || ({first} + {cores} <= 65536 && {replay} + {cores} <= 65536 && "
        f"({replay} >= {first} + {cores} || {first} >= {replay} + {cores}) && "
        f"([{_SINGLE_PORTS}] + {_KV_TRANSFER_PORTS}).all(p, (p < {first} || p >= {first} + {cores}) && "
        f"(p < {replay} || p >= {replay} + {cores})))"
    )


KV_EVENT_PORTS_RULE = _kv_event_ports_rule()
_EVENT_PORTS = "(has(self.networking.kvEvents) ? [self.networking.kvEvents.port] : [])"
RANK_PORTS_RULE = (
    "!has(self.engine.pipelineParallelSize) || self.engine.pipelineParallelSize == 1 || "
    f"([{_SINGLE_PORTS}] + {_EVENT_PORTS} + {_KV_TRANSFER_PORTS}).all(p, !(p in [{RANK_PORT}, {RANK_PORT + 1}]))"
)
KV_TRANSFER_PORT_RULE = f"{_KV_TRANSFER_PORTS}.all(port, [{_SINGLE_PORTS}].all(p, p != port))"
"""Rules of the whole spec."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsSpec:
    """spec.networking.kvEvents"""

    port: int = schema_field(DEFAULT_PORT, minimum=1024, maximum=65535, restarts=Restarts.YES)
    """Port of the pods on which they publish the events. With engine.dataParallelSize, each core uses a port of its
    own: this one and the ones after it. Default 5557, as in vLLM."""
    replayPort: int | None = schema_field(None, minimum=1024, maximum=65535, restarts=Restarts.YES)
    """The same for the port on which subscribers request events that they missed. Default: the next port after those
    of the cores, such as 5558."""
    topic: str | None = schema_field(None, max_length=255, restarts=Restarts.YES)
    """Topic of the events. The empty topic is vLLM's default, and some routers accept no other one. Default:
    kv@POD_IP@MODEL."""
    subscribers: tuple[dict[str, Any], ...] = schema_field(
        type=tuple[NetworkPolicyPeer, ...], minItems=1, max_items=32, list_type="atomic"
    )
    """The pods that can connect to these ports: those of the endpoint picker or of the router. They can read the token
    ids of all requests. Without networkPolicy.enabled, every pod of the cluster can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentRef:
    """An entry of spec.networking.httpRoute.parentRefs. It is copied into the HTTPRoute."""

    name: str = schema_field(**OBJECT_NAME)
    """Name of the Gateway."""
    namespace: str | None = schema_field(None, min_length=1, max_length=63, pattern=OBJECT_NAME["pattern"])
    """Namespace of the Gateway. Default: the namespace of the service."""
    sectionName: str | None = schema_field(None, **OBJECT_NAME)
    """Name of a listener of the Gateway. Default: all listeners that accept the route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpRouteSpec:
    """spec.networking.httpRoute"""

    parentRefs: tuple[dict[str, Any], ...] = schema_field(
        type=tuple[ParentRef, ...], minItems=1, max_items=8, list_type="atomic"
    )
    """Gateways that the route belongs to."""
    hostnames: tuple[str, ...] = schema_field(
        (), items={"min_length": 1, "max_length": 253, "pattern": HOSTNAME}, max_items=16, list_type="set"
    )
    """Host names of requests. Default: those of the listeners."""
    scheme: str = schema_field("https", enum=("https", "http"))
    """Scheme of status.address.external. Default https, because TLS usually ends at the Gateway."""
    port: str = schema_field("openai", enum=("openai", "http"))
    """Port of the Service that gets the requests. If inferencePool is set, the pool gets them. Default openai."""
    requestTimeout: str | None = schema_field(
        None, min_length=2, max_length=28, pattern="^([0-9]{1,5}(h|m|s|ms)){1,4}$"
    )
    """Time limit of a request including its stream, such as 10m; 0s turns the limit off. Default: that of the
    gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkingSpec:
    """spec.networking"""

    networkPolicy: NetworkPolicySpec = schema_field(factory=NetworkPolicySpec)
    """NetworkPolicy of the pods."""
    inferencePool: InferencePoolSpec | None = schema_field(None)
    """InferencePool of the Gateway API inference extension. A gateway then selects pods by their load and adapters.
    Default: none."""
    kvEvents: KvEventsSpec | None = schema_field(None)
    """Events about the KV blocks that each pod has cached, in vLLM's format. With them, a router sends a prompt to the
    pod that has its beginning. They contain token ids. Default: none."""
    httpRoute: HttpRouteSpec | None = schema_field(None)
    """HTTPRoute of the Gateway API, which makes the service reachable through a Gateway. Allow the gateway's pods in
    networkPolicy.ingressFrom. Default: none."""
