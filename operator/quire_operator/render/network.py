# SPDX-License-Identifier: Apache-2.0
"""Services, NetworkPolicies, PodMonitor, InferencePool and HTTPRoute of a service. Called by objects.py."""

from urllib.parse import urlsplit

from quire_operator.api.disaggregation_spec import Role
from quire_operator.api.llmservice import LLMService
from quire_operator.api.networking_spec import HttpRouteSpec
from quire_operator.render import model_storage, object_names
from quire_operator.render.context import RenderContext
from quire_operator.render.manifests import Manifest, new_manifest
from quire_spec.documents.sources import Source
from quire_spec.errors import ConfigError

_PROTOCOLS = {"http": "http", "grpc": "kubernetes.io/h2c", "metrics": "http", "health": "http"}
_DNS = [{"port": port, "protocol": protocol} for port in (53, 5353) for protocol in ("UDP", "TCP")]
"""A network plugin compares the port of the DNS pods, not that of their Service. OpenShift's pods listen on 5353."""
_EKS_POD_IDENTITY = {
    "to": [{"ipBlock": {"cidr": cidr}} for cidr in ("169.254.170.23/32", "fd00:ec2::23/128")],
    "ports": [{"port": 80, "protocol": "TCP"}],
}
"""The agent on each node that gives a pod the credentials of its ServiceAccount."""
_GCE_METADATA = {
    "to": [{"ipBlock": {"cidr": cidr}} for cidr in ("169.254.169.254/32", "169.254.169.252/32")],
    "ports": [{"port": port, "protocol": "TCP"} for port in (80, 988)],
}
"""Google's metadata server, and the one on each node that stands in for it with workload identity federation. It gives
a pod the token of its service account."""
_PROMETHEUS = {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}}}
"""A NetworkPolicy peer that matches Prometheus in any namespace. It uses the label that the Prometheus operator and the
Prometheus charts set. Prometheus can connect to the health port. The admin API uses the same port, but it requires a
key."""


def client_service(service: LLMService) -> Manifest:
    """Return the Service for clients. It does not contain the pods that only compute prompts."""
    return _service_manifest(service, service.name, {"type": "ClusterIP"}, service.pods_of_clients)


def headless_service(service: LLMService) -> Manifest:
    """Return the headless Service. It contains the addresses of all pods, even of unready pods, because the operator
    calls them too."""
    options = {"clusterIP": "None", "publishNotReadyAddresses": True}
    return _service_manifest(service, object_names.headless_service(service), options, service)


def nodes_service(service: LLMService) -> Manifest:
    """Return the headless Service with the addresses of all pods of the groups, by which pods find out which addresses
    they may read KV blocks from. Workers have no other Service, because clients must not connect to them."""
    assert service.kv_transfer is not None
    port = service.kv_transfer.port
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": object_names.group_labels(service),
        "ports": [{"name": "kv-transfer", "port": port, "protocol": "TCP", "targetPort": port}],
    }
    return new_manifest("v1", "Service", service, object_names.nodes_service(service), spec=spec)


def server_network_policy(service: LLMService, context: RenderContext) -> Manifest:
    """Return the NetworkPolicy of the server pods.

    For ingress, clients can connect to the exposed ports (HTTP, gRPC and OpenAI). Prometheus, the operator and an
    endpoint picker can connect to the health port. Only Prometheus can connect to the port with the metrics of the
    server, and only the subscribers in the spec to the ports of KV events. Only the pods of the service can connect to
    the port on which they serve KV blocks, and decode pods to the OpenAI port of prefill pods. For egress, the pods can
    connect to DNS, to the ports of the adapters' sources and, for a bucket without credentials, to the identity agent
    of EKS. The ports always include 443, because adapters can be added later. With tracing, they can connect to the
    collector's port.
    """
    ports = service.spec.runtime.ports
    client_ports = [service.ports[name] for name in ("http", "grpc", "openai") if name in service.ports]
    clients = list(service.spec.networking.networkPolicy.ingressFrom) or [{"podSelector": {}}]
    # An endpoint picker also reads the metrics. The spec contains the name of its Service, but not the labels of its
    # pods. Therefore, all pods of the namespace are allowed.
    endpoint_pickers: list[Manifest] = [{"podSelector": {}}] if service.spec.networking.inferencePool else []
    ingress = [
        {"from": clients, "ports": _tcp_ports(*client_ports)},
        {"from": [_PROMETHEUS, *_operator_peers(context), *endpoint_pickers], "ports": _tcp_ports(ports.health)},
        {"from": [_PROMETHEUS], "ports": _tcp_ports(ports.metrics)},
    ]
    if (events := service.spec.networking.kvEvents) is not None:
        ingress.append({"from": list(events.subscribers), "ports": _tcp_ports(*service.kv_event_ports.values())})
    pods = [_pod_peer(service)]
    if (transfer := service.kv_transfer) is not None:
        ingress.append({"from": pods, "ports": _tcp_ports(transfer.port)})
    prompt_ports = [] if service.openai_port is None or not service.roles else _tcp_ports(service.openai_port)
    if prompt_ports:
        ingress.append({"from": [_pod_peer(service.for_role(Role.DECODE))], "ports": prompt_ports})
    sources = [*service.adapter_places.values(), *(context.catalog.content_sources if context.catalog else ())]
    if pods_download := model_storage.pods_download(service):
        sources += model_storage.downloaded_sources(service)
    egress = _source_egress(service, sources) if pods_download or service.spec.lora.maxLoaded else []
    if transfer is not None:
        egress.append({"to": pods, "ports": _tcp_ports(transfer.port)})
        if ports_of_peers := sorted({int(peer.rpartition(":")[2]) for peer in transfer.allowedPeers}):
            egress.append({"ports": _tcp_ports(*ports_of_peers)})
    if prompt_ports:
        egress.append({"to": [_pod_peer(service.for_role(Role.PREFILL))], "ports": prompt_ports})
    if (tracing := service.spec.observability.tracing) is not None:
        egress.append({"ports": _tcp_ports(_url_port(tracing.endpoint))})
    if service.spec.openai.allowedMediaDomains:
        egress.append({"ports": _tcp_ports(443)})
    return _network_policy(service, service.name, object_names.SERVER, ingress, egress)


def group_network_policy(service: LLMService, context: RenderContext) -> Manifest:
    """Return the NetworkPolicy of all pods of a LeaderWorkerSet, in addition to the one of its servers.

    The pods of a group connect to each other on ports that gloo and NCCL choose, without a key and unencrypted.
    Therefore, only pods of the same set can connect to them, on all ports. Prometheus and the operator can connect to
    the health port, and the pods of the other role to the port on which they serve KV blocks.
    """
    pods: list[Manifest] = [{"podSelector": {"matchLabels": object_names.group_labels(service)}}]
    all_ports = [{"protocol": "TCP"}]
    ingress: list[Manifest] = [
        {"from": pods, "ports": all_ports},
        {"from": [_PROMETHEUS, *_operator_peers(context)], "ports": _tcp_ports(service.spec.runtime.ports.health)},
    ]
    egress: list[Manifest] = [{"to": pods, "ports": all_ports}]
    for other in (service.for_role(role) for role in service.roles if role is not service.role):
        # A node reads its parts of KV blocks from the node of the other group with the same number.
        assert service.kv_transfer is not None, "roles exchange KV blocks"
        peers = [{"podSelector": {"matchLabels": object_names.group_labels(other)}}]
        ports = _tcp_ports(service.kv_transfer.port)
        ingress.append({"from": peers, "ports": ports})
        egress.append({"to": peers, "ports": ports})
    if model_storage.pods_download(service):
        egress += _source_egress(service, model_storage.downloaded_sources(service))
    policy = _network_policy(service, f"{object_names.of_role(service)}-group", object_names.SERVER, ingress, egress)
    policy["spec"]["podSelector"] = {"matchLabels": object_names.group_labels(service)}
    return policy


def download_network_policy(service: LLMService, context: RenderContext) -> Manifest:
    """Return the NetworkPolicy of the download pods. Only the operator can connect to these pods. It reads the progress
    of the download from them."""
    name, health_ports = f"{service.name}-{object_names.DOWNLOAD}", _tcp_ports(service.spec.runtime.ports.health)
    ingress = [{"from": [peer], "ports": health_ports} for peer in _operator_peers(context)]
    egress = _source_egress(service, model_storage.downloaded_sources(service))
    return _network_policy(service, name, object_names.DOWNLOAD, ingress, egress)


def _source_egress(service: LLMService, sources: list[Source]) -> list[Manifest]:
    without_secret = {source.kind_name for source in sources if source.secret_ref is None}
    rules: list[Manifest] = [{"ports": _tcp_ports(*source_ports(service, sources))}]
    identities = {"s3": _EKS_POD_IDENTITY, "gcs": _GCE_METADATA}
    return [*rules, *(identity for kind, identity in identities.items() if kind in without_secret)]


def source_ports(service: LLMService, sources: list[Source]) -> list[int]:
    """Return the ports to which a pod must connect. They are port 443, the ports of the sources, and the ports of the
    hub mirror and of the proxies. Environment variables set the mirror and the proxies.

    Raises:
        ConfigError: a URL is invalid although it matches the pattern in the CRD.
    """
    url_variables = ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    urls = [e.value for e in service.spec.runtime.env if e.value and e.name.upper() in url_variables]
    urls += [s.http.url for s in sources if s.http]
    urls += [f"{'http' if s.oci.insecure else 'https'}://{s.oci.reference}" for s in sources if s.oci]
    urls += [s.bucket.endpoint for s in sources if s.bucket and s.bucket.endpoint]
    return sorted({443, *map(_url_port, urls)})


def _url_port(url: str) -> int:
    """Return the port of a URL."""
    try:
        # The URL of a proxy is allowed to omit the scheme.
        split_url = urlsplit(url if "://" in url else f"http://{url}")
        return split_url.port or (80 if split_url.scheme == "http" else 443)
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL ({error}); correct it in the spec") from error


def pod_monitor(service: LLMService) -> Manifest:
    """Return the PodMonitor. The health port serves all metrics, including those of Triton Inference Server."""
    spec = {
        "selector": {"matchLabels": object_names.selector_labels(service, object_names.SERVER)},
        "podMetricsEndpoints": [{"port": "health", "path": "/metrics", "interval": "15s"}],
    }
    labels = service.spec.observability.metricsLabels
    return new_manifest("monitoring.coreos.com/v1", "PodMonitor", service, service.name, labels=labels, spec=spec)


def inference_pool(service: LLMService) -> Manifest:
    """Return the InferencePool of the Gateway API inference extension."""
    pool = service.spec.networking.inferencePool
    assert pool is not None, "an InferencePool is rendered only if spec.networking.inferencePool is set"
    picker = pool.endpointPicker
    picker_ref = {"name": picker.name, "port": {"number": picker.port}, "failureMode": picker.failureMode}
    spec = {
        "selector": {"matchLabels": object_names.selector_labels(service, object_names.SERVER)},
        # Pods that an older release rendered have no port of the OpenAI API.
        "targetPorts": [{"number": service.ports.get(pool.targetPort, service.spec.runtime.ports.http)}],
        "endpointPickerRef": picker_ref,
    }
    return new_manifest("inference.networking.k8s.io/v1", "InferencePool", service, service.name, spec=spec)


def http_route(service: LLMService, route: HttpRouteSpec) -> Manifest:
    """Return the HTTPRoute. All requests go to the InferencePool if there is one, otherwise to the Service."""
    backend: Manifest = {"kind": "Service", "name": service.name, "port": service.ports.get(route.port)}
    if service.spec.networking.inferencePool:
        backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": service.name}
    elif backend["port"] is None:
        # Pods that an older release rendered have no port of the OpenAI API.
        backend["port"] = service.spec.runtime.ports.http
    timeouts = {"timeouts": {"request": route.requestTimeout}} if route.requestTimeout else {}
    spec = {
        "parentRefs": list(route.parentRefs),
        **({"hostnames": list(route.hostnames)} if route.hostnames else {}),
        "rules": [{"backendRefs": [backend], **timeouts}],
    }
    return new_manifest("gateway.networking.k8s.io/v1", "HTTPRoute", service, service.name, spec=spec)


def _service_manifest(service: LLMService, name: str, options: Manifest, pods: LLMService) -> Manifest:
    protocols = _PROTOCOLS | {"openai": "http" if service.spec.openai.tlsSecretRef is None else "https"}
    if service.grpc_uses_tls:
        protocols["grpc"] = "https"
    spec = {
        **options,
        "selector": object_names.selector_labels(pods, object_names.SERVER),
        "ports": [
            # The protocol is part of the key of an entry.
            {"name": n, "port": port, "protocol": "TCP", "targetPort": n, "appProtocol": protocols[n]}
            for n, port in service.ports.items()
        ],
    }
    return new_manifest("v1", "Service", service, name, spec=spec)


def _network_policy(
    service: LLMService, name: str, component: str, ingress: list[Manifest], egress: list[Manifest]
) -> Manifest:
    spec = {
        "podSelector": {"matchLabels": object_names.selector_labels(service, component)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": [{"ports": _DNS}, *egress],
    }
    return new_manifest("networking.k8s.io/v1", "NetworkPolicy", service, name, component, spec=spec)


def _pod_peer(service: LLMService) -> Manifest:
    """Return the peer that selects the server pods of a service, or of one of its roles."""
    return {"podSelector": {"matchLabels": object_names.selector_labels(service, object_names.SERVER)}}


def _operator_peers(context: RenderContext) -> list[Manifest]:
    return [dict(context.operator_peer)] if context.operator_peer else []


def _tcp_ports(*ports: int) -> list[Manifest]:
    return [{"port": port, "protocol": "TCP"} for port in ports]
