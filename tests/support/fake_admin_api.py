# SPDX-License-Identifier: Apache-2.0
"""Pods' admin ports on 127.0.0.x: the real handlers (quire_server.supervisor.admin_api) over a pod that a test scripts.

Not real supervisors: those hang, lie and answer 500 only when they are broken, and need a server each. What real ones
do with a push is tested in test_adapter_push.py.
"""

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Self

from aiohttp import web

from quire_server.adapters.manager import StaleCatalog
from quire_server.supervisor.admin_api import AdminAPI
from quire_spec.dataclass_json import to_json
from quire_spec.documents.adapter_catalog import HELD, AdapterCatalog, AdapterSpec
from quire_spec.documents.download_progress import PROGRESS_PATH, DownloadProgress
from quire_spec.documents.pod_status import (
    AdapterState,
    AdapterStatus,
    ContentStatus,
    MeasuredMemory,
    PodStatus,
    ProcessState,
    ProcessStatus,
)

SINCE = "2026-01-01T00:00:00Z"


@dataclass
class FakePod:
    """The fake pod behind one admin port."""

    served_name: str = "s"
    failing_adapters: dict[str, str] = field(default_factory=dict)
    """Errors of adapters that fail on this pod."""
    loading_adapters: set[str] = field(default_factory=set)
    """Adapters that never finish loading."""
    unready_reason: str = ""
    """Why the pod is not ready."""
    hangs: bool = False
    delay_s: float = 0.0
    """Delay before each response."""
    status_fails: bool = False
    """GET /status returns an internal error."""
    put_fails: bool = False
    """PUT /adapters returns an internal error."""
    drops_catalog: bool = False
    """The pod accepts a catalog and drops it."""
    kv_tokens: int = 160_000
    """Blocks of the KV cache."""
    catalog: AdapterCatalog = field(default_factory=AdapterCatalog)
    pushed_catalogs: list[AdapterCatalog] = field(default_factory=list)
    kv_differences: list[str] = field(default_factory=list)
    """Settings of the blocks in which other pods differ."""
    num_status_requests: int = 0
    num_restarts: int = 0

    def is_closing(self) -> bool:
        return False

    def not_ready_reason(self) -> str:
        return self.unready_reason

    def status(self) -> PodStatus:
        self.num_status_requests += 1
        if self.status_fails:
            raise RuntimeError("scripted")
        adapters = [self._adapter_status(adapter) for adapter in self.catalog.adapters]
        ready = [a.name for a in adapters if a.state is AdapterState.READY]
        started_at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.num_restarts)
        return PodStatus(
            version="0.1.0",
            served_name=self.served_name,
            ready=not self.unready_reason,
            reason=self.unready_reason,
            core_started_at=started_at.isoformat().replace("+00:00", "Z"),
            generation=self.catalog.generation,
            processes={"core": ProcessStatus(ProcessState.READY, 1, SINCE)},
            memory=MeasuredMemory(1, 1, 1, self.kv_tokens // 16, 16, 4096, "bfloat16", "cuda:0"),
            models=[self.served_name, *ready],
            adapters=adapters,
            catalogue=self.catalog.version.digest,
            kv_differences=self.kv_differences,
        )

    async def metrics(self) -> str:
        return ""

    def set_catalog(self, catalog: AdapterCatalog, replaces: str = "") -> None:
        if self.put_fails:
            raise RuntimeError("scripted")
        if catalog.generation < self.catalog.generation and replaces != self.catalog.version.digest:
            raise StaleCatalog(f"generation {catalog.generation} is older than {self.catalog.generation}")
        self.pushed_catalogs.append(catalog)
        if not self.drops_catalog:
            self.catalog = catalog

    def restart(self, catalog: AdapterCatalog | None = None) -> None:
        """Restart the container: it loses pushed catalogs and loads the one of its ConfigMap."""
        self.catalog, self.num_restarts = catalog or AdapterCatalog(), self.num_restarts + 1

    def _adapter_status(self, adapter: AdapterSpec) -> AdapterStatus:
        candidate = next((held for held in adapter.held() if held.name == f"{adapter.name}{HELD}candidate"), None)
        if candidate is None:
            return self._content_status(adapter.name)
        status = self._content_status(candidate.name)
        state = AdapterState.VERIFIED if status.state is AdapterState.READY else status.state
        held = ContentStatus(state, status.digest, status.error)
        return replace(self._content_status(adapter.name), candidate=held)

    def _content_status(self, name: str) -> AdapterStatus:
        if name in self.failing_adapters:
            return AdapterStatus(name, AdapterState.FAILED, SINCE, error=self.failing_adapters[name])
        if name in self.loading_adapters:
            return AdapterStatus(name, AdapterState.LOADING, SINCE)
        return AdapterStatus(name, AdapterState.READY, SINCE, f"sha256:{name.encode().hex():0>64}"[:71], name)


class FakeAdminServers:
    """Admin ports served by a thread, for synchronous and asynchronous tests. A context manager."""

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

    def open(self, pod: FakePod, host: str, key_file: Path | None, port: int = 0) -> int:
        """Serve a pod and return the port."""
        return self._run_in_loop(self._open(pod, host, key_file, port))

    def close(self, host: str, port: int) -> None:
        """Close the port."""
        self._run_in_loop(self._close(self._runners.pop((host, port))))

    def open_download(self, progress: DownloadProgress, host: str, port: int = 0) -> int:
        """Serve a download pod with this progress and return the port."""
        return self._run_in_loop(self._open_download(progress, host, port))

    async def _open_download(self, progress: DownloadProgress, host: str, port: int) -> int:
        async def handle(request: web.Request) -> web.Response:
            return web.json_response(to_json(progress))

        app = web.Application()
        app.router.add_get(PROGRESS_PATH, handle)
        return await self._serve(app, host, port)

    async def _open(self, pod: FakePod, host: str, key_file: Path | None, port: int) -> int:
        app = AdminAPI(pod, key_file).app()

        @web.middleware
        async def delay_response(request: web.Request, handler: Any) -> web.StreamResponse:
            await asyncio.sleep(pod.delay_s)
            while pod.hangs:
                await asyncio.sleep(0.02)
            response: web.StreamResponse = await handler(request)
            return response

        app.middlewares.append(delay_response)
        return await self._serve(app, host, port)

    async def _serve(self, app: web.Application, host: str, port: int) -> int:
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, host, port)
        await site.start()
        bound_port: int = runner.addresses[0][1]
        self._runners[host, bound_port] = runner
        return bound_port

    async def _close(self, runner: web.AppRunner) -> None:
        """Stop accepting before the server closes: asyncio loses a connection that was just accepted
        (python/cpython#109564)."""
        for site in runner.sites:
            for listening_socket in site._server.sockets:  # type: ignore[attr-defined]
                self._loop.remove_reader(listening_socket.fileno())
        await asyncio.sleep(0.01)
        await runner.cleanup()

    def _run_in_loop(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(60)
