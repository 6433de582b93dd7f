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
from collections.abc import AsyncIterator, Set
from pathlib import Path

import aiohttp
from aiohttp import web

from quire_server.adapters.fetcher import AdapterFetcher
from quire_server.adapters.manager import AdapterManager
from quire_server.adapters.runtime_adapters import RuntimeAdapters
from quire_server.downloads.adapter_cache import AdapterCache
from quire_server.logs import LogRelay
from quire_server.model_server import launch
from quire_server.supervisor import run_dir
from quire_server.supervisor.admin_api import AdminAPI
from quire_server.supervisor.child_process import become_subreaper
from quire_server.supervisor.control_server import ControlServer
from quire_server.supervisor.other_models import OtherModels
from quire_server.supervisor.process_manager import ProcessManager
from quire_server.supervisor.settings import SupervisorSettings
from quire_server.supervisor.supervisor import Supervisor
from quire_sources.factory import SourceOptions
from quire_spec import constants
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.server_arguments import check_server_files, parse_server_arguments
from quire_spec.engine.config import EngineConfig
from quire_spec.errors import ConfigError
from quire_spec.net.addresses import format_for_url, is_ipv6

logger = logging.getLogger(__name__)

_ADMIN_SHUTDOWN_TIMEOUT_S = 2.0


async def run(settings: SupervisorSettings) -> None:
    """Run a pod until SIGTERM, SIGINT or SIGHUP arrives.

    Raises:
        ConfigError: the configuration is invalid, or the machine cannot run it; a restart would fail again.
        StartupFailed: a process did not start.
    """
    config, catalog = EngineConfig.load(settings.engine), AdapterCatalog.load(settings.adapters)
    constants.check_model_name(settings.served_name, "--served-name")
    check_server_files(parse_server_arguments(settings.server_args, "--server-arg"), "--server-arg")
    install, python = launch.find_server(), launch.current_interpreter()
    launch.preflight(install, python, 1 + len(catalog.exposed_names()))
    become_subreaper()
    source_options = SourceOptions(settings.secrets_dir, settings.pvcs, settings.allow_path_sources)
    async with contextlib.AsyncExitStack() as stack:
        run_folder = stack.enter_context(run_dir.locked_run_dir(settings.run_dir))
        fetcher = await stack.enter_async_context(
            AdapterFetcher(_open_cache(settings), source_options, settings.max_adapter_bytes)
        )
        session = await stack.enter_async_context(aiohttp.ClientSession())
        process_manager = ProcessManager(
            settings, run_folder, (install, python), config.device == "cuda", LogRelay(settings.shows_server_log)
        )
        adapter_manager = AdapterManager(settings.served_name, fetcher, process_manager.handles)
        stack.push_async_callback(adapter_manager.close)
        adapter_manager.check(catalog)
        other_models = _find_other_models(settings, run_folder, process_manager, adapter_manager, catalog)
        _check_ports(settings)
        supervisor = Supervisor(settings, process_manager, adapter_manager, other_models, session)
        await stack.enter_async_context(_admin_server(supervisor, settings))
        if settings.allow_runtime_lora_updating:
            runtime_adapters = RuntimeAdapters(adapter_manager, settings.allowed_local_lora_paths)
            methods = {"load_lora_adapter": runtime_adapters.load, "unload_lora_adapter": runtime_adapters.unload}
            await stack.enter_async_context(ControlServer(methods).listen(run_folder / constants.SUPERVISOR_SOCKET))
        adapter_manager.set_catalog(catalog)
        await supervisor.run(_install_signal_handlers(process_manager, run_folder))


def _find_other_models(
    settings: SupervisorSettings,
    run_folder: Path,
    process_manager: ProcessManager,
    adapter_manager: AdapterManager,
    catalog: AdapterCatalog,
) -> OtherModels:
    """Return the models of --model-repository.

    Raises:
        ConfigError: the folder cannot be read, or the name of a model is invalid or already in use.
    """

    def own_names() -> Set[str]:
        current = adapter_manager.catalog if adapter_manager.catalog_version.digest else catalog
        return {settings.served_name, *(adapter.name for adapter in current.adapters)}

    try:
        return OtherModels(
            *(settings.model_repository, run_folder / run_dir.OTHER_REPOSITORY, process_manager.handles, own_names),
            settings.own_model_folder,
        )
    except ConfigError as error:
        raise ConfigError(f"--model-repository {error}") from error


@contextlib.asynccontextmanager
async def _admin_server(supervisor: Supervisor, settings: SupervisorSettings) -> AsyncIterator[None]:
    """Serve the health port while the context is open."""
    app = AdminAPI(supervisor, settings.admin_key_file).app()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_ADMIN_SHUTDOWN_TIMEOUT_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, settings.host, settings.health_port).start()
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
    """Raise an error if two options have the same port, or if a port is already in use.

    Without this check, the server would print its whole usage text if two ports were equal. If another process already
    used the HTTP port, the server would report this late. If another process already used the gRPC port, the server
    would report nothing, and both would share the port.
    """
    flag_by_port: dict[int, str] = {}
    for flag, port in settings.ports.items():
        if (other_flag := flag_by_port.setdefault(port, flag)) != flag:
            raise ConfigError(f"{other_flag} {port} and {flag} {port}: ports must differ; use different numbers")
    errors = {
        f"{flag} {port}": _listen_error(settings.listen_host(flag), port) for flag, port in settings.ports.items()
    }
    unavailable = [
        f"{flag_and_port} ({error.strerror})" for flag_and_port, error in errors.items() if error is not None
    ]
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
                    f"--host {host}: not an address of this machine ({error.strerror}); use one of its addresses, or "
                    "0.0.0.0 for all"
                ) from error
            return error
    return None
