# SPDX-License-Identifier: Apache-2.0
"""Puts a pod together: checks what can be checked before anything starts, opens the health port, and runs it."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from aiohttp import web

from quire_server import launch, run_dir
from quire_server.adapters import AdapterBoard
from quire_server.admin import Admin
from quire_server.cache import Cache
from quire_server.fetcher import Fetcher
from quire_server.output import Output
from quire_server.pod import Pod
from quire_server.processes import adopt_orphans
from quire_server.settings import Settings
from quire_server.sources import SourceOptions
from quire_server.supervisor import Supervisor
from quire_spec import names
from quire_spec.address import in_url, is_v6
from quire_spec.catalogue import Catalogue
from quire_spec.config import EngineConfig
from quire_spec.errors import ConfigError

log = logging.getLogger(__name__)

_ADMIN_STOP_S = 2.0


async def serve(settings: Settings) -> None:
    """Run a pod until SIGTERM, SIGINT or SIGHUP.

    Raises:
        ConfigError: something is wrong that starting again would not change.
        CannotRun: a process never came up.
    """
    config, catalogue = EngineConfig.load(settings.engine), Catalogue.load(settings.adapters)
    names.check_model_name(settings.served_name, "--served-name")
    install, python = launch.find_server(), launch.this_python()
    launch.preflight(install, python, 1 + len(catalogue.exposed()))
    adopt_orphans()
    async with contextlib.AsyncExitStack() as stack:
        folder = stack.enter_context(run_dir.owned(settings.run_dir))
        fetcher = await stack.enter_async_context(Fetcher(_cache(settings), _sources(settings)))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        pod = Pod(settings, folder, (install, python), config.device == "cuda", Output(settings.verbose))
        board = AdapterBoard(settings.served_name, fetcher, pod.links)
        stack.push_async_callback(board.close)
        board.check(catalogue)
        _check_ports(settings)
        supervisor = Supervisor(settings, pod, board, session)
        await stack.enter_async_context(_listening(supervisor, settings))
        board.apply(catalogue)
        await supervisor.run(_signals(pod, folder))


@contextlib.asynccontextmanager
async def _listening(supervisor: Supervisor, settings: Settings) -> AsyncIterator[None]:
    """The health port, open."""
    app = Admin(supervisor, settings.admin_key_file).app()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_ADMIN_STOP_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.health_port).start()
        yield
    finally:
        await runner.cleanup()


def _signals(pod: Pod, folder: Path) -> asyncio.Event:
    """Set by the first signal to end (a closed terminal is one); the second ends everything at once."""
    stop = asyncio.Event()

    def on(number: signal.Signals) -> None:
        if not stop.is_set():
            log.info("asked to stop signal=%s", number.name)
            stop.set()
            return
        log.warning("asked again, everything is ended now signal=%s", number.name)
        pod.kill()
        run_dir.empty(folder)
        logging.shutdown()
        os._exit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, on, number)
    return stop


def _cache(settings: Settings) -> Cache:
    try:
        return Cache(settings.cache_dir)
    except OSError as error:
        raise ConfigError(f"--cache-dir {str(settings.cache_dir)!r}: {error.strerror}") from error


def _sources(settings: Settings) -> SourceOptions:
    return SourceOptions(
        settings.secrets_dir, settings.pvcs, settings.allow_path_sources, max_weights_bytes=settings.max_adapter_bytes
    )


def _check_ports(settings: Settings) -> None:
    """Refuse a port that is given twice, to which the server answers with its whole usage, and one that is taken: it
    would say so late, and its gRPC port it would even share silently."""
    first: dict[int, str] = {}
    for flag, port in settings.ports.items():
        if (other := first.setdefault(port, flag)) != flag:
            raise ConfigError(f"{other} {port} and {flag} {port}: ports must differ; give each its own number")
    faults = {f"{flag} {port}": _listen_error(settings.host, port) for flag, port in settings.ports.items()}
    said = [f"{given} ({error.strerror})" for given, error in faults.items() if error is not None]
    if said:
        raise ConfigError(
            f"{', '.join(said)}: cannot listen on {in_url(settings.host)} there; stop what does, or give "
            f"{'another port' if len(said) == 1 else 'other ports'}"
        )


def _listen_error(host: str, port: int) -> OSError | None:
    """Why nobody can listen there, or None; raises ConfigError when it is the host that is wrong."""
    with socket.socket(socket.AF_INET6 if is_v6(host) else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"--host {host}: not an address of this machine ({error.strerror}); give one of its own, or "
                    "0.0.0.0 for all"
                ) from error
            return error
    return None
