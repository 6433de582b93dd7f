# SPDX-License-Identifier: Apache-2.0
"""Runs the text process and the core processes of a batch.

It starts these processes, loads the adapters, and restarts a process that has ended. A pod runs the same processes, and
also the server. Adapters do not change during a batch. Therefore, they are fetched once, before the processes start.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from quire_server.adapters.fetcher import AdapterFetcher, CachedAdapter
from quire_server.clients.handles import CoreHandle, TextHandle
from quire_server.supervisor import engine_process
from quire_server.supervisor.child_process import ChildProcess
from quire_server.supervisor.managed_process import ManagedProcess
from quire_spec.constants import AdapterName, core_names
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.pod_config import PodConfig
from quire_spec.errors import ConfigError, InvalidArgument, QuireError

_POLL_INTERVAL_S = 0.05
_STOP_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


class LocalEngine:
    """The text process and the core processes of a batch."""

    def __init__(
        self,
        config_file: Path,
        run_dir: Path,
        cached_adapter_by_name: Mapping[AdapterName, CachedAdapter],
        relay: Callable[[str, str], None],
    ) -> None:
        """`config_file` is the path of pod.json. `relay(name, line)` is called for each line that a process prints."""
        self._config_file = config_file
        self._run_dir = run_dir
        self._cached_adapter_by_name = cached_adapter_by_name
        self._relay = relay
        self._cores: dict[str, CoreHandle] = {}
        self._ready = asyncio.Event()
        self._rejected: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Future that gets the error if the core rejects an adapter."""
        self._core_names = core_names(PodConfig.load(config_file).engine.data_parallel_size)
        sessions: dict[str, Callable[[ChildProcess], Awaitable[str]]] = {"text": self._text_session}
        sessions |= {name: partial(self._core_session, name) for name in self._core_names}
        self._processes = {
            name: ManagedProcess(name, partial(self._start, name), session, lambda: None)
            for name, session in sessions.items()
        }

    async def run(self) -> None:
        """Keep all processes running until this call is cancelled.

        Raises:
            StartupFailed: a process did not start.
            ConfigError: the core rejects an adapter.
        """
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._raise_rejected())
                for process in self._processes.values():
                    group.create_task(process.run())
        except ExceptionGroup as group_error:
            raise group_error.exceptions[0] from None
        finally:
            for process in self._processes.values():
                if process.child is not None:
                    await process.child.stop(_STOP_TIMEOUT_S)

    async def wait_ready(self) -> None:
        """Wait until the engine can run requests for the model and for all adapters."""
        await self._ready.wait()

    async def _raise_rejected(self) -> None:
        await self._rejected

    async def _start(self, name: str) -> ChildProcess:
        return await engine_process.start(name, self._config_file, self._run_dir, self._relay)

    async def _core_session(self, name: str, child: ChildProcess) -> str:
        async with engine_process.connect(name, self._run_dir) as control:
            core = await CoreHandle.open(control, engine_process.START_TIMEOUT_S)
            for adapter_name, adapter in self._cached_adapter_by_name.items():
                try:
                    await core.load_adapter(adapter.digest, adapter.folder, False)
                except InvalidArgument as error:
                    if not self._rejected.done():
                        self._rejected.set_exception(ConfigError(f"adapter {adapter_name!r}: {error}"))
            self._processes[name].mark_ready()
            self._cores[name] = core
            try:
                return await engine_process.watch_connection(control)
            finally:
                del self._cores[name]
                self._ready.clear()

    async def _text_session(self, child: ChildProcess) -> str:
        async with engine_process.connect("text", self._run_dir) as control:
            text = await TextHandle.open(control, engine_process.START_TIMEOUT_S)
            cached = self._cached_adapter_by_name
            digest_by_name = {name: adapter.digest for name, adapter in cached.items()}
            files = {name: adapter.chat_template for name, adapter in cached.items()}
            template_by_name = {name: str(file) for name, file in files.items() if file is not None}
            await text.set_adapters(digest_by_name, {}, template_by_name)
            self._processes["text"].mark_ready()
            watch_task = asyncio.create_task(engine_process.watch_connection(control))
            try:
                while not watch_task.done():
                    await self._update_ready(text)
                    await asyncio.sleep(_POLL_INTERVAL_S)
                return watch_task.result()
            finally:
                watch_task.cancel()
                self._ready.clear()

    async def _update_ready(self, text: TextHandle) -> None:
        """Check whether the text process is connected to the cores, and all of them have all adapters."""
        if self._ready.is_set():
            return
        try:
            is_connected = (await text.status()).core
        except QuireError:
            return
        cores = [core for core in self._cores.values() if not core.control.closed.is_set()]
        if is_connected and len(cores) == len(self._core_names):
            self._ready.set()
            logger.info("engine ready adapters=%d", len(self._cached_adapter_by_name))


async def fetch_adapters(
    catalog: AdapterCatalog, served_name: str, fetcher: AdapterFetcher
) -> dict[AdapterName, CachedAdapter]:
    """Fetch all adapters, and return the content of each adapter under its name.

    Raises:
        ConfigError: adapters cannot be fetched; the message lists all of these adapters.
    """
    if any(adapter.name == served_name for adapter in catalog.adapters):
        raise ConfigError(f"adapters: {served_name!r} is the base model's name; give the adapter another name")
    cached_adapter_by_name: dict[AdapterName, CachedAdapter] = {}
    problems = []
    for adapter in catalog.adapters:
        try:
            cached_adapter_by_name[AdapterName(adapter.name)] = await fetcher.fetch(adapter.source)
        except QuireError as error:
            problems.append(f"adapter {adapter.name!r}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))
    return cached_adapter_by_name
