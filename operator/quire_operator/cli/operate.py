# SPDX-License-Identifier: Apache-2.0
"""`quire operate`: the operator as a process: login, kopf, controller, port, a clean end. Called by cli.py."""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Mapping
from typing import Any

from quire_operator.controller import log_config as logs
from quire_operator.controller.controller import Controller, ControllerSettings
from quire_operator.controller.health import serve_health
from quire_operator.kube import resources
from quire_operator.kube.api_client import ApiClient
from quire_operator.kube.cluster_config import ClusterConfig
from quire_operator.kube.watch_heartbeat import WatchHeartbeat
from quire_spec.errors import ConfigError, QuireError
from quire_spec.net.addresses import listen_address

logger = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Look after LLMServices until SIGTERM or SIGINT; returns the exit status."""
    try:
        # Imported here: people who only plan need not have it.
        import kopf  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"quire operate needs {error.name}; pip install 'quire-llm[operator]'") from error
    logs.configure(args.log_format, args.log_level)
    cluster_config = ClusterConfig.from_environment(args.kubeconfig, args.context)
    try:
        asyncio.run(run_operator(cluster_config, args))
    except QuireError as error:
        logger.error("operator ends error=%s", error)
        return 1
    return 0


async def run_operator(cluster_config: ClusterConfig, args: argparse.Namespace) -> None:
    """Run until a signal comes.

    Raises:
        QuireError: a part ended that must not; the process is to be started again.
    """
    from quire_operator.controller import kopf_handlers

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    settings = ControllerSettings(
        namespaces=tuple(args.namespaces),
        workers=args.workers,
        images={"GPU": args.gpu_image, "CPU": args.cpu_image},
        operator_peer=network_policy_peer(cluster_config),
        resync_s=args.resync,
    )
    async with ApiClient(cluster_config) as client, contextlib.AsyncExitStack() as stack:
        controller = Controller(client, settings)
        port = await stack.enter_async_context(
            serve_health(controller, listen_address(args.host, os.environ), args.port)
        )
        logger.info("serving health and metrics port=%d server=%s", port, cluster_config.server)
        if args.lease:
            logger.warning("--lease is ignored: leader election was removed, run one replica of the operator")
        heartbeats = [WatchHeartbeat(resources.LLM_SERVICE, namespace) for namespace in settings.namespaces or (None,)]
        controller.heartbeats += heartbeats
        async with controller.run() as failed:
            watch_task = asyncio.create_task(
                kopf_handlers.watch_services(
                    cluster_config, controller.cache, heartbeats, settings.watch_timeouts, stop
                )
            )
            stop_waiter = asyncio.create_task(stop.wait())
            tasks: list[asyncio.Future[Any]] = [failed, watch_task, stop_waiter]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            ended_unexpectedly = not stop.is_set()
            stop.set()
        # kopf takes its time to end; whoever takes over finds nobody at work.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(10):
                await watch_task
        for task in done:
            if task.exception() is not None:
                raise task.exception()  # type: ignore[misc]
        if ended_unexpectedly:
            raise QuireError("the watch of LLMServices ended by itself")


def network_policy_peer(cluster_config: ClusterConfig) -> Mapping[str, Any] | None:
    """The operator as a peer of NetworkPolicies; None outside of a cluster."""
    if cluster_config.token_file is None:
        return None
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": cluster_config.namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "quire-operator"}},
    }
