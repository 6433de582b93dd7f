# SPDX-License-Identifier: Apache-2.0
"""The custom and the external metrics API, behind the API server's aggregator, with values that a test sets.

An ExternalName Service leads the API server to this process, so the API server must run on this machine.
"""

import base64
import json
import ssl
import threading
from collections import Counter
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from nodocker_cluster.pki import CertificateAuthority
from support.cluster import Cluster
from support.engine_processes import wait_for

_API_SERVICE = ("apiregistration.k8s.io/v1", "APIService")
_VERSIONS = {"external.metrics.k8s.io": "v1beta1", "custom.metrics.k8s.io": "v1beta2"}
_SERVICE = "metrics"


class MetricsApi:
    """A context manager; both APIs exist while it is open."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self._cluster, self._namespace = cluster, namespace
        self.external: dict[tuple[str, str], int] = {}
        """Maps the name of a metric and a label selector to a value."""
        self.by_pod: dict[str, int] = {}
        """Maps the name of a metric of pods to the value of each pod."""
        self.num_queries: Counter[str] = Counter()
        """Number of queries by metric."""

    def __enter__(self) -> Self:
        authority = CertificateAuthority(self._cluster.folder / f"metrics-{self._namespace}")
        authority.issue("metrics", "metrics", hosts=[f"{_SERVICE}.{self._namespace}.svc"])
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(authority.folder / "metrics.crt", authority.folder / "metrics.key")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        port = self._server.server_address[1]
        spec = {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]}
        metadata = {"name": _SERVICE, "namespace": self._namespace}
        self._cluster.apply({"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec})
        ca = base64.b64encode((authority.folder / "ca.crt").read_bytes()).decode()
        for group, version in _VERSIONS.items():
            service = {"name": _SERVICE, "namespace": self._namespace, "port": port}
            spec = {"group": group, "version": version, "service": service, "caBundle": ca}
            spec |= {"groupPriorityMinimum": 100, "versionPriority": 100}
            name = {"name": f"{version}.{group}"}
            self._cluster.apply(
                {"apiVersion": _API_SERVICE[0], "kind": _API_SERVICE[1], "metadata": name, "spec": spec}
            )
        wait_for(lambda: all(map(self._is_available, _VERSIONS)), 60, "the metrics APIs")
        return self

    def __exit__(self, *_: object) -> None:
        for group, version in _VERSIONS.items():
            self._cluster.delete(*_API_SERVICE, f"{version}.{group}")
        self._server.shutdown()
        self._server.server_close()

    def _is_available(self, group: str) -> bool:
        body = self._cluster.get(*_API_SERVICE, f"{_VERSIONS[group]}.{group}") or {}
        conditions = body.get("status", {}).get("conditions", [])
        return any(c["type"] == "Available" and c["status"] == "True" for c in conditions)

    def _answer(self, path: str, selector: str) -> dict[str, Any] | None:
        """Return the document of a path below /apis; None if there is none."""
        group, version, *rest = path.split("/")
        if _VERSIONS.get(group) != version:
            return None
        if not rest:
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": f"{group}/{version}",
                "resources": [],
            }
        metric = rest[-1]
        self.num_queries[metric] += 1
        stamp = {"timestamp": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        if group.startswith("external"):
            value = self.external.get((metric, selector))
            items = [] if value is None else [{"metricName": metric, "metricLabels": {}, "value": str(value), **stamp}]
            kind = "ExternalMetricValueList"
        else:
            pods = self._cluster.items("v1", "Pod", rest[1], labelSelector=selector)
            items = [
                {
                    "describedObject": {"kind": "Pod", "namespace": rest[1], "name": pod["metadata"]["name"]},
                    "metric": {"name": metric},
                    "value": str(self.by_pod[metric]),
                    **stamp,
                }
                for pod in pods
            ]
            kind = "MetricValueList"
        return {"kind": kind, "apiVersion": f"{group}/{version}", "metadata": {}, "items": items}

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                url = urlsplit(self.path)
                selector = parse_qs(url.query).get("labelSelector", [""])[0]
                is_api = url.path.startswith("/apis/")
                document = api._answer(url.path.removeprefix("/apis/").rstrip("/"), selector) if is_api else None
                body = json.dumps(document or {}).encode()
                self.send_response(200 if document else 404)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Write no log."""

        return Handler
