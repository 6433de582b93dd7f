# SPDX-License-Identifier: Apache-2.0
"""The parts of an operator process that do not belong to kopf: the API client, the controller and an HTTP port.

The module determines the order in which these parts start and stop. It does not import kopf. kopf_handlers.py starts an
OperatorProcess in kopf's startup handler, and passes events of LLMServices to it. The liveness probes read its state,
and the cleanup handler closes it.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from quire_operator.controller.controller import Controller, ControllerSettings
from quire_operator.controller.health import serve_health
from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.cluster_config import ClusterConfig
from quire_operator.kube.discovery import is_served
from quire_operator.kube.errors import ApiError
from quire_operator.kube.watch_heartbeat import WatchHeartbeat
from quire_spec.net.addresses import ANY_ADDRESS, listen_address

logger = logging.getLogger(__name__)

DEFAULT_PORT = 8080
PORT_VARIABLE = "QUIRE_OPERATOR_PORT"
"""Environment variable that contains the port for readiness and metrics. It exists because `kopf run` has no option for
this port.
"""
_CRD_POLL_S, _CRD_LOG_INTERVAL_S = 2.0, 60.0
"""Seconds between two checks for the CRD, and between two log messages that report it as missing."""


@dataclass(frozen=True, slots=True)
class OperatorOptions:
    """Options of `quire operate`. `kopf run` uses the default values."""

    cluster_config: ClusterConfig | None = None
    """Address and credentials of the API server. If it is None, ClusterConfig.from_environment is used."""
    settings: ControllerSettings = field(default_factory=ControllerSettings)
    """Settings of the controller. The field operator_peer of these settings is ignored. Its value is derived from the
    cluster config.
    """
    host: str = ANY_ADDRESS
    port: int = field(default_factory=lambda: int(os.environ.get(PORT_VARIABLE, DEFAULT_PORT)))
    """Port on which readiness and metrics are served. 0 selects any free port."""
    make_client: Callable[[ClusterConfig], ApiClient] = ApiClient


class OperatorProcess:
    """The API client, the controller and the HTTP port of one operator. The object must be created while an event loop
    is running.
    """

    def __init__(self, options: OperatorOptions, stop: Callable[[], None]) -> None:
        """If a part fails permanently, `stop` is called once. The process must then end and be restarted.

        Raises:
            ConfigError: the cluster config does not exist or is invalid.
        """
        self.cluster_config = options.cluster_config or ClusterConfig.from_environment()
        self.settings = replace(options.settings, operator_peer=_network_policy_peer(self.cluster_config))
        self.client = options.make_client(self.cluster_config)
        self.controller = Controller(self.client, self.settings)
        namespaces = self.settings.namespaces or (None,)
        self.service_heartbeats = [WatchHeartbeat(resources.LLM_SERVICE, namespace) for namespace in namespaces]
        self.controller.heartbeats += self.service_heartbeats
        self.failure: BaseException | None = None
        """Error of the part that failed permanently, if there is one."""
        self._options, self._stop = options, stop
        self._exit_stack = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """Start all parts. This does not wait for the API server.

        Raises:
            ConfigError: the port is in use, or the address does not belong to this machine.
        """
        options = self._options
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.client)
            host = listen_address(options.host, os.environ)
            port = await stack.enter_async_context(serve_health(self.controller, host, options.port))
            logger.info("serving health and metrics port=%d server=%s", port, self.cluster_config.server)
            controller_failure = await stack.enter_async_context(self.controller.run())
            controller_failure.add_done_callback(self._on_controller_failure)
            self._exit_stack = stack.pop_all()

    async def close(self) -> None:
        """Stop all parts, in the reverse order of their start."""
        await self._exit_stack.aclose()

    def handle_service_event(self, event_type: str | None, body: dict[str, Any]) -> None:
        """Update the cache with one event of kopf's watch. If `event_type` is None, the object comes from kopf's first
        list.

        If the object differs from the cached one, the cache then puts the service into the work queue.
        """
        if event_type == "DELETED":
            self.controller.cache.remove(resources.LLM_SERVICE, body)
        else:
            self.controller.cache.upsert(resources.LLM_SERVICE, body)

    async def wait_for_crd(self) -> None:
        """Wait until the API server serves LLMServices.

        kopf looks for a resource only when it starts, unless it is allowed to watch all CRDs of the cluster. An
        operator that watches only some namespaces is not allowed to do that.
        """
        logged_at = float("-inf")
        while True:
            try:
                if await is_served(self.client, resources.LLM_SERVICE):
                    return
                for heartbeat in self.service_heartbeats:
                    heartbeat.reset()
                if time.monotonic() - logged_at > _CRD_LOG_INTERVAL_S:
                    logged_at = time.monotonic()
                    logger.error(
                        "CRD %s.%s is not installed; waiting for it version=%s; install it: "
                        "helm upgrade --install quire charts/quire, or kubectl apply --server-side -f "
                        "crds/llmservices.yaml",
                        resources.LLM_SERVICE.plural, resources.LLM_SERVICE.group, resources.LLM_SERVICE.version,
                    )  # fmt: skip
            except ApiError as error:
                logger.warning("could not look for the CRD error=%s", error)
            await asyncio.sleep(_CRD_POLL_S)

    def _on_controller_failure(self, failure: asyncio.Future[None]) -> None:
        if not failure.cancelled() and (error := failure.exception()) is not None:
            self.failure = error
            logger.error("controller failed, so the operator stops error=%s", error)
            self._stop()


def default_identity(cluster_config: ClusterConfig) -> str:
    """Return the identity of an operator that was started without one: its namespace, or its machine outside of a
    cluster."""
    if cluster_config.token_file is None:
        return f"{socket.gethostname()}/quire"
    return f"{cluster_config.namespace}/quire"


def _network_policy_peer(cluster_config: ClusterConfig) -> Mapping[str, Any] | None:
    """Return a NetworkPolicy peer that selects the operator, or None if it runs outside of a cluster."""
    if cluster_config.token_file is None:
        return None
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": cluster_config.namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "quire-operator"}},
    }
