# SPDX-License-Identifier: Apache-2.0
"""Envoy before the OpenAI ports of pods. It repeats a request whose connection fails at another pod. An endpoint picker
can choose the pod."""

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nodocker_cluster import envoy
from nodocker_cluster.ports import free_ports
from support.engine_processes import wait_for
from support.pod_cluster import is_open

_CONNECTION_MANAGER = "envoy.extensions.filters.network.http_connection_manager.v3.HttpConnectionManager"
_EXT_PROC = "envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor"
_HTTP_OPTIONS = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
_OVERRIDE_HOST = "envoy.extensions.load_balancing_policies.override_host.v3.OverrideHost"
_ROUND_ROBIN = "envoy.extensions.load_balancing_policies.round_robin.v3.RoundRobin"
_DESTINATION = "x-gateway-destination-endpoint"
"""The header in which a picker names pods."""
POD_HEADER = "x-pod"
"""The response header with the address of the pod that has answered."""
_ROUTER = "envoy.extensions.filters.http.router.v3.Router"
_PREVIOUS_HOSTS = "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"


@contextlib.contextmanager
def running_envoy(hosts: Sequence[tuple[str, int]], folder: Path, picker_port: int | None = None) -> Iterator[int]:
    """Start Envoy before addresses; yield its port on this machine.

    The picker at `picker_port` chooses the pod of each request, as in docs/gpu-cluster.md. It can choose any address if
    there are no `hosts`.
    """
    (port,) = free_ports(1)
    file = folder / "envoy.json"
    file.write_text(json.dumps(_config(port, hosts, picker_port)))
    command = [envoy.find_or_install(print), "--config-path", file, "--use-dynamic-base-id", "--concurrency", "1"]
    with (folder / "envoy.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_for(lambda: is_open(port) or process.poll() is not None, 30, "Envoy listens")
            assert process.poll() is None, (folder / "envoy.log").read_text()[-2000:]
            yield port
        finally:
            process.terminate()


def _config(port: int, hosts: Sequence[tuple[str, int]], picker_port: int | None) -> dict[str, Any]:
    retries = {
        # A pod that starts again answers 503 until it can serve.
        "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-status-codes",
        "retriable_status_codes": [503],
        "num_retries": 2,
        "host_selection_retry_max_attempts": 3,
        "retry_host_predicate": [_typed("envoy.retry_host_predicates.previous_hosts", _PREVIOUS_HOSTS)],
    }
    route = {
        "match": {"prefix": "/"},
        "route": {"cluster": "pods", "timeout": "0s", "retry_policy": retries},
        "response_headers_to_add": [{"header": {"key": POD_HEADER, "value": "%UPSTREAM_REMOTE_ADDRESS%"}}],
    }
    router = _typed("envoy.filters.http.router", _ROUTER)
    manager = {
        "stat_prefix": "pods",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [router] if picker_port is None else [_picker_filter(), router],
    }
    filters = [_typed("envoy.filters.network.http_connection_manager", _CONNECTION_MANAGER, **manager)]
    pods: dict[str, Any] = {
        "name": "pods",
        "connect_timeout": "1s",
        "circuit_breakers": {"thresholds": [{"max_retries": 1024}]},
    }
    if hosts:
        pods |= {"load_assignment": _assignment("pods", hosts)}
        if picker_port is not None:
            fallback = _policy("round_robin", _ROUND_ROBIN)
            sources = [{"header": _DESTINATION}]
            override = {"override_host_sources": sources, "fallback_policy": fallback}
            pods |= {"load_balancing_policy": _policy("override_host", _OVERRIDE_HOST, **override)}
    else:
        pods |= {"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED"}
        pods |= {"original_dst_lb_config": {"use_http_header": True, "http_header_name": _DESTINATION}}
    clusters = [pods] if picker_port is None else [pods, _picker_cluster(picker_port)]
    listener = {"name": "clients", "address": _socket("127.0.0.1", port), "filter_chains": [{"filters": filters}]}
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


def _picker_filter() -> dict[str, Any]:
    streamed = "FULL_DUPLEX_STREAMED"  # the only mode in which the picker answers
    return _typed(
        "envoy.filters.http.ext_proc",
        _EXT_PROC,
        grpc_service={"envoy_grpc": {"cluster_name": "picker", "authority": "picker"}, "timeout": "600s"},
        message_timeout="600s",  # the picker may hold a request
        processing_mode={
            "request_header_mode": "SEND",
            "request_body_mode": streamed,
            "request_trailer_mode": "SEND",
            "response_header_mode": "SEND",
            "response_body_mode": streamed,
            "response_trailer_mode": "SEND",
        },
    )


def _picker_cluster(port: int) -> dict[str, Any]:
    http2 = {"@type": f"type.googleapis.com/{_HTTP_OPTIONS}", "explicit_http_config": {"http2_protocol_options": {}}}
    return {
        "name": "picker",
        "connect_timeout": "1s",
        "typed_extension_protocol_options": {_HTTP_OPTIONS: http2},
        "load_assignment": _assignment("picker", [("127.0.0.1", port)]),
    }


def _policy(name: str, message: str, **fields: Any) -> dict[str, Any]:
    extension = _typed(f"envoy.load_balancing_policies.{name}", message, **fields)
    return {"policies": [{"typed_extension_config": extension}]}


def _assignment(name: str, hosts: Sequence[tuple[str, int]]) -> dict[str, Any]:
    endpoints = [{"endpoint": {"address": _socket(host, port)}} for host, port in hosts]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]}


def _typed(name: str, message: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"type.googleapis.com/{message}", **fields}}


def _socket(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
