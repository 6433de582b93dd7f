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

from quire_operator.kube import kinds
from quire_operator.kube.client import Client
from quire_operator.kube.heard import Heard
from quire_operator.kube.login import Login
from quire_operator.reconcile import log as logs
from quire_operator.reconcile.controller import Controller, Settings
from quire_operator.reconcile.health import serving
from quire_spec.errors import ConfigError, QuireError
from quire_spec.net.addresses import listen_address

log = logging.getLogger(__name__)


def run(options: argparse.Namespace) -> int:
    """Look after LLMServices until SIGTERM or SIGINT; returns the exit status."""
    try:
        # Imported here: people who only plan need not have it.
        import kopf  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"quire operate needs {error.name}; pip install 'quire-llm[operator]'") from error
    logs.set_up(options.log_format, options.log_level)
    login = Login.find(options.kubeconfig, options.context)
    try:
        asyncio.run(operate(login, options))
    except QuireError as error:
        log.error("operator ends error=%s", error)
        return 1
    return 0


async def operate(login: Login, options: argparse.Namespace) -> None:
    """Run until a signal comes.

    Raises:
        QuireError: a part ended that must not; the process is to be started again.
    """
    from quire_operator import handlers

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    settings = Settings(
        namespaces=tuple(options.namespaces),
        workers=options.workers,
        images={"GPU": options.gpu_image, "CPU": options.cpu_image},
        operator=peer(login),
        resync_s=options.resync,
    )
    async with Client(login) as client, contextlib.AsyncExitStack() as stack:
        controller = Controller(client, settings)
        port = await stack.enter_async_context(
            serving(controller, listen_address(options.host, os.environ), options.port)
        )
        log.info("serving health and metrics port=%d server=%s", port, login.server)
        if options.lease:
            log.warning("--lease is ignored: leader election was removed, run one replica of the operator")
        heard = [Heard(kinds.LLM_SERVICE, namespace) for namespace in settings.namespaces or (None,)]
        controller.heard += heard
        async with controller.running() as failed:
            watching = asyncio.create_task(handlers.watch(login, controller.cache, heard, settings.patience, stop))
            stopped = asyncio.create_task(stop.wait())
            parts: list[asyncio.Future[Any]] = [failed, watching, stopped]
            done, _ = await asyncio.wait(parts, return_when=asyncio.FIRST_COMPLETED)
            early = not stop.is_set()
            stop.set()
        # kopf takes its time to end; whoever takes over finds nobody at work.
        with contextlib.suppress(Exception):
            async with asyncio.timeout(10):
                await watching
        for part in done:
            if part.exception() is not None:
                raise part.exception()  # type: ignore[misc]
        if early:
            raise QuireError("the watch of LLMServices ended by itself")


def peer(login: Login) -> Mapping[str, Any] | None:
    """The operator as a peer of NetworkPolicies; None outside of a cluster."""
    if login.token_file is None:
        return None
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": login.namespace}},
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "quire-operator"}},
    }
