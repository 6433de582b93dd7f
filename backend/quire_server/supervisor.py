# SPDX-License-Identifier: Apache-2.0
"""One pod from start to end: when it is ready and why not, what it tells, how it drains and stops.

Owns readiness and the status document. Processes and their deaths are pod.py's, adapters are adapters.py's, HTTP is
admin.py's; assembly.py puts them together.
"""

import asyncio
import contextlib
import logging
import time
from importlib.metadata import version
from typing import Any

import aiohttp

from quire_server import report
from quire_server.adapters import AdapterBoard
from quire_server.links import ServerLink
from quire_server.pod import Pod
from quire_server.settings import Settings
from quire_spec import address
from quire_spec.catalogue import Catalogue
from quire_spec.errors import QuireError
from quire_spec.status import PodStatus, ProcessState

log = logging.getLogger(__name__)

_FIRST_PROGRESS_S = 5.0
_MAX_PROGRESS_S = 60.0
_SWEEP_S = 3600.0
_METRICS_TIMEOUT = aiohttp.ClientTimeout(total=5)


class Supervisor:
    """What the health port tells about and the signals reach."""

    def __init__(self, settings: Settings, pod: Pod, board: AdapterBoard, session: aiohttp.ClientSession) -> None:
        self._settings = settings
        self._pod = pod
        self._board = board
        self._session = session
        self._was_up = False
        self.draining = False
        """Asked to stop; never ready again."""
        pod.on_change = self.changed

    # What the health port tells

    def reason(self) -> str:
        """Why the pod is not ready, in a sentence; empty when it is."""
        if self.draining:
            return "draining: the pod has been asked to stop"
        for name, keeper in self._pod.keepers.items():
            if keeper.state is not ProcessState.READY:
                return f"{name} is {keeper.state.value.lower()}"
        server: ServerLink | None = self._pod.links.server
        if server is None or not server.base_ready:
            return f"model {self._settings.served_name!r} is being loaded on the server"
        if not self._pod.linked:
            return "text is connecting to core"
        if pending := self._board.pending():
            return f"adapters are being loaded: {report.some(pending)}"
        return ""

    def status(self) -> PodStatus:
        """The status document."""
        reason, core = self.reason(), self._pod.links.core
        adapters = self._board.statuses()
        return PodStatus(
            version=version("quire-llm"),
            served_name=self._settings.served_name,
            ready=not reason,
            reason=reason,
            core_started_at=core.started_at if core else None,
            generation=self._board.mark.generation,
            processes={name: keeper.status() for name, keeper in self._pod.keepers.items()},
            memory=core.memory if core else None,
            models=self._models(),
            adapters=adapters,
            catalogue=self._board.mark.digest,
        )

    async def metrics(self) -> str:
        """Text's metrics, the server's own, and the supervisor's."""
        text, server = await asyncio.gather(self._text_metrics(), self._server_metrics())
        return report.joined(text, server, report.own_metrics(self.status()))

    def apply(self, catalogue: Catalogue, replaces: str = "") -> None:
        """Take a new catalogue; parameters and errors are those of AdapterBoard.check."""
        self._board.apply(catalogue, replaces)

    def _models(self) -> list[str]:
        """Server models that answer now."""
        links = self._pod.links
        if links.core is None or links.text is None or links.server is None:
            return []
        base = [self._settings.served_name] if links.server.base_ready else []
        return base + sorted(self._board.serving() & links.server.models)

    async def _text_metrics(self) -> str:
        link = self._pod.links.text
        with contextlib.suppress(QuireError):
            return await link.metrics() if link else ""
        return ""

    async def _server_metrics(self) -> str:
        host, port = self._settings.loopback, self._settings.metrics_port
        url = f"http://{address.in_url(host)}:{port}/metrics"
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with self._session.get(url, timeout=_METRICS_TIMEOUT) as answer:
                return await answer.text()
        return ""

    # Life

    def changed(self) -> None:
        """A process came up or went."""
        links = self._pod.links
        up = links.core is not None and links.text is not None and links.server is not None
        if up and not self._was_up:
            self._board.hold()
        self._was_up = up
        self._board.look()

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until `stop`, then drain and end everything; raises CannotRun when a process never comes up."""
        running = asyncio.create_task(self._pod.run(), name="pod")
        stopping = asyncio.create_task(stop.wait(), name="stop")
        others = [asyncio.create_task(self._announce()), asyncio.create_task(self._sweep())]
        drained = False
        try:
            await _first(running, stopping, *others)
            if stop.is_set():
                drained = await self._drain(running)
        finally:
            self.draining = True
            # The adapters first: they would set about what the processes' ends undo.
            await self._board.close()
            await _cancel(running, stopping, *others)
            if not stop.is_set():
                # Something has failed: nobody is served, and there is nothing to wait for.
                self._pod.kill()
            await self._pod.stop(drained)
        if not running.cancelled():
            running.result()

    async def _drain(self, running: "asyncio.Task[None]") -> bool:
        """Let open requests finish; False when some did not."""
        self.draining = True
        timeout_s = self._settings.drain_timeout_s
        log.info("draining: new requests are refused, open ones may finish timeout_s=%g", timeout_s)
        drain = asyncio.create_task(self._pod.drain(timeout_s))
        both: list[asyncio.Future[Any]] = [drain, running]
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        await _cancel(drain)
        drained = not drain.cancelled() and drain.result()
        if not drained:
            log.warning("requests are still open, they are ended with an error")
        return drained

    async def _announce(self) -> None:
        """Say what is waited for, less and less often, and once that the pod is ready."""
        begun, pause_s = time.monotonic(), _FIRST_PROGRESS_S
        due = begun + pause_s
        while self.reason() or self._board.unsettled():
            await asyncio.sleep(0.05)
            if time.monotonic() >= due:
                log.info("not ready yet: %s (%.0f s)", self._waiting_for(), time.monotonic() - begun)
                pause_s = min(2 * pause_s, _MAX_PROGRESS_S)
                due += pause_s
        # On stdout, alone: the log is on stderr. Nobody may be reading it any more.
        with contextlib.suppress(OSError):
            print(report.ready(self._settings, self.status(), time.monotonic() - begun), flush=True)

    def _waiting_for(self) -> str:
        waiting = [f"{entry.name} {entry.state.value}" for entry in self._board.unsettled()]
        adapters = f"{len(waiting)} adapters are on their way: {report.some(waiting)}"
        reason = self.reason()
        return adapters if waiting and (not reason or reason.startswith("adapters")) else reason

    async def _sweep(self) -> None:
        """Keep the cache from growing for ever."""
        while True:
            try:
                for digest in await self._board.sweep():
                    log.info("adapter removed from the cache digest=%s", digest)
            except OSError as error:
                # Its volume may be away for a moment, and what is loaded serves without it.
                log.warning("cache was not swept error=%s", error)
            await asyncio.sleep(_SWEEP_S)


async def _first(running: "asyncio.Task[None]", stopping: "asyncio.Task[Any]", *others: "asyncio.Task[None]") -> None:
    """Wait for one of the first two; the others may end, but not fail."""
    waiting: set[asyncio.Task[Any]] = {running, stopping, *others}
    while not (running.done() or stopping.done()):
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in done - {running}:
            task.result()


async def _cancel(*tasks: "asyncio.Task[Any]") -> None:
    """End tasks; what they raised is in them."""
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
