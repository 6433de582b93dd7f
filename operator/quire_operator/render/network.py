# SPDX-License-Identifier: Apache-2.0
"""Services, NetworkPolicies, PodMonitor and InferencePool: how a service's pods are reached, and by whom."""

from typing import Any
from urllib.parse import urlsplit

from quire_operator.render import model, names
from quire_operator.render.cluster import Cluster
from quire_operator.service import LLMService
from quire_spec.documents.adapter_catalog import Source
from quire_spec.errors import ConfigError

_PROTOCOLS = {"http": "http", "grpc": "kubernetes.io/h2c", "metrics": "http", "health": "http"}
_DNS = [{"port": 53, "protocol": "UDP"}, {"port": 53, "protocol": "TCP"}]
_PROMETHEUS = {
    "namespaceSelector": {},
    "podSelector": {"matchLabels": {"app.kubernetes.io/name": "prometheus"}},
}
"""Prometheus as its operator and charts label it, in whatever namespace. Administration on the same port has a key."""


def service(of: LLMService) -> dict[str, Any]:
    """The Service that clients call."""
    return _service(of, of.name, {"type": "ClusterIP"})


def pods_service(of: LLMService) -> dict[str, Any]:
    """The headless Service: each pod by its address, also before it is ready, when the operator already talks to it."""
    return _service(of, names.pods(of), {"clusterIP": "None", "publishNotReadyAddresses": True})


def server_policy(of: LLMService, cluster: Cluster) -> dict[str, Any]:
    """The NetworkPolicy of the pods that serve.

    Clients reach HTTP and gRPC; Prometheus, the operator and an endpoint picker the health port; Prometheus the
    server's metrics. Out go names, and the ports that adapters are fetched from: adapters come later too, so HTTPS is
    always among them.
    """
    ports = of.spec.runtime.ports
    clients = list(of.spec.networking.networkPolicy.ingressFrom) or [{"podSelector": {}}]
    # An endpoint picker reads the metrics too. Its Service has a name here, its pods have not.
    pickers: list[dict[str, Any]] = [{"podSelector": {}}] if of.spec.networking.inferencePool else []
    watchers = [_PROMETHEUS, *([dict(cluster.operator)] if cluster.operator else []), *pickers]
    sources = [adapter.source for adapter in of.spec.adapters]
    if model.downloads(of):
        sources.append(of.spec.model.source)
    fetches = of.spec.lora.maxLoaded > 0 or model.downloads(of)
    ingress = [
        {"from": clients, "ports": _tcp(ports.http, ports.grpc)},
        {"from": watchers, "ports": _tcp(ports.health)},
        {"from": [_PROMETHEUS], "ports": _tcp(ports.metrics)},
    ]
    return _policy(of, of.name, names.SERVER, ingress, fetch_ports(of, sources) if fetches else [])


def download_policy(of: LLMService, cluster: Cluster) -> dict[str, Any]:
    """The NetworkPolicy of the pods that download the model: the operator alone calls them, to ask how far they are."""
    name = f"{of.name}-{names.DOWNLOAD}"
    asked = (
        [{"from": [dict(cluster.operator)], "ports": _tcp(of.spec.runtime.ports.health)}] if cluster.operator else []
    )
    return _policy(of, name, names.DOWNLOAD, asked, fetch_ports(of, [of.spec.model.source]))


def fetch_ports(of: LLMService, sources: list[Source]) -> list[int]:
    """Ports that files come from; 443 always. A mirror of the hub and a proxy are named in the environment.

    Raises:
        ConfigError: a URL has no port that can be told, which its pattern in the CRD does not find.
    """
    named = ("HF_ENDPOINT", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
    urls = [e.value for e in of.spec.runtime.env if e.value and e.name.upper() in named]
    urls += [s.http.url for s in sources if s.http] + [s.s3.endpoint for s in sources if s.s3 and s.s3.endpoint]
    return sorted({443, *map(_port, urls)})


def _port(url: str) -> int:
    """The port that a URL leads to."""
    try:
        # Those of proxies may come without their scheme.
        parts = urlsplit(url if "://" in url else f"http://{url}")
        return parts.port or (80 if parts.scheme == "http" else 443)
    except ValueError as error:
        raise ConfigError(f"{url!r} is not a URL ({error}); correct it where the spec has it") from error


def pod_monitor(of: LLMService) -> dict[str, Any]:
    """The PodMonitor: the health port tells all metrics, the server's own among them."""
    meta = names.meta(of, of.name)
    # Those by which the operator finds what it made stay: without them it would make the PodMonitor again each time.
    found_by = {names.MANAGED_BY, names.INSTANCE, names.COMPONENT}
    wanted = {key: value for key, value in of.spec.observability.metricsLabels.items() if key not in found_by}
    meta["labels"] = {**meta["labels"], **wanted}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": meta,
        "spec": {
            "selector": {"matchLabels": names.selector(of, names.SERVER)},
            "podMetricsEndpoints": [{"port": "health", "path": "/metrics", "interval": "15s"}],
        },
    }


def inference_pool(of: LLMService) -> dict[str, Any]:
    """The InferencePool of the Gateway API's inference extension."""
    pool = of.spec.networking.inferencePool
    assert pool is not None, "only rendered when asked for"
    picker = pool.endpointPicker
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": names.meta(of, of.name),
        "spec": {
            "selector": {"matchLabels": names.selector(of, names.SERVER)},
            "targetPorts": [{"number": of.spec.runtime.ports.http}],
            "endpointPickerRef": {
                "name": picker.name,
                "port": {"number": picker.port},
                "failureMode": picker.failureMode,
            },
        },
    }


def _service(of: LLMService, name: str, kind: dict[str, Any]) -> dict[str, Any]:
    ports = of.spec.runtime.ports
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.meta(of, name),
        "spec": {
            **kind,
            "selector": names.selector(of, names.SERVER),
            "ports": [
                # The protocol is part of an entry's key: without it, server-side apply before 1.21 refuses the list.
                {"name": n, "port": getattr(ports, n), "protocol": "TCP", "targetPort": n, "appProtocol": protocol}
                for n, protocol in _PROTOCOLS.items()
            ],
        },
    }


def _policy(
    of: LLMService, name: str, component: str, ingress: list[dict[str, Any]], egress_ports: list[int]
) -> dict[str, Any]:
    fetch = [{"ports": _tcp(*egress_ports)}] if egress_ports else []
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": names.meta(of, name, component),
        "spec": {
            "podSelector": {"matchLabels": names.selector(of, component)},
            "policyTypes": ["Ingress", "Egress"],
            "ingress": ingress,
            "egress": [{"ports": _DNS}, *fetch],
        },
    }


def _tcp(*ports: int) -> list[dict[str, Any]]:
    return [{"port": port, "protocol": "TCP"} for port in ports]
