# SPDX-License-Identifier: Apache-2.0
"""Pods' admin ports on 127.0.0.x: the real handlers (quire_server.supervisor.admin_api) over a pod that a test scripts.

Not real supervisors: those hang, lie and answer 500 only when they are broken, and need a server each. What real ones
do with a push is tested in test_adapter_push.py.
"""

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from quire_server.adapters.manager import StaleCatalog
from quire_server.supervisor.admin_api import AdminAPI
from quire_spec.dataclass_json import to_json
from quire_spec.documents.adapter_catalog import AdapterCatalog
from quire_spec.documents.download_progress import PROGRESS_PATH, DownloadProgress
from quire_spec.documents.pod_status import (
    AdapterState,
    AdapterStatus,
    MeasuredMemory,
    PodStatus,
    ProcessState,
    ProcessStatus,
)

SINCE = "2026-01-01T00:00:00Z"


@dataclass
class ScriptedPod:
    """What is behind one admin port."""

    served_name: str = "s"
    failing: dict[str, str] = field(default_factory=dict)
    """Adapters that fail here, and with what error."""
    loading: set[str] = field(default_factory=set)
    """Adapters that never finish to load."""
    reason_: str = ""
    """Why it is not ready."""
    hangs: bool = False
    delay_s: float = 0.0
    """Before each answer."""
    breaks: bool = False
    """GET /status is an internal error."""
    refuses: bool = False
    """PUT /adapters is one."""
    lies: bool = False
    """Takes a catalogue and forgets it."""
    tokens: int = 160_000
    """Of the KV cache."""
    catalogue: AdapterCatalog = field(default_factory=AdapterCatalog)
    pushes: list[AdapterCatalog] = field(default_factory=list)
    asked: int = 0
    started: int = 0

    def not_ready_reason(self) -> str:
        return self.reason_

    def status(self) -> PodStatus:
        self.asked += 1
        if self.breaks:
            raise RuntimeError("scripted")
        adapters = [self._adapter(adapter.name) for adapter in self.catalogue.adapters]
        ready = [a.name for a in adapters if a.state is AdapterState.READY]
        began = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.started)
        return PodStatus(
            version="0.1.0",
            served_name=self.served_name,
            ready=not self.reason_,
            reason=self.reason_,
            core_started_at=began.isoformat().replace("+00:00", "Z"),
            generation=self.catalogue.generation,
            processes={"core": ProcessStatus(ProcessState.READY, 1, SINCE)},
            memory=MeasuredMemory(1, 1, 1, self.tokens // 16, 16, 4096, "bfloat16", "cuda:0"),
            models=[self.served_name, *ready],
            adapters=adapters,
            catalogue=self.catalogue.version.digest,
        )

    async def metrics(self) -> str:
        return ""

    def set_catalog(self, catalog: AdapterCatalog, replaces: str = "") -> None:
        if self.refuses:
            raise RuntimeError("scripted")
        if catalog.generation < self.catalogue.generation and replaces != self.catalogue.version.digest:
            raise StaleCatalog(f"generation {catalog.generation} is older than {self.catalogue.generation}")
        self.pushes.append(catalog)
        if not self.lies:
            self.catalogue = catalog

    def restart(self, catalogue: AdapterCatalog | None = None) -> None:
        """As a container that is started anew: what it was told is gone, it has what its ConfigMap says."""
        self.catalogue, self.started = catalogue or AdapterCatalog(), self.started + 1

    def _adapter(self, name: str) -> AdapterStatus:
        if name in self.failing:
            return AdapterStatus(name, AdapterState.FAILED, SINCE, error=self.failing[name])
        if name in self.loading:
            return AdapterStatus(name, AdapterState.LOADING, SINCE)
        return AdapterStatus(name, AdapterState.READY, SINCE, f"sha256:{name.encode().hex():0>64}"[:71], name)


class AdminPorts:
    """Admin ports served by a thread of its own, so that tests of any kind can use them. A context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._runners: dict[tuple[str, int], web.AppRunner] = {}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        for address in list(self._runners):
            self.close(*address)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def open(self, pod: ScriptedPod, host: str, key_file: Path | None, port: int = 0) -> int:
        """Serve a pod; the port."""
        return self._run(self._open(pod, host, key_file, port))

    def close(self, host: str, port: int) -> None:
        """Nobody listens there any more."""
        self._run(self._close(self._runners.pop((host, port))))

    def open_download(self, progress: DownloadProgress, host: str, port: int = 0) -> int:
        """Serve a pod that downloads a model and is so far; the port."""
        return self._run(self._open_download(progress, host, port))

    async def _open_download(self, progress: DownloadProgress, host: str, port: int) -> int:
        async def answer(request: web.Request) -> web.Response:
            return web.json_response(to_json(progress))

        app = web.Application()
        app.router.add_get(PROGRESS_PATH, answer)
        return await self._serve(app, host, port)

    async def _open(self, pod: ScriptedPod, host: str, key_file: Path | None, port: int) -> int:
        app = AdminAPI(pod, key_file).app()

        @web.middleware
        async def hold_up(request: web.Request, handler: Any) -> web.StreamResponse:
            await asyncio.sleep(pod.delay_s)
            while pod.hangs:
                await asyncio.sleep(0.02)
            answer: web.StreamResponse = await handler(request)
            return answer

        app.middlewares.append(hold_up)
        return await self._serve(app, host, port)

    async def _serve(self, app: web.Application, host: str, port: int) -> int:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        found: int = runner.addresses[0][1]
        self._runners[host, found] = runner
        return found

    async def _close(self, runner: web.AppRunner) -> None:
        """asyncio loses a connection that it has accepted when its server closes (python/cpython#109564): so that there
        is none, it accepts no more for a moment."""
        for site in runner.sites:
            for listening in site._server.sockets:  # type: ignore[attr-defined]
                self._loop.remove_reader(listening.fileno())
        await asyncio.sleep(0.01)
        await runner.cleanup()

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60)
