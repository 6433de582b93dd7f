# SPDX-License-Identifier: Apache-2.0
"""Services, NetworkPolicies, PodMonitor and InferencePool of a service. Called by objects.py."""

from typing import Any
from urllib.parse import urlsplit

from quire_operator.api.llmservice import LLMService
from quire_operator.render import model_storage, object_names
from quire_operator.render.context import RenderContext
from quire_spec.documents.adapter_catalog import Source
from quire_spec.errors import ConfigError

_PROTOCOLS = {"http": "http", "grpc": "kubernetes.io/h2c", "metrics": "http", "health": "http"}
_DNS = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
_PROMETHEUS = {
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
}
"""Prometheus in any namespace, by the label of its operator and charts. The admin API on this port requires a key."""


def client_service(service: LLMService) -> dict[str, Any]:
    """Return the Service for clients."""
    return _service_manifest(service, service.name, {"type": "ClusterIP"})


def headless_service(service: LLMService) -> dict[str, Any]:
    """Return the headless Service, with the addresses of all pods. The operator also calls pods that are not ready."""
    return _service_manifest(
        service, object_names.headless_service(service), {"clusterIP": "None", "publishNotReadyAddresses": True}
    )


def server_network_policy(service: LLMService, context: RenderContext) -> dict[str, Any]:
    """Return the NetworkPolicy of the server pods.

    Ingress: clients to the HTTP and gRPC ports; Prometheus, the operator and an endpoint picker to the health port;
    Prometheus to the port of the server's metrics. Egress: DNS and the ports of adapter sources. Adapters can be added
    later, so port 443 is always included.
    """
    ports = service.spec.runtime.ports
    clients = list(service.spec.networking.networkPolicy.ingressFrom) or [{"podSelector": {}}]
    # An endpoint picker reads the metrics too. The spec names its Service, but the labels of its pods are unknown.
    endpoint_pickers: list[dict[str, Any]] = [{"podSelector": {}}] if service.spec.networking.inferencePool else []
    health_clients = [_PROMETHEUS, *([dict(context.operator_peer)] if context.operator_peer else []), *endpoint_pickers]
    sources = [adapter.source for adapter in service.spec.adapters]
    if model_storage.pods_download(service):
        sources.append(service.spec.model.source)
    needs_egress = service.spec.lora.maxLoaded > 0 or model_storage.pods_download(service)
    ingress = [
        {"from": clients, "ports": _tcp_ports(ports.http, ports.grpc)},
        {"from": health_clients, "ports": _tcp_ports(ports.health)},
        {"from": [_PROMETHEUS], "ports": _tcp_ports(ports.metrics)},
    ]
    return _network_policy(
        service, service.name, object_names.SERVER, ingress, source_ports(service, sources) if needs_egress else []
    )


def download_network_policy(service: LLMService, context: RenderContext) -> dict[str, Any]:
    """Return the NetworkPolicy of the download pods. Only the operator calls them, to read the progress."""
    name = f"{service.name}-{object_names.DOWNLOAD}"
    ingress = (
        [{"from": [dict(context.operator_peer)], "ports": _tcp_ports(service.spec.runtime.ports.health)}]
        if context.operator_peer
        else []
    )
    return _network_policy(
        service, name, object_names.DOWNLOAD, ingress, source_ports(service, [service.spec.model.source])
    )


def source_ports(service: LLMService, sources: list[Source]) -> list[int]:
    """Return the ports of the sources, of a hub mirror and of proxies in the environment, and always 443.

    Raises:
        ConfigError: a URL is invalid although it matches the pattern in the CRD.
    """
    url_variables = ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    urls = [e.value for e in service.spec.runtime.env if e.value and e.name.upper() in url_variables]
    urls += [s.http.url for s in sources if s.http] + [s.s3.endpoint for s in sources if s.s3 and s.s3.endpoint]
    return sorted({443, *map(_url_port, urls)})


def _url_port(url: str) -> int:
    """Return the port of a URL."""
    try:
        # The URL of a proxy can have no scheme.
        split_url = urlsplit(url if "://" in url else f"http://{url}")
        return split_url.port or (80 if split_url.scheme == "http" else 443)
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL ({error}); correct it in the spec") from error


def pod_monitor(service: LLMService) -> dict[str, Any]:
    """Return the PodMonitor. The health port serves all metrics, including those of Triton Inference Server."""
    meta = object_names.object_meta(service, service.name)
    # The operator selects its objects by these labels. Without them it would create the PodMonitor again in each pass.
    reserved_labels = {object_names.MANAGED_BY, object_names.INSTANCE, object_names.COMPONENT}
    metrics_labels = {
        key: value for key, value in service.spec.observability.metricsLabels.items() if key not in reserved_labels
    }
    meta["labels"] = {**meta["labels"], **metrics_labels}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": meta,
        "spec": {
            "selector": {"matchLabels": object_names.selector_labels(service, object_names.SERVER)},
            "podMetricsEndpoints": [{"port": "health", "path": "/metrics", "interval": "15s"}],
        },
    }


def inference_pool(service: LLMService) -> dict[str, Any]:
    """Return the InferencePool of the Gateway API inference extension."""
    pool = service.spec.networking.inferencePool
    assert pool is not None, "rendered only if spec.networking.inferencePool is set"
    picker = pool.endpointPicker
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": object_names.object_meta(service, service.name),
        "spec": {
            "selector": {"matchLabels": object_names.selector_labels(service, object_names.SERVER)},
            "targetPorts": [{"number": service.spec.runtime.ports.http}],
            "endpointPickerRef": {
                "name": picker.name,
                "port": {"number": picker.port},
                "failureMode": picker.failureMode,
            },
        },
    }


def _service_manifest(service: LLMService, name: str, service_type: dict[str, Any]) -> dict[str, Any]:
    ports = service.spec.runtime.ports
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": object_names.object_meta(service, name),
        "spec": {
            **service_type,
            "selector": object_names.selector_labels(service, object_names.SERVER),
            "ports": [
                # The protocol is part of an entry's key: without it, server-side apply before 1.21 rejects the list.
                {"name": n, "port": getattr(ports, n), "protocol": "TCP", "targetPort": n, "appProtocol": protocol}
                for n, protocol in _PROTOCOLS.items()
            ],
        },
    }


def _network_policy(
    service: LLMService, name: str, component: str, ingress: list[dict[str, Any]], egress_ports: list[int]
) -> dict[str, Any]:
    egress = [{"ports": _tcp_ports(*egress_ports)}] if egress_ports else []
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": object_names.object_meta(service, name, component),
        "spec": {
            "podSelector": {"matchLabels": object_names.selector_labels(service, component)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": [{"ports": _DNS}, *egress],
        },
    }


def _tcp_ports(*ports: int) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"} for port in ports]
