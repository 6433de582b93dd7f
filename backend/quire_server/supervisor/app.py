# SPDX-License-Identifier: Apache-2.0
"""Builds and runs the supervisor of a pod. It checks the setup before any process starts, opens the health port, and
installs the signal handlers."""

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Callable, Set
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from quire_server.adapters.fetcher import AdapterFetcher, AdapterTrust
from quire_server.adapters.manager import AdapterManager
from quire_server.adapters.on_demand import OnDemandAdapters, private_folder
from quire_server.adapters.runtime_adapters import RuntimeAdapters
from quire_server.downloads.adapter_cache import AdapterCache
from quire_server.downloads.model_trust import verify_models
from quire_server.logs import LogRelay
from quire_server.model_server import launch
from quire_server.model_server.vllm_repository import log_ignored_parts
from quire_server.supervisor import run_dir
from quire_server.supervisor.admin_api import AdminAPI
from quire_server.supervisor.child_process import become_subreaper
from quire_server.supervisor.other_models import OtherModels
from quire_server.supervisor.process_manager import ProcessManager
from quire_server.supervisor.settings import SupervisorSettings
from quire_server.supervisor.supervisor import Supervisor
from quire_sources.factory import SourceOptions
from quire_sources.readers.blocking import run_in_daemon_thread
from quire_spec import constants
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.model_repository import find_vllm_model
from quire_spec.documents.pod_config import PodConfig
from quire_spec.documents.server_arguments import check_server_files, parse_server_arguments
from quire_spec.errors import ConfigError
from quire_spec.net.addresses import format_for_url, is_ipv6
from quire_spec.protocol.server import Server

logger = logging.getLogger(__name__)

_ADMIN_SHUTDOWN_TIMEOUT_S = 2.0


async def run(settings: SupervisorSettings) -> None:
    """Run a pod until SIGTERM, SIGINT or SIGHUP arrives.

    Raises:
        ConfigError: the configuration is invalid, or the machine cannot run it; a restart would fail again.
        StartupFailed: a process did not start.
    """
    config, field = settings.config, "server.serverArgs"
    catalog = AdapterCatalog.load(config.adapters)
    check_server_files(parse_server_arguments(config.server.serverArgs, field), field)
    if config.vllmRepository is not None:
        log_ignored_parts(config.vllmRepository)
    install, python = launch.find_server(), launch.current_interpreter()
    launch.preflight(install, python, 1 + len(catalog.exposed_names()))
    become_subreaper()
    trust = AdapterTrust.of(config.trust)
    source_options = SourceOptions(config.sources.secretsDir, config.sources.claims, config.sources.allowPaths)
    async with contextlib.AsyncExitStack() as stack:
        run_folder = stack.enter_context(run_dir.locked_run_dir(settings.run_dir))
        fetcher = await stack.enter_async_context(
            AdapterFetcher(_open_cache(settings), source_options, config.limits.maxAdapterBytes, trust=trust)
        )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        process_manager = ProcessManager(
            settings, run_folder, (install, python), config.engine.device == "cuda", LogRelay(config.server.shows_log)
        )
        adapter_manager = AdapterManager(config.servedName, fetcher, process_manager.handles)
        stack.push_async_callback(adapter_manager.close)
        adapter_manager.check(catalog)
        other_models = _find_other_models(config, run_folder, process_manager, adapter_manager, catalog)
        _check_ports(settings)
        on_demand = await stack.enter_async_context(
            OnDemandAdapters(
                adapter_manager,
                process_manager.handles,
                private_folder(settings.cache_dir, run_folder),
                source_options,
                config.limits.maxAdapterBytes,
                trust,
            )
        )
        supervisor = Supervisor(settings, process_manager, adapter_manager, on_demand, other_models, session)
        await stack.enter_async_context(_admin_server(supervisor, settings))
        methods: list[Callable[..., Any]] = [on_demand.find_adapter, supervisor.replace_adapters]
        if config.openai is not None and config.openai.allowRuntimeLoraUpdating:
            runtime_adapters = RuntimeAdapters(adapter_manager, config.openai.allowedLocalLoraPaths)
            methods += [runtime_adapters.load_lora_adapter, runtime_adapters.unload_lora_adapter]
        await stack.enter_async_context(Server(methods).listening(run_folder / constants.SUPERVISOR_SOCKET))
        adapter_manager.set_catalog(catalog)
        supervisor.model_signatures = await run_in_daemon_thread(verify_models, config)
        await supervisor.run(_install_signal_handlers(process_manager, run_folder))


def _find_other_models(
    config: PodConfig,
    run_folder: Path,
    process_manager: ProcessManager,
    adapter_manager: AdapterManager,
    catalog: AdapterCatalog,
) -> OtherModels:
    """Return the models of server.modelRepository.

    Raises:
        ConfigError: the folder cannot be read, or the name of a model is invalid or already in use.
    """

    def own_names() -> Set[str]:
        current = adapter_manager.catalog if adapter_manager.catalog_version.digest else catalog
        return {config.servedName, *(adapter.name for adapter in current.adapters)}

    try:
        return OtherModels(
            config.server.modelRepository,
            run_folder / run_dir.OTHER_REPOSITORY,
            process_manager.handles,
            own_names,
            None if config.vllmRepository is None else find_vllm_model(config.vllmRepository).path,
        )
    except ConfigError as error:
        raise ConfigError(f"server.modelRepository: {error}") from error


@contextlib.asynccontextmanager
async def _admin_server(supervisor: Supervisor, settings: SupervisorSettings) -> AsyncIterator[None]:
    """Serve the health port while the context is open."""
    app = AdminAPI(supervisor, settings.config.adminKeyFile).app()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_ADMIN_SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.config.ports.health).start()
        yield
    finally:
        await runner.cleanup()


def _install_signal_handlers(process_manager: ProcessManager, run_folder: Path) -> asyncio.Event:
    """Return an event that is set by the first SIGTERM, SIGINT or SIGHUP. The second signal kills all processes."""
    stop = asyncio.Event()

    def on_signal(signal_number: signal.Signals) -> None:
        if not stop.is_set():
            logger.info("stop requested signal=%s", signal_number.name)
            stop.set()
            return
        logger.warning("second stop signal, killing all processes signal=%s", signal_number.name)
        process_manager.kill()
        run_dir.clean(run_folder)
        logging.shutdown()
        os._exit(128 + signal_number)

    for signal_number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(signal_number, on_signal, signal_number)
    return stop


def _open_cache(settings: SupervisorSettings) -> AdapterCache:
    try:
        return AdapterCache(settings.cache_dir)
    except OSError as error:
        raise ConfigError(f"--cache-dir {str(settings.cache_dir)!r}: {error.strerror}") from error


def _check_ports(settings: SupervisorSettings) -> None:
    """Raise an error if a port is already in use.

    Without this check, the server would report late that another process uses the HTTP port. If another process used
    the gRPC port, the server would report nothing, and both would share the port.
    """
    ports = settings.config.named_ports
    errors = {f"{name} {port}": _listen_error(settings.listen_host(name), port) for name, port in ports.items()}
    unavailable = [f"{port} ({error.strerror})" for port, error in errors.items() if error is not None]
    if unavailable:
        raise ConfigError(
            f"{', '.join(unavailable)}: cannot listen on {format_for_url(settings.host)}; stop the process that uses "
            f"{'the port, or use another port' if len(unavailable) == 1 else 'the ports, or use other ports'}"
        )


def _listen_error(host: str, port: int) -> OSError | None:
    """Try to listen on `host` and `port`. Return the error if this fails, and None if it succeeds. Raises ConfigError
    if `host` is not an address of this machine."""
    with socket.socket(socket.AF_INET6 if is_ipv6(host) else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(
                    f"host {host}: not an address of this machine ({error.strerror}); use one of its addresses, or "
                    "0.0.0.0 for all"
                ) from error
            return error
    return None
