# SPDX-License-Identifier: Apache-2.0
"""Envoy before the OpenAI ports of pods. It repeats a request whose connection fails at another pod."""

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
_ROUTER = "envoy.extensions.filters.http.router.v3.Router"
_PREVIOUS_HOSTS = "envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"


@contextlib.contextmanager
def running_envoy(hosts: Sequence[tuple[str, int]], folder: Path) -> Iterator[int]:
    """Start Envoy before addresses; yield its port on this machine."""
    (port,) = free_ports(1)
    file = folder / "envoy.json"
    file.write_text(json.dumps(_config(port, hosts)))
    command = [envoy.find_or_install(print), "--config-path", file, "--use-dynamic-base-id", "--concurrency", "1"]
    with (folder / "envoy.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            wait_for(lambda: is_open(port) or process.poll() is not None, 30, "Envoy listens")
            assert process.poll() is None, (folder / "envoy.log").read_text()[-2000:]
            yield port
        finally:
            process.terminate()


def _config(port: int, hosts: Sequence[tuple[str, int]]) -> dict[str, Any]:
    retries = {
        # A pod that starts again answers 503 until it can serve.
        "retry_on": "connect-failure,refused-stream,reset-before-request,retriable-status-codes",
        "retriable_status_codes": [503],
        "num_retries": 2,
        "host_selection_retry_max_attempts": 3,
        "retry_host_predicate": [_typed("envoy.retry_host_predicates.previous_hosts", _PREVIOUS_HOSTS)],
    }
    route = {"match": {"prefix": "/"}, "route": {"cluster": "pods", "timeout": "0s", "retry_policy": retries}}
    manager = {
        "stat_prefix": "pods",
        "route_config": {"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
        "http_filters": [_typed("envoy.filters.http.router", _ROUTER)],
    }
    filters = [_typed("envoy.filters.network.http_connection_manager", _CONNECTION_MANAGER, **manager)]
    endpoints = [{"endpoint": {"address": _socket(host, port)}} for host, port in hosts]
    cluster = {
        "name": "pods",
        "connect_timeout": "1s",
        "circuit_breakers": {"thresholds": [{"max_retries": 1024}]},
        "load_assignment": {"cluster_name": "pods", "endpoints": [{"lb_endpoints": endpoints}]},
    }
    listener = {"name": "clients", "address": _socket("127.0.0.1", port), "filter_chains": [{"filters": filters}]}
    return {"static_resources": {"listeners": [listener], "clusters": [cluster]}}


def _typed(name: str, message: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "typed_config": {"@type": f"type.googleapis.com/{message}", **fields}}


def _socket(host: str, port: int) -> dict[str, Any]:
    return {"socket_address": {"address": host, "port_value": port}}
