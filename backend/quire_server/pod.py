# SPDX-License-Identifier: Apache-2.0
"""Core, text and server: kept running and linked, and what it means when one of them, or a stub, dies.

    core dies     text ends the open requests; core starts again, adapters are loaded again
    text dies     the stubs end the open requests; text starts again, gets the aliases again
    server dies   connections end; server starts again, adapter models are registered again
    stub dies     no request open: its model is loaded anew. Requests open: this server would let their clients hang for
                  ever, so it is killed, which ends every connection, and starts again

What adapters do about it is adapters.py's; readiness, start and end are supervisor.py's.
"""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from quire_server import launch, ledger, repository
from quire_server.control import Control, LinkLost
from quire_server.keeper import Keeper
from quire_server.links import CoreLink, Links, ServerLink, TextLink
from quire_server.processes import Child
from quire_server.run_dir import REPOSITORY, note_shm_prefix
from quire_server.server_client import ServerClient
from quire_server.settings import Settings
from quire_server.stubs import Stub, StubWatch
from quire_spec import names
from quire_spec.errors import QuireError, Unavailable

log = logging.getLogger(__name__)

START_S = 3600.0
"""How long core may take to load its weights; a Kubernetes startup probe is shorter and decides there."""
SERVER_START_S = 300.0
_DIAL_S = 0.05
_PROBE_S = 0.1
_PING_S = 5.0
_HUNG_S = 120.0
"""A process that answers nothing for this long will not answer again. A step of a large model on a slow CPU is
shorter."""
_DYING_S = 2.0
"""How long a process may live on after it has closed its connection to us."""
_LINKED_S = 0.5
_EXIT_TIMEOUT_S = 5
"""Of the server, after the drain: connections without a request, kept alive by clients, would hold it for longer."""
_STOP_S = 10.0

ENGINE_ENV = {"LRU_CACHE_CAPACITY": "128", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
"""Of the processes of the engine, where the environment says nothing else: products that torch and oneDNN keep
compiled, of which each number of tokens and shape of a weight has one. By themselves they keep 1,024, and a core that
computes float32 on a CPU grew by 0.7 GB in some thousand requests; with 128 by 0.15 GB, and it was as fast."""


class Pod:
    """The processes of one pod."""

    def __init__(
        self,
        settings: Settings,
        run_dir: Path,
        server: tuple[launch.ServerInstall, launch.Interpreter],
        gpu: bool,
        relay: Callable[[str, str], None],
    ) -> None:
        """`relay(name, line)` gets the processes' output."""
        self.links = Links()
        self.linked = False
        """Text has its connection to the core."""
        self._settings = settings
        self._run_dir = run_dir
        self._server = server
        self._options = launch.ServerOptions(
            run_dir / REPOSITORY,
            settings.served_name,
            run_dir,
            launch.new_key(),
            launch.new_shm_prefix(),
            settings.host,
            settings.http_port,
            settings.grpc_port,
            settings.metrics_port,
            gpu,
            _EXIT_TIMEOUT_S,
        )
        note_shm_prefix(run_dir, self._options.shm_prefix)
        self._relay = relay
        self.on_change: Callable[[], None] = lambda: None
        """Called whenever something came up or went."""
        self._tasks: set[asyncio.Task[None]] = set()
        core = partial(self._start_engine, "core", names.CORE_SOCKET)
        text = partial(self._start_engine, "text", names.TEXT_SOCKET)
        self.keepers = {
            "core": Keeper("core", core, self._core_session, self._changed),
            "text": Keeper("text", text, self._text_session, self._changed),
            "server": Keeper("server", self._start_server, self._server_session, self._changed),
        }

    async def run(self) -> None:
        """Keep everything running until cancelled; raises CannotRun when a process never comes up."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_link())
                for keeper in self.keepers.values():
                    group.create_task(keeper.run(), name=f"keeper {keeper.name}")
        except ExceptionGroup as group_error:
            # Several may fail of one cause, such as an engine.json that both refuse.
            raise group_error.exceptions[0] from None

    async def drain(self, timeout_s: float) -> bool:
        """Have text refuse new requests and finish the open ones; False when some are still open."""
        if self.links.text is None:
            return True
        try:
            await self.links.text.drain(timeout_s)
        except LinkLost:
            return True
        except QuireError as error:
            log.warning("drain: %s", error)
            return False
        return True

    async def stop(self, drained: bool) -> None:
        """End all processes, in order; `run` has been cancelled before."""
        for task in self._tasks:
            task.cancel()
        # With requests still open, text goes first: the stubs then end them with a proper error.
        for name in ("server", "text", "core") if drained else ("text", "server", "core"):
            child = self.keepers[name].child
            if child is not None and not child.ended.done():
                code = await child.stop(_STOP_S)
                log.info("process stopped name=%s exit_code=%d", name, code)

    def kill(self) -> None:
        """End all processes at once."""
        for keeper in self.keepers.values():
            if keeper.child is not None:
                keeper.child.kill()

    # Starts

    async def _start_engine(self, name: str, socket: str) -> Child:
        # What a killed process left: nobody listens there.
        (self._run_dir / socket).unlink(missing_ok=True)
        s = self._settings
        argv = [sys.executable, "-m", f"quire_engine.{name}_process", "--engine", str(s.engine)]
        argv += ["--served-name", s.served_name, "--run-dir", str(self._run_dir)]
        return await Child.start(name, argv, self._relay, ENGINE_ENV | os.environ)

    async def _start_server(self) -> Child:
        socket = self._run_dir / names.TEXT_SOCKET
        launch.clear_shared_memory(self._options.shm_prefix)
        repository.clear_copies(socket)
        repository.write_base(self._options.repository, self._settings.served_name, socket)
        argv, env = launch.server_command(*self._server, self._options)
        return await Child.start("server", argv, self._relay, env)

    # Sessions: each holds its link while its process serves, and returns why the process has to be killed

    async def _core_session(self, child: Child) -> str:
        async with self._dialled("core", names.CORE_SOCKET) as control:
            status = await control.call("status", timeout_s=START_S)
            self.links.core = CoreLink(control, status)
            try:
                self.keepers["core"].ready()
                return await self._watch(control)
            finally:
                self.links.core, self.linked = None, False
                self._changed()

    async def _text_session(self, child: Child) -> str:
        async with self._dialled("text", names.TEXT_SOCKET) as control:
            await control.call("status", timeout_s=START_S)
            self.links.text = TextLink(control)
            try:
                self.keepers["text"].ready()
                return await self._watch(control)
            finally:
                self.links.text, self.linked = None, False
                self._changed()

    async def _server_session(self, child: Child) -> str:
        s = self._settings
        async with ServerClient(s.loopback, s.http_port, s.grpc_port, self._options.key) as client:
            async with asyncio.timeout(SERVER_START_S):
                while not await client.is_ready(s.served_name):
                    await asyncio.sleep(_PROBE_S)
            stubs = StubWatch(child.pid, lambda stub: self._spawn(self._bury(child, stubs, stub)))
            self.links.server = ServerLink(
                client,
                s.served_name,
                self._run_dir / names.TEXT_SOCKET,
                stubs.scan,
                lambda model: self._spawn(self._retire(stubs, stubs.of(model))),
            )
            try:
                self.keepers["server"].ready()
                return await self._watch_server(client)
            finally:
                stubs.close()
                self.links.server = None
                self._changed()

    @contextlib.asynccontextmanager
    async def _dialled(self, name: str, socket: str) -> AsyncIterator[Control]:
        """A connection to a process that is starting."""
        async with asyncio.timeout(START_S):
            while True:
                try:
                    control = await Control.connect(name, self._run_dir / socket)
                    break
                except OSError:
                    await asyncio.sleep(_DIAL_S)
        try:
            yield control
        finally:
            await control.close()

    async def _watch(self, control: Control) -> str:
        while True:
            try:
                async with asyncio.timeout(_PING_S):
                    await control.lost.wait()
                # Its end is usually seen first, and cancels us.
                await asyncio.sleep(_DYING_S)
                return "it closed its connection"
            except TimeoutError:
                pass
            try:
                await control.call("status", timeout_s=_HUNG_S)
            except LinkLost:
                continue
            except Unavailable:
                return f"no answer for {_HUNG_S:g} s"

    async def _watch_server(self, client: ServerClient) -> str:
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while loop.time() - answered < _HUNG_S:
            await asyncio.sleep(_PING_S)
            if await client.live():
                answered = loop.time()
        return f"no answer for {_HUNG_S:g} s"

    async def _watch_link(self) -> None:
        """Whether text has its connection to the core, which it makes by itself."""
        while True:
            linked, text = False, self.links.text
            if text is not None and self.links.core is not None:
                with contextlib.suppress(QuireError):
                    linked = await text.linked() and self.links.core is not None
            if linked != self.linked:
                self.linked = linked
                self._changed()
            await asyncio.sleep(_LINKED_S if linked else _DIAL_S)

    # Stubs

    async def _bury(self, server: Child, stubs: StubWatch, stub: Stub) -> None:
        """A stub has died."""
        num_open = ledger.num_open(self._run_dir, stub.pid)
        ledger.forget(self._run_dir, stub.pid)
        if num_open == 0 and stub.model and self.links.server is not None:
            try:
                await self.links.server.revive(stub.model, lambda: stubs.replaced(stub))
                return
            except QuireError as error:
                log.error("model cannot be loaded again model=%s error=%s", stub.model, error)
            finally:
                self._changed()
        log.error(
            "stub died, server is killed to end its clients' streams model=%s open_requests=%d",
            stub.model or "unknown",
            num_open,
        )
        server.kill()

    async def _retire(self, stubs: StubWatch, pids: set[int]) -> None:
        """A model was unloaded: see that its stubs end."""
        await stubs.retire(pids, lambda pid: ledger.num_open(self._run_dir, pid))
        for pid in pids:
            ledger.forget(self._run_dir, pid)

    def _changed(self) -> None:
        self.on_change()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
