# SPDX-License-Identifier: Apache-2.0
"""Supervision of the pod's processes (core, text, server, openai, kv_peer): their sessions, and the reaction to each
death.

- If core dies, text ends the open requests. Then core is restarted, and the adapters are loaded again. With
  data_parallel_size above 1, the processes core-0, core-1, ... take its place, and the others serve on.
- If text dies, the stubs and the OpenAI front fail their open requests. Then text is restarted, and the aliases are
  sent again.
- If server dies, its connections end. Then server is restarted, and the models of the adapters are loaded again.
- If openai dies, its connections end. Then openai is restarted.
- If kv_peer dies, other pods compute what they would have read, and their leases end. Then kv_peer is restarted. No
  request of this pod depends on it.
- If a stub of the server dies without open requests, its model is loaded again. If the stub has open requests, the
  server is killed and restarted, because the clients would otherwise wait forever. If the model of the stub is not
  one of Quire's models, it is always loaded again, and the server keeps running (other_models.py).

This module owns the processes and their handles. adapters/manager.py reloads adapters; supervisor.py owns readiness and
shutdown.
"""

import asyncio
import contextlib
import logging
import shutil
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from quire_server.clients.handles import CoreHandle, ProcessHandles, ServerHandle, TextHandle
from quire_server.frontend import open_requests
from quire_server.model_server import launch, readiness_file, repository
from quire_server.model_server.client import ModelServerClient
from quire_server.model_server.readiness_file import ReadinessFile
from quire_server.supervisor import engine_process, kv_peer_process
from quire_server.supervisor.child_process import RETURN_MEMORY_ENV, ChildProcess
from quire_server.supervisor.managed_process import MAX_START_ATTEMPTS, ManagedProcess, RestartBackoff
from quire_server.supervisor.openai_front import OpenAIFront, openai_process_name
from quire_server.supervisor.other_models import OtherModels
from quire_server.supervisor.run_dir import OTHER_REPOSITORY, REPOSITORY, write_cache_salt_secret, write_shm_prefix
from quire_server.supervisor.settings import SupervisorSettings
from quire_server.supervisor.stub_watcher import StubProcess, StubWatcher
from quire_spec import constants
from quire_spec.documents.pod_status import CoreState, ProcessState
from quire_spec.documents.server_arguments import with_forwarded_header
from quire_spec.errors import QuireError
from quire_spec.protocol.client import ConnectionLost
from quire_spec.protocol.results import KVPeerStatus

logger = logging.getLogger(__name__)

SERVER_START_TIMEOUT_S = 300.0
_PROBE_INTERVAL_S = 0.1
_CONNECTED_POLL_S = 0.5
_EXIT_TIMEOUT_S = 5
"""After the drain, the server exits within this many seconds. Without this timeout, keep-alive connections that are
idle would delay the exit."""
_STOP_TIMEOUT_S = 10.0
_LEASE_WAIT_S = 30.0
"""A drain waits at most this many seconds for other pods that read KV blocks."""
_LEASE_POLL_S = 0.25
_UNLEASED_S = 1.0
"""A drain ends when other pods have had no leases for this many seconds. A pod that gets an answer of this one leases
its blocks a moment later."""


class ProcessManager:
    """The processes of one pod."""

    def __init__(
        self,
        settings: SupervisorSettings,
        run_dir: Path,
        server_runtime: tuple[launch.ServerInstall, launch.Interpreter],
        has_gpu: bool,
        relay: Callable[[str, str], None],
    ) -> None:
        """`relay(name, line)` is called for each output line of a process."""
        self.handles = ProcessHandles()
        self.core_connected = False
        """True while the text process is connected to a core."""
        self.core_states: Mapping[str, CoreState] = {}
        """The state of each core if there are several."""
        self._settings = settings
        self._run_dir = run_dir
        self._server_runtime = server_runtime
        config = settings.config
        key, shm_prefix = launch.new_key(), launch.new_shm_prefix()
        self._readiness_file = ReadinessFile(run_dir / readiness_file.NAME)
        self._options = launch.ServerOptions(
            run_dir / REPOSITORY,
            config.servedName,
            run_dir,
            key,
            shm_prefix,
            http_host=settings.server_host("http"),
            http_port=config.ports.http,
            grpc_host=settings.server_host("grpc"),
            grpc_port=config.ports.grpc,
            metrics_host=settings.host,
            metrics_port=config.ports.metrics,
            gpu_metrics=has_gpu,
            readiness_file=self._readiness_file.path,
            exit_timeout_s=_EXIT_TIMEOUT_S,
            other_repository=run_dir / OTHER_REPOSITORY if config.server.modelRepository is not None else None,
            model_env=frozenset(config.server.modelEnv),
            arguments=config.server.serverArgs
            if config.engine.otlp_traces_endpoint is None
            else with_forwarded_header(config.server.serverArgs, constants.TRACE_HEADER),
        )
        self.other_models: OtherModels | None = None
        """The models of server.modelRepository. The supervisor sets this attribute before it calls `run`."""
        write_shm_prefix(run_dir, self._options.shm_prefix)
        write_cache_salt_secret(run_dir)
        self._relay = relay
        self.on_change: Callable[[], None] = lambda: None
        """Function that is called whenever a process, a handle or a connection has changed."""
        self._tasks: set[asyncio.Task[None]] = set()
        notify = self._notify_change
        self.core_names = constants.core_names(config.engine.data_parallel_size)
        self.processes = {
            name: ManagedProcess(
                name,
                partial(self._start_engine, name),
                partial(self._engine_session, name),
                notify,
                # With several nodes, the core ends whenever another node is lost.
                RestartBackoff(1.0, 60.0) if config.engine.nnodes > 1 else None,
                MAX_START_ATTEMPTS if config.engine.nnodes == 1 else None,
            )
            for name in (*self.core_names, "text")
        }
        self.processes["server"] = ManagedProcess("server", self._start_server, self._server_session, notify)
        self.kv_peer_status = KVPeerStatus()
        """The counters of kv_peer, as it last reported them."""
        if config.engine.kv_transfer is not None:
            name = constants.KV_PEER
            self.processes[name] = ManagedProcess(name, self._start_kv_peer, self._kv_peer_session, notify)
        if config.openai is not None:
            for index in range(config.openai.apiServerCount):
                self._add_openai_front(index)

    def _add_openai_front(self, index: int) -> None:
        name = openai_process_name(index)
        front = OpenAIFront(
            self._settings.config_file, self._run_dir, index, self._relay, lambda: self.processes[name].mark_ready()
        )
        self.processes[name] = ManagedProcess(name, front.start, front.session, self._notify_change)

    def engine_is_ready(self) -> bool:
        """Return True if the base model serves requests."""
        handles = self.handles
        has_engine = handles.core is not None and handles.text is not None and self.core_connected
        return has_engine and handles.server is not None and handles.server.base_ready

    def is_closing(self) -> bool:
        """Return True if the pod is about to stop. It still serves, but its connections should end."""
        return (self._run_dir / constants.CLOSING_FILE).exists()

    def publish_readiness(self, is_draining: bool, adapters: Mapping[str, bool]) -> None:
        """Write the server's readiness file. `adapters` contains each adapter that has a model. The value is True if
        the adapter serves requests."""
        is_ready = self.engine_is_ready() and not is_draining
        models = {name: is_ready and is_serving for name, is_serving in adapters.items()}
        models[self._settings.config.servedName] = is_ready
        others = self._require_other_models()
        models |= {name: can_answer and not is_draining for name, can_answer in others.readiness(models).items()}
        self._readiness_file.write(is_ready and not others.gating(), models)

    def _require_other_models(self) -> OtherModels:
        assert self.other_models is not None, "the supervisor has not set the other models"
        return self.other_models

    async def run(self) -> None:
        """Keep all processes running until this task is cancelled; raises StartupFailed if a process does not start."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_core_connection())
                for process in self.processes.values():
                    group.create_task(process.run(), name=f"process {process.name}")
        except ExceptionGroup as group_error:
            # Several processes can fail for the same reason, for example because pod.json is invalid. Only the first
            # error is raised.
            raise group_error.exceptions[0] from None

    async def drain(self, timeout_s: float) -> bool:
        """Reject new requests in the text process, and wait until the open requests have ended, and until other pods
        have read their KV blocks. Return False if some requests are still open."""
        started_at = time.monotonic()
        is_drained = await self._drain_text(timeout_s)
        kv_peer = self.processes.get(constants.KV_PEER)
        if is_drained and kv_peer is not None and kv_peer.state is ProcessState.READY:
            await self._wait_for_leases(min(_LEASE_WAIT_S, timeout_s - (time.monotonic() - started_at)))
        return is_drained

    async def _wait_for_leases(self, timeout_s: float) -> None:
        unleased_at = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s), engine_process.connect(constants.KV_PEER, self._run_dir) as control:
                while time.monotonic() < unleased_at + _UNLEASED_S:
                    if (await control.call("status", KVPeerStatus)).num_leases:
                        unleased_at = time.monotonic()
                    await asyncio.sleep(_LEASE_POLL_S)
        except TimeoutError:
            logger.warning("other pods still read KV blocks timeout_s=%g", timeout_s)
        except QuireError as error:
            logger.warning("leases are not known error=%s", error)

    async def _drain_text(self, timeout_s: float) -> bool:
        (self._run_dir / constants.CLOSING_FILE).touch()
        if self.handles.text is None:
            return True
        try:
            await self.handles.text.drain(timeout_s)
        except ConnectionLost:
            return True
        except QuireError as error:
            logger.warning("drain failed error=%s", error)
            return False
        return True

    async def stop(self, drained: bool) -> None:
        """Stop all processes, one after the other. Before that, the caller must cancel `run`."""
        for task in self._tasks:
            task.cancel()
        # If requests are still open, the text process is stopped first. The stubs and the OpenAI fronts then end these
        # requests with an error.
        fronts = [name for name in self.processes if name.startswith(("openai", constants.KV_PEER))]
        others = (*fronts, "server", "text") if drained else ("text", *fronts, "server")
        for name in (*others, *self.core_names):
            child = self.processes[name].child
            if child is not None and not child.exited.done():
                code = await child.stop(_STOP_TIMEOUT_S)
                logger.info("process stopped name=%s exit_code=%d", name, code)

    def kill(self) -> None:
        """Kill all processes."""
        for process in self.processes.values():
            if process.child is not None:
                process.child.kill()

    # Starts

    async def _start_engine(self, name: str) -> ChildProcess:
        return await engine_process.start(name, self._settings.config_file, self._run_dir, self._relay)

    async def _start_server(self) -> ChildProcess:
        socket = self._run_dir / constants.TEXT_SOCKET
        launch.clear_shared_memory(self._options.shm_prefix)
        shutil.rmtree(self._options.repository, ignore_errors=True)
        base = self._settings.config.servedName
        repository.write_model(self._options.repository, base, base, socket)
        argv, env = launch.server_command(*self._server_runtime, self._options)
        return await ChildProcess.start("server", argv, self._relay, RETURN_MEMORY_ENV | env)

    async def _start_kv_peer(self) -> ChildProcess:
        return await kv_peer_process.start(self._settings.config_file, self._run_dir, self._relay)

    # Sessions. While a process serves requests, its session sets the handle of the process. A session returns the
    # reason why the process must be killed.

    async def _engine_session(self, name: str, child: ChildProcess) -> str:
        async with engine_process.connect(name, self._run_dir) as control:
            if name == "text":
                self.handles.text = await TextHandle.open(control, engine_process.START_TIMEOUT_S)
            else:
                publishes = self._settings.config.engine.publishes_kv_events
                core = await CoreHandle.open(control, engine_process.START_TIMEOUT_S, publishes)
                self.handles.cores[name] = core
            try:
                self.processes[name].mark_ready()
                if name != "text" and self._settings.config.engine.nnodes > 1:
                    return await engine_process.watch_group_core(control)
                return await engine_process.watch_connection(control)
            finally:
                if name == "text":
                    self.handles.text = None
                else:
                    del self.handles.cores[name]
                self.core_connected &= self.handles.text is not None and bool(self.handles.cores)
                self._notify_change()

    async def _kv_peer_session(self, child: ChildProcess) -> str:
        def keep(status: KVPeerStatus) -> None:
            self.kv_peer_status = status

        return await kv_peer_process.watch(self._run_dir, self.processes[constants.KV_PEER].mark_ready, keep)

    async def _server_session(self, child: ChildProcess) -> str:
        settings, config = self._settings, self._settings.config
        http = settings.client_host("http"), config.ports.http
        grpc = settings.client_host("grpc"), config.ports.grpc
        async with ModelServerClient(http, grpc, self._options.key, config.server.grpc_certificate) as client:
            async with asyncio.timeout(SERVER_START_TIMEOUT_S):
                while not await client.is_loaded(config.servedName):
                    await asyncio.sleep(_PROBE_INTERVAL_S)
            await client.connect_tls()
            stubs = StubWatcher(
                child.pid,
                lambda stub: self._spawn(self._on_stub_death(child, stubs, stub)),
                self._options.other_repository,
            )
            self.handles.server = ServerHandle(
                client,
                config.servedName,
                self._options.repository,
                self._run_dir / constants.TEXT_SOCKET,
                stubs.scan,
                lambda model: self._spawn(self._reap_unloaded_stubs(stubs, stubs.pids_of(model))),
            )
            try:
                self.processes["server"].mark_ready()
                return await self._watch_server(client)
            finally:
                stubs.close()
                self.handles.server = None
                self._notify_change()

    async def _watch_server(self, client: ModelServerClient) -> str:
        loop = asyncio.get_running_loop()
        last_response = loop.time()
        while loop.time() - last_response < engine_process.UNRESPONSIVE_TIMEOUT_S:
            await asyncio.sleep(engine_process.PING_INTERVAL_S)
            if await client.is_live():
                last_response = loop.time()
        return f"no response for {engine_process.UNRESPONSIVE_TIMEOUT_S:g} s"

    async def _watch_core_connection(self) -> None:
        """Check at short intervals whether the text process is connected to the core."""
        while True:
            connected, text = False, self.handles.text
            if text is not None and self.handles.cores:
                with contextlib.suppress(QuireError):
                    status = await text.status()
                    connected, self.core_states = status.core and bool(self.handles.cores), status.cores
            if connected != self.core_connected:
                self.core_connected = connected
                self._notify_change()
            await asyncio.sleep(_CONNECTED_POLL_S if connected else engine_process.CONNECT_RETRY_S)

    # Stubs

    async def _on_stub_death(self, server: ChildProcess, stubs: StubWatcher, stub: StubProcess) -> None:
        """React to a stub that has died: reload its model, or kill the server if the stub had open requests."""
        others = self._require_other_models()
        if stub.model in others.names:
            await others.reload_dead(stub.model)
            return
        if not stub.model and others.is_loading():
            logger.warning("stub of an unknown model died while a model of the repository was loading pid=%d", stub.pid)
            return
        num_open = open_requests.read_open_requests(self._run_dir, stub.pid)
        open_requests.remove(self._run_dir, stub.pid)
        if num_open == 0 and stub.model and self.handles.server is not None:
            try:
                await self.handles.server.reload_model(stub.model, lambda: stubs.was_replaced(stub))
                return
            except QuireError as error:
                logger.error("model reload failed model=%s error=%s", stub.model, error)
            finally:
                self._notify_change()
        logger.error(
            "stub died, killing the server so that all open streams end model=%s open_requests=%d",
            stub.model or "unknown",
            num_open,
        )
        server.kill()

    async def _reap_unloaded_stubs(self, stubs: StubWatcher, pids: set[int]) -> None:
        """Make sure that the stubs of an unloaded model end. Then remove their request counters."""
        await stubs.kill_unloaded(pids, lambda pid: open_requests.read_open_requests(self._run_dir, pid))
        for pid in pids:
            open_requests.remove(self._run_dir, pid)

    def _notify_change(self) -> None:
        self.on_change()

    def _spawn(self, coro: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(coro)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
